"""`quantize_format` quantizes matrices in plain torch, in any pair of a code format and a scale format.

Codes: of float8 dtypes, one a byte; of float4_e2m1fn_x2, two a byte as uint8, the first in the low half. E2M1 has no
NaN: a block with one gets a scale that is NaN.
Scales: of float8_e8m0fnu, the smallest power of two that brings a block into the range (OCP MX, 5.3); of float8_e4m3fn,
that of the block over one of the whole tensor, which brings the largest to 448 (NVFP4, arXiv:2509.25149, appendix B).
Shapes: a matrix (..., R, K) in blocks (rows, width) -> codes (..., R, K) or (..., R, ceil(K/2)), scale (...,
ceil(R/rows), ceil(K/width)); the last block of an axis may be a part of one.
An amax is that of `scales.magnitude`: NaN does not count, infinity counts as the largest finite number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops.kernels.dropout import BITS, draws
from fuseops.kernels.groups import column_of_row, num_groups, padded_columns
from fuseops.kernels.scales import FLT_MAX, RowTransform, inverse_scale, magnitude, pieces, saturate

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
E2M1, E2M1_MAX = torch.float4_e2m1fn_x2, 6.0
E4M3_MAX = torch.finfo(E4M3).max
HADAMARD = 16
SIGNS = 0b1101011111101000
"""The signs of the random Hadamard transform, TransformerEngine's: element k is negated if bit k is set."""
Block = tuple[int, int]
LARGEST = {E4M3: 8, E5M2: 15}
"""Exponents of the largest codes, each of which is 1.75 times a power of two."""


class Format(NamedTuple):
    """A `Format` describes how matrices are quantized along their last axis: see `fuseops.recipes.Scaling`."""

    data: torch.dtype
    scale: torch.dtype
    block: Block
    powers: bool  # of two are the scales; always for E8M0, and never for E4M3
    epsilon: float = 0.0


def e8m0_scale(amax: Tensor, form: Format, whole: Tensor | None) -> tuple[Tensor, Tensor]:
    """(scale, its inverse in float32): the smallest power of two from 2^-127 on with amax <= scale * largest code.

    Adding what 2 is above 1.75 carries into the exponent where the mantissa is beyond 1.75.
    """
    exponent = (amax.view(torch.int32) + 0x1FFFFF >> 23) - LARGEST[form.data]
    exponent = exponent.clamp(min=0)  # biased by 127
    inverse = (254 - exponent << 23).view(torch.float32)
    return exponent.to(torch.uint8).view(E8M0), inverse


def whole_inverse(amax: Tensor) -> Tensor:
    """The factor that brings the block scales of a tensor with this amax into the range of E4M3; 1 for amax 0."""
    largest = torch.full_like(amax, E4M3_MAX * E2M1_MAX)
    return torch.where(amax == 0, 1.0, (largest / amax).clamp(max=FLT_MAX))


def e4m3_scale(amax: Tensor, form: Format, whole: Tensor | None) -> tuple[Tensor, Tensor]:
    """(scale, the inverse of it and the one of the whole tensor).   whole: amax of the tensor, as amax broadcasts"""
    inverse_of_whole = whole_inverse(whole)  # type: ignore[arg-type]
    # by a tensor: GPUs multiply by the inverse of a number, which rounds twice
    sixth = inverse_of_whole / torch.full_like(inverse_of_whole, E2M1_MAX)
    scale = saturate(amax * sixth, E4M3)
    inverse = 1 / (scale.float() * (1 / inverse_of_whole))
    return scale, torch.where(scale.float() == 0, 0.0, inverse.clamp(max=FLT_MAX))


def float32_scale(amax: Tensor, form: Format, whole: Tensor | None) -> tuple[Tensor, Tensor]:
    """(scale, its inverse), any float32 numbers, or powers of two."""
    inverse = inverse_scale(amax, form.data, form.powers)
    return 1 / inverse, inverse


SCALES = {E8M0: e8m0_scale, E4M3: e4m3_scale, torch.float32: float32_scale}
"""By dtype: what gives the scales of blocks with an amax, and their inverse."""


def e2m1_codes(x: Tensor, draws: Tensor | None) -> Tensor:
    """Codes of four bits, in bytes: to the nearest, ties to even; with draws of 16 bits up as often as x is far up."""
    size = x.nan_to_num(0.0, E2M1_MAX, -E2M1_MAX).abs_().clamp_(max=E2M1_MAX)
    two, four = size >= 2, size >= 4  # from where codes lie twice as far apart
    size.mul_(2).div_(1.0 + two).div_(1.0 + four)
    code = size.round_() if draws is None else size.add_((draws + 0.5) / (1 << BITS)).floor_()
    code.add_(two, alpha=2).add_(four, alpha=2).clamp_(max=7)
    sign = torch.signbit(x) & ~x.isnan()
    return code.to(torch.uint8) | (sign.to(torch.uint8) << 3)


def packed(codes: Tensor) -> Tensor:
    """Two codes a byte, the first in the low half; an odd one at the end has zero beside it."""
    low, high = F.pad(codes, (0, codes.shape[-1] % 2)).unflatten(-1, (-1, 2)).unbind(-1)
    return low | (high << 4)


def e2m1_as_e4m3(packed_codes: Tensor) -> Tensor:
    """Codes of four bits, two a byte, as E4M3 codes of numbers that are 2^-6 times theirs.

    Both formats end an exponent's field with the mantissa, and begin with subnormal numbers.
    """
    low = (packed_codes & 7) << 2 | (packed_codes & 8) << 4
    high = packed_codes >> 2 & 28 | packed_codes & 128
    return torch.stack([low, high], -1).flatten(-2).view(E4M3)


E2M1_UP = 64.0
"""The factor of the E4M3 codes of `e2m1_as_e4m3`."""


def quantize_format(
    x: Tensor,
    form: Format,
    whole: Tensor | None = None,
    seed: Tensor | None = None,
    transform: RowTransform | None = None,
) -> tuple[Tensor, Tensor]:
    """(codes, scales) of matrices in blocks, piece by piece.

    whole: amax of the tensor, of a shape that broadcasts with the scales', where scales stand over one of it.
    seed: (1,) int64, of random rounding.  transform: what gives, for rows of x, those that take their place.
    """
    rows = form.block[0]
    made: list[Tensor] = []  # dynamo knows no list[Tensor]()
    cut = pieces(x, rows)
    for number, piece in enumerate(cut):
        at = slice(piece.start // rows, -(-piece.stop // rows))
        own = whole[..., at, :] if whole is not None and whole.shape[-2] > 1 else whole
        part = x[..., piece, :] if transform is None else transform(x[..., piece, :])
        random = None if seed is None else seed + 2 * number
        found = _quantize_piece(part.float(), form, own, random)
        del part
        if len(cut) == 1:
            return found
        high = x.shape[-2], -(-x.shape[-2] // rows)
        if not made:
            sizes = zip(found, high, strict=True)
            made = [t.new_empty(*t.shape[:-2], n, t.shape[-1]) for t, n in sizes]
        for t, where, mine in zip(made, (piece, at), found, strict=True):
            t[..., where, :] = mine
    return made[0], made[1]


def _quantize_piece(
    x: Tensor, form: Format, whole: Tensor | None, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x float32"""
    data, (rows, width) = form.data, form.block
    r, k = x.shape[-2:]
    if k % width or r % rows:
        x = F.pad(x, (0, -k % width, 0, -r % rows))
    tiles = x.unflatten(-1, (-1, width)).unflatten(-3, (-1, rows))
    if whole is not None:
        whole = whole.unsqueeze(-1).unsqueeze(-3)
    amax = magnitude(tiles).amax((-3, -1), keepdim=True)
    amax = amax.clamp(min=form.epsilon) if form.epsilon else amax
    scales, inverse = SCALES[form.scale](amax, form, whole)
    scaled = tiles * inverse
    if data is E2M1:
        scales = torch.where(tiles.isnan().any(-1, True).any(-3, True), torch.nan, scales.float())
        scales = scales.to(form.scale)
    del tiles, x
    scaled = scaled.flatten(-4, -3).flatten(-2)[..., :r, :k]
    if data is E2M1:
        random = None if seed is None else draws(seed, scaled.numel()).view(scaled.shape)
        codes = packed(e2m1_codes(scaled, random))
    else:
        codes = saturate(scaled, data)
    return codes.contiguous(), scales.squeeze(-1).squeeze(-2)


def codes_values(codes: Tensor, data: torch.dtype) -> Tensor:
    """The values of codes without their scales, in float32."""
    if data is E2M1:
        return e2m1_as_e4m3(codes).float() * E2M1_UP
    return codes.float()


def dequantize_format(
    codes: Tensor,
    scale: Tensor,
    data: torch.dtype,
    block: Block,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """codes times their scales; of an odd number of codes of four bits one more.

    dtype: float32, or bfloat16, in which the product of a code and a scale is exact too.
    """
    rows, width = block
    scale = scale.to(dtype)
    if data is E2M1:
        codes, scale = e2m1_as_e4m3(codes), scale * E2M1_UP
    found = codes.to(dtype)
    r, k = found.shape[-2:]
    if rows > 1:
        scale = scale.repeat_interleave(rows, -2)[..., :r, :]
    whole, rest = divmod(k, width)
    if whole:
        tiles = found[..., : whole * width].unflatten(-1, (whole, width))
        tiles.mul_(scale[..., :whole, None])
    if rest:
        found[..., whole * width :].mul_(scale[..., whole:])
    return found


def hadamard(x: Tensor) -> Tensor:
    """The last axis in sixteens, multiplied by the Hadamard matrix over 4: its own inverse, in float32."""
    x = F.pad(x.float(), (0, -x.shape[-1] % HADAMARD))
    for half in (1, 2, 4, 8):
        a, b = x.unflatten(-1, (-1, 2, half)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
    return x * 0.25


def random_hadamard(x: Tensor) -> Tensor:
    """The random Hadamard transform of the last axis, a multiple of sixteen, in float32."""
    return hadamard(x.float() * signs(x.shape[-1], x))


def signs(width: int, like: Tensor) -> Tensor:
    """The signs, 1 or -1, of the elements of a random Hadamard transform."""
    place = torch.arange(width, device=like.device) % HADAMARD
    return 1.0 - 2.0 * ((SIGNS >> place) & 1)


def transpose_in_groups(x: Tensor, offs: Tensor | None) -> Tensor:
    """The transpose over tokens that begin anew in each group at a multiple of 128, zeros between.   -> (K, C)"""
    rows, k = x.shape
    width = padded_columns(rows, num_groups(offs))
    if offs is None:
        return F.pad(x, (0, 0, 0, width - rows)).t() if width > rows else x.t()
    full = x.new_zeros(width + 1, k).index_copy_(0, column_of_row(offs, rows, x), x)
    return full[:width].t()


def micro_format(data: torch.dtype) -> Format:
    """MXFP8 of FP8 codes, NVFP4 of codes of four bits, in blocks along a row."""
    if data is E2M1:
        return Format(data, E4M3, (1, 16), False)
    return Format(data, E8M0, (1, 32), True)


def swizzled(scale: Tensor, offs: Tensor | None = None) -> Tensor:
    """Scales (..., R, S), as bytes, where tensor cores of Blackwell read them: in blocks of 128 rows and 4 scales, 512
    bytes, with those of row r at 16 (r % 32) + 4 (r // 32); zeros where there is none.
    -> (..., ceil(R/128), ceil(S/4), 32, 4, 4)

    offs: of groups of rows, whose blocks begin anew in each: those of group g at block offs[g-1] // 128 + g.
    """
    rows, s = scale.shape[-2:]
    if offs is not None:
        width = padded_columns(rows, len(offs))
        placed = scale.new_zeros(width + 1, s)
        scale = placed.index_copy_(0, column_of_row(offs, rows, scale), scale)[:width]
    padded = F.pad(scale, (0, -s % 4, 0, -scale.shape[-2] % 128))
    tiles = padded.unflatten(-2, (-1, 4, 32)).unflatten(-1, (-1, 4))
    return tiles.movedim(-2, -4).transpose(-2, -3).contiguous()


def unswizzled(scale: Tensor, rows: int, count: int, offs: Tensor | None = None) -> Tensor:
    """The inverse of `swizzled`.   -> (..., rows, count)"""
    scale = scale.transpose(-2, -3).movedim(-4, -2).flatten(-2).flatten(-4, -2)[..., :count]
    if offs is not None:
        scale = F.pad(scale, (0, 0, 0, 1))[column_of_row(offs, rows, scale)]
    return scale[..., :rows, :].contiguous()


def whole_of_blocks(of_token: Tensor, width: int, turn: bool) -> Tensor:
    """A tensor's amax, () or by tokens (T,), in a shape that broadcasts with block scales.   turn: of columns"""
    if not of_token.dim():
        return of_token[None, None]
    return of_token[None, ::width] if turn else of_token[:, None]
