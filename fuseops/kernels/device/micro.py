"""Kernel of fuseops.kernels.micro: MXFP8 and NVFP4, blocks of 32 and of 16 along the GEMM's inner axis.

A program loads a tile of 128 tokens by BLOCK_N features once, and writes codes and scales of one layout: rows, whose
blocks run along features, or columns, the transpose, whose blocks run along tokens. The tile is reshaped so that a
block is one axis, which the amax reduces. Columns are transposed as codes, not before: that moves a quarter of
the bytes.
Scales are plain, or swizzled as Blackwell's tensor cores read them: tiles of 128 rows by 4 scales, 512 bytes, in which
row r and scale s are at (r % 32) * 16 + r // 32 * 4 + s.
"""

import triton
import triton.language as tl

from fuseops.kernels.device.groups import group_at_block
from fuseops.kernels.device.quantize import FLT_MAX, amax_of

ROUND_MAGIC: tl.constexpr = tl.constexpr(8388608.0)
"""2^23: (x + 2^23) - 2^23 rounds x, 0 <= x < 2^22, to the nearest integer, ties to even."""


@triton.jit
def e8m0_scale(amax, LARGEST: tl.constexpr):
    """Return (E8M0 bits of the scale, its inverse) of amax: amax over the largest code, rounded up to a power of two.

    The largest code is 1.75 * 2^LARGEST, in e4m3 and in e5m2: a mantissa above 1.75 carries into the exponent.
    """
    exponent = (tl.minimum(amax, FLT_MAX).to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23
    exponent = tl.maximum(exponent - LARGEST, 0)
    return exponent.to(tl.uint8), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_code(x):
    """Return (the e4m3 code of a number from 0 to 448, its value), rounded to nearest even.

    By integer arithmetic: ptxas misreads a conversion whose result is stored and converted back.
    """
    subnormal = (x * 512.0 + ROUND_MAGIC) - ROUND_MAGIC
    bits = x.to(tl.int32, bitcast=True)
    # eight steps an exponent, 120 exponents less
    code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    normal = ((code + 960) << 20).to(tl.float32, bitcast=True)
    is_subnormal = x < 0.015625  # the smallest number that is not subnormal
    return tl.where(is_subnormal, subnormal.to(tl.int32), code), tl.where(
        is_subnormal, subnormal * 0.001953125, normal
    )


@triton.jit
def e4m3_scale(amax, tensor_amax, has_nan):
    """Return (E4M3 bits of the block's scale, the inverse of that times the tensor's scale); bits are NaN if has_nan.

    The tensor's scale maps its amax to 448 * 6 = 2688: the largest block scale times the largest code of e2m1.
    """
    inv_tensor_scale = tl.minimum(
        tl.div_rn(2688.0, tl.where(tensor_amax == 0.0, 2688.0, tensor_amax)), FLT_MAX
    )
    block_scale = tl.minimum(amax, FLT_MAX) * tl.div_rn(inv_tensor_scale, 6.0)
    code, scale = e4m3_code(tl.minimum(block_scale, 448.0))
    inverse = tl.minimum(tl.div_rn(1.0, scale * tl.div_rn(1.0, inv_tensor_scale)), FLT_MAX)
    return tl.where(has_nan, 0x7F, code).to(tl.uint8), tl.where(scale == 0.0, 0.0, inverse)


@triton.jit
def e2m1_codes(x):
    """Return e2m1 codes (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign bit), rounded to nearest even; NaN becomes 0."""
    x = tl.where(x == x, x, 0.0)
    magnitude = tl.minimum(tl.abs(x), 6.0)
    scaled = tl.where(
        magnitude < 2.0, magnitude * 2.0, tl.where(magnitude < 4.0, magnitude, magnitude * 0.5)
    )
    code = ((scaled + ROUND_MAGIC) - ROUND_MAGIC).to(tl.int32)
    code += tl.where(magnitude < 2.0, 0, tl.where(magnitude < 4.0, 2, 4))
    return code | (x.to(tl.int32, bitcast=True) < 0).to(tl.int32) << 3


@triton.jit(do_not_specialize=["R", "E"])
def quantize_micro_kernel(
    x_ptr, offs_ptr, amax_ptr, code_ptr, scale_ptr, R, K, C, E, stride_x,
    COL: tl.constexpr, GROUPS: tl.constexpr, FP4: tl.constexpr, SWIZZLE: tl.constexpr,
    LARGEST: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Quantize a tile: 128 tokens of one group by BLOCK_N features, to rows (R, K) or, COL, columns (K, C).

    The last group's tiles go on over padding rows, which are zeros. Features go on up to a multiple of 128, as swizzled
    scales do. `outer` is the axis of blocks in the stored layout, `inner` the axis along a block.
    """
    WIDTH: tl.constexpr = 16 if FP4 else 32
    num_n = tl.cdiv(K, 128) * (128 // BLOCK_N)
    block, col0 = tl.program_id(0) // num_n, tl.program_id(0) % num_n * BLOCK_N
    if GROUPS:
        group, begin, end = group_at_block(block, offs_ptr, R, E, 128, BLOCK_E)
        row0 = begin + (block - begin // 128 - group) * 128
        store_end = tl.where(group == E - 1, R, end)
    else:
        group, row0, end, store_end = 0, block * 128, R, R
    rows, cols = tl.arange(0, 128), tl.arange(0, BLOCK_N)
    x = tl.load(
        x_ptr + row0.to(tl.int64) * stride_x + col0 + (rows[:, None] * stride_x + cols[None, :]),
        mask=(rows < end - row0)[:, None] & (cols < K - col0)[None, :],
        other=0.0,
    ).to(tl.float32)
    OUTER: tl.constexpr = BLOCK_N if COL else 128
    INNER: tl.constexpr = 128 if COL else BLOCK_N
    AXIS: tl.constexpr = 1 if COL else 2
    if COL:
        x = tl.reshape(x, (128 // WIDTH, WIDTH, BLOCK_N))
    else:
        x = tl.reshape(x, (128, BLOCK_N // WIDTH, WIDTH))
    if FP4:
        has_nan = tl.max((x != x).to(tl.int32), axis=AXIS) > 0
        bits, inverse = e4m3_scale(amax_of(x, AXIS), tl.load(amax_ptr + group), has_nan)
    else:
        bits, inverse = e8m0_scale(amax_of(x, AXIS), LARGEST)
    q = x * tl.expand_dims(inverse, AXIS)
    # two codes of FP4 are packed in a byte, the first in its low half
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
    if COL:  # transposed as bytes, a quarter of float32
        codes, bits = tl.trans(codes), tl.trans(bits)
    if COL:
        outer0, inner0, outer_end, inner_size = col0, block * 128, K, C
    else:
        outer0, inner0, outer_end, inner_size = row0, col0, store_end, K
    outer, inner = tl.arange(0, OUTER), tl.arange(0, INNER // PACK)
    pitch = tl.cdiv(inner_size, PACK)
    tl.store(
        code_ptr
        + outer0.to(tl.int64) * pitch
        + inner0 // PACK
        + (outer[:, None] * pitch + inner[None, :]),
        codes,
        mask=(outer < outer_end - outer0)[:, None] & (inner < pitch - inner0 // PACK)[None, :],
    )
    num_scales = tl.cdiv(inner_size, WIDTH)
    scale_col = inner0 // WIDTH + tl.arange(0, INNER // WIDTH)
    if SWIZZLE:
        scale_tiles = tl.cdiv(num_scales, 4)
        scale_row = (outer0 if COL else block * 128) + outer
        offsets = ((scale_row // 128).to(tl.int64) * scale_tiles)[:, None] + (scale_col // 4)[
            None, :
        ]
        offsets = (
            offsets * 512
            + (scale_row % 32 * 16 + scale_row % 128 // 32 * 4)[:, None]
            + (scale_col % 4)[None, :]
        )
        scale_row_end = tl.cdiv(K, 128) * 128 if COL else 1 << 30
        mask = (scale_row < scale_row_end)[:, None] & (scale_col < scale_tiles * 4)[None, :]
    else:
        offsets = (outer0 + outer).to(tl.int64)[:, None] * num_scales + scale_col[None, :]
        mask = (outer < outer_end - outer0)[:, None] & (scale_col < num_scales)[None, :]
    tl.store(scale_ptr + offsets, bits, mask=mask)
