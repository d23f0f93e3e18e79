"""Kernels of fuseops.kernels.bias."""

import triton
import triton.language as tl


@triton.jit
def group_of(rows, offs_ptr, E, BLOCK_E: tl.constexpr):
    """Group of every row: how many groups end at or before it (E for padding rows)."""
    e = tl.arange(0, BLOCK_E)
    ends = tl.load(offs_ptr + e, mask=e < E, other=2147483647)
    return tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), axis=1)


@triton.jit(do_not_specialize=["R"])
def bias_fwd_kernel(
    x_ptr, bias_ptr, offs_ptr, probs_ptr, y_ptr, R, N, E, stride_x,
    GROUPED: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
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


@triton.jit(do_not_specialize=["R", "S"])
def bias_bwd_kernel(
    dy_ptr, offs_ptr, probs_ptr, bias_ptr, partial_ptr, dprobs_ptr, R, N, S, stride_dy,
    GROUPED: tl.constexpr, SCALED: tl.constexpr, NEED_DPROBS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (block of columns, split, group): sums of one of S ranges of the group's rows.

    With NEED_DPROBS the block is as wide as the rows, which then need not be read again.
    """
    split = tl.program_id(1)
    group = tl.program_id(2).to(tl.int64)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    begin = tl.zeros((), dtype=tl.int64)
    end = begin + R
    if GROUPED:
        begin = tl.load(offs_ptr + group - 1, mask=group > 0, other=0).to(tl.int64)
        end = tl.load(offs_ptr + group).to(tl.int64)
    each = tl.cdiv(tl.cdiv(end - begin, S), BLOCK_R) * BLOCK_R
    first = begin + split * each
    last = tl.minimum(first + each, end)
    total = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    if NEED_DPROBS:
        bias = tl.load(bias_ptr + group * N + cols, mask=cols < N, other=0.0).to(tl.float32)
    for start in tl.range(0, last - first, BLOCK_R, num_stages=STAGES):
        rows = first + start + tl.arange(0, BLOCK_R)
        mask = (rows < last)[:, None] & (cols < N)
        dy = tl.load(dy_ptr + (rows * stride_dy)[:, None] + cols, mask=mask, other=0.0).to(
            tl.float32
        )
        if NEED_DPROBS:
            tl.store(dprobs_ptr + rows, tl.sum(dy * bias, axis=1), mask=rows < last)
        if SCALED:
            dy *= tl.load(probs_ptr + rows, mask=rows < last, other=0.0)[:, None]
        total += dy
    tl.store(
        partial_ptr + (group * S + split) * N + cols, tl.sum(total, axis=0)[None, :], mask=cols < N
    )
    if NEED_DPROBS:
        if group == tl.num_programs(2) - 1:  # padding rows have no gradient
            for start in range(end + split * BLOCK_R, R, S * BLOCK_R):
                rows = start + tl.arange(0, BLOCK_R)
                tl.store(dprobs_ptr + rows, tl.zeros((BLOCK_R,), tl.float32), mask=rows < R)
