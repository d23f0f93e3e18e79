"""Quantized tensors: plain dataclasses of component tensors, never a `torch.Tensor` subclass.

So checkpointing, saved-tensor hooks and offload see real storages, and a component can be freed or moved alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ROW, COL = "row", "col"  # quantized along the last axis (fprop, dgrad), along the rows (wgrad)


@dataclass(frozen=True)
class Format:
    """What an edge of the plan asks for.

    granularity: "tensor" (one scale) or "group" (one a group of `offs`); layouts: the subset of {"row", "col"} that a
    later GEMM reads; high: keep the high-precision tensor beside it (a bias gradient reads that).
    """

    dtype: torch.dtype
    granularity: str = "tensor"
    layouts: frozenset[str] = frozenset({ROW})
    high: bool = False

    def __str__(self) -> str:
        layouts = "+".join(sorted(self.layouts))
        return f"{str(self.dtype).removeprefix('torch.')}[{self.granularity}, {layouts}]"


@dataclass(frozen=True)
class Quantized:
    """A tensor of shape (M, K) in a quantized format.

    row    (M, K) data quantized along K, or None
    col    (K, M) the transpose, quantized along M, or None
    scale  () or (G,) float32, multiply the data by it to get the value
    offs   (G,) int32 row ends of the groups, with granularity "group"
    high   (M, K) the high-precision tensor itself, where a reader also needs it
    dtype  of the high-precision tensor that it stands for
    """

    row: Tensor | None
    col: Tensor | None
    scale: Tensor
    offs: Tensor | None
    high: Tensor | None
    dtype: torch.dtype

    COMPONENTS = ("row", "col", "scale", "offs", "high")

    def components(self) -> Mapping[str, Tensor]:
        """The component tensors that are present, by name."""
        pairs = ((name, getattr(self, name)) for name in self.COMPONENTS)
        return {name: t for name, t in pairs if t is not None}

    @classmethod
    def of(cls, components: Mapping[str, Tensor], dtype: torch.dtype) -> "Quantized":
        """From component tensors by name (those brought back after saving)."""
        row, col, offs, high = (components.get(name) for name in ("row", "col", "offs", "high"))
        return cls(row, col, components["scale"], offs, high, dtype)

    def only(self, *layouts: str) -> "Quantized":
        """Without the layouts (and the high-precision tensor) that no later GEMM reads."""
        row = self.row if ROW in layouts else None
        col = self.col if COL in layouts else None
        return Quantized(row, col, self.scale, self.offs, None, self.dtype)


@dataclass(frozen=True)
class Roles:
    """The formats of one op's operands under a recipe; None is high precision."""

    input: Format | None = None
    weight: Format | None = None
    grad_output: Format | None = None
