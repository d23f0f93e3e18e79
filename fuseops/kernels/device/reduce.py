"""The second stage of column sums and column maxima, always in the same order.

A first stage gives chunk c of ROWS rows one row of ``partial``. With groups, the part of group g in
chunk c has row c + g: chunks and groups both ascend, so no two parts share one.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def before_launch(PDL: tl.constexpr):
    """The next launch may begin."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def after_launch(PDL: tl.constexpr):
    """Wait for the launch before this one."""
    if PDL:
        gdc_wait()


@triton.jit
def overlapped(PDL: tl.constexpr):
    """The next launch may begin, this one waits for the one before it."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def fold(x, AT_ONCE: tl.constexpr):
    """(B, N) -> (AT_ONCE, N): sums of rows AT_ONCE apart. Where a thread holds these, nothing moves."""
    return tl.sum(tl.reshape(x, (x.shape[0] // AT_ONCE, AT_ONCE, x.shape[1])), axis=0)


@triton.jit(do_not_specialize=["S", "ROWS"])
def column_sum_kernel(
    partial_ptr, offs_ptr, y_ptr, S, N, ROWS,
    GROUPED: tl.constexpr, PDL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of columns of one group: the sum of its rows of partial (S, N)."""
    overlapped(PDL)
    group = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    first = tl.zeros((), dtype=tl.int64)
    last = first + S
    if GROUPED:
        begin = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
        end = tl.load(offs_ptr + group)
        first = begin // ROWS + group
        last = tl.where(end > begin, (end - 1) // ROWS + group + 1, first)
    total = tl.zeros((BLOCK_S, BLOCK_N), dtype=tl.float32)
    for start in range(first, last, BLOCK_S):
        rows = start + tl.arange(0, BLOCK_S)[:, None]
        mask = (rows < last) & (cols < N)
        total += tl.load(partial_ptr + rows * N + cols, mask=mask, other=0.0)
    y = tl.sum(total, axis=0)[None, :]
    tl.store(y_ptr + group * N + cols, y, mask=cols < N)
