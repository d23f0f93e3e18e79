"""Kernels of fuseops.kernels.activation."""

import triton
import triton.language as tl

from fuseops.kernels.device.act import act_grad, act_slope, gate_columns, linear_slope
from fuseops.kernels.device.reduce import before_launch, fold, overlapped


@triton.jit(do_not_specialize=["R"])
def act_fwd_kernel(
    x_ptr, probs_ptr, y_ptr, R, N, stride_x,
    ACT: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, INTERLEAVE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    overlapped(PDL)
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    rows = (pid // num_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < R)[:, None] & (cols < N)
    x_row = x_ptr + (rows * stride_x)[:, None]
    gate = gate_columns(cols, INTERLEAVE)
    y, _ = act_slope(tl.load(x_row + gate, mask=mask, other=0.0).to(tl.float32), ACT, ALPHA, LIMIT)
    if GATED:
        u = tl.load(x_row + gate + (INTERLEAVE if INTERLEAVE else N), mask=mask, other=0.0)
        lin, _ = linear_slope(u.to(tl.float32), ACT, LIMIT, OFFSET)
        y *= lin
    if SCALED:
        y *= tl.load(probs_ptr + rows, mask=rows < R, other=0.0)[:, None]
    tl.store(y_ptr + (rows * N)[:, None] + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R"])
def act_dprobs_kernel(
    dy_ptr, x_ptr, dprobs_ptr, R, N, stride_dy, stride_x,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program owns whole rows: a sum each, in a fixed order."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    x_row = x_ptr + (rows * stride_x)[:, None]
    dot = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = (start + tl.arange(0, BLOCK_N))[None, :]
        mask = (rows < R)[:, None] & (cols < N)
        dy = tl.load(dy_ptr + (rows * stride_dy)[:, None] + cols, mask=mask, other=0.0)
        dy = dy.to(tl.float32)
        y, _, _ = act_grad(x_row, cols, dy, mask, N, ACT, GATED, INTERLEAVE, ALPHA, LIMIT, OFFSET)
        dot += tl.where(mask, dy * y, 0.0)
    tl.store(dprobs_ptr + rows, tl.sum(dot, axis=1), mask=rows < R)


@triton.jit(do_not_specialize=["R"])
def act_bwd_kernel(
    dy_ptr, x_ptr, dx_ptr, R, N, stride_dy, stride_x,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    overlapped(PDL)
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    rows = (pid // num_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < R)[:, None] & (cols < N)
    dy = tl.load(dy_ptr + (rows * stride_dy)[:, None] + cols, mask=mask, other=0.0).to(tl.float32)
    x_row = x_ptr + (rows * stride_x)[:, None]
    _, dg, du = act_grad(x_row, cols, dy, mask, N, ACT, GATED, INTERLEAVE, ALPHA, LIMIT, OFFSET)
    dx = dx_ptr + (rows * (2 * N if GATED else N))[:, None] + gate_columns(cols, INTERLEAVE)
    tl.store(dx, dg.to(dx_ptr.dtype.element_ty), mask=mask)
    if GATED:
        tl.store(dx + (INTERLEAVE if INTERLEAVE else N), du.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R"])
def scaled_act_bwd_kernel(
    dy_ptr, x_ptr, probs_ptr, dx_ptr, dprobs_ptr, y_ptr, R, N, stride_dy, stride_x,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    NEED_DPROBS: tl.constexpr, NEED_Y: tl.constexpr, PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program owns whole rows, so that dprobs is one sum in a fixed order."""
    overlapped(PDL)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    probs = tl.load(probs_ptr + rows, mask=rows < R, other=0.0)[:, None]
    x_row = x_ptr + (rows * stride_x)[:, None]
    dy_row = dy_ptr + (rows * stride_dy)[:, None]
    dx_row = dx_ptr + (rows * (2 * N if GATED else N))[:, None]
    dot = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = (start + tl.arange(0, BLOCK_N))[None, :]
        mask = (rows < R)[:, None] & (cols < N)
        dy = tl.load(dy_row + cols, mask=mask, other=0.0).to(tl.float32)
        y, dg, du = act_grad(
            x_row, cols, dy * probs, mask, N, ACT, GATED, INTERLEAVE, ALPHA, LIMIT, OFFSET
        )
        dx = dx_row + gate_columns(cols, INTERLEAVE)
        tl.store(dx, dg.to(dx_ptr.dtype.element_ty), mask=mask)
        if GATED:
            tl.store(
                dx + (INTERLEAVE if INTERLEAVE else N), du.to(dx_ptr.dtype.element_ty), mask=mask
            )
        if NEED_DPROBS:
            dot += tl.where(mask, dy * y, 0.0)
        if NEED_Y:
            tl.store(
                y_ptr + (rows * N)[:, None] + cols,
                (y * probs).to(y_ptr.dtype.element_ty),
                mask=mask,
            )
    if NEED_DPROBS:
        tl.store(dprobs_ptr + rows, tl.sum(dot, axis=1), mask=rows < R)


@triton.jit(do_not_specialize=["R"])
def act_bwd_bias_kernel(
    dy_ptr, x_ptr, dx_ptr, partial_ptr, R, N, stride_dy, stride_x,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    PDL: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes every num_programs-th block of rows of a block of columns; its column sums of dx
    are one row of ``partial``.
    """
    before_launch(PDL)
    split = tl.program_id(1).to(tl.int64)
    cols = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    gate = gate_columns(cols, INTERLEAVE)
    step = INTERLEAVE if INTERLEAVE else N
    width = 2 * N if GATED else N
    sum_g = tl.zeros((AT_ONCE, BLOCK_N), dtype=tl.float32)
    sum_u = tl.zeros((AT_ONCE, BLOCK_N), dtype=tl.float32)
    for start in tl.range(split * BLOCK_R, R, tl.num_programs(1) * BLOCK_R, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_R)
        mask = (rows < R)[:, None] & (cols < N)
        dy = tl.load(dy_ptr + (rows * stride_dy)[:, None] + cols, mask=mask, other=0.0).to(
            tl.float32
        )
        x_row = x_ptr + (rows * stride_x)[:, None]
        _, dg, du = act_grad(x_row, cols, dy, mask, N, ACT, GATED, INTERLEAVE, ALPHA, LIMIT, OFFSET)
        dx = dx_ptr + (rows * width)[:, None] + gate
        tl.store(dx, dg.to(dx_ptr.dtype.element_ty), mask=mask)
        sum_g += fold(dg, AT_ONCE)
        if GATED:
            tl.store(dx + step, du.to(dx_ptr.dtype.element_ty), mask=mask)
            sum_u += fold(du, AT_ONCE)
    partial = partial_ptr + split * width + gate
    tl.store(partial, tl.sum(sum_g, axis=0)[None, :], mask=cols < N)
    if GATED:
        tl.store(partial + step, tl.sum(sum_u, axis=0)[None, :], mask=cols < N)
