"""Reference of `fuseops.kernels.bias`."""

from __future__ import annotations

import torch
from torch import Tensor

from .grouped import group_of_row
from .precision import accumulator, wide


def bias_fwd(x: Tensor, bias: Tensor) -> Tensor:
    """x + bias."""
    return (wide(x) + wide(bias)).to(x.dtype)


def bias_bwd(dy: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """dbias: dy summed over all axes but the last, in the accumulator's dtype or rounded to `dtype`.

    (..., N) -> (N,)
    """
    rows = dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])
    given = rows.dtype
    if given is torch.float32 and (dtype is given or dtype is None):
        return torch.sum(rows, 0)
    total = rows.sum(0, dtype=accumulator(dy.dtype))
    return total if dtype is None else total.to(dtype)


def grouped_bias_fwd(x: Tensor, bias: Tensor, offs: Tensor, probs: Tensor | None = None) -> Tensor:
    """x + bias[group] (* probs); padding rows become zero.   x (R, N), bias (E, N), offs (E,), probs (R,)"""
    group, valid = _group_of_row(offs, x.shape[0])
    shift = wide(bias)[group]
    shift = shift if probs is None else shift * probs[:, None].to(shift.dtype)
    return (wide(x) + shift).masked_fill(~valid, 0.0).to(x.dtype)


def grouped_bias_bwd(
    dy: Tensor, offs: Tensor, probs: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(dbias (E, N), dprobs (R,) if bias is given, else empty), in the accumulator's dtype."""
    group, valid = _group_of_row(offs, dy.shape[0])
    grad = wide(dy).masked_fill(~valid, 0.0)
    scaled = grad
    if probs is not None:
        scaled = grad * probs[:, None].masked_fill(~valid, 0.0).to(grad.dtype)
    dbias = grad.new_zeros(offs.shape[0], dy.shape[1]).index_add(0, group, scaled)
    return dbias, grad.new_empty(0) if bias is None else (grad * wide(bias)[group]).sum(1)


def _group_of_row(offs: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(group of every row, the last one for padding; (R, 1) whether it has one)."""
    group = group_of_row(offs, rows)
    return group.clamp(max=offs.shape[0] - 1), (group < offs.shape[0]).unsqueeze(-1)
