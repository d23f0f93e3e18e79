"""Kernel of fuseops.kernels.quantize for rowwise vectors, and what other quantizing kernels share: amaxes and scales.

A scale is 1 / inv, and inv = LIMIT / amax, LIMIT being the largest number of the format, so codes are x * inv.
"""

import triton
import triton.language as tl

FLT_MAX: tl.constexpr = tl.constexpr(3.4028234663852886e38)


@triton.jit
def amax_of(x, axis: tl.constexpr):
    """Return the largest magnitude along an axis, float32; NaN does not count (the larger of NaN and 0 is 0)."""
    return tl.maximum(tl.max(tl.abs(x.to(tl.float32)), axis=axis), 0.0)


@triton.jit
def inverse_scale(amax, LIMIT: tl.constexpr, POW2: tl.constexpr):
    """Return LIMIT / amax, correctly rounded, at most FLT_MAX, 1 for amax 0; with POW2 rounded down to a power of two,
    at most 2^63. An infinite amax counts as the largest finite value.
    """
    amax = tl.minimum(amax, FLT_MAX)
    if POW2:
        inv = tl.minimum(tl.div_rn(LIMIT, amax), 9223372036854775808.0)
        return (inv.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    else:
        return tl.minimum(tl.div_rn(LIMIT, tl.where(amax == 0.0, LIMIT, amax)), FLT_MAX)


@triton.jit
def vector_scales(amax, LIMIT: tl.constexpr, POW2: tl.constexpr, BLOCK: tl.constexpr):
    """Return (inverse scales, scales) of amax (BLOCK,).

    The gathers spread amax to one element a thread for the divisions: amax is replicated over the threads that hold one
    row or column, and each of them would divide.
    """
    lane = tl.arange(0, BLOCK)
    inv = inverse_scale(tl.gather(amax, lane, axis=0), LIMIT, POW2)
    return tl.gather(inv, lane, axis=0), tl.div_rn(1.0, inv)


@triton.jit
def widened(x):
    """Convert x to float32; bfloat16 by a shift, not by ``.to``: between two uses the compiler then keeps x as it was
    loaded, in half of the registers.
    """
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def quantize_like(x, inv, like_ptr):
    """Return x * inv in the FP8 format of ``like_ptr``. The conversion saturates."""
    return (widened(x) * inv).to(like_ptr.dtype.element_ty)


@triton.jit
def load_tile(x_ptr, row0, col0, R, N, stride_x, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the tile at (row0, col0) of x (R, N) as float32: one 64-bit base, 32-bit offsets within the tile."""
    r, c = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_N)[None, :]
    mask = (r < R - row0) & (c < N - col0)
    return tl.load(
        x_ptr + row0.to(tl.int64) * stride_x + col0 + (r * stride_x + c), mask=mask, other=0.0
    ).to(tl.float32)


@triton.jit
def store_tile(y_ptr, codes, row0, col0, R, N, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store codes to the tile at (row0, col0) of y (R, N), contiguous."""
    r, c = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_N)[None, :]
    mask = (r < R - row0) & (c < N - col0)
    tl.store(y_ptr + row0.to(tl.int64) * N + col0 + (r * N + c), codes, mask=mask)


@triton.jit(do_not_specialize=["R"])
def quantize_vectors_kernel(
    x_ptr, row_ptr, scale_ptr, R, N, stride_x,
    LIMIT: tl.constexpr, POW2: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Quantize a tile, BLOCK_N / 128 vectors of 128 wide, along rows: codes (R, N), scales (ceil(N / 128), R)."""
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    row0, col0 = pid // num_n * BLOCK_R, pid % num_n * BLOCK_N
    VECTORS: tl.constexpr = BLOCK_N // 128
    x = load_tile(x_ptr, row0, col0, R, N, stride_x, BLOCK_R, BLOCK_N)
    x = tl.reshape(x, (BLOCK_R, VECTORS, 128))
    inv = inverse_scale(amax_of(x, 2), LIMIT, POW2)
    codes = tl.reshape(quantize_like(x, inv[:, :, None], row_ptr), (BLOCK_R, BLOCK_N))
    store_tile(row_ptr, codes, row0, col0, R, N, BLOCK_R, BLOCK_N)
    rows = row0 + tl.arange(0, BLOCK_R)[:, None]
    vector = col0 // 128 + tl.arange(0, VECTORS)[None, :]
    scale_ptrs = scale_ptr + rows + vector.to(tl.int64) * R
    tl.store(scale_ptrs, tl.div_rn(1.0, inv), mask=(rows < R) & (vector * 128 < N))
