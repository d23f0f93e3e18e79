"""A small byte-level language model with a mixture of experts, composed from ops."""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseops import ops
from fuseops.layers import MoE
from fuseops.layers.sequential import Residual, Sequential

from .data import VOCAB

Op = TypeVar("Op", ops.Linear, ops.GroupedLinear)


@dataclass(frozen=True)
class Config:
    """A `Config` holds the sizes of the model. The defaults learn fast on two CPU cores."""

    dim: int = 96  # D
    heads: int = 3
    layers: int = 3  # the first is dense, the others have experts
    ffn: int = 192  # F of the dense block
    experts: int = 8  # E
    top_k: int = 2  # K
    expert_ffn: int = 96  # F of an expert
    context: int = 128  # bytes
    recent: int = 4  # bytes that the stem sees at once
    byte_dim: int = 32
    balance: float = 0.01  # weight of the load-balancing loss


class Stem(nn.Module):
    """A `Stem` embeds each position from its last few bytes by a small MLP: most of a byte's surprise is local.

    (B, T) int64 -> (B, T, D)
    """

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.recent = c.recent
        self.bytes = nn.Embedding(VOCAB, c.byte_dim)
        self.mlp = Sequential(
            ops.Linear(c.recent * c.byte_dim, 2 * c.dim, bias=False),
            ops.Bias(2 * c.dim),
            ops.GELU(),
            ops.Linear(2 * c.dim, c.dim, bias=False),
        )

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text)
        earlier = [F.pad(x, (0, 0, k, 0))[:, : text.shape[1]] for k in range(1, self.recent)]
        return self.mlp(torch.cat([x, *earlier], dim=-1))


class Attention(nn.Module):
    """x + causal attention.   (B, T, D) -> (B, T, D)"""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads = c.heads
        self.qkv = Sequential(ops.RMSNorm(c.dim), ops.Linear(c.dim, 3 * c.dim, bias=False))
        self.out = Sequential(quiet(ops.Linear(c.dim, c.dim, bias=False), c))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, t, d))


class Routed(NamedTuple):
    """A `Routed` holds a router's probabilities and the experts that it chose."""

    chosen: Tensor  # (tokens, K) int32
    share: Tensor  # (E,) of all rows, sums to 1
    balance: Tensor  # 1 when the tokens are spread evenly, E when one expert gets them all


class Experts(nn.Module):
    """x + the top-k experts of each token, weighted by the router.   (B, T, D) -> (B, T, D)"""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm = Sequential(ops.RMSNorm(c.dim))
        self.moe = MoE(c.dim, c.expert_ffn, c.experts, c.top_k, balance_loss=1.0)
        quiet(self.moe["fc2"], c)

    def forward(self, x: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Routed]:
        returns = ("experts", "offs", "router_loss")
        if chosen is None:
            y, experts, offs, balance = self.moe(self.norm(x), returns=returns)
        else:
            given = self.moe.with_given_experts()
            y, experts, offs, balance = given(self.norm(x), chosen=chosen, returns=returns)
        share = offs.diff(prepend=offs.new_zeros(1)) / offs[-1]
        return x + y, Routed(experts, share, balance)


class Layer(nn.Module):
    """A `Layer` runs attention, then a dense MLP or experts.   (B, T, D) -> (B, T, D)"""

    def __init__(self, c: Config, sparse: bool) -> None:
        super().__init__()
        self.attention = Attention(c)
        self.mlp: nn.Module = Experts(c) if sparse else dense(c)

    def forward(self, x: Tensor, chosen: Iterator[Tensor]) -> tuple[Tensor, Routed | None]:
        x = self.attention(x)
        if isinstance(self.mlp, Experts):
            return self.mlp(x, next(chosen, None))
        return self.mlp(x), None


def dense(c: Config) -> Residual:
    """x + MLP(x).   (B, T, D) -> (B, T, D)"""
    return Residual(
        ops.RMSNorm(c.dim),
        ops.Linear(c.dim, 2 * c.ffn, bias=False),
        ops.SwiGLU(),
        quiet(ops.Linear(c.ffn, c.dim, bias=False), c),
    )


def quiet(op: Op, c: Config) -> Op:
    """`op` with a smaller weight: of ops that add to the residual stream, so that its size does not
    grow with the depth.
    """
    with torch.no_grad():
        op.weight.mul_(1 / math.sqrt(2 * c.layers))
    return op


class Output(NamedTuple):
    logits: Tensor  # (B, T, V)
    routed: tuple[Routed, ...]  # one a MoE block


class ByteModel(nn.Module):
    """Predicts the next byte at every position.   (B, T) int64 -> Output

    chosen: experts of every token for each MoE block, instead of what the routers would choose.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.stem = Stem(config)
        self.layers = nn.ModuleList(Layer(config, sparse=i > 0) for i in range(config.layers))
        self.head = Sequential(ops.RMSNorm(config.dim), ops.Linear(config.dim, VOCAB, bias=False))

    def forward(self, text: Tensor, chosen: Sequence[Tensor] | None = None) -> Output:
        given = iter(chosen or ())
        routed: list[Routed] = []
        with precision(text.device):
            x = self.stem(text)
            for layer in self.layers:
                x, decision = layer(x, given)
                if decision is not None:
                    routed.append(decision)
            return Output(self.head(x), tuple(routed))


def precision(device: torch.device) -> AbstractContextManager[object]:
    """bfloat16 GEMMs on a GPU, float32 on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def nats(out: Output, text: Tensor) -> Tensor:
    """Cross-entropy a byte, of windows with one byte more than the model saw."""
    return F.cross_entropy(out.logits.flatten(0, 1).float(), text[:, 1:].flatten())


def objective(out: Output, text: Tensor, balance: float) -> Tensor:
    """What training minimises: nats a byte, and uneven routing."""
    return nats(out, text) + balance * torch.stack([r.balance for r in out.routed]).mean()
