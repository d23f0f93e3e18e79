"""Kernels of fuseops.kernels.bias."""

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import add_rows, after_launch, before_launch, fold, overlapped

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
    overlapped(PDL)
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


@triton.jit
def group_at(row, ends):
    """(the group that this row belongs to, its end); padding is one group more that never ends."""
    group = tl.sum((ends <= row).to(tl.int32), axis=0)
    return group, tl.min(tl.where(ends > row, ends, NEVER), axis=0)


@triton.jit(do_not_specialize=["R", "ROWS"])
def bias_bwd_kernel(
    dy_ptr, offs_ptr, probs_ptr, bias_ptr, partial_ptr, dots_ptr, R, N, E, ROWS, stride_dy,
    GROUPED: tl.constexpr, SCALED: tl.constexpr, NEED_DPROBS: tl.constexpr, PDL: tl.constexpr,
    BLOCK_E: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, chunk): sums of its rows, one a group: row chunk + group of partial.

    With groups a chunk is ROWS rows, without it is every num_programs-th block of BLOCK_R = ROWS rows.
    With NEED_DPROBS, dots (column blocks, R) gets what these columns add to each dprobs.
    """
    before_launch(PDL)
    chunk = tl.program_id(1).to(tl.int64)
    cols = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    begin = chunk * ROWS
    if GROUPED:
        step = BLOCK_R
        last = tl.minimum(begin + ROWS, R)
        e = tl.arange(0, BLOCK_E)
        ends = tl.load(offs_ptr + e, mask=e < E, other=NEVER).to(tl.int64)
        used = tl.minimum(tl.max(tl.where(e < E, ends, 0), axis=0), last)
        group, end = group_at(begin, ends)
    else:
        step = tl.num_programs(1) * ROWS
        used = R.to(tl.int64)
        group, end = 0, used
    if NEED_DPROBS:
        dots_row = dots_ptr + tl.program_id(0).to(tl.int64) * R
    while begin < used:
        end = tl.minimum(end, used)
        if NEED_DPROBS:
            bias = tl.load(bias_ptr + group.to(tl.int64) * N + cols, mask=cols < N, other=0.0)
            bias = bias.to(tl.float32)
        total = tl.zeros((AT_ONCE, BLOCK_N), dtype=tl.float32)
        for start in tl.range(begin, end, step, num_stages=STAGES):
            rows = start + tl.arange(0, BLOCK_R)
            mask = (rows < end)[:, None] & (cols < N)
            at = dy_ptr + (rows * stride_dy)[:, None] + cols
            dy = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            if SCALED:  # no load waits behind a store
                probs = tl.load(probs_ptr + rows, mask=rows < end, other=0.0)
            if NEED_DPROBS:
                tl.store(dots_row + rows, tl.sum(dy * bias, axis=1), mask=rows < end)
            if SCALED:
                dy *= probs[:, None]
            total += fold(dy, AT_ONCE)
        sums = tl.sum(total, axis=0)[None, :]
        tl.store(partial_ptr + (chunk + group) * N + cols, sums, mask=cols < N)
        begin = end
        if GROUPED:
            group, end = group_at(begin, ends)
    if NEED_DPROBS:  # padding rows have no gradient
        for start in range(begin, last, BLOCK_R):
            rows = start + tl.arange(0, BLOCK_R)
            tl.store(dots_row + rows, tl.zeros((BLOCK_R,), tl.float32), mask=rows < last)


@triton.jit(do_not_specialize=["ROWS", "D", "R"])
def group_sum_kernel(
    partial_ptr, offs_ptr, y_ptr, dots_ptr, dprobs_ptr, N, E, ROWS, D, R,
    PDL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The second stage, a block of columns of one group a program: the sum of its parts. Programs after
    these add the D rows of dots.
    """
    before_launch(PDL)
    num_n = tl.cdiv(N, BLOCK_N)
    group = (tl.program_id(0) // num_n).to(tl.int64)
    if group < E:
        begin = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
        end = tl.load(offs_ptr + group)
        first = begin // ROWS + group
        last = tl.where(end > begin, (end - 1) // ROWS + group + 1, first)
        after_launch(PDL)
        add_rows(
            partial_ptr,
            y_ptr + group * N,
            first,
            last,
            tl.program_id(0) % num_n,
            N,
            BLOCK_S,
            BLOCK_N,
        )
    else:
        after_launch(PDL)
        block = tl.program_id(0) - num_n * E
        add_rows(dots_ptr, dprobs_ptr, 0, D, block, R, BLOCK_D, BLOCK_R)
