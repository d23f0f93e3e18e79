"""The training loop, the judge and the sampler."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .data import batch
from .model import ByteModel, nats, objective


@dataclass(frozen=True)
class LearningRate:
    """A `LearningRate` holds the steps, batches and learning rate of a training."""

    steps: int
    batch: int = 16
    lr: float = 4e-3  # peak
    warmup: int = 20
    floor: float = 0.03  # of the peak, at the end
    clip: float = 1.0
    glances: int = 10  # looks at the held-out text on the way

    def lr_at(self, step: int) -> float:
        """Warm-up, then a cosine down to the floor."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.lr * min(1, (step + 1) / self.warmup) * (self.floor + (1 - self.floor) * cosine)


@dataclass
class History:
    """A `History` holds the losses of a training, in nats a byte."""

    train: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)  # (step, loss on a part of it)
    # last rows of each expert, a router each
    shares: list[list[float]] = field(default_factory=list)
    seconds: float = 0.0
    bytes_seen: int = 0

    def __str__(self) -> str:
        recent, rate = self.train[-20:], self.bytes_seen / max(self.seconds, 1e-9)
        return (
            f"train {sum(recent) / len(recent):.3f}  held out {self.held_out[-1][1]:.3f} nats/byte  "
            f"{rate / 1e3:.0f} kB/s"
        )


Watcher = Callable[[int, History], None]


def train(
    model: ByteModel,
    text: Tensor,
    judged: Tensor,
    schedule: LearningRate,
    seed: int,
    watch: Watcher,
) -> History:
    """Train in place. The same seed gives the same losses on the same machine.

    judged: windows of held-out text to glance at on the way.  watch: called after every step.
    """
    device = next(model.parameters()).device
    length = model.config.context
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    history = History()
    every = max(1, schedule.steps // schedule.glances)
    start = time.perf_counter()
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr_at(step)
        seen = batch(text, schedule.batch, length, generator).to(device)
        history.train.append(train_step(model, seen, optimizer, schedule.clip, history))
        history.bytes_seen += schedule.batch * length
        if (step + 1) % every == 0 or step == 0:
            history.held_out.append((step + 1, evaluate(model, judged)))
        history.seconds = time.perf_counter() - start
        watch(step + 1, history)
    return history


def train_step(
    model: ByteModel, text: Tensor, optimizer: torch.optim.Optimizer, clip: float, history: History
) -> float:
    """One step.  -> nats a byte before it"""
    optimizer.zero_grad(set_to_none=True)
    out = model(text[:, :-1])
    objective(out, text, model.config.balance).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    history.shares = [routed.share.tolist() for routed in out.routed]
    return nats(out, text).item()


@torch.no_grad()
def evaluate(model: ByteModel, judged: Tensor, size: int = 32) -> float:
    """Nats a byte on windows of held-out text."""
    device = next(model.parameters()).device
    total = 0.0
    for text in judged.split(size):
        text = text.to(device)
        total += nats(model(text[:, :-1]), text).item() * len(text)
    return total / len(judged)


@torch.no_grad()
def sample(
    model: ByteModel, prompt: bytes, length: int, seed: int, temperature: float = 0.7
) -> bytes:
    """`prompt` and what the model writes after it."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(length):
        seen = torch.tensor([text[-model.config.context :]], device=device)
        logits = model(seen).logits[0, -1].double().cpu()
        chances = (logits / temperature).softmax(-1)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return bytes(text)


def printable(text: bytes) -> str:
    """Text that is safe on a terminal: whatever else the model wrote becomes a replacement mark."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(
        c if c.isprintable() or c in "\n" else " " if c == "\t" else "�" for c in decoded
    )
