"""Formats as data: what a code is, what a scale is, and one driver that quantizes matrices in any pair of them.

Scales: of float8_e8m0fnu, the smallest power of two that brings a block into the range (OCP MX, 5.3).
Shapes: a matrix (..., R, K) in blocks (rows, width) -> codes (..., R, K), scale (..., ceil(R/rows), ceil(K/width)); the
last block of an axis may be a part of one.
An amax is that of `quantize.magnitude`: NaN does not count, infinity counts as the largest finite number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .operands import columns_of, place_of_row
from .quantize import magnitude, saturate

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
Block = tuple[int, int]
LARGEST = {E4M3: 8, E5M2: 15}
"""Exponents of the largest codes, each of which is 1.75 times a power of two."""


def e8m0_scale(amax: Tensor, data: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale, its inverse in float32): the smallest power of two from 2^-127 on with amax <= scale * largest code.

    Adding what 2 is above 1.75 carries into the exponent where the mantissa is beyond 1.75.
    """
    exponent = (amax.view(torch.int32) + 0x1FFFFF >> 23) - LARGEST[data]
    exponent = exponent.clamp(min=0)  # biased by 127
    inverse = (254 - exponent << 23).view(torch.float32)
    return exponent.to(torch.uint8).view(E8M0), inverse


SCALES: Mapping[torch.dtype, Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]] = {
    E8M0: e8m0_scale
}


def quantize_format(
    x: Tensor, data: torch.dtype, scale: torch.dtype, block: Block
) -> tuple[Tensor, Tensor]:
    """(codes, scales) of matrices in blocks."""
    rows, width = block
    r, k = x.shape[-2:]
    padded = F.pad(x.float(), (0, -k % width, 0, -r % rows))
    tiles = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, rows))
    scales, inverse = SCALES[scale](magnitude(tiles).amax((-3, -1), keepdim=True), data)
    codes = saturate(tiles * inverse, data).flatten(-4, -3).flatten(-2)[..., :r, :k]
    return codes.contiguous(), scales.squeeze(-1).squeeze(-2)


def dequantize_format(codes: Tensor, scale: Tensor, block: Block) -> Tensor:
    """codes times their scales, in float32."""
    rows, width = block
    r, k = codes.shape[-2:]
    spread = scale.float().repeat_interleave(rows, -2)[..., :r, :].repeat_interleave(width, -1)
    return codes.float() * spread[..., :k]


def turned_in_groups(x: Tensor, offs: Tensor | None) -> Tensor:
    """The transpose over tokens that begin anew in each group at a multiple of 128, zeros between.   -> (K, C)"""
    rows, k = x.shape
    width = columns_of(rows, None if offs is None else len(offs))
    full = x.new_zeros(width + 1, k).index_copy(0, place_of_row(offs, rows, x), x)
    return full[:width].t()
