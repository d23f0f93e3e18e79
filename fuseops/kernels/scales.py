"""Plain torch quantizes to FP8 by amax, the scale that follows from it, and an explicit saturation."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops.kernels.groups import (
    column_of_row,
    group_of_row,
    num_groups,
    padded_columns,
    padding_mask,
)
from fuseops.kernels.launch import thread

RowTransform = Callable[[Tensor], Tensor]
PIECES, LEAST_PIECE = 32, 1 << 20
SMALLEST = 2.0**-63
"""No power-of-two scale is smaller, so that the product of two is a normal number; a block of zeros has it."""
FLT_MAX = torch.finfo(torch.float32).max


def magnitude(x: Tensor) -> Tensor:
    """|x| for an amax: NaN does not count, infinity counts as the largest finite value."""
    return x.float().abs().nan_to_num_(0.0, FLT_MAX)


def inverse_scale(
    amax: Tensor, dtype: torch.dtype, pow2: bool = False, factor: float = 1.0
) -> Tensor:
    """limit / amax * factor, at most FLT_MAX, or `factor` for amax 0; with pow2 limit / amax, rounded down to a power
    of two, at most 1 / SMALLEST.
    """
    limit = torch.full_like(amax, torch.finfo(dtype).max)
    if pow2:
        inv = (limit / amax).clamp(max=1 / SMALLEST)
        return (inv.view(torch.int32) & 0x7F800000).view(torch.float32)
    return (limit / torch.where(amax > 0, amax, limit) * factor).clamp(max=FLT_MAX)


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in an FP8 format: values and infinities beyond the range become its ends, NaN stays NaN."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def pieces(x: Tensor, step: int = 1) -> list[slice]:
    """Slices of the rows of matrices (..., R, K), at multiples of `step`, that bound the memory of temporaries: 32,
    none of less than 2^20 elements. One slice in compiled code and in fakes, which have no temporaries.
    """
    rows = x.shape[-2]
    if torch.compiler.is_compiling() or thread.in_fake or x.numel() <= LEAST_PIECE:
        return [slice(0, rows)]
    size = max(x.numel() // PIECES, LEAST_PIECE) * rows // x.numel()
    size = max(size // step, 1) * step
    return [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


def by_pieces(cut: list[slice], make: Callable[[slice], Tensor]) -> Tensor:
    """Matrices (..., R, N) whose rows `make` computes slice by slice, into one allocation."""
    if len(cut) == 1:
        return make(cut[0]).contiguous()
    out: Tensor | None = None
    for piece in cut:
        part = make(piece)
        if out is None:
            out = part.new_empty(*part.shape[:-2], cut[-1].stop, part.shape[-1])
        out[..., piece, :] = part
        del part
    return cast("Tensor", out)


def amax_of_tokens(x: Tensor, axis: int, transform: RowTransform | None = None) -> Tensor:
    """The largest magnitude of each token of a matrix.   axis: that of features.  transform: what gives, for rows of x,
    those that count in their place
    """
    if not x.shape[axis]:
        return x.new_zeros(x.shape[1 - axis], dtype=torch.float32)
    parts = (x[piece] if transform is None else transform(x[piece]) for piece in pieces(x))
    found = [magnitude(part).amax(axis) for part in parts]
    if len(found) == 1:
        return found[0]
    return torch.cat(found) if axis else torch.stack(found).amax(0)


def amax_of_groups(by_token: Tensor, ends: Tensor | None) -> Tensor:
    """The largest amax of all tokens, or of each group.   (T,) -> () or (E,)"""
    tokens = by_token.shape[0]
    if ends is None:
        return by_token.amax() if tokens else by_token.new_zeros(())
    found = by_token.new_zeros(ends.shape[0] + 1)
    group = group_of_row(ends, tokens)
    return found.scatter_reduce(0, group, by_token, "amax")[:-1]


def amax_of_matrices(weight: Tensor) -> Tensor:
    """(..., N, K) -> (...) float32"""
    if not weight.numel():
        return weight.new_zeros(weight.shape[:-2], dtype=torch.float32)
    parts = [magnitude(weight[..., piece, :]).amax((-2, -1)) for piece in pieces(weight)]
    return parts[0] if len(parts) == 1 else torch.stack(parts).amax(0)


def spread_over_groups(
    of_group: Tensor, ends: Tensor | None, count: int, of_none: float = 1.0
) -> Tensor:
    """() or (E,) -> () or (T,), with `of_none` where a token is in no group."""
    if ends is None:
        return of_group
    return F.pad(of_group, (0, 1), value=of_none)[group_of_row(ends, count)]


def codes_of_rows(x: Tensor, up: Tensor, offs: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Codes of rows times one number, or one a group; padding rows become zero.   (R, K), () or (E,) -> (R, K)"""
    rows = x.shape[0]  # of which traced code may know no number
    spread = spread_over_groups(up, offs, rows).expand(rows)[:, None]
    padding = None if offs is None else padding_mask(offs, rows)

    def scaled(piece: slice) -> Tensor:
        part = x[piece].float() * spread[piece]
        return saturate(part if padding is None else part.masked_fill(padding[piece], 0.0), dtype)

    return by_pieces(pieces(x), scaled)


def codes_of_matrices(weight: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes of matrices, each times a number of its own.   (..., N, K), (...) -> (..., N, K)"""
    by = up[..., None, None]
    cut = pieces(weight)
    return by_pieces(cut, lambda at: saturate(weight[..., at, :].float() * by, dtype))


def columns_in_groups(data: Tensor, offs: Tensor | None) -> Tensor:
    """Codes transposed, with groups at multiples of 128 and zeros between.   (R, K) -> (K, C)"""
    rows = data.shape[0]
    width = padded_columns(rows, num_groups(offs))
    place, raw = column_of_row(offs, rows, data), data.view(torch.uint8).t()

    def laid(piece: slice) -> Tensor:
        part = raw[piece].t()
        return part.new_zeros(width + 1, part.shape[1]).index_copy(0, place, part)[:width].t()

    return by_pieces(pieces(raw), laid).view(data.dtype)
