"""Twins of RMSNorm whose result is an FP8 operand."""

from __future__ import annotations

import torch
from torch import Tensor

from .norm import add_rmsnorm_fwd, rmsnorm_fwd
from .operands import quantize_operand
from .precision import wide
from .quantize import quantize_vectors


def rmsnorm_operand(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows, their scales, h, rstd) of x normed, or of h = x + residual, which is empty without one."""
    if residual is None:
        h = x.new_empty(0)
        y, rstd = rmsnorm_fwd(x, weight, eps, weight_offset)
    else:
        y, h, rstd = add_rmsnorm_fwd(x, residual, weight, eps, weight_offset)
    data, scale = quantize_vectors(y.reshape(-1, y.shape[-1]), dtype)
    return data, scale, h, rstd


def rmsnorm_columns(
    x: Tensor, weight: Tensor | None, rstd: Tensor, dtype: torch.dtype, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(columns, their scales) of the codes that `rmsnorm_operand` makes rows of."""
    y = wide(x) * rstd[..., None]
    if weight is not None:
        y = y * (weight.to(y.dtype) + weight_offset)
    rows = y.to(x.dtype).reshape(-1, x.shape[-1])
    return quantize_operand(rows, None, dtype, False)[2:]
