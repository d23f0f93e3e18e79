"""Formats as data: what a code is, what a scale is, and one driver that quantizes matrices in any pair of them.

Codes: of float8 dtypes, one a byte; of float4_e2m1fn_x2, two a byte as uint8, the first in the low half. E2M1 has no
NaN: a block with one gets a scale that is NaN.
Scales: of float8_e8m0fnu, the smallest power of two that brings a block into the range (OCP MX, 5.3); of float8_e4m3fn,
that of the block over one of the whole tensor, which brings the largest to 448 (NVFP4, arXiv:2509.25149, appendix B).
Shapes: a matrix (..., R, K) in blocks (rows, width) -> codes (..., R, K) or (..., R, ceil(K/2)), scale (...,
ceil(R/rows), ceil(K/width)); the last block of an axis may be a part of one.
An amax is that of `quantize.magnitude`: NaN does not count, infinity counts as the largest finite number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from .dropout import BITS, draws
from .grouped import group_of_row
from .operands import columns_of, place_of_row
from .quantize import FLT_MAX, magnitude, saturate

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
E2M1, E2M1_MAX = torch.float4_e2m1fn_x2, 6.0
E4M3_MAX = torch.finfo(E4M3).max
HADAMARD = 16
SIGNS = 0b1101011111101000
"""Of the random Hadamard transform: bit k says that element k is negated. TransformerEngine's."""
Block = tuple[int, int]
LARGEST = {E4M3: 8, E5M2: 15}
"""Exponents of the largest codes, each of which is 1.75 times a power of two."""


def e8m0_scale(amax: Tensor, data: torch.dtype, whole: Tensor | None) -> tuple[Tensor, Tensor]:
    """(scale, its inverse in float32): the smallest power of two from 2^-127 on with amax <= scale * largest code.

    Adding what 2 is above 1.75 carries into the exponent where the mantissa is beyond 1.75.
    """
    exponent = (amax.view(torch.int32) + 0x1FFFFF >> 23) - LARGEST[data]
    exponent = exponent.clamp(min=0)  # biased by 127
    inverse = (254 - exponent << 23).view(torch.float32)
    return exponent.to(torch.uint8).view(E8M0), inverse


def whole_inverse(amax: Tensor) -> Tensor:
    """What brings the scales of blocks of a tensor with this amax into the range of E4M3; 1 for amax 0."""
    largest = torch.full_like(amax, E4M3_MAX * E2M1_MAX)
    return torch.where(amax == 0, 1.0, (largest / amax).clamp(max=FLT_MAX))


def e4m3_scale(amax: Tensor, data: torch.dtype, whole: Tensor | None) -> tuple[Tensor, Tensor]:
    """(scale, the inverse of it and the one of the whole tensor).   whole: amax of the tensor, as amax broadcasts"""
    inverse_of_whole = whole_inverse(whole)  # type: ignore[arg-type]
    scale = saturate(amax * (inverse_of_whole / E2M1_MAX), E4M3)
    inverse = 1 / (scale.float() * (1 / inverse_of_whole))
    return scale, torch.where(scale.float() == 0, 0.0, inverse.clamp(max=FLT_MAX))


Scale = Callable[[Tensor, torch.dtype, Tensor | None], tuple[Tensor, Tensor]]
SCALES: Mapping[torch.dtype, Scale] = {E8M0: e8m0_scale, E4M3: e4m3_scale}


def e2m1_codes(x: Tensor, draws: Tensor | None) -> Tensor:
    """Codes of four bits, in bytes: to the nearest, ties to even; with draws of 16 bits up as often as x is far up."""
    x = x.nan_to_num(0.0, E2M1_MAX, -E2M1_MAX)
    size = x.abs().clamp(max=E2M1_MAX)
    scaled = torch.where(size < 2, size * 2, torch.where(size < 4, size, size / 2))
    up = scaled.round() if draws is None else (scaled + (draws + 0.5) / (1 << BITS)).floor()
    code = up + torch.where(size < 2, 0, torch.where(size < 4, 2, 4))
    return code.clamp(max=7).to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)


def e2m1_values(codes: Tensor) -> Tensor:
    """What codes of four bits stand for, in float32."""
    size = (codes & 7).float()
    size = torch.where(size < 4, size * 0.5, torch.where(size < 6, size - 2, size * 2 - 8))
    return torch.where(codes > 7, -size, size)


def packed(codes: Tensor) -> Tensor:
    """Two codes a byte, the first in the low half; an odd one at the end has zero beside it."""
    low, high = F.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def unpacked(codes: Tensor) -> Tensor:
    """The inverse of `packed`; of an odd number one more."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def quantize_format(
    x: Tensor,
    data: torch.dtype,
    scale: torch.dtype,
    block: Block,
    whole: Tensor | None = None,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(codes, scales) of matrices in blocks.

    whole: amax of the tensor, of a shape that broadcasts with the scales', where scales stand over one of it.
    seed: (1,) int64, of random rounding.
    """
    rows, width = block
    r, k = x.shape[-2:]
    padded = F.pad(x.float(), (0, -k % width, 0, -r % rows))
    tiles = padded.unflatten(-1, (-1, width)).unflatten(-3, (-1, rows))
    if whole is not None:
        whole = whole.unsqueeze(-1).unsqueeze(-3)
    scales, inverse = SCALES[scale](magnitude(tiles).amax((-3, -1), keepdim=True), data, whole)
    scaled = (tiles * inverse).flatten(-4, -3).flatten(-2)[..., :r, :k]
    if data is E2M1:
        scales = torch.where(tiles.isnan().any(-1, True).any(-3, True), torch.nan, scales.float())
        scales = scales.to(scale)
        random = None if seed is None else draws(seed, scaled.numel()).view(scaled.shape)
        codes = packed(e2m1_codes(scaled, random))
    else:
        codes = saturate(scaled, data)
    return codes.contiguous(), scales.squeeze(-1).squeeze(-2)


def codes_values(codes: Tensor, data: torch.dtype) -> Tensor:
    """What codes stand for by themselves, in float32."""
    return e2m1_values(unpacked(codes)) if data is E2M1 else codes.float()


def dequantize_format(codes: Tensor, scale: Tensor, data: torch.dtype, block: Block) -> Tensor:
    """codes times their scales, in float32; of an odd number of codes of four bits one more."""
    rows, width = block
    found = codes_values(codes, data)
    r, k = found.shape[-2:]
    spread = scale.float().repeat_interleave(rows, -2)[..., :r, :].repeat_interleave(width, -1)
    return found * F.pad(spread, (0, max(k - spread.shape[-1], 0)))[..., :k]


def hadamard(x: Tensor) -> Tensor:
    """The last axis in sixteens, multiplied by the Hadamard matrix over 4: its own inverse, in float32."""
    x = F.pad(x.float(), (0, -x.shape[-1] % HADAMARD))
    for half in (1, 2, 4, 8):
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
    return x * 0.25


def signs(width: int, like: Tensor) -> Tensor:
    """1 and -1 for every element of the random Hadamard transform."""
    place = torch.arange(width, device=like.device) % HADAMARD
    return 1.0 - 2.0 * ((SIGNS >> place) & 1)


def amax_of_groups(by_token: Tensor, ends: Tensor | None) -> Tensor:
    """The largest of all, or of each group.   (T,) -> () or (E,)"""
    if ends is None:
        return by_token.amax() if len(by_token) else by_token.new_zeros(())
    found = by_token.new_zeros(len(ends) + 1)
    group = group_of_row(ends, len(by_token))
    return found.scatter_reduce(0, group, by_token, "amax")[:-1]


def spread_over_groups(of_group: Tensor, ends: Tensor | None, count: int) -> Tensor:
    """() or (E,) -> () or (T,), with 1 where a token is in no group."""
    if ends is None:
        return of_group
    return F.pad(of_group, (0, 1), value=1.0)[group_of_row(ends, count)]


def turned_in_groups(x: Tensor, offs: Tensor | None) -> Tensor:
    """The transpose over tokens that begin anew in each group at a multiple of 128, zeros between.   -> (K, C)"""
    rows, k = x.shape
    width = columns_of(rows, None if offs is None else len(offs))
    full = x.new_zeros(width + 1, k).index_copy(0, place_of_row(offs, rows, x), x)
    return full[:width].t()
