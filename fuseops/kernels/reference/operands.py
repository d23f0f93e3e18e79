"""Twins of what makes FP8 operands of GEMMs in blocks of 128: rows, columns by the exponent shift, weights.

Rows: codes (R, K) and scales (ceil(K/128), R), one for 128 features of a row.
Columns: codes (K, C), the transpose, over tokens that begin anew in each group at a multiple of 128, and scales
(ceil(K/128), C/128), one for a square of 128 features and 128 tokens; columns of no row are zeros. They are the codes
of the rows shifted to one exponent a square: the largest of its rows' scales. Scales are powers of two, so a value is
rounded once in total, and again only where its code falls below the format's normal numbers by the shift.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .activation import act_fwd, scaled_act_bwd, scaled_act_fwd
from .fp8 import dequantize
from .grouped import group_of_row, padding_mask
from .quantize import (
    BLOCK,
    SMALLEST,
    by_pieces,
    expert_quantize,
    grouped_quantize,
    inverse_scale,
    magnitude,
    pieces,
    quantize_vectors,
    saturate,
    tensor_quantize,
)

Four = tuple[Tensor, Tensor, Tensor, Tensor]


def columns_of(rows: int, groups: int | None) -> int:
    """C, the columns that so many rows take: each group begins at a multiple of 128.   groups: None without `offs`"""
    return -(-rows // BLOCK) * BLOCK if groups is None else (rows // BLOCK + groups) * BLOCK


def place_of_row(offs: Tensor | None, rows: int, like: Tensor) -> Tensor:
    """The column of each row; of a padding row one behind the last.   -> (R,) int64"""
    row = torch.arange(rows, device=like.device)
    if offs is None:
        return row
    groups = len(offs)
    group = group_of_row(offs, rows)
    ends = F.pad(offs.long(), (1, 1))  # begin of each group, and 0 for padding rows
    begin = ends[group]
    place = (begin // BLOCK + group) * BLOCK + row - begin
    return torch.where(group == groups, columns_of(rows, groups), place)


def quantize_operand(x: Tensor, offs: Tensor | None, dtype: torch.dtype, row: bool = True) -> Four:
    """(rows, their scales, columns, their scales); rows are empty where they are not wanted."""
    data, scale = quantize_vectors(x, dtype)
    col, col_scale = _columns(data, scale, offs)
    if not row:
        data, scale = data.new_empty(0), scale.new_empty(0)
    return data, scale, col, col_scale


def permute_operand(
    data: Tensor,
    scale: Tensor,
    index: Tensor | None,
    offs: Tensor | None,
    row: bool = True,
    col: bool = True,
) -> Four:
    """Rows index[r] of an operand (all of them, in order, without an index), as rows and as columns.

    Rows of padding are zeros.
    """
    if index is not None:
        rows = index.shape[0]
        padding = padding_mask(offs, rows)[:, 0]  # type: ignore[arg-type]
        at = index.long().masked_fill(padding, 0)
        raw = data.view(torch.uint8)[at].masked_fill(padding[:, None], 0)
        data, scale = raw.view(data.dtype), scale[:, at].masked_fill(padding, SMALLEST)
    rows_of = (data.contiguous(), scale.contiguous()) if row else _nothing(data, data.dtype)
    return *rows_of, *(_columns(data, scale, offs) if col else _nothing(data, data.dtype))


def columns_in_groups(data: Tensor, offs: Tensor | None) -> Tensor:
    """Codes transposed, with groups at multiples of 128 and zeros between.   (R, K) -> (K, C)"""
    rows = data.shape[0]
    width = columns_of(rows, None if offs is None else len(offs))
    place, raw = place_of_row(offs, rows, data), data.view(torch.uint8).t()

    def laid(piece: slice) -> Tensor:
        part = raw[piece].t()
        return part.new_zeros(width + 1, part.shape[1]).index_copy(0, place, part)[:width].t()

    return by_pieces(pieces(raw), laid).view(data.dtype)


def by_group(scale: Tensor, offs: Tensor, rows: int) -> Tensor:
    """The scale of every row's group, 0 for padding rows.   (E,) -> (R,)"""
    return F.pad(scale, (0, 1))[group_of_row(offs, rows)]


def _columns(data: Tensor, scale: Tensor, offs: Tensor | None) -> tuple[Tensor, Tensor]:
    """The exponent shift of rows."""
    rows, k = data.shape
    groups = None if offs is None else len(offs)
    width = columns_of(rows, groups)
    place = place_of_row(offs, rows, data)
    codes = data.new_zeros(width + 1, k, dtype=torch.float32).index_copy(0, place, data.float())
    scales = scale.new_zeros(len(scale), width + 1).index_copy(1, place, scale)[:, :width]
    square = scales.unflatten(1, (width // BLOCK, BLOCK)).amax(2).clamp(min=SMALLEST)
    shift = scales / square.repeat_interleave(BLOCK, 1)
    shifted = codes[:width] * shift.repeat_interleave(BLOCK, 0)[:k].t()
    return saturate(shifted, data.dtype).t().contiguous(), square


def quantize_weight(weight: Tensor, dtype: torch.dtype, row: bool = True, col: bool = True) -> Four:
    """(codes as they lie, scales, codes transposed, scales) in squares of 128 x 128 of each matrix.

    (E, N, K) -> (E, N, K), (E, ceil(N/128), ceil(K/128)), and both transposed; of (N, K) without E.
    Empty where not wanted.
    """
    *lead, n, k = weight.shape
    padded = F.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    tiles = padded.view(*lead, -(-n // BLOCK), BLOCK, -(-k // BLOCK), BLOCK)
    inv = inverse_scale(magnitude(tiles).amax((-3, -1), keepdim=True), dtype, True)
    data = saturate((tiles * inv).view_as(padded)[..., :n, :k], dtype)
    scale = 1 / inv[..., 0, :, 0]
    turned = (t.mT.clone(memory_format=torch.contiguous_format) for t in (data, scale))
    return (
        *((data.contiguous(), scale.contiguous()) if row else _nothing(weight, dtype)),
        *(turned if col else _nothing(weight, dtype)),
    )


def _nothing(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales that are not wanted."""
    return like.new_empty(0, dtype=dtype), like.new_empty(0, dtype=torch.float32)


def _values(h: Tensor, scale: Tensor | None) -> Tensor:
    return h if scale is None else dequantize(h, scale, "block", torch.bfloat16)


def swiglu_operand(
    h: Tensor,
    probs: Tensor | None,
    offs: Tensor | None,
    dtype: torch.dtype,
    row: bool = True,
    col: bool = False,
    h_scale: Tensor | None = None,
) -> Four:
    """`quantize_operand` of swiglu(h) (* probs), rounded as h is.   (R, 2F), (R,) -> over (R, F)

    With h_scale h is codes, which stand for bfloat16 values.
    """
    h = _values(h, h_scale)
    a = act_fwd(h, "swiglu") if probs is None else scaled_act_fwd(h, probs, "swiglu")
    if col:
        return quantize_operand(a, offs, dtype, row)
    data, scale = quantize_vectors(a, dtype)
    return data, scale, data.new_empty(0), scale.new_empty(0)


def dswiglu_operand(
    da: Tensor,
    h: Tensor,
    probs: Tensor | None,
    offs: Tensor | None,
    dtype: torch.dtype,
    a_dtype: torch.dtype,
    row: bool = True,
    col: bool = True,
    act: bool = True,
    h_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(`quantize_operand` of dh, columns of a with their scales, dprobs) of a = swiglu(h) (* probs), each rounded as h
    is before it is quantized.   (R, F), (R, 2F), (R,) -> over (R, 2F), (R, F), (R,)

    What is not wanted is empty, and dprobs without probs; of padding rows dprobs is zero.
    """
    h = _values(h, h_scale)
    by = torch.ones(h.shape[0], device=h.device) if probs is None else probs
    dh, dprobs, a = scaled_act_bwd(da, h, by, "swiglu", probs is not None, True)
    rows = quantize_operand(dh, offs, dtype, row) if row or col else None
    first = _nothing(h, dtype) if rows is None else rows[:2]
    second = rows[2:] if rows is not None and col else _nothing(h, dtype)
    columns = quantize_operand(a, offs, a_dtype, False)[2:] if act else _nothing(h, a_dtype)
    if probs is not None and offs is not None:
        dprobs = dprobs.masked_fill(padding_mask(offs, h.shape[0])[:, 0], 0.0)
    return *first, *second, *columns, dprobs


def quantize_groups(
    x: Tensor,
    offs: Tensor | None,
    dtype: torch.dtype,
    row: bool = True,
    col: bool = False,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, columns, scale) with one scale a group, or one for all.   (R, N) -> (R, N), (N, C), (E,) or ()"""
    if offs is None:
        data, scale = tensor_quantize(x, dtype, amax)
    else:
        data, scale = grouped_quantize(x, offs, dtype, amax)
    columns = columns_in_groups(data, offs) if col else data.new_empty(0)
    return data if row else data.new_empty(0), columns, scale


def quantize_matrices(
    weight: Tensor, dtype: torch.dtype, row: bool = True, col: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, codes transposed, scale) with one scale a matrix.   (E, N, K) -> (E, N, K), (E, K, N), (E,)

    Of (N, K) without E.
    """
    data, scale = expert_quantize(weight, dtype)
    turned = data.mT.contiguous() if col else data.new_empty(0)
    return data if row else data.new_empty(0), turned, scale
