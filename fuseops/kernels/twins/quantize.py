"""Twins of fuseops.kernels.quantize: saturation is explicit, never left to a cast."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
FLT_MAX = torch.finfo(torch.float32).max


def magnitude(x: Tensor) -> Tensor:
    """|x| for an amax: NaN does not count, infinity counts as the largest finite value."""
    return x.float().abs().nan_to_num(0.0, FLT_MAX)


def inverse_scale(amax: Tensor, dtype: torch.dtype, pow2: bool) -> Tensor:
    """limit / amax, at most FLT_MAX; rounded down to a power of two if wanted; 1 for amax 0."""
    limit = torch.full_like(amax, torch.finfo(dtype).max)
    inv = (limit / torch.where(amax == 0, limit, amax)).clamp(max=FLT_MAX)
    return (inv.view(torch.int32) & 0x7F800000).view(torch.float32) if pow2 else inv


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in an FP8 format: finite values and infinities beyond the range become its ends, NaN stays
    NaN.
    """
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def quantize_tensor(x, dtype, layout="row", pow2=False):
    """(rowwise (R, N), columnwise (N, R), scale (1,), amax (1,)); a layout not wanted is empty."""
    size = magnitude(x)
    amax = torch.cat([size.flatten(), size.new_zeros(1)]).amax().reshape(1)
    inv = inverse_scale(amax, dtype, pow2)
    q = saturate(x.float() * inv, dtype)
    row, col = pick_layout(q, q, layout)
    return row, col, 1 / inv, amax


def quantize_rows(x, dtype, pow2=False):
    """(q (R, N), scale (R,))."""
    inv = inverse_scale(magnitude(x).amax(1), dtype, pow2)
    return saturate(x.float() * inv[:, None], dtype), 1 / inv


def quantize_blocks(x, dtype, block_rows, layout="row", pow2=False):
    """(rowwise (R, N), columnwise (N, R), their scales); block_rows is 1 (vectors of 128) or 128
    (squares).
    """
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


def _nothing(x: Tensor, dtype: torch.dtype, block_rows: int, layout: str) -> tuple[Tensor, ...]:
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


def quantize_columns(x, dtype, pow2=False):
    """(q (N, R), the transpose of x quantized with one scale a column of x, scale (N,))."""
    largest = torch.cat([magnitude(x), x.new_zeros(1, x.shape[1], dtype=torch.float32)]).amax(0)
    inv = inverse_scale(largest, dtype, pow2)
    return saturate(x.float() * inv, dtype).t().contiguous(), 1 / inv


def quantize_group_blocks(x, offs, dtype, pow2=False):
    """(q (N, R), scale (R // 128 + E, N)): columnwise vectors of 128 rows that begin anew in each
    group; zeros in q for padding rows, 1 for scales that nothing uses.
    """
    rows, n = x.shape
    group = torch.searchsorted(
        offs, torch.arange(rows, device=x.device, dtype=offs.dtype), right=True
    )
    valid = (group < len(offs))[:, None]
    group = group.clamp(max=len(offs) - 1)
    begin = torch.cat([offs.new_zeros(1), offs[:-1]])[group].long()
    row = torch.arange(rows, device=x.device)
    block = torch.where(valid[:, 0], begin // BLOCK + group + (row - begin) // BLOCK, 0)
    x = torch.where(valid, x.float(), 0.0)
    amax = x.new_zeros(rows // BLOCK + len(offs), n, dtype=torch.float32)
    amax = amax.scatter_reduce(0, block[:, None].expand(-1, n), magnitude(x).to(amax.dtype), "amax")
    inv = inverse_scale(amax, dtype, pow2)
    return saturate(x * inv[block], dtype).t().contiguous(), 1 / inv
