"""What the job found, and what is said of it."""

import argparse
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fuseops.explain import Explanation
from fuseops.words import size

from . import DEFAULT_STEPS
from .checks import Checked
from .data import Corpus
from .train import History

MARGIN = 0.15  # nats a byte that the model must be below the bigram model


class Outcome(NamedTuple):
    """An outcome holds everything that the job found."""

    args: argparse.Namespace
    device: torch.device
    corpus: Corpus
    parameters: int
    history: History
    bigram: float
    held_out: float
    checked: Checked
    plan: Explanation
    sample: str
    seconds: float

    @property
    def enforced(self) -> bool:
        """Only a full run owes a good loss."""
        return self.args.steps >= DEFAULT_STEPS

    @property
    def bar(self) -> float:
        return self.bigram - MARGIN

    @property
    def failures(self) -> list[str]:
        return [sentence for passed, sentence in self.verdicts() if passed is False]

    def verdicts(self) -> Iterator[tuple[bool | None, str]]:
        """(passed, sentence) for each thing that the demo must show; None where nothing is owed."""
        yield from self.checked.verdicts()
        reached = self.held_out <= self.bar
        yield (
            reached if self.enforced else None,
            f"loss {self.held_out:.3f} nats a byte on all held-out text; byte bigrams {self.bigram:.3f}, so the bar is "
            f"{self.bar:.3f}"
            + ("" if self.enforced else f" (not enforced below {DEFAULT_STEPS} steps)"),
        )

    def saved(self) -> dict[str, int]:
        """Bytes between forward and backward of one batch, by what was done."""
        c = self.checked
        sizes = c.saved_unfused, c.saved_fused, c.saved_offloaded
        return dict(zip(("unfused", "fused", "fused_and_offloaded"), sizes, strict=True))

    def time(self) -> str:
        return f"{self.seconds:.0f} s, of which {self.history.seconds:.0f} s training"

    def lines(self) -> Iterator[str]:
        """What is printed of it."""
        words = {True: "ok", False: "FAILED", None: "--"}
        for passed, sentence in self.verdicts():
            yield f"{words[passed]:>6}  {sentence}"
        saved = ", ".join(f"{size(n)} {how.replace('_', ' ')}" for how, n in self.saved().items())
        yield f"        saved for the backward: {saved}"
        yield f"        {self.time()}"

    def facts(self) -> Iterator[tuple[str, str]]:
        """What the report says of the run."""
        busiest = max(max(shares) for shares in self.history.shares)
        corpus, args = self.corpus, self.args
        yield "text", f"{corpus.files} files of {corpus.root}, {len(corpus.train)} bytes"
        yield "model", f"{self.parameters} parameters"
        yield "steps", f"{args.steps} on {described(self.device)}, seed {args.seed}"
        yield "time", self.time()
        yield "routing", f"the busiest expert gets {100 * busiest:.0f} % of the rows"
        yield "versions", f"torch {torch.__version__}, Python {platform.python_version()}"

    def to_json(self, path: Path) -> dict[str, Any]:
        """What was found as plain data.   path: of the report"""
        c = self.checked
        return {
            "passed": not self.failures,
            "failures": self.failures,
            "steps": self.args.steps,
            "seed": self.args.seed,
            "device": str(self.device),
            "parameters": self.parameters,
            "loss": {
                "unit": "nats a byte",
                "held_out": self.held_out,
                "bigram": self.bigram,
                "bar": self.bar,
                "bar_enforced": self.enforced,
                "train": self.history.train,
                "held_out_on_the_way": self.history.held_out,
            },
            "fused_spans": c.fused_spans,
            "fused_vs_unfused": {**c.fusion._asdict(), "tolerance": c.tolerance},
            "offloaded_bytes": c.offloaded_bytes,
            "offloaded_unequal": list(c.offload_unequal),
            "saved_bytes": self.saved(),
            "expert_shares": self.history.shares,
            "seconds": {"total": self.seconds, "training": self.history.seconds},
            "sample": self.sample,
            "report": str(path),
        }


def described(device: torch.device) -> str:
    """The name of a GPU, or what the CPU is used as."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "one thread of the CPU"
