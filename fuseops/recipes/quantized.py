"""Quantized tensors: plain dataclasses of component tensors, never a `torch.Tensor` subclass.

So checkpointing, saved-tensor hooks and offload see real storages, and a component can be freed or moved alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fuseops.words import dtype_name

ROW, COL = "row", "col"  # quantized along the last axis (fprop, dgrad), along the rows (wgrad)


@dataclass(frozen=True)
class Format:
    """What an edge of the plan asks for.

    granularity: "tensor" (one scale) or "group" (one a group of `offs`); layouts: the subset of {"row", "col"} that a
    later GEMM reads; high: keep the high-precision tensor beside it (a bias gradient reads that); blocks: a scale for
    every 128 elements along the summed axis instead (128 x 128 of a weight), none over two groups.
    """

    dtype: torch.dtype
    granularity: str = "tensor"
    layouts: frozenset[str] = frozenset({ROW})
    high: bool = False
    blocks: bool = False

    def __str__(self) -> str:
        grain = f"blocks of a {self.granularity}" if self.blocks else self.granularity
        layouts = "+".join(sorted(self.layouts))
        return f"{dtype_name(self.dtype)}[{grain}, {layouts}]"


@dataclass(frozen=True)
class Quantized:
    """A tensor of shape (M, K) in a quantized format.

    row        (M, K) data quantized along K, or None
    col        (K, M) the transpose, quantized along M, or None; blocks of groups: at `fuseops.kernels.column_offs`
    scale      () or (G,) float32, multiply the data by it to get the value; with blocks (ceil(K/128), M), of `row`
    offs       (G,) int32 row ends of the groups, with granularity "group"
    high       (M, K) the high-precision tensor itself, where a reader also needs it
    dtype      of the high-precision tensor that it stands for
    col_scale  with blocks (ceil(M/128), K) or, where they begin anew in each group, (M//128 + G, K), of `col`
    """

    row: Tensor | None
    col: Tensor | None
    scale: Tensor | None
    offs: Tensor | None
    high: Tensor | None
    dtype: torch.dtype
    col_scale: Tensor | None = None

    COMPONENTS = ("row", "col", "scale", "offs", "high", "col_scale")

    def components(self) -> Mapping[str, Tensor]:
        """The component tensors that are present, by name."""
        pairs = ((name, getattr(self, name)) for name in self.COMPONENTS)
        return {name: t for name, t in pairs if t is not None}

    @classmethod
    def of(cls, components: Mapping[str, Tensor], dtype: torch.dtype) -> "Quantized":
        """From component tensors by name (those brought back after saving)."""
        return cls(dtype=dtype, **{name: components.get(name) for name in cls.COMPONENTS})

    def present(self, name: str) -> Tensor:
        """A component that must be there.  Raises ValueError."""
        component: Tensor | None = getattr(self, name)
        if component is None:
            raise ValueError(
                f"the {name} that this GEMM reads was not made: the op's layouts() leaves it out"
            )
        return component

    def only(self, *layouts: str) -> "Quantized":
        """Without the layouts (and the high-precision tensor) that no later GEMM reads."""
        kept = replace(self, high=None)
        if ROW not in layouts:
            # one scale of the whole tensor, or of a group, is that of the columns too
            kept = replace(kept, row=None, scale=self.scale if self.col_scale is None else None)
        return kept if COL in layouts else replace(kept, col=None, col_scale=None)


@dataclass(frozen=True)
class Roles:
    """The formats of one op's operands under a recipe; None is high precision."""

    input: Format | None = None
    weight: Format | None = None
    grad_output: Format | None = None

    @property
    def columns(self) -> bool:
        """Whether the weight gradient multiplies two quantized operands: those of one alone it reads rowwise."""
        return self.input is not None and self.grad_output is not None


HIGH = Roles()  # the one object of an op that no recipe applies to
