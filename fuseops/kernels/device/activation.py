"""Kernels of fuseops.kernels.activation."""

import triton
import triton.language as tl

from fuseops.kernels.device.act import act_grad, act_value, gate_columns, load_sides, store_sides
from fuseops.kernels.device.reduce import fold, pdl_trigger, pdl_trigger_and_wait


@triton.jit
def tile_of(R, N, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """(rows, first column, columns) of a program's tile."""
    num_n = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // num_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    first = (tl.program_id(0) % num_n) * BLOCK_N
    return rows, first, (first + tl.arange(0, BLOCK_N))[None, :]


@triton.jit(do_not_specialize=["R"])
def act_fwd_kernel(
    x_ptr, probs_ptr, y_ptr, R, N, stride_x,
    ACT: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, INTERLEAVE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pdl_trigger_and_wait(PDL)
    rows, first, cols = tile_of(R, N, BLOCK_R, BLOCK_N)
    inside, x_row = (rows < R)[:, None], x_ptr + (rows * stride_x)[:, None]
    gate, up = load_sides(x_row, inside, first, N, BLOCK_N, GATED, INTERLEAVE)
    y = act_value(gate, up, ACT, GATED, ALPHA, LIMIT, OFFSET)
    if SCALED:
        y *= tl.load(probs_ptr + rows, mask=rows < R, other=0.0)[:, None]
    y_row = y_ptr + (rows * N)[:, None]
    tl.store(y_row + cols, y.to(y_ptr.dtype.element_ty), mask=inside & (cols < N))


@triton.jit(do_not_specialize=["R"])
def act_dprobs_kernel(
    dy_ptr, x_ptr, dprobs_ptr, R, N, stride_dy, stride_x,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program owns whole rows: a sum each, in a fixed order."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside, x_row = (rows < R)[:, None], x_ptr + (rows * stride_x)[:, None]
    dot = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = (start + tl.arange(0, BLOCK_N))[None, :]
        mask = inside & (cols < N)
        dy = tl.load(dy_ptr + (rows * stride_dy)[:, None] + cols, mask=mask, other=0.0)
        gate, up = load_sides(x_row, inside, start, N, BLOCK_N, GATED, INTERLEAVE)
        y = act_value(gate, up, ACT, GATED, ALPHA, LIMIT, OFFSET)
        dot += tl.where(mask, dy.to(tl.float32) * y, 0.0)
    tl.store(dprobs_ptr + rows, tl.sum(dot, axis=1), mask=rows < R)


@triton.jit(do_not_specialize=["R"])
def act_bwd_kernel(
    dy_ptr, x_ptr, dx_ptr, R, N, stride_dy, stride_x,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pdl_trigger_and_wait(PDL)
    rows, first, cols = tile_of(R, N, BLOCK_R, BLOCK_N)
    inside, x_row = (rows < R)[:, None], x_ptr + (rows * stride_x)[:, None]
    dy_row = dy_ptr + (rows * stride_dy)[:, None]
    dy = tl.load(dy_row + cols, mask=inside & (cols < N), other=0.0).to(tl.float32)
    gate, up = load_sides(x_row, inside, first, N, BLOCK_N, GATED, INTERLEAVE)
    _, dg, du = act_grad(gate, up, dy, ACT, GATED, ALPHA, LIMIT, OFFSET)
    dx_row = dx_ptr + (rows * (2 * N if GATED else N))[:, None]
    store_sides(dx_row, inside, first, N, dg, du, GATED, INTERLEAVE)


@triton.jit(do_not_specialize=["R"])
def scaled_act_bwd_kernel(
    dy_ptr, x_ptr, probs_ptr, dx_ptr, dprobs_ptr, y_ptr, R, N, stride_dy, stride_x,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    SCALED: tl.constexpr, NEED_DPROBS: tl.constexpr, NEED_Y: tl.constexpr, PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program owns whole rows, so that dprobs is one sum in a fixed order."""
    pdl_trigger_and_wait(PDL)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    probs = tl.load(probs_ptr + rows, mask=rows < R, other=0.0)[:, None] if SCALED else 1.0
    inside, x_row = (rows < R)[:, None], x_ptr + (rows * stride_x)[:, None]
    dy_row = dy_ptr + (rows * stride_dy)[:, None]
    dx_row = dx_ptr + (rows * (2 * N if GATED else N))[:, None]
    y_row = y_ptr + (rows * N)[:, None]
    dot = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = (start + tl.arange(0, BLOCK_N))[None, :]
        mask = inside & (cols < N)
        dy = tl.load(dy_row + cols, mask=mask, other=0.0).to(tl.float32)
        gate, up = load_sides(x_row, inside, start, N, BLOCK_N, GATED, INTERLEAVE)
        y, dg, du = act_grad(gate, up, dy * probs, ACT, GATED, ALPHA, LIMIT, OFFSET)
        store_sides(dx_row, inside, start, N, dg, du, GATED, INTERLEAVE)
        if NEED_DPROBS:
            dot += tl.where(mask, dy * y, 0.0)
        if NEED_Y:
            tl.store(y_row + cols, (y * probs).to(y_ptr.dtype.element_ty), mask=mask)
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
    pdl_trigger(PDL)
    split = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * BLOCK_N
    cols = (first + tl.arange(0, BLOCK_N))[None, :]
    width = 2 * N if GATED else N
    sum_g = tl.zeros((AT_ONCE, BLOCK_N), dtype=tl.float32)
    sum_u = tl.zeros((AT_ONCE, BLOCK_N), dtype=tl.float32)
    for start in tl.range(split * BLOCK_R, R, tl.num_programs(1) * BLOCK_R, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_R)
        inside, x_row = (rows < R)[:, None], x_ptr + (rows * stride_x)[:, None]
        dy_row = dy_ptr + (rows * stride_dy)[:, None]
        dy = tl.load(dy_row + cols, mask=inside & (cols < N), other=0.0).to(tl.float32)
        gate, up = load_sides(x_row, inside, first, N, BLOCK_N, GATED, INTERLEAVE)
        _, dg, du = act_grad(gate, up, dy, ACT, GATED, ALPHA, LIMIT, OFFSET)
        dx_row = dx_ptr + (rows * width)[:, None]
        store_sides(dx_row, inside, first, N, dg, du, GATED, INTERLEAVE)
        sum_g += fold(dg, AT_ONCE)
        if GATED:
            sum_u += fold(du, AT_ONCE)
    partial = partial_ptr + split * width + gate_columns(cols, INTERLEAVE)
    tl.store(partial, tl.sum(sum_g, axis=0)[None, :], mask=cols < N)
    if GATED:
        step = INTERLEAVE if INTERLEAVE else N
        tl.store(partial + step, tl.sum(sum_u, axis=0)[None, :], mask=cols < N)
