"""Reference of `fuseops.kernels.layer_norm`."""

from __future__ import annotations

import torch
from torch import Tensor

from .precision import wide


def layernorm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    dims: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """y = (x - mean) * rstd * (weight + weight_offset) + bias, and mean and rstd of the last `dims` axes."""
    full, axes = wide(x), tuple(range(-dims, 0))
    mean = full.mean(axes, keepdim=True)
    centred = full - mean
    rstd = torch.rsqrt(centred.square().mean(axes, keepdim=True) + eps)
    y = centred * rstd
    if weight is not None:
        y = y * (weight.to(y.dtype) + weight_offset)
    if bias is not None:
        y = y + bias.to(y.dtype)
    mean, rstd = (t.flatten(-dims).squeeze(-1) for t in (mean, rstd))
    return y.to(x.dtype), mean, rstd


def add_layernorm_fwd(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, h, mean, rstd): h = x + residual as stored, the others of h."""
    h = (wide(x) + wide(residual)).to(x.dtype)
    y, mean, rstd = layernorm_fwd(h, weight, bias, eps, weight_offset)
    return y, h, mean, rstd


def layernorm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dres: Tensor | None = None,
    need_dw: bool = True,
    need_db: bool = True,
    weight_offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx = (w dy - mean(w dy) - xhat mean(w dy xhat)) rstd + dres;  dw and db: row sums of dy xhat and of dy."""
    full, grad = wide(x), wide(dy)
    dims = x.dim() - rstd.dim()
    axes, rows = tuple(range(-dims, 0)), tuple(range(rstd.dim()))
    mean, rstd = (t.view(*t.shape, *(1,) * dims) for t in (mean, rstd))
    xhat = (full - mean) * rstd
    sums = [t.sum(rows) if rows else t for t in (grad * xhat, grad)]
    if weight is not None:
        grad = grad * (weight.to(grad.dtype) + weight_offset)
    along = (grad * xhat).mean(axes, keepdim=True)
    dx = (grad - grad.mean(axes, keepdim=True) - xhat * along) * rstd
    dx = dx if dres is None else dx + wide(dres)
    dw, db = (
        t.to(dtype or t.dtype) if need else t.new_empty(0)
        for t, need in zip(sums, (need_dw, need_db), strict=True)
    )
    return dx.to(x.dtype), dw, db
