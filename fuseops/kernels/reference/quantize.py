"""Reference of `fuseops.kernels.quantize`: saturation is explicit, never left to a cast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .grouped import group_of_row, padding_mask

BLOCK = 128
SMALLEST = 2.0**-63
"""No power-of-two scale is smaller, so that the product of two is a normal number; a block of zeros has it."""
FLT_MAX = torch.finfo(torch.float32).max


def magnitude(x: Tensor) -> Tensor:
    """|x| for an amax: NaN does not count, infinity counts as the largest finite value."""
    return x.float().abs().nan_to_num_(0.0, FLT_MAX)


def inverse_scale(amax: Tensor, dtype: torch.dtype, pow2: bool) -> Tensor:
    """limit / amax, at most FLT_MAX, 1 for amax 0; with pow2 rounded down to a power of two, at most 1 / SMALLEST."""
    limit = torch.full_like(amax, torch.finfo(dtype).max)
    if pow2:
        inv = (limit / amax).clamp(max=1 / SMALLEST)
        return (inv.view(torch.int32) & 0x7F800000).view(torch.float32)
    return (limit / torch.where(amax == 0, limit, amax)).clamp(max=FLT_MAX)


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in an FP8 format: finite values and infinities beyond the range become its ends, NaN stays NaN."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def quantize_tensor(
    x: Tensor, dtype: torch.dtype, layout: str = "row", pow2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rowwise (R, N), columnwise (N, R), scale (), amax ()); a layout not wanted is empty."""
    size = magnitude(x)
    amax = size.amax() if x.numel() else size.new_zeros(())
    inv = inverse_scale(amax, dtype, pow2)
    q = saturate(x.float() * inv, dtype)
    row, col = pick_layout(q, q, layout)
    return row, col, 1 / inv, amax


def quantize_rows(x: Tensor, dtype: torch.dtype, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """(q (R, N), scale (R,))."""
    amax = magnitude(x).amax(1) if x.shape[1] else x.new_zeros(x.shape[0], dtype=torch.float32)
    inv = inverse_scale(amax, dtype, pow2)
    return saturate(x.float() * inv[:, None], dtype), 1 / inv


def grouped_quantize(x: Tensor, offs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One scale a group of rows; padding rows become zero.   (R, K), (E,) -> data (R, K), scale (E,)"""
    rows, groups = x.shape[0], offs.shape[0]
    group = group_of_row(offs, rows)
    by_row = magnitude(x).amax(1) if x.shape[1] else x.new_zeros(rows, dtype=torch.float32)
    amax = by_row.new_zeros(groups + 1).scatter_reduce(0, group, by_row, "amax")
    inv = inverse_scale(amax, dtype, False)
    scaled = (x.float() * inv[group].unsqueeze(-1)).masked_fill(padding_mask(offs, rows), 0.0)
    return saturate(scaled, dtype), 1 / inv[:groups]


def expert_quantize(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One scale an expert.   (E, N, K) -> data (E, N, K), scale (E,)"""
    inv = inverse_scale(magnitude(weight).amax((1, 2)), dtype, False)
    return saturate(weight.float() * inv[:, None, None], dtype), 1 / inv


def quantize_blocks(
    x: Tensor, dtype: torch.dtype, block_rows: int, layout: str = "row", pow2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rowwise (R, N), columnwise (N, R), their scales); block_rows is 1 (vectors of 128) or 128 (squares)."""
    rows, n = x.shape
    if not x.numel():
        return _nothing(x, dtype, block_rows, layout)
    blocks_r, blocks_n = -(-rows // BLOCK), -(-n // BLOCK)
    padded = torch.nn.functional.pad(
        x.float(), (0, blocks_n * BLOCK - n, 0, blocks_r * BLOCK - rows)
    )
    tiles = padded.view(blocks_r, BLOCK, blocks_n, BLOCK)
    size = magnitude(tiles)
    if block_rows == BLOCK:
        inv_row = inv_col = inverse_scale(size.amax((1, 3), keepdim=True), dtype, pow2)
        row_scale = 1 / inv_row[:, 0, :, 0]
        col_scale = row_scale.t().contiguous()
    else:
        inv_row = inverse_scale(size.amax(3, keepdim=True), dtype, pow2)
        inv_col = inverse_scale(size.amax(1, keepdim=True), dtype, pow2)
        row_scale = (1 / inv_row).reshape(-1, blocks_n)[:rows].t().contiguous()
        col_scale = (1 / inv_col).reshape(blocks_r, -1)[:, :n].contiguous()
    row_q, col_q = ((tiles * inv).view_as(padded)[:rows, :n] for inv in (inv_row, inv_col))
    row, col = pick_layout(saturate(row_q, dtype), saturate(col_q, dtype), layout)
    none = x.new_empty(0, dtype=torch.float32)
    return row, col, row_scale if layout != "col" else none, col_scale if layout != "row" else none


def quantize_columns(x: Tensor, dtype: torch.dtype, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """(q (N, R), the transpose of x quantized with one scale a column of x, scale (N,))."""
    amax = magnitude(x).amax(0) if x.shape[0] else x.new_zeros(x.shape[1], dtype=torch.float32)
    inv = inverse_scale(amax, dtype, pow2)
    return saturate(x.float() * inv, dtype).t().contiguous(), 1 / inv


def quantize_group_blocks(
    x: Tensor, offs: Tensor, dtype: torch.dtype, pow2: bool = False
) -> tuple[Tensor, Tensor]:
    """See `fuseops.kernels.quantize_group_blocks`."""
    (rows, n), groups = x.shape, offs.shape[0]
    blocks = rows // BLOCK + groups
    group, begin = group_of_row(offs, rows).clamp(max=groups - 1), _begins(offs)
    column = torch.arange(rows, device=x.device) + (_aligned(begin) - begin)[group]
    full = x.float().masked_fill(padding_mask(offs, rows), 0.0)
    full = full.new_zeros(blocks * BLOCK, n).index_copy(0, column, full).view(blocks, BLOCK, n)
    inv = inverse_scale(magnitude(full).amax(1), dtype, pow2)
    col = saturate(full * inv[:, None], dtype).view(-1, n)
    return col.t().contiguous(), 1 / inv


def column_offs(offs: Tensor) -> Tensor:
    """Where groups end in columns that begin at multiples of 128: each where the next one begins.   (E,) -> (E,)"""
    number = torch.arange(1, len(offs) + 1, device=offs.device, dtype=offs.dtype)
    return (offs // BLOCK + number) * BLOCK


def _begins(offs: Tensor) -> Tensor:
    """The first row of each group.   -> (E,) int64"""
    return torch.cat([offs.new_zeros(1), offs[:-1]]).long()


def _aligned(begin: Tensor) -> Tensor:
    """Where groups begin if each does at a multiple of 128: the last one up to its first row, and one further for
    each group before it, which no group's rows overlap, and which takes no look at the counts.
    """
    return (begin // BLOCK + torch.arange(len(begin), device=begin.device)) * BLOCK


def _nothing(x: Tensor, dtype: torch.dtype, block_rows: int, layout: str) -> Any:
    rows, n = x.shape
    blocks_r, blocks_n = -(-rows // BLOCK), -(-n // BLOCK)
    shapes = [(rows, n), (n, rows), (blocks_n, rows), (blocks_r, n)]
    if block_rows == BLOCK:
        shapes[2:] = [(blocks_r, blocks_n), (blocks_n, blocks_r)]
    wanted = (layout != "col", layout != "row") * 2
    dtypes = (dtype, dtype, torch.float32, torch.float32)
    return tuple(
        x.new_empty(s if w else 0, dtype=d) for s, w, d in zip(shapes, wanted, dtypes, strict=True)
    )


def pick_layout(row: Tensor, col: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """(row, transposed col), empty where the layout is not wanted."""
    none = row.new_empty(0)
    return (
        row.contiguous() if layout != "col" else none,
        col.t().contiguous() if layout != "row" else none,
    )
