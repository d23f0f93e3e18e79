"""Kernels of fuseops.kernels.casts."""

import triton
import triton.language as tl

from fuseops.kernels.device.quantize import saturate


@triton.jit
def converted(x, y_ptr, LIMIT: tl.constexpr):
    """x as y's type; LIMIT is the range of an FP8 type, 0 for others."""
    if LIMIT > 0:
        x = saturate(x.to(tl.float32), LIMIT)
    elif x.dtype != y_ptr.dtype.element_ty:
        x = x.to(tl.float32)
    return x.to(y_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["R"])
def cast_kernel(
    x_ptr, y_ptr, R, N, stride_x,
    LIMIT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    rows = (pid // num_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < R)[:, None] & (cols < N)
    x = tl.load(x_ptr + (rows * stride_x)[:, None] + cols, mask=mask)
    tl.store(y_ptr + (rows * N)[:, None] + cols, converted(x, y_ptr, LIMIT), mask=mask)


@triton.jit(do_not_specialize=["R"])
def cast_transpose_kernel(
    x_ptr, row_ptr, col_ptr, R, N, stride_b, stride_x,
    LIMIT: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, ALIGN: tl.constexpr,
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
    y = converted(x, row_ptr, LIMIT)
    if ROW:
        tl.store(row_ptr + (batch * R + rows)[:, None] * N + cols[None, :], y, mask=mask)
    if COL:
        mask = (cols < N)[:, None] & (rows < R)[None, :]
        at = col_ptr + (batch * N + cols)[:, None] * R + rows[None, :]
        tl.store(at, tl.trans(y), mask=mask)
