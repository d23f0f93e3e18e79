"""Twins of fuseops.kernels.bias."""

from __future__ import annotations

import torch
from torch import Tensor


def group_of_rows(rows: int, offs: Tensor) -> tuple[Tensor, Tensor]:
    """(group of every row, whether it has one); rows at or beyond offs[-1] have none."""
    row = torch.arange(rows, device=offs.device)
    group = torch.searchsorted(offs, row.to(offs.dtype), right=True)
    return group.clamp(max=len(offs) - 1), group < len(offs)


def bias_fwd(x, bias):
    """x + bias."""
    return (x.float() + bias.float()).to(x.dtype)


def bias_bwd(dy):
    """dbias float32: dy summed over all axes but the last."""
    return dy.flatten(0, -2).float().sum(0)


def grouped_bias_fwd(x, bias, offs, probs=None):
    """x + bias[group] (* probs); padding rows become zero.   x (R, N), bias (E, N), offs (E,),
    probs (R,)
    """
    group, valid = group_of_rows(len(x), offs)
    shift = bias.float()[group]
    shift = shift if probs is None else shift * probs[:, None]
    return torch.where(valid[:, None], x.float() + shift, 0.0).to(x.dtype)


def grouped_bias_bwd(dy, offs, probs=None, bias=None):
    """(dbias (E, N) float32, dprobs (R,) float32 if bias is given, else empty)."""
    group, valid = group_of_rows(len(dy), offs)
    dy = torch.where(valid[:, None], dy.float(), 0.0)
    scaled = dy if probs is None else torch.where(valid, probs, 0.0)[:, None] * dy
    dbias = dy.new_zeros(len(offs), dy.shape[1]).index_add_(0, group, scaled)
    return dbias, dy.new_empty(0) if bias is None else (dy * bias.float()[group]).sum(1)
