"""The second stage of column sums, always in the same order, and what the first stages share."""

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


MOST_LANES = tl.constexpr(1024)  # of a program, at most: of a wider row each holds several elements


@triton.jit
def apart(x, y):
    """x * y, rounded before lanes exchange it. A product that is contracted with the exchange is exact in its own lane
    and rounded in the other: lanes that hold one sum differ, and race to store it. Lanes with several elements of a
    row exchange their sum.
    """
    if x.shape[-1] > MOST_LANES:
        return x * y
    else:
        return tl.fma(x, y, 0.0)


@triton.jit
def row_dots(x, y):
    """(B, N), (B, N) -> (B,): the same in every lane of a row."""
    return tl.sum(apart(x, y), axis=1)


@triton.jit
def fold(x, AT_ONCE: tl.constexpr):
    """(B, N) -> (AT_ONCE, N): sums of rows AT_ONCE apart. Where a thread holds these, nothing moves."""
    return tl.sum(tl.reshape(x, (x.shape[0] // AT_ONCE, AT_ONCE, x.shape[1])), axis=0)


@triton.jit
def add_rows(
    x_ptr, y_ptr, first, last, block, N, used, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """y[block of columns] = the sum of rows first to last of x, BLOCK_S of them at a time; of N columns
    those from `used` on are zeros.
    """
    cols = block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_S, BLOCK_N), dtype=tl.float32)
    for start in range(first, last, BLOCK_S):
        rows = (start + tl.arange(0, BLOCK_S)).to(tl.int64)[:, None]
        mask = (rows < last) & (cols < used)
        total += tl.load(x_ptr + rows * N + cols, mask=mask, other=0.0)
    tl.store(y_ptr + cols, tl.sum(total, axis=0)[None, :], mask=cols < N)


@triton.jit(do_not_specialize=["S"])
def column_sums_kernel(
    partial_ptr, y_ptr, z_ptr, S, N, PDL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr
):
    """One block of columns: the sum of the rows of partial (S, N) to y, or of partial (2, S, N) to y and z."""
    overlapped(PDL)
    if tl.program_id(1) == 0:
        add_rows(partial_ptr, y_ptr, 0, S, tl.program_id(0), N, N, BLOCK_S, BLOCK_N)
    else:
        other = partial_ptr + S.to(tl.int64) * N
        add_rows(other, z_ptr, 0, S, tl.program_id(0), N, N, BLOCK_S, BLOCK_N)
