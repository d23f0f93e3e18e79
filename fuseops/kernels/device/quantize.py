"""Kernels of fuseops.kernels.quantize: amaxes, scales, and rowwise vectors."""

import triton
import triton.language as tl

FLT_MAX: tl.constexpr = tl.constexpr(3.4028234663852886e38)


@triton.jit
def amax_of(x, axis: tl.constexpr):
    """The largest magnitude along an axis; NaN does not count (the larger of NaN and 0 is 0)."""
    return tl.maximum(tl.max(tl.abs(x.to(tl.float32)), axis=axis), 0.0)


@triton.jit
def inverse_scale(amax, LIMIT: tl.constexpr, POW2: tl.constexpr):
    """LIMIT / amax, correctly rounded, at most FLT_MAX, 1 for amax 0; with POW2 rounded down to a power of two, at
    most 2^63. An infinite amax counts as the largest finite value.
    """
    amax = tl.minimum(amax, FLT_MAX)
    if POW2:
        inv = tl.minimum(tl.div_rn(LIMIT, amax), 9223372036854775808.0)
        return (inv.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    else:
        return tl.minimum(tl.div_rn(LIMIT, tl.where(amax == 0.0, LIMIT, amax)), FLT_MAX)


@triton.jit
def vector_scales(amax, LIMIT: tl.constexpr, POW2: tl.constexpr, BLOCK: tl.constexpr):
    """(inverse scales, scales) of amax (BLOCK,). The gathers give every thread one element for the
    divisions: else each that holds a part of a row or column would divide for all of it.
    """
    at = tl.arange(0, BLOCK)
    inv = inverse_scale(tl.gather(amax, at, axis=0), LIMIT, POW2)
    return tl.gather(inv, at, axis=0), tl.div_rn(1.0, inv)


@triton.jit
def widened(x):
    """x as float32. bfloat16 by other instructions than ``.to`` takes: between two uses the compiler
    then keeps x as it was loaded, in half of the registers.
    """
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def converted(x, inv, like_ptr):
    """x * inv in the FP8 format of ``like_ptr``. The conversion saturates."""
    return (widened(x) * inv).to(like_ptr.dtype.element_ty)


@triton.jit
def load_tile(x_ptr, row0, col0, R, N, stride_x, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """float32 tile at (row0, col0): one 64-bit base, 32-bit offsets within the tile."""
    r, c = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_N)[None, :]
    mask = (r < R - row0) & (c < N - col0)
    return tl.load(
        x_ptr + row0.to(tl.int64) * stride_x + col0 + (r * stride_x + c), mask=mask, other=0.0
    ).to(tl.float32)


@triton.jit
def store_tile(y_ptr, q, row0, col0, R, N, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """q into the tile at (row0, col0) of y (R, N)."""
    r, c = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_N)[None, :]
    mask = (r < R - row0) & (c < N - col0)
    tl.store(y_ptr + row0.to(tl.int64) * N + col0 + (r * N + c), q, mask=mask)


@triton.jit(do_not_specialize=["R"])
def quantize_vectors_kernel(
    x_ptr, row_ptr, scale_ptr, R, N, stride_x,
    LIMIT: tl.constexpr, POW2: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Vectors of 128 along a row, rowwise only; a tile is some of them wide."""
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    row0, col0 = pid // num_n * BLOCK_R, pid % num_n * BLOCK_N
    WIDE: tl.constexpr = BLOCK_N // 128
    x = load_tile(x_ptr, row0, col0, R, N, stride_x, BLOCK_R, BLOCK_N)
    x = tl.reshape(x, (BLOCK_R, WIDE, 128))
    inv = inverse_scale(amax_of(x, 2), LIMIT, POW2)
    q = tl.reshape(converted(x, inv[:, :, None], row_ptr), (BLOCK_R, BLOCK_N))
    store_tile(row_ptr, q, row0, col0, R, N, BLOCK_R, BLOCK_N)
    rows = row0 + tl.arange(0, BLOCK_R)[:, None]
    block = col0 // 128 + tl.arange(0, WIDE)[None, :]
    at = scale_ptr + rows + block.to(tl.int64) * R
    tl.store(at, tl.div_rn(1.0, inv), mask=(rows < R) & (block * 128 < N))
