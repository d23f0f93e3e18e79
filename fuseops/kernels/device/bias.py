"""Kernels of fuseops.kernels.bias."""

import triton
import triton.language as tl

from fuseops.kernels.device.quantize_columns import group_at_block
from fuseops.kernels.device.reduce import (
    add_rows,
    fold,
    pdl_trigger,
    pdl_trigger_and_wait,
    pdl_wait,
    row_dots,
)

NEVER = tl.constexpr(2147483647)


@triton.jit
def group_of(rows, offs_ptr, E, BLOCK_E: tl.constexpr):
    """Group of every row: how many groups end at or before it (E for padding rows)."""
    e = tl.arange(0, BLOCK_E)
    ends = tl.load(offs_ptr + e, mask=e < E, other=NEVER)
    return tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["R"])
def bias_fwd_kernel(
    x_ptr, bias_ptr, offs_ptr, probs_ptr, y_ptr, R, N, E, stride_x,
    GROUPED: tl.constexpr, SCALED: tl.constexpr,
    PDL: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pdl_trigger_and_wait(PDL)
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    rows = (pid // num_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    mask = (rows < R)[:, None] & (cols < N)
    if GROUPED:
        group = group_of(rows, offs_ptr, E, BLOCK_E)
        mask_in = mask & (group < E)[:, None]
        bias = tl.load(
            bias_ptr + (group.to(tl.int64) * N)[:, None] + cols, mask=mask_in, other=0.0
        ).to(tl.float32)
    else:
        mask_in = mask
        bias = tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)
    if SCALED:
        bias *= tl.load(probs_ptr + rows, mask=rows < R, other=0.0)[:, None]
    x = tl.load(x_ptr + (rows * stride_x)[:, None] + cols, mask=mask_in, other=0.0).to(tl.float32)
    y = tl.where(mask_in, x + bias, 0.0)
    tl.store(y_ptr + (rows * N)[:, None] + cols, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R"])
def bias_bwd_kernel(
    dy_ptr, partial_ptr, R, N, stride_dy,
    PDL: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, p): sums of every num_programs-th block of rows, row p of partial."""
    pdl_trigger(PDL)
    program = tl.program_id(1).to(tl.int64)
    cols = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    total = tl.zeros((AT_ONCE, BLOCK_N), dtype=tl.float32)
    step = tl.num_programs(1) * BLOCK_R
    for start in tl.range(program * BLOCK_R, R.to(tl.int64), step, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_R)
        mask = (rows < R)[:, None] & (cols < N)
        dy = tl.load(dy_ptr + (rows * stride_dy)[:, None] + cols, mask=mask, other=0.0)
        total += fold(dy.to(tl.float32), AT_ONCE)
    sums = tl.sum(total, axis=0)[None, :]
    tl.store(partial_ptr + program * N + cols, sums, mask=cols < N)


@triton.jit(do_not_specialize=["R"])
def grouped_bias_bwd_kernel(
    dy_ptr, offs_ptr, probs_ptr, bias_ptr, partial_ptr, y_ptr, dots_ptr, R, N, E, stride_dy,
    SCALED: tl.constexpr, NEED_DPROBS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
    BLOCK_E: tl.constexpr, AT_ONCE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Chunk c is up to CHUNK rows of the last group g that begins at or before it, at chunk
    begin // CHUNK + g. The sums of a group that fits into one go to its row of y, others to row c of
    partial. With NEED_DPROBS, dots (column blocks, R) gets what these columns add to each dprobs.
    """
    pdl_trigger(PDL)
    num_n = tl.cdiv(N, BLOCK_N)
    chunk, block = tl.program_id(0) // num_n, tl.program_id(0) % num_n
    cols = (block * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    group, begin, end = group_at_block(chunk, offs_ptr, E, CHUNK, BLOCK_E)
    first = begin + (chunk - begin // CHUNK - group) * CHUNK
    count = tl.minimum(end - first, CHUNK)
    dy_ptr += first.to(tl.int64) * stride_dy
    probs_ptr += first
    if NEED_DPROBS:
        dots_ptr += block.to(tl.int64) * R + first
        bias = tl.load(bias_ptr + group.to(tl.int64) * N + cols, mask=cols < N, other=0.0)
        bias = bias.to(tl.float32)
    total = tl.zeros((AT_ONCE, BLOCK_N), dtype=tl.float32)
    for start in range(0, count, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        at = dy_ptr + (rows.to(tl.int64) * stride_dy)[:, None] + cols
        mask = (rows < count)[:, None] & (cols < N)  # dy leaves L2 before the partial sums do
        dy = tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if SCALED:
            probs = tl.load(probs_ptr + rows, mask=rows < count, other=0.0)
        if NEED_DPROBS:
            dots = row_dots(dy, bias)
            tl.store(dots_ptr + rows, dots, mask=rows < count)
        if SCALED:
            dy *= probs[:, None]
        total += fold(dy, AT_ONCE)
    if (count > 0) | (first == begin):  # an empty group has one chunk
        whole = end - begin <= CHUNK
        row = tl.where(whole, y_ptr + group.to(tl.int64) * N, partial_ptr + chunk.to(tl.int64) * N)
        tl.store(row + cols, tl.sum(total, axis=0)[None, :], mask=cols < N)


@triton.jit(do_not_specialize=["D", "R"])
def group_sum_kernel(
    partial_ptr, offs_ptr, y_ptr, dots_ptr, dprobs_ptr, N, E, D, R,
    CHUNK: tl.constexpr, PDL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The second stage, a block of columns of one group a program: the sum of its chunks, unless there
    is one. Programs after these add the D rows of dots; padding rows have no gradient.
    """
    pdl_trigger(PDL)
    num_n = tl.cdiv(N, BLOCK_N)
    group = (tl.program_id(0) // num_n).to(tl.int64)
    if group < E:
        begin = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
        rows = tl.load(offs_ptr + group) - begin
        pdl_wait(PDL)
        if rows > CHUNK:
            first = begin // CHUNK + group
            block, last = tl.program_id(0) % num_n, first + tl.cdiv(rows, CHUNK)
            add_rows(partial_ptr, y_ptr + group * N, first, last, block, N, N, BLOCK_S, BLOCK_N)
    else:
        used = tl.load(offs_ptr + E - 1)
        pdl_wait(PDL)
        block = tl.program_id(0) - num_n * E
        add_rows(dots_ptr, dprobs_ptr, 0, D, block, R, used, BLOCK_D, BLOCK_R)
