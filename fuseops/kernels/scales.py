"""From numbers to codes of FP8: amax, the scale that follows from it, and saturation, never left to a cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops.kernels.groups import columns_of, group_of_row, padding_mask, place_of_row

PIECES, LEAST_PIECE = 32, 1 << 20
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


def pieces(x: Tensor, step: int = 1) -> list[slice]:
    """Where matrices (..., R, K) are cut along their rows, at multiples of `step`, for what makes temporaries of an
    element's many bytes: into 32, none of less than 2^20 elements. Compiled code makes no temporaries.
    """
    rows = x.shape[-2]
    if torch.compiler.is_compiling() or x.numel() <= LEAST_PIECE:
        return [slice(0, rows)]
    size = max(x.numel() // PIECES, LEAST_PIECE) * rows // x.numel()
    size = max(size // step, 1) * step
    return [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]


def by_pieces(cut: list[slice], make: Callable[[slice], Tensor]) -> Tensor:
    """Matrices (..., R, N), whose rows are made piece by piece, where more than one into memory that waits for them."""
    if len(cut) == 1:
        return make(cut[0]).contiguous()
    made: Tensor | None = None
    for piece in cut:
        part = make(piece)
        if made is None:
            made = part.new_empty(*part.shape[:-2], cut[-1].stop, part.shape[-1])
        made[..., piece, :] = part
        del part
    return cast("Tensor", made)


def tensor_quantize(
    x: Tensor, dtype: torch.dtype, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One scale for all.   (R, N) -> data (R, N), scale ()"""
    if amax is None:
        size = magnitude(x)
        amax = size.amax() if x.numel() else size.new_zeros(())
    inv = inverse_scale(amax, dtype, False)
    return saturate(x.float() * inv, dtype), 1 / inv


def grouped_quantize(
    x: Tensor, offs: Tensor, dtype: torch.dtype, amax: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One scale a group of rows; padding rows become zero.   (R, K), (E,) -> data (R, K), scale (E,)"""
    rows, groups = x.shape[0], offs.shape[0]
    group = group_of_row(offs, rows)
    if amax is None:
        by_row = magnitude(x).amax(1) if x.shape[1] else x.new_zeros(rows, dtype=torch.float32)
        amax = by_row.new_zeros(groups + 1).scatter_reduce(0, group, by_row, "amax")[:groups]
    inv = inverse_scale(F.pad(amax, (0, 1)), dtype, False)
    scaled = (x.float() * inv[group].unsqueeze(-1)).masked_fill(padding_mask(offs, rows), 0.0)
    return saturate(scaled, dtype), 1 / inv[:groups]


def expert_quantize(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One scale an expert.   (E, N, K) -> data (E, N, K), scale (E,); of (N, K) without E"""
    inv = inverse_scale(magnitude(weight).amax((-2, -1)), dtype, False)
    return saturate(weight.float() * inv[..., None, None], dtype), 1 / inv


def columns_in_groups(data: Tensor, offs: Tensor | None) -> Tensor:
    """Codes transposed, with groups at multiples of 128 and zeros between.   (R, K) -> (K, C)"""
    rows = data.shape[0]
    width = columns_of(rows, None if offs is None else len(offs))
    place, raw = place_of_row(offs, rows, data), data.view(torch.uint8).t()

    def laid(piece: slice) -> Tensor:
        part = raw[piece].t()
        return part.new_zeros(width + 1, part.shape[1]).index_copy(0, place, part)[:width].t()

    return by_pieces(pieces(raw), laid).view(data.dtype)
