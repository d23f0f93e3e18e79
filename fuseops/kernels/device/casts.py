"""Kernels of fuseops.kernels.casts."""

import triton
import triton.language as tl


@triton.jit
def converted(x, y_ptr):
    """x as y's type. Conversions to FP8 saturate."""
    if x.dtype != y_ptr.dtype.element_ty:
        x = x.to(tl.float32)
    return x.to(y_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["R"])
def cast_kernel(
    x_ptr, y_ptr, R, N, stride_x,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    rows = (pid // num_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < R)[:, None] & (cols < N)
    x = tl.load(x_ptr + (rows * stride_x)[:, None] + cols, mask=mask)
    tl.store(y_ptr + (rows * N)[:, None] + cols, converted(x, y_ptr), mask=mask)


@triton.jit(do_not_specialize=["R"])
def cast_transpose_kernel(
    x_ptr, row_ptr, col_ptr, R, N, stride_b, stride_x,
    ROW: tl.constexpr, COL: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of one matrix of the batch, into both layouts. ALIGN divides R."""
    pid = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    R = R // ALIGN * ALIGN
    num_n = tl.cdiv(N, BLOCK_N)
    rows = (pid // num_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = (pid % num_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < R)[:, None] & (cols < N)[None, :]
    x = tl.load(
        x_ptr + batch * stride_b + (rows * stride_x)[:, None] + cols[None, :], mask=mask, other=0.0
    )
    y = converted(x, row_ptr)
    if ROW:
        tl.store(row_ptr + (batch * R + rows)[:, None] * N + cols[None, :], y, mask=mask)
    if COL:
        mask = (cols < N)[:, None] & (rows < R)[None, :]
        at = col_ptr + (batch * N + cols)[:, None] * R + rows[None, :]
        tl.store(at, tl.trans(y), mask=mask)
