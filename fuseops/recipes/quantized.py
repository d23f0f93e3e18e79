"""Quantized tensors: plain dataclasses of component tensors, never a `torch.Tensor` subclass.

So checkpointing, saved-tensor hooks and offload see real storages, and a component can be freed or moved alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.errors import FuseOpsError

from .scaling import SQUARE, Scaling

BLOCK = 128


class Layout(NamedTuple):
    """Codes, and the scales that they are multiplied by to get the values."""

    data: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Quantized:
    """A tensor of shape (R, K) in a quantized format.

    row      codes (R, K), as forward and input gradient read them, or None.
             scale: of (1, 128) blocks (ceil(K/128), R), of (1, 32) blocks (R, ceil(K/32)); else () or, of groups, (E,)
    col      codes (K, C) over the tokens, as a weight gradient reads them, or None. Each group begins at a multiple of
             128 (`fuseops.kernels.column_offs`), and what belongs to no row is zero.
             scale: of squares (ceil(K/128), C/128), of (128, 1) blocks (C/128, K), of (32, 1) blocks (K, C/32); else
             that of the rows
    scaling  the format
    offs     (E,) int32 row ends of the groups, or None
    dtype    of the tensor that it stands for
    """

    row: Layout | None
    col: Layout | None
    scaling: Scaling
    offs: Tensor | None
    dtype: torch.dtype

    def components(self) -> Mapping[str, Tensor]:
        """The component tensors that are present, by name."""
        found: dict[str, Tensor] = {}
        for name, layout in (("row", self.row), ("col", self.col)):
            if layout is not None:
                found |= {name: layout.data, f"{name}_scale": layout.scale}
        return found if self.offs is None else {**found, "offs": self.offs}

    def of(self, components: Mapping[str, Tensor]) -> Quantized:
        """The same with other component tensors by name (those brought back after saving)."""
        row, col = (
            Layout(components[name], components[f"{name}_scale"]) if name in components else None
            for name in ("row", "col")
        )
        return replace(self, row=row, col=col, offs=components.get("offs"))

    def dequantize(self) -> Tensor:
        """The values, rows first: from the rows where they are there, else from the columns.

        -> (R, K), or (C, K) with groups at multiples of 128, in the dtype that it stands for; of a weight its shape
        """
        found = values(self, "row") if self.row is not None else values(self, "col").mT
        return found.to(self.dtype)


def product_dtype(q: Quantized) -> torch.dtype:
    """In which codes times scales are exact, and none is out of range."""
    exact = q.scaling.block is not None and q.dtype is torch.bfloat16
    return torch.bfloat16 if exact else torch.float32


def values(q: Quantized, layout: str) -> Tensor:
    """What a layout stands for, in `product_dtype`: rows (R, K), columns (K, C), a weight as it lies."""
    found: Layout | None = getattr(q, layout)
    if found is None:
        raise FuseOpsError(f"an operand in {q.scaling} has no {layout} layout, which is read.")
    data, scale = found
    if not q.scaling.family.codes:
        return K.dequantize_format(data, scale, q.scaling.grain).to(product_dtype(q))
    return (data.float() * _spread(q, layout, data, scale)).to(product_dtype(q))


def _spread(q: Quantized, layout: str, data: Tensor, scale: Tensor) -> Tensor:
    """The scale of every code, in a shape that the codes' broadcasts with."""
    *_, rows, width = data.shape
    scaling = q.scaling
    if scaling.block == SQUARE or (layout == "col" and scaling.columns == SQUARE):
        return _wide(_wide(scale, -2, rows), -1, width)
    if scaling.block is not None and layout == "col":  # (C/128, K) of (K, C)
        return _wide(scale, 0, width).t()
    if scaling.block is not None:  # (K/128, R) of (R, K)
        return _wide(scale, 0, width).t()
    if scale.dim() == 0 or q.offs is None:
        return scale[:, None, None] if scale.dim() else scale
    ends = K.column_offs(q.offs) if layout == "col" else q.offs
    by_group = K.by_group(scale, ends, width if layout == "col" else rows)
    return by_group if layout == "col" else by_group[:, None]


def _wide(scale: Tensor, axis: int, size: int) -> Tensor:
    return scale.repeat_interleave(BLOCK, axis).narrow(axis, 0, size)
