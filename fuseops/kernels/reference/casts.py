"""Reference of `fuseops.kernels.casts`."""

from __future__ import annotations

import torch
from torch import Tensor

from .quantize import saturate


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype, rounded to nearest even; FP8 saturates."""
    if dtype.itemsize == 1:
        return saturate(x.float() if x.itemsize < 4 else x, dtype).contiguous()
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def cast_transpose(x: Tensor, dtype: torch.dtype, layout: str = "both") -> tuple[Tensor, Tensor]:
    """(rowwise (..., R, N), columnwise (..., N, R)); a layout not wanted is empty."""
    y = cast(x, dtype)
    none = y.new_empty(0)
    col = y.transpose(-1, -2).clone(memory_format=torch.contiguous_format)
    return y if layout != "col" else none, col if layout != "row" else none
