"""Kernel of fuseops.kernels.micro: quantization in blocks of 16 and 32 along the axis that is summed."""

import triton
import triton.language as tl

from fuseops.kernels.device.quantize import FLT_MAX, amax_of
from fuseops.kernels.device.quantize_columns import group_at_block

ROUND: tl.constexpr = tl.constexpr(8388608.0)
"""2^23: a small number and it, less it, is rounded to nearest even."""


@triton.jit
def e8m0_scale(amax, LARGEST: tl.constexpr):
    """(bits of the scale, its inverse); LARGEST is the exponent of the largest code, which is 1.75 times a power."""
    exponent = (tl.minimum(amax, FLT_MAX).to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23
    exponent = tl.maximum(exponent - LARGEST, 0)
    return exponent.to(tl.uint8), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_code(x):
    """(code of a number from 0 to 448, what it stands for), rounded to nearest even. By arithmetic: ptxas misreads a
    conversion whose result is stored and converted back.
    """
    small = (x * 512.0 + ROUND) - ROUND
    bits = x.to(tl.int32, bitcast=True)
    code = (
        (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    ) - 960  # eight steps an exponent, 120 exponents less
    wide = ((code + 960) << 20).to(tl.float32, bitcast=True)
    least = x < 0.015625  # the smallest number that is not subnormal
    return tl.where(least, small.to(tl.int32), code), tl.where(least, small * 0.001953125, wide)


@triton.jit
def e4m3_scale(amax, whole, lost):
    """(bits of the scale, the inverse of it and the one of the whole tensor); NaN where a number of the block is."""
    up = tl.minimum(tl.div_rn(2688.0, tl.where(whole == 0.0, 2688.0, whole)), FLT_MAX)
    found = tl.minimum(amax, FLT_MAX) * tl.div_rn(up, 6.0)
    code, wide = e4m3_code(tl.minimum(found, 448.0))
    inverse = tl.minimum(tl.div_rn(1.0, wide * tl.div_rn(1.0, up)), FLT_MAX)
    return tl.where(lost, 0x7F, code).to(tl.uint8), tl.where(wide == 0.0, 0.0, inverse)


@triton.jit
def e2m1_codes(x):
    """Codes of four bits, rounded to nearest even; NaN is 0."""
    x = tl.where(x == x, x, 0.0)
    size = tl.minimum(tl.abs(x), 6.0)
    scaled = tl.where(size < 2.0, size * 2.0, tl.where(size < 4.0, size, size * 0.5))
    code = ((scaled + ROUND) - ROUND).to(tl.int32)
    code += tl.where(size < 2.0, 0, tl.where(size < 4.0, 2, 4))
    return code | (x.to(tl.int32, bitcast=True) < 0).to(tl.int32) << 3


@triton.jit(do_not_specialize=["R", "E"])
def quantize_micro_kernel(
    x_ptr, offs_ptr, amax_ptr, code_ptr, scale_ptr, R, K, C, E, stride_x,
    COL: tl.constexpr, GROUPS: tl.constexpr, FP4: tl.constexpr, SWIZZLE: tl.constexpr,
    LARGEST: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A tile is 128 tokens of one group and BLOCK_N features; C is the width of columns. The last group's tiles go on
    over padding, which is zeros. Features go on up to a multiple of 128, as swizzled scales do.
    """
    WIDTH: tl.constexpr = 16 if FP4 else 32
    num_n = tl.cdiv(K, 128) * (128 // BLOCK_N)
    block, col0 = tl.program_id(0) // num_n, tl.program_id(0) % num_n * BLOCK_N
    if GROUPS:
        group, begin, end = group_at_block(block, offs_ptr, E, 128, BLOCK_E)
        row0, end = begin + (block - begin // 128 - group) * 128, tl.minimum(end, R)
        last = tl.where(group == E - 1, R, end)
    else:
        group, row0, end, last = 0, block * 128, R, R
    rows, cols = tl.arange(0, 128), tl.arange(0, BLOCK_N)
    x = tl.load(
        x_ptr + row0.to(tl.int64) * stride_x + col0 + (rows[:, None] * stride_x + cols[None, :]),
        mask=(rows < end - row0)[:, None] & (cols < K - col0)[None, :],
        other=0.0,
    ).to(tl.float32)
    HIGH: tl.constexpr = BLOCK_N if COL else 128
    WIDE: tl.constexpr = 128 if COL else BLOCK_N
    AXIS: tl.constexpr = 1 if COL else 2
    if COL:
        x = tl.reshape(x, (128 // WIDTH, WIDTH, BLOCK_N))
    else:
        x = tl.reshape(x, (128, BLOCK_N // WIDTH, WIDTH))
    if FP4:
        lost = tl.max((x != x).to(tl.int32), axis=AXIS) > 0
        bits, inverse = e4m3_scale(amax_of(x, AXIS), tl.load(amax_ptr + group), lost)
    else:
        bits, inverse = e8m0_scale(amax_of(x, AXIS), LARGEST)
    q = x * tl.expand_dims(inverse, AXIS)
    # codes: at the tile's place in (R, K) or (K, C), two in a byte of FP4
    PACK: tl.constexpr = 2 if FP4 else 1
    if FP4:
        q = e2m1_codes(q)
        if COL:
            q = tl.trans(tl.reshape(q, (64, 2, BLOCK_N)), (0, 2, 1))
        else:
            q = tl.reshape(q, (128, BLOCK_N // 2, 2))
        low, high = tl.split(q)
        codes = (low | high << 4).to(tl.uint8)
    else:
        codes = tl.reshape(q, (128, BLOCK_N)).to(code_ptr.dtype.element_ty)
    if COL:  # turned as bytes, a quarter of what they came from
        codes, bits = tl.trans(codes), tl.trans(bits)
    if COL:
        first, place, until, width = col0, block * 128, K, C
    else:
        first, place, until, width = row0, col0, last, K
    outer, inner = tl.arange(0, HIGH), tl.arange(0, WIDE // PACK)
    pitch = tl.cdiv(width, PACK)
    tl.store(
        code_ptr
        + first.to(tl.int64) * pitch
        + place // PACK
        + (outer[:, None] * pitch + inner[None, :]),
        codes,
        mask=(outer < until - first)[:, None] & (inner < pitch - place // PACK)[None, :],
    )
    count = tl.cdiv(width, WIDTH)
    s = place // WIDTH + tl.arange(0, WIDE // WIDTH)
    if SWIZZLE:
        tiles = tl.cdiv(count, 4)
        o = (first if COL else block * 128) + outer
        at = ((o // 128).to(tl.int64) * tiles)[:, None] + (s // 4)[None, :]
        at = at * 512 + (o % 32 * 16 + o % 128 // 32 * 4)[:, None] + (s % 4)[None, :]
        most = tl.cdiv(K, 128) * 128 if COL else 1 << 30
        mask = (o < most)[:, None] & (s < tiles * 4)[None, :]
    else:
        at = (first + outer).to(tl.int64)[:, None] * count + s[None, :]
        mask = (outer < until - first)[:, None] & (s < count)[None, :]
    tl.store(scale_ptr + at, bits, mask=mask)
