"""Kernels of fuseops.kernels.quantize."""

import triton
import triton.language as tl

FLT_MAX: tl.constexpr = tl.constexpr(3.4028234663852886e38)


@triton.jit
def magnitude(x):
    """|x| for an amax: NaN does not count, infinity counts as the largest finite value."""
    return tl.minimum(tl.where(x == x, tl.abs(x), 0.0), FLT_MAX)


@triton.jit
def inverse_scale(amax, LIMIT: tl.constexpr, POW2: tl.constexpr):
    """LIMIT / amax, correctly rounded, at most FLT_MAX; rounded down to a power of two if wanted;
    1 for amax 0.
    """
    inv = tl.minimum(tl.div_rn(LIMIT, tl.where(amax == 0.0, LIMIT, amax)), FLT_MAX)
    if POW2:
        inv = (inv.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return inv


@triton.jit
def saturate(x, LIMIT: tl.constexpr):
    """x within the finite range of the format; NaN stays NaN."""
    return tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))


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


@triton.jit
def store_transposed(
    col_ptr, q, row0, col0, R, N, ALIGN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):
    """q (BLOCK_R, BLOCK_N) into the transposed tensor (N, R). R is not specialized: ALIGN says
    what divides it.
    """
    R = R // ALIGN * ALIGN
    c, r = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_R)[None, :]
    mask = (c < N - col0) & (r < R - row0)
    tl.store(col_ptr + col0.to(tl.int64) * R + row0 + (c * R + r), tl.trans(q), mask=mask)


@triton.jit(do_not_specialize=["R"])
def amax_kernel(x_ptr, partial_ptr, R, N, stride_x, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """A program takes every num_programs-th tile."""
    num_n = tl.cdiv(N, BLOCK_N)
    largest = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(R, BLOCK_R) * num_n, tl.num_programs(0)):
        rows = (tile // num_n * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        cols = (tile % num_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask = (rows < R)[:, None] & (cols < N)
        x = tl.load(x_ptr + (rows * stride_x)[:, None] + cols, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude(x))
    tl.store(partial_ptr + tl.program_id(0), tl.max(tl.max(largest, axis=1), axis=0))


@triton.jit(do_not_specialize=["R"])
def quantize_tensor_kernel(
    x_ptr, partial_ptr, row_ptr, col_ptr, scale_ptr, amax_ptr, R, N, P, stride_x,
    LIMIT: tl.constexpr, POW2: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    row0, col0 = pid // num_n * BLOCK_R, pid % num_n * BLOCK_N
    x = load_tile(x_ptr, row0, col0, R, N, stride_x, BLOCK_R, BLOCK_N)
    p = tl.arange(0, BLOCK_P)
    amax = tl.max(tl.load(partial_ptr + p, mask=p < P, other=0.0), axis=0)
    inv = inverse_scale(amax, LIMIT, POW2)
    if pid == 0:
        tl.store(scale_ptr, tl.div_rn(1.0, inv))
        tl.store(amax_ptr, amax)
    q = saturate(x * inv, LIMIT).to(row_ptr.dtype.element_ty)
    if ROW:
        store_tile(row_ptr, q, row0, col0, R, N, BLOCK_R, BLOCK_N)
    if COL:
        store_transposed(col_ptr, q, row0, col0, R, N, ALIGN, BLOCK_R, BLOCK_N)


@triton.jit(do_not_specialize=["R"])
def quantize_rows_kernel(
    x_ptr, row_ptr, scale_ptr, R, N, stride_x,
    LIMIT: tl.constexpr, POW2: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < R)[:, None] & (cols < N)
    x = tl.load(x_ptr + (rows * stride_x)[:, None] + cols, mask=mask, other=0.0).to(tl.float32)
    inv = inverse_scale(tl.max(magnitude(x), axis=1), LIMIT, POW2)
    tl.store(scale_ptr + rows, tl.div_rn(1.0, inv), mask=rows < R)
    q = saturate(x * inv[:, None], LIMIT).to(row_ptr.dtype.element_ty)
    tl.store(row_ptr + (rows * N)[:, None] + cols, q, mask=mask)


@triton.jit(do_not_specialize=["R"])
def quantize_blocks_kernel(
    x_ptr, row_ptr, col_ptr, row_scale_ptr, col_scale_ptr, R, N, stride_x,
    LIMIT: tl.constexpr, POW2: tl.constexpr, SQUARE: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Blocks of 128: along a row, along a column (BLOCK_R is 128), or SQUARE (the tile is one
    block).
    """
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    block_r, block_n = pid // num_n, pid % num_n
    row0, col0 = block_r * BLOCK_R, block_n * BLOCK_N
    x = load_tile(x_ptr, row0, col0, R, N, stride_x, BLOCK_R, BLOCK_N)
    size = magnitude(x)
    if SQUARE:
        inv = inverse_scale(tl.max(tl.max(size, axis=1), axis=0), LIMIT, POW2)
        q = saturate(x * inv, LIMIT).to(row_ptr.dtype.element_ty)
        if ROW:
            tl.store(row_scale_ptr + block_r * num_n + block_n, tl.div_rn(1.0, inv))
            store_tile(row_ptr, q, row0, col0, R, N, BLOCK_R, BLOCK_N)
        if COL:
            tl.store(col_scale_ptr + block_n * tl.cdiv(R, BLOCK_R) + block_r, tl.div_rn(1.0, inv))
            store_transposed(col_ptr, q, row0, col0, R, N, ALIGN, BLOCK_R, BLOCK_N)
    else:
        if ROW:
            WIDE: tl.constexpr = BLOCK_N // 128
            inv = inverse_scale(tl.max(tl.reshape(size, (BLOCK_R, WIDE, 128)), axis=2), LIMIT, POW2)
            scaled = tl.reshape(
                tl.reshape(x, (BLOCK_R, WIDE, 128)) * inv[:, :, None], (BLOCK_R, BLOCK_N)
            )
            store_tile(
                row_ptr,
                saturate(scaled, LIMIT).to(row_ptr.dtype.element_ty),
                row0,
                col0,
                R,
                N,
                BLOCK_R,
                BLOCK_N,
            )
            rows = row0 + tl.arange(0, BLOCK_R)[:, None]
            block = block_n * WIDE + tl.arange(0, WIDE)[None, :]
            scale = row_scale_ptr + rows + block.to(tl.int64) * R
            tl.store(scale, tl.div_rn(1.0, inv), mask=(rows < R) & (block * 128 < N))
        if COL:
            inv = inverse_scale(tl.max(size, axis=0), LIMIT, POW2)
            q = saturate(x * inv[None, :], LIMIT).to(row_ptr.dtype.element_ty)
            cols = col0 + tl.arange(0, BLOCK_N)
            tl.store(
                col_scale_ptr + block_r.to(tl.int64) * N + cols, tl.div_rn(1.0, inv), mask=cols < N
            )
            store_transposed(col_ptr, q, row0, col0, R, N, ALIGN, BLOCK_R, BLOCK_N)
