"""Reference of `fuseops.kernels.permute`."""

from __future__ import annotations

import torch
from torch import Tensor

from .grouped import padding_mask
from .precision import wide


def scatter_rows(
    x: Tensor, pos: Tensor, offs: Tensor, rows: int, probs: Tensor | None = None
) -> Tensor:
    """y[pos[t, k]] = x[t] (* probs[pos[t, k]]), zeros at padding rows.   x (T, N) -> y (rows, N)"""
    row = _row_of_copy(pos, offs, rows)
    copies = x[:, None].expand(-1, pos.shape[1], -1)
    if probs is not None:
        copies = (wide(copies) * wide(_padded(probs))[row][:, :, None]).to(x.dtype)
    return x.new_zeros(rows + 1, x.shape[1]).index_put((row,), copies)[:rows]


def gather_rows(x: Tensor, index: Tensor, offs: Tensor, probs: Tensor | None = None) -> Tensor:
    """y[r] = x[index[r]] (* probs[r]), zeros at padding rows.   x (T, N), index (R,) -> y (R, N)"""
    padding = padding_mask(offs, index.shape[0])
    y = _padded(x)[index.masked_fill(padding[:, 0], x.shape[0])]
    if probs is None:
        return y
    return (wide(y) * wide(probs)[:, None].masked_fill(padding, 0.0)).to(x.dtype)


def combine_fwd(
    x: Tensor,
    pos: Tensor,
    offs: Tensor,
    probs: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """y[t] = sum over k of x[pos[t, k]] (* probs[pos[t, k]]).   x (R, N), pos (T, K) -> y (T, N)"""
    row = _row_of_copy(pos, offs, x.shape[0])
    terms = wide(_padded(x)[row])
    terms = terms if probs is None else terms * wide(_padded(probs))[row][:, :, None]
    return terms.sum(1).to(dtype or x.dtype)


def values_of_copies(values: Tensor, pos: Tensor, offs: Tensor) -> Tensor:
    """values[pos[t, k]], zero where there is no such copy.   values (R,), pos (T, K) -> (T, K)"""
    return _padded(values)[_row_of_copy(pos, offs, values.shape[0])]


def _row_of_copy(pos: Tensor, offs: Tensor, rows: int) -> Tensor:
    """Row of every copy, `rows` for a copy that has none.   pos (T, K) -> (T, K) int64"""
    kept = (pos >= 0) & (pos < offs[-1].clamp(max=rows))
    return torch.where(kept, pos.long(), rows)


def _padded(x: Tensor) -> Tensor:
    """x with a row of zeros behind its last."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])
