"""Models whose saved tensors the offload benchmark moves, and offload as it is usually written."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops.cli.example import ExampleAttention


class Shape(NamedTuple):
    """Sizes of a stack; experts 0: dense."""

    blocks: int
    d: int
    f: int
    heads: int
    tokens: int
    sequences: int = 1
    experts: int = 0
    top_k: int = 0


SHAPES = {
    "dense": Shape(12, 4096, 14336, 32, 8192),
    "moe": Shape(32, 1024, 1024, 8, 8 * 4096, 8, 32, 8),
}
SMALL = {
    "dense": Shape(6, 64, 128, 2, 64),
    "moe": Shape(6, 64, 64, 2, 64, 2, 4, 2),
}


def block(s: Shape) -> fo.Sequential:
    linear = lambda i, o: fo.ops.Linear(i, o, bias=False)  # noqa: E731
    attention = (linear(s.d, 3 * s.d), ExampleAttention(s.heads, s.sequences), linear(s.d, s.d))
    mlp: tuple[nn.Module, ...] = (
        (fo.MoE(s.d, s.f, s.experts, s.top_k),)
        if s.experts
        else (linear(s.d, 2 * s.f), fo.ops.SwiGLU(), linear(s.f, s.d))
    )
    return fo.Sequential(
        {
            "attn": fo.Residual(fo.ops.RMSNorm(s.d), *attention),
            "mlp": fo.Residual(fo.ops.RMSNorm(s.d), *mlp),
        }
    )


class Stack(nn.Module):
    """A stack of blocks; `recompute` checkpoints each."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(shape) for _ in range(shape.blocks))
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


def stack(kind: str, small: bool, blocks: int | None, device: torch.device) -> tuple[Stack, Tensor]:
    """A model and a batch that needs a gradient."""
    shape = (SMALL if small else SHAPES)[kind]
    shape = shape._replace(blocks=blocks or shape.blocks)
    dtype = torch.float32 if small else torch.bfloat16
    torch.manual_seed(0)
    with torch.device(device):
        rows = torch.randn(shape.tokens, shape.d, dtype=dtype, requires_grad=True)
        model = Stack(shape._replace(blocks=0))
        model.blocks.extend(block(shape).to(dtype) for _ in range(shape.blocks))
        return model, rows


class AsyncHooks:
    """Offload as it is usually written (torchtune's hooks): each tensor of 1 MiB or more is copied on a
    side stream when it is saved and when it is read, with `record_stream` for lifetimes.
    """

    def __init__(self, device: torch.device) -> None:
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.pool: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def pack(self, t: Tensor) -> Any:
        if t.nbytes < 1 << 20 or isinstance(t, nn.Parameter) or not t.is_contiguous():
            return t.detach()
        free = self.pool.setdefault((t.shape, t.dtype), [])
        host = free.pop() if free else torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        self.out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.out):
            host.copy_(t, non_blocking=True)
            t.record_stream(self.out)
        return host, t.device

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        host, device = packed
        self.back.wait_stream(self.out)
        with torch.cuda.stream(self.back):
            t = host.to(device, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self.back)
        t.record_stream(torch.cuda.current_stream())
        self.out.wait_stream(self.back)
        self.pool[t.shape, t.dtype].append(host)
        return t

    def __call__(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)
