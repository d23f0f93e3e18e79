"""Bias add and its gradient, of all rows or of groups of rows, as two-stage column sums.

Memory-bound, without atomics, so that the bits repeat. In the backward's first stage a program sums a chunk of rows of
one block of columns into a row of `partial`, in an accumulator of AT_ONCE rows (`fold`), which needs no exchange
between threads before the end; the second stage (`reduce.column_sums_kernel`, `group_sum_kernel`) adds the rows of
`partial` in a fixed order. With PDL a stage's prologue overlaps the launch before it.
"""

import triton
import triton.language as tl

from fuseops.kernels.device.groups import (
    group_of_rows,
    load_group_rows,
    num_used_rows,
    rows_of_block,
)
from fuseops.kernels.device.reduce import (
    add_rows,
    fold,
    pdl_trigger,
    pdl_trigger_and_wait,
    pdl_wait,
    row_dots,
)


@triton.jit(do_not_specialize=["R"])
def bias_fwd_kernel(
    x_ptr, bias_ptr, offs_ptr, probs_ptr, y_ptr, R, N, E, stride_x,
    GROUPED: tl.constexpr, SCALED: tl.constexpr,
    PDL: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y = x + bias[group of the row] (* probs), a tile of rows and columns a program; padding rows become zero."""
    pdl_trigger_and_wait(PDL)
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    rows = (pid // num_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < R)[:, None] & (cols < N)
    if GROUPED:
        group = group_of_rows(rows, offs_ptr, E, BLOCK_E)
        x_mask = mask & (group < E)[:, None]
        bias = tl.load(
            bias_ptr + (group.to(tl.int64) * N)[:, None] + cols, mask=x_mask, other=0.0
        ).to(tl.float32)
    else:
        x_mask = mask
        bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    if SCALED:
        bias *= tl.load(probs_ptr + rows, mask=rows < R, other=0.0)[:, None]
    x = tl.load(x_ptr + (rows * stride_x)[:, None] + cols, mask=x_mask, other=0.0).to(tl.float32)
    y = tl.where(x_mask, x + bias, 0.0)
    tl.store(y_ptr + (rows * N)[:, None] + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R"])
def bias_bwd_kernel(
    dy_ptr, partial_ptr, R, N, stride_dy,
    PDL: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """First stage: program (block of columns, p) sums every num_programs-th block of rows into row p of partial."""
    pdl_trigger(PDL)
    program = tl.program_id(1).to(tl.int64)
    cols = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    acc = tl.zeros((AT_ONCE, BLOCK_N), dtype=tl.float32)
    row_stride = tl.num_programs(1) * BLOCK_R
    for start in tl.range(program * BLOCK_R, R.to(tl.int64), row_stride, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_R)
        mask = (rows < R)[:, None] & (cols < N)
        dy = tl.load(dy_ptr + (rows * stride_dy)[:, None] + cols, mask=mask, other=0.0)
        acc += fold(dy.to(tl.float32), AT_ONCE)
    sums = tl.sum(acc, axis=0)[None, :]
    tl.store(partial_ptr + program * N + cols, sums, mask=cols < N)


@triton.jit(do_not_specialize=["R"])
def grouped_bias_bwd_kernel(
    dy_ptr, offs_ptr, probs_ptr, bias_ptr, partial_ptr, y_ptr, dots_ptr, R, N, E, stride_dy,
    SCALED: tl.constexpr, NEED_DPROBS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
    BLOCK_E: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """First stage of groups: a program sums one chunk of a group, one block of columns, of dy (* probs).

    A chunk is a block of up to CHUNK rows, as `groups` numbers them. The sums of a group of one chunk go to its row of
    y, others to row `chunk` of partial. With NEED_DPROBS, dots (column
    blocks, R) gets what these columns add to each row's dprobs.
    """
    pdl_trigger(PDL)
    num_n = tl.cdiv(N, BLOCK_N)
    chunk, block = tl.program_id(0) // num_n, tl.program_id(0) % num_n
    cols = (block * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    group, begin, first_row, end = rows_of_block(chunk, offs_ptr, R, E, CHUNK, BLOCK_E)
    num_rows = tl.minimum(end - first_row, CHUNK)
    dy_ptr += first_row.to(tl.int64) * stride_dy
    probs_ptr += first_row
    if NEED_DPROBS:
        dots_ptr += block.to(tl.int64) * R + first_row
        bias = tl.load(bias_ptr + group.to(tl.int64) * N + cols, mask=cols < N, other=0.0)
        bias = bias.to(tl.float32)
    acc = tl.zeros((AT_ONCE, BLOCK_N), dtype=tl.float32)
    for start in range(0, num_rows, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        dy_ptrs = dy_ptr + (rows.to(tl.int64) * stride_dy)[:, None] + cols
        mask = (rows < num_rows)[:, None] & (cols < N)  # dy leaves L2 before the partial sums do
        dy = tl.load(dy_ptrs, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if SCALED:
            probs = tl.load(probs_ptr + rows, mask=rows < num_rows, other=0.0)
        if NEED_DPROBS:
            dots = row_dots(dy, bias)
            tl.store(dots_ptr + rows, dots, mask=rows < num_rows)
        if SCALED:
            dy *= probs[:, None]
        acc += fold(dy, AT_ONCE)
    if (num_rows > 0) | (first_row == begin):  # an empty group has one chunk
        one_chunk = end - begin <= CHUNK
        sums_ptr = tl.where(
            one_chunk, y_ptr + group.to(tl.int64) * N, partial_ptr + chunk.to(tl.int64) * N
        )
        tl.store(sums_ptr + cols, tl.sum(acc, axis=0)[None, :], mask=cols < N)


@triton.jit(do_not_specialize=["D", "R"])
def group_sum_kernel(
    partial_ptr, offs_ptr, y_ptr, dots_ptr, dprobs_ptr, N, E, D, R,
    CHUNK: tl.constexpr, PDL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Second stage of groups: a program sums the chunks of one group, one block of columns, unless there is just one.

    Programs beyond the E groups' sum the D rows of dots instead, BLOCK_R rows of dprobs each; padding rows get zero.
    """
    pdl_trigger(PDL)
    num_n = tl.cdiv(N, BLOCK_N)
    group = (tl.program_id(0) // num_n).to(tl.int64)
    if group < E:
        begin, num_rows = load_group_rows(offs_ptr, group, R)
        pdl_wait(PDL)
        if num_rows > CHUNK:
            chunk0 = begin // CHUNK + group
            block, end_chunk = tl.program_id(0) % num_n, chunk0 + tl.cdiv(num_rows, CHUNK)
            add_rows(
                partial_ptr, y_ptr + group * N, chunk0, end_chunk, block, N, N, BLOCK_S, BLOCK_N
            )
    else:
        num_used = num_used_rows(offs_ptr, E, R)
        pdl_wait(PDL)
        block = tl.program_id(0) - num_n * E
        add_rows(dots_ptr, dprobs_ptr, 0, D, block, R, num_used, BLOCK_D, BLOCK_R)
