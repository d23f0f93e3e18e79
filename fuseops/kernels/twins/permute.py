"""Twins of fuseops.kernels.permute."""

from __future__ import annotations

import torch
from torch import Tensor


def copies(pos: Tensor, offs: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(row of every copy, whether it has one) for pos (T, K); a copy without a row gets row
    ``rows``.
    """
    kept = (pos >= 0) & (pos < offs[-1].clamp(max=rows))
    return torch.where(kept, pos.long(), rows), kept


def scatter_rows(x, pos, offs, rows, probs=None):
    """y[pos[t, k]] = x[t] (* probs[pos[t, k]]), zeros at padding rows.   x (T, N) -> y (rows, N)"""
    row, _ = copies(pos, offs, rows)
    spread = x[:, None].expand(-1, pos.shape[1], -1)
    if probs is not None:
        spread = (spread.float() * _padded(probs)[row][:, :, None]).to(x.dtype)
    return x.new_zeros(rows + 1, x.shape[1]).index_put((row,), spread)[:rows]


def gather_rows(x, index, offs, probs=None):
    """y[r] = x[index[r]] (* probs[r]), zeros at padding rows.   x (T, N), index (R,) -> y (R, N)"""
    used = torch.arange(len(index), device=x.device) < offs[-1]
    y = torch.cat([x, x.new_zeros(1, x.shape[1])])[torch.where(used, index, len(x))]
    return y if probs is None else _scaled(y, torch.where(used, probs, 0.0))


def combine_fwd(x, pos, offs, probs=None):
    """y[t] = sum over k of x[pos[t, k]] (* probs[pos[t, k]]).   x (R, N), pos (T, K) -> y (T, N)"""
    row, _ = copies(pos, offs, len(x))
    terms = _padded(x)[row].float()
    terms = terms if probs is None else terms * _padded(probs)[row][:, :, None]
    return terms.sum(1).to(x.dtype)


def combine_bwd(dy, x, pos, offs, probs):
    """(dx (R, N), dprobs (R,) float32) of combine_fwd with probs; zeros at padding rows."""
    row, _ = copies(pos, offs, len(x))
    dots = (dy.float()[:, None] * _padded(x)[row].float()).sum(2)
    dprobs = dots.new_zeros(len(x) + 1).index_put((row,), dots)[: len(x)]
    return scatter_rows(dy, pos, offs, len(x), probs).to(x.dtype), dprobs


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() * scale[:, None]).to(x.dtype)


def _padded(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])
