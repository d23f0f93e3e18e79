"""LayerNorm, RMSNorm and L2 norm, forward and backward. Triton, sm_80 and later. BLOCK_N, a power of two, holds a whole
row.

FORM is "layer", which subtracts the mean, "rms", or "sum": of the squares instead of their mean.

Trap: products in sums over a row go through `row_dots` and `mul_rn` (see there), or lanes of a row would disagree.
"""

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import fold, mul_rn, pdl_trigger, pdl_trigger_and_wait, row_dots


@triton.jit
def head_row_offsets(rows, H, stride, stride_h):
    """Compute the element offset of each row, H of them a token. Without a branch: an H of 1 is a constant, and folds
    away.
    """
    row = rows.to(tl.int32)  # as R is: the division by H is 32 bits wide
    return (row // H).to(tl.int64) * stride + (row % H).to(tl.int64) * stride_h


@triton.jit
def normalize_rows(
    x_row, residual_ptr, weight_ptr, bias_ptr, h_ptr, mean_ptr, rstd_ptr, rows, R, N,
    stride_residual, eps, weight_offset, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, FORM: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Normalize whole rows of x, or of h = x + residual, which is stored, in float32; store their statistics too.
    -> y (BLOCK_R, BLOCK_N), 0 beyond column N
    """
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < R)[:, None] & (cols < N)
    x = tl.load(x_row + cols, mask=mask, other=0.0).to(tl.float32)
    if HAS_WEIGHT:  # above the reductions: the compiler moves no load across these
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + weight_offset
    if HAS_BIAS:
        bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(
            residual_ptr + (rows * stride_residual)[:, None] + cols, mask=mask, other=0.0
        ).to(tl.float32)
        h = x.to(h_ptr.dtype.element_ty)  # the norm sees what is stored
        tl.store(h_ptr + (rows * N)[:, None] + cols, h, mask=mask)
        x = h.to(tl.float32)
    if FORM == "layer":
        mean = tl.sum(x, axis=1) / N
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(row_dots(x, x) / (1 if FORM == "sum" else N) + eps)
    if FORM == "layer":
        tl.store(mean_ptr + rows, mean, mask=rows < R)
    tl.store(rstd_ptr + rows, rstd, mask=rows < R)
    y = x * rstd[:, None]
    if HAS_WEIGHT:
        y *= weight
    if HAS_BIAS:
        y += bias
    return y


@triton.jit(do_not_specialize=["R"])
def norm_fwd_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr,
    R, N, H, stride_x, stride_xh, stride_residual, eps, weight_offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    FORM: tl.constexpr, PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Normalize BLOCK_R rows a program, H rows a token."""
    pdl_trigger_and_wait(PDL)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    x_row = x_ptr + head_row_offsets(rows, H, stride_x, stride_xh)[:, None]
    y = normalize_rows(
        x_row, residual_ptr, weight_ptr, bias_ptr, h_ptr, mean_ptr, rstd_ptr, rows, R, N,
        stride_residual, eps, weight_offset, HAS_RESIDUAL, HAS_WEIGHT, HAS_BIAS, FORM, BLOCK_N,
    )  # fmt: skip
    cols = tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < R)[:, None] & (cols < N)
    tl.store(y_ptr + (rows * N)[:, None] + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R"])
def norm_bwd_kernel(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dres_ptr, dx_ptr, partial_ptr, R, N, H_DY, H_X,
    stride_dy, stride_dyh, stride_x, stride_xh, stride_dres, weight_offset,
    HAS_WEIGHT: tl.constexpr, HAS_DRES: tl.constexpr, NEED_DW: tl.constexpr, NEED_DB: tl.constexpr,
    FORM: tl.constexpr, PDL: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx (+ dres) of rows, and partial sums of dw and db.

    A program takes every num_programs-th block of BLOCK_R rows and keeps its sums in registers, AT_ONCE rows of them;
    at the end it stores them as a row of partial: of all dw first, then of all db. `reduce.column_sums_kernel` adds
    these rows.
    """
    pdl_trigger(PDL)
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK_N)[None, :]
    dw_acc = tl.zeros((AT_ONCE, BLOCK_N), dtype=tl.float32)
    db_acc = tl.zeros((AT_ONCE, BLOCK_N), dtype=tl.float32)
    CENTRED: tl.constexpr = FORM == "layer"
    # wider weights would spill: read again for every row
    WEIGHT_FITS: tl.constexpr = HAS_WEIGHT and BLOCK_N <= (4096 if CENTRED else 8192)
    if WEIGHT_FITS:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + weight_offset
    for block in tl.range(pid, tl.cdiv(R, BLOCK_R), tl.num_programs(0), num_stages=STAGES):
        rows = (block * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask = (rows < R)[:, None] & (cols < N)
        x_row = x_ptr + head_row_offsets(rows, H_X, stride_x, stride_xh)[:, None]
        x = tl.load(x_row + cols, mask=mask, other=0.0).to(tl.float32)
        dy_row = dy_ptr + head_row_offsets(rows, H_DY, stride_dy, stride_dyh)[:, None]
        dy = tl.load(dy_row + cols, mask=mask, other=0.0).to(tl.float32)
        if CENTRED:
            x -= tl.load(mean_ptr + rows, mask=rows < R, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < R, other=0.0)[:, None]
        x_hat = x * rstd
        if NEED_DW:
            dw_acc += fold(dy * x_hat, AT_ONCE)
        if NEED_DB:
            db_acc += fold(dy, AT_ONCE)
        if WEIGHT_FITS:
            dy = mul_rn(dy, weight) if CENTRED else dy * weight
        elif HAS_WEIGHT:
            dy *= (
                tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + weight_offset
            )
        mean_dy_x_hat = (row_dots(dy, x_hat) / (1 if FORM == "sum" else N))[:, None]
        if CENTRED:
            dy -= (tl.sum(dy, axis=1) / N)[:, None]
        dx = (dy - x_hat * mean_dy_x_hat) * rstd
        if HAS_DRES:
            dx += tl.load(dres_ptr + (rows * stride_dres)[:, None] + cols, mask=mask, other=0.0).to(
                tl.float32
            )
        tl.store(dx_ptr + (rows * N)[:, None] + cols, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    partial_ptrs = partial_ptr + pid.to(tl.int64) * N + cols
    if NEED_DW:
        tl.store(partial_ptrs, tl.sum(dw_acc, axis=0)[None, :], mask=cols < N)
        partial_ptrs += tl.num_programs(0).to(tl.int64) * N
    if NEED_DB:
        tl.store(partial_ptrs, tl.sum(db_acc, axis=0)[None, :], mask=cols < N)
