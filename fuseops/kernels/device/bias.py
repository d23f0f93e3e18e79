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
def add_and_least(count, least, other_count, other_least):
    """Two reductions in one."""
    return count + other_count, tl.minimum(least, other_least)


@triton.jit
def group_at(row, ends):
    """(the group that this row belongs to, its end); padding is one group more that never ends."""
    ended = ends <= row
    return tl.reduce((ended.to(tl.int32), tl.where(ended, NEVER, ends)), 0, add_and_least)


@triton.jit(do_not_specialize=["R"])
def bias_bwd_kernel(
    dy_ptr, partial_ptr, R, N, stride_dy,
    PDL: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, p): sums of every num_programs-th block of rows, row p of partial."""
    before_launch(PDL)
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


@triton.jit
def group_bias(bias_ptr, group, cols, E, N):
    """The bias of a group, zeros for padding."""
    at = bias_ptr + group.to(tl.int64) * N + cols
    return tl.load(at, mask=(cols < N) & (group < E), other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["R", "ROWS"])
def grouped_bias_bwd_kernel(
    dy_ptr, offs_ptr, probs_ptr, bias_ptr, partial_ptr, y_ptr, dots_ptr, R, N, E, ROWS, stride_dy,
    SCALED: tl.constexpr, NEED_DPROBS: tl.constexpr, PDL: tl.constexpr,
    BLOCK_E: tl.constexpr, AT_ONCE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, chunk): sums of ROWS rows. Those of a group that lies in the chunk are
    done, row group of y; those of another are row chunk + group of partial.

    The loop goes on over the ends of groups, so that loads run ahead over them too. With NEED_DPROBS,
    dots (column blocks, R) gets what these columns add to each dprobs.
    """
    before_launch(PDL)
    chunk = tl.program_id(1).to(tl.int64)
    cols = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    begin = chunk * ROWS  # from here on rows and ends of groups count from it
    count = tl.minimum(R - begin, ROWS).to(tl.int32)
    e = tl.arange(0, BLOCK_E)
    ends = tl.load(offs_ptr + e, mask=e < E, other=NEVER)
    ends = tl.where(e < E, ends - begin, NEVER).to(tl.int32)
    used = tl.minimum(tl.load(offs_ptr + E - 1) - begin, count).to(tl.int32)
    group, end = group_at(0, ends)
    shared = tl.load(offs_ptr + group - 1, mask=group > 0, other=0) < begin  # with an earlier chunk
    dy_ptr += begin * stride_dy
    probs_ptr += begin
    partial_ptr += chunk * N
    if NEED_DPROBS:
        dots_ptr += tl.program_id(0).to(tl.int64) * R + begin
        bias = group_bias(bias_ptr, group, cols, E, N)
    total = tl.zeros((AT_ONCE, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, used, BLOCK_R, num_stages=STAGES):
        stop = tl.minimum(start + BLOCK_R, used)
        rows = start + tl.arange(0, BLOCK_R)
        at = dy_ptr + (rows.to(tl.int64) * stride_dy)[:, None] + cols
        dy = tl.load(at, mask=(rows < used)[:, None] & (cols < N), other=0.0).to(tl.float32)
        if SCALED:  # no load waits behind a store
            probs = tl.load(probs_ptr + rows, mask=rows < used, other=0.0)
        if NEED_DPROBS:
            dots = tl.zeros((BLOCK_R,), dtype=tl.float32)
        if end < stop:
            done = start
            while end < stop:
                mine = (rows >= done) & (rows < end)
                part = tl.where(mine[:, None], dy, 0.0)
                if SCALED:
                    part *= tl.where(mine, probs, 0.0)[:, None]
                sums = tl.sum(total + fold(part, AT_ONCE), axis=0)[None, :]
                to = tl.where(shared, partial_ptr, y_ptr) + group.to(tl.int64) * N
                tl.store(to + cols, sums, mask=cols < N)
                total = tl.zeros((AT_ONCE, BLOCK_N), dtype=tl.float32)
                if NEED_DPROBS:
                    dots = tl.where(mine, tl.sum(dy * bias, axis=1), dots)
                done = end
                shared = False
                group, end = group_at(done, ends)
                if NEED_DPROBS:
                    bias = group_bias(bias_ptr, group, cols, E, N)
            dy = tl.where((rows >= done)[:, None], dy, 0.0)
            if SCALED:
                probs = tl.where(rows >= done, probs, 0.0)
            if NEED_DPROBS:
                dots = tl.where(rows >= done, tl.sum(dy * bias, axis=1), dots)
        elif NEED_DPROBS:
            dots = tl.sum(dy * bias, axis=1)
        if NEED_DPROBS:
            tl.store(dots_ptr + rows, dots, mask=rows < used)
        if SCALED:
            dy *= probs[:, None]
        total += fold(dy, AT_ONCE)
    if used > 0:
        to = tl.where(shared | (end > count), partial_ptr, y_ptr) + group.to(tl.int64) * N
        tl.store(to + cols, tl.sum(total, axis=0)[None, :], mask=cols < N)
    if NEED_DPROBS:  # padding rows have no gradient
        for start in range(tl.maximum(used, 0), count, BLOCK_R):
            rows = start + tl.arange(0, BLOCK_R)
            tl.store(dots_ptr + rows, tl.zeros((BLOCK_R,), tl.float32), mask=rows < count)


@triton.jit(do_not_specialize=["ROWS", "D", "R"])
def group_sum_kernel(
    partial_ptr, offs_ptr, y_ptr, dots_ptr, dprobs_ptr, N, E, ROWS, D, R,
    PDL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The second stage, a block of columns of one group a program: the sum of its parts, unless there is
    one, which is y already. Programs after these add the D rows of dots.
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
        if last != first + 1:
            y = y_ptr + group * N
            block = tl.program_id(0) % num_n
            add_rows(partial_ptr, y, first, last, block, N, BLOCK_S, BLOCK_N)
    else:
        after_launch(PDL)
        block = tl.program_id(0) - num_n * E
        add_rows(dots_ptr, dprobs_ptr, 0, D, block, R, BLOCK_D, BLOCK_R)
