"""Activations, gated or not, and their gradients, memory-bound. Triton, sm_80 and later. The maths is in `act`."""

import triton
import triton.language as tl

from fuseops.kernels.device.act import (
    act_grad,
    act_value,
    gate_columns,
    load_gate_up,
    store_gate_up,
)
from fuseops.kernels.device.reduce import fold, pdl_trigger, pdl_trigger_and_wait


@triton.jit
def program_tile(R, N, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute the coordinates of a program's tile.   -> (rows, first column, columns (1, BLOCK_N))"""
    num_n = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // num_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col0 = (tl.program_id(0) % num_n) * BLOCK_N
    return rows, col0, (col0 + tl.arange(0, BLOCK_N))[None, :]


@triton.jit(do_not_specialize=["R"])
def act_fwd_kernel(
    x_ptr, probs_ptr, y_ptr, R, N, stride_x,
    ACT: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, INTERLEAVE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute y = act(x) (* probs) of one tile."""
    pdl_trigger_and_wait(PDL)
    rows, col0, cols = program_tile(R, N, BLOCK_R, BLOCK_N)
    row_mask, x_row = (rows < R)[:, None], x_ptr + (rows * stride_x)[:, None]
    gate, up = load_gate_up(x_row, row_mask, col0, N, BLOCK_N, GATED, INTERLEAVE)
    y = act_value(gate, up, ACT, GATED, ALPHA, LIMIT, OFFSET)
    if SCALED:
        y *= tl.load(probs_ptr + rows, mask=rows < R, other=0.0)[:, None]
    y_row = y_ptr + (rows * N)[:, None]
    tl.store(y_row + cols, y.to(y_ptr.dtype.element_ty), mask=row_mask & (cols < N))


@triton.jit(do_not_specialize=["R"])
def act_dprobs_kernel(
    dy_ptr, x_ptr, dprobs_ptr, R, N, stride_dy, stride_x,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dprobs = rowsum(dy * act(x)). A program owns whole rows: one sum each, in a fixed order."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    row_mask, x_row = (rows < R)[:, None], x_ptr + (rows * stride_x)[:, None]
    dot_acc = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = (start + tl.arange(0, BLOCK_N))[None, :]
        mask = row_mask & (cols < N)
        dy = tl.load(dy_ptr + (rows * stride_dy)[:, None] + cols, mask=mask, other=0.0)
        gate, up = load_gate_up(x_row, row_mask, start, N, BLOCK_N, GATED, INTERLEAVE)
        y = act_value(gate, up, ACT, GATED, ALPHA, LIMIT, OFFSET)
        dot_acc += tl.where(mask, dy.to(tl.float32) * y, 0.0)
    tl.store(dprobs_ptr + rows, tl.sum(dot_acc, axis=1), mask=rows < R)


@triton.jit(do_not_specialize=["R"])
def act_bwd_kernel(
    dy_ptr, x_ptr, dx_ptr, R, N, stride_dy, stride_x,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute dx of one tile."""
    pdl_trigger_and_wait(PDL)
    rows, col0, cols = program_tile(R, N, BLOCK_R, BLOCK_N)
    row_mask, x_row = (rows < R)[:, None], x_ptr + (rows * stride_x)[:, None]
    dy_row = dy_ptr + (rows * stride_dy)[:, None]
    dy = tl.load(dy_row + cols, mask=row_mask & (cols < N), other=0.0).to(tl.float32)
    gate, up = load_gate_up(x_row, row_mask, col0, N, BLOCK_N, GATED, INTERLEAVE)
    _, dgate, dup = act_grad(gate, up, dy, ACT, GATED, ALPHA, LIMIT, OFFSET)
    dx_row = dx_ptr + (rows * (2 * N if GATED else N))[:, None]
    store_gate_up(dx_row, row_mask, col0, N, dgate, dup, GATED, INTERLEAVE)


@triton.jit(do_not_specialize=["R"])
def scaled_act_bwd_kernel(
    dy_ptr, x_ptr, probs_ptr, dx_ptr, dprobs_ptr, y_ptr, R, N, stride_dy, stride_x,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    SCALED: tl.constexpr, NEED_DPROBS: tl.constexpr, NEED_Y: tl.constexpr, PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx and, where wanted, dprobs and y * probs in one pass. A program owns whole rows, so that dprobs is one
    sum in a fixed order.
    """
    pdl_trigger_and_wait(PDL)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    probs = tl.load(probs_ptr + rows, mask=rows < R, other=0.0)[:, None] if SCALED else 1.0
    row_mask, x_row = (rows < R)[:, None], x_ptr + (rows * stride_x)[:, None]
    dy_row = dy_ptr + (rows * stride_dy)[:, None]
    dx_row = dx_ptr + (rows * (2 * N if GATED else N))[:, None]
    y_row = y_ptr + (rows * N)[:, None]
    dot_acc = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, N, BLOCK_N, num_stages=STAGES):
        cols = (start + tl.arange(0, BLOCK_N))[None, :]
        mask = row_mask & (cols < N)
        dy = tl.load(dy_row + cols, mask=mask, other=0.0).to(tl.float32)
        gate, up = load_gate_up(x_row, row_mask, start, N, BLOCK_N, GATED, INTERLEAVE)
        y, dgate, dup = act_grad(gate, up, dy * probs, ACT, GATED, ALPHA, LIMIT, OFFSET)
        store_gate_up(dx_row, row_mask, start, N, dgate, dup, GATED, INTERLEAVE)
        if NEED_DPROBS:
            dot_acc += tl.where(mask, dy * y, 0.0)
        if NEED_Y:
            tl.store(y_row + cols, (y * probs).to(y_ptr.dtype.element_ty), mask=mask)
    if NEED_DPROBS:
        tl.store(dprobs_ptr + rows, tl.sum(dot_acc, axis=1), mask=rows < R)


@triton.jit(do_not_specialize=["R"])
def act_bwd_bias_kernel(
    dy_ptr, x_ptr, dx_ptr, partial_ptr, R, N, stride_dy, stride_x,
    ACT: tl.constexpr, GATED: tl.constexpr, INTERLEAVE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr,
    PDL: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute dx and partial column sums of it, the bias's gradient.

    A program takes every num_programs-th block of rows of a block of columns; its column sums of dx are one row of
    `partial`, which `reduce.column_sums_kernel` adds.
    """
    pdl_trigger(PDL)
    row_split = tl.program_id(1).to(tl.int64)
    col0 = tl.program_id(0) * BLOCK_N
    cols = (col0 + tl.arange(0, BLOCK_N))[None, :]
    width = 2 * N if GATED else N
    dgate_acc = tl.zeros((AT_ONCE, BLOCK_N), dtype=tl.float32)
    dup_acc = tl.zeros((AT_ONCE, BLOCK_N), dtype=tl.float32)
    for start in tl.range(row_split * BLOCK_R, R, tl.num_programs(1) * BLOCK_R, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_R)
        row_mask, x_row = (rows < R)[:, None], x_ptr + (rows * stride_x)[:, None]
        dy_row = dy_ptr + (rows * stride_dy)[:, None]
        dy = tl.load(dy_row + cols, mask=row_mask & (cols < N), other=0.0).to(tl.float32)
        gate, up = load_gate_up(x_row, row_mask, col0, N, BLOCK_N, GATED, INTERLEAVE)
        _, dgate, dup = act_grad(gate, up, dy, ACT, GATED, ALPHA, LIMIT, OFFSET)
        dx_row = dx_ptr + (rows * width)[:, None]
        store_gate_up(dx_row, row_mask, col0, N, dgate, dup, GATED, INTERLEAVE)
        dgate_acc += fold(dgate, AT_ONCE)
        if GATED:
            dup_acc += fold(dup, AT_ONCE)
    partial_row = partial_ptr + row_split * width + gate_columns(cols, INTERLEAVE)
    tl.store(partial_row, tl.sum(dgate_acc, axis=0)[None, :], mask=cols < N)
    if GATED:
        up_offset = INTERLEAVE if INTERLEAVE else N
        tl.store(partial_row + up_offset, tl.sum(dup_acc, axis=0)[None, :], mask=cols < N)
