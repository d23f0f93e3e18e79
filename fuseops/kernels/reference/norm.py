"""Reference of `fuseops.kernels.norm`."""

from __future__ import annotations

import torch
from torch import Tensor

from .precision import wide


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    dims: int = 1,
    mean: bool = True,
) -> tuple[Tensor, Tensor]:
    """y = x * rstd * (weight + weight_offset), rstd = 1 / sqrt(mean(x^2) + eps) over the last `dims` axes; of their
    sum instead, without `mean`.
    """
    full, axes = wide(x), tuple(range(-dims, 0))
    total = torch.mean if mean else torch.sum
    rstd = torch.rsqrt(total(full.square(), axes, keepdim=True) + eps)
    y = full * rstd
    if weight is not None:
        y = y * (weight.to(y.dtype) + weight_offset)
    return y.to(x.dtype), rstd.flatten(-dims).squeeze(-1)


def add_rmsnorm_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, h, rstd): h = x + residual as stored, y and rstd of h."""
    h = (wide(x) + wide(residual)).to(x.dtype)
    y, rstd = rmsnorm_fwd(h, weight, eps, weight_offset)
    return y, h, rstd


def rmsnorm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dres: Tensor | None = None,
    need_dw: bool = True,
    weight_offset: float = 0.0,
    dtype: torch.dtype | None = None,
    mean: bool = True,
) -> tuple[Tensor, Tensor]:
    """dx = (w dy - xhat mean(w dy xhat)) rstd + dres, or with a sum for the mean;  dw = row sum of dy xhat, empty
    if not needed.
    """
    full, grad = wide(x), wide(dy)
    dims = x.dim() - rstd.dim()
    axes, rows = tuple(range(-dims, 0)), tuple(range(rstd.dim()))
    rstd = rstd.view(*rstd.shape, *(1,) * dims)
    xhat = full * rstd
    dw = (grad * xhat).sum(rows) if rows else grad * xhat
    if weight is not None:
        grad = grad * (weight.to(grad.dtype) + weight_offset)
    total = torch.mean if mean else torch.sum
    dx = (grad - xhat * total(grad * xhat, axes, keepdim=True)) * rstd
    dx = dx if dres is None else dx + wide(dres)
    if not need_dw:
        return dx.to(x.dtype), dw.new_empty(0)
    return dx.to(x.dtype), dw if dtype is None else dw.to(dtype)
