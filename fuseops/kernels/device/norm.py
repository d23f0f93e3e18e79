"""Kernels of fuseops.kernels.norm. BLOCK_N holds a whole row."""

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import before_launch, fold, overlapped, row_dots


@triton.jit
def at_heads(rows, H, stride, stride_h):
    """Where rows begin, H of them a token. Without a branch: H of 1 is a constant, and folds."""
    row = rows.to(tl.int32)  # as the number of rows is
    return (row // H).to(tl.int64) * stride + (row % H).to(tl.int64) * stride_h


@triton.jit
def normed(
    x_row, residual_ptr, weight_ptr, h_ptr, rstd_ptr, rows, R, N, stride_residual, eps, weight_offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, MEAN: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Whole rows of x (+ residual, which are stored in h) normed, in float32; their rstd is stored."""
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < R)[:, None] & (cols < N)
    x = tl.load(x_row + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_WEIGHT:  # before the reduction, which nothing is loaded across
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + weight_offset
    if HAS_RESIDUAL:
        x += tl.load(
            residual_ptr + (rows * stride_residual)[:, None] + cols, mask=mask, other=0.0
        ).to(tl.float32)
        h = x.to(h_ptr.dtype.element_ty)  # the norm sees what is stored
        tl.store(h_ptr + (rows * N)[:, None] + cols, h, mask=mask)
        x = h.to(tl.float32)
    rstd = tl.rsqrt(row_dots(x, x) / (N if MEAN else 1) + eps)
    tl.store(rstd_ptr + rows, rstd, mask=rows < R)
    y = x * rstd[:, None]
    if HAS_WEIGHT:
        y *= weight
    return y


@triton.jit(do_not_specialize=["R"])
def rmsnorm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, h_ptr, rstd_ptr,
    R, N, H, stride_x, stride_xh, stride_residual, eps, weight_offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, MEAN: tl.constexpr, PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """MEAN: of the squares; without it their sum."""
    overlapped(PDL)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    x_row = x_ptr + at_heads(rows, H, stride_x, stride_xh)[:, None]
    y = normed(
        x_row, residual_ptr, weight_ptr, h_ptr, rstd_ptr, rows, R, N, stride_residual, eps, weight_offset,
        HAS_RESIDUAL, HAS_WEIGHT, MEAN, BLOCK_N,
    )  # fmt: skip
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < R)[:, None] & (cols < N)
    tl.store(y_ptr + (rows * N)[:, None] + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R"])
def rmsnorm_bwd_kernel(
    dy_ptr, x_ptr, weight_ptr, rstd_ptr, dres_ptr, dx_ptr, partial_ptr, R, N, H_DY, H_X,
    stride_dy, stride_dyh, stride_x, stride_xh, stride_dres, weight_offset,
    HAS_WEIGHT: tl.constexpr, HAS_DRES: tl.constexpr, NEED_DW: tl.constexpr, MEAN: tl.constexpr,
    PDL: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes every num_programs-th block of rows and keeps its sum of dw in registers."""
    before_launch(PDL)
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((AT_ONCE, BLOCK_N), dtype=tl.float32)
    KEEP: tl.constexpr = (
        HAS_WEIGHT and BLOCK_N <= 8192
    )  # wider weights would spill: read again for every row
    if KEEP:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + weight_offset
    for block in tl.range(pid, tl.cdiv(R, BLOCK_R), tl.num_programs(0), num_stages=STAGES):
        rows = (block * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask = (rows < R)[:, None] & (cols < N)
        x_row = x_ptr + at_heads(rows, H_X, stride_x, stride_xh)[:, None]
        x = tl.load(x_row + cols, mask=mask, other=0.0).to(tl.float32)
        dy_row = dy_ptr + at_heads(rows, H_DY, stride_dy, stride_dyh)[:, None]
        dy = tl.load(dy_row + cols, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=rows < R, other=0.0)[:, None]
        x_hat = x * rstd
        if NEED_DW:
            total += fold(dy * x_hat, AT_ONCE)
        if KEEP:
            dy *= weight
        elif HAS_WEIGHT:
            dy *= (
                tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + weight_offset
            )
        dx = (dy - x_hat * (row_dots(dy, x_hat) / (N if MEAN else 1))[:, None]) * rstd
        if HAS_DRES:
            dx += tl.load(dres_ptr + (rows * stride_dres)[:, None] + cols, mask=mask, other=0.0).to(
                tl.float32
            )
        tl.store(dx_ptr + (rows * N)[:, None] + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        at = partial_ptr + pid.to(tl.int64) * N + cols
        tl.store(at, tl.sum(total, axis=0)[None, :], mask=cols < N)
