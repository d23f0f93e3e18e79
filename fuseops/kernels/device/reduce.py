"""Helpers of Triton kernels that reduce or that overlap with their neighbours, and the second stage of column sums.

- Programmatic dependent launch: `pdl_trigger`, `pdl_wait`, `pdl_trigger_and_wait`.
- Sums whose bits depend on no schedule: `mul_rn`, `row_dots`, `fold`.
- A column sum is two launches without atomics: the programs of the first write a row of partial sums each, and
  `column_sums_kernel` adds these rows, always in the same order.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fuseops.kernels.device.groups import num_used_rows


@triton.jit
def pdl_trigger(PDL: tl.constexpr):
    """Let the next launch begin (griddepcontrol.launch_dependents)."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until all earlier launches have ended and their writes are visible (griddepcontrol.wait)."""
    if PDL:
        gdc_wait()


@triton.jit
def pdl_trigger_and_wait(PDL: tl.constexpr):
    """Let the next launch begin, and wait for all earlier ones: the first line of a kernel launched with
    `pdl_overlap`.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


# of a program, at most: in a wider row each lane holds several elements
MAX_LANES = tl.constexpr(1024)


@triton.jit
def mul_rn(x, y):
    """Multiply with one rounding of its own, as __fmul_rn: a product that lanes then exchange is not contracted with
    the addition.

    Contracted, it is exact in its own lane and rounded in the other, so that lanes which hold one sum differ, and race
    to store it. It can happen only where each lane holds one element of a row: lanes with several exchange their sum.
    """
    if x.shape[-1] > MAX_LANES:
        return x * y
    else:
        return tl.fma(x, y, 0.0)


@triton.jit
def row_dots(x, y):
    """Compute the dot products of rows, (B, N), (B, N) -> (B,): the same bits in every lane of a row."""
    return tl.sum(mul_rn(x, y), axis=1)


@triton.jit
def fold(x, AT_ONCE: tl.constexpr):
    """Sum rows AT_ONCE apart, (B, N) -> (AT_ONCE, N): in registers, where a thread holds all of these rows."""
    return tl.sum(tl.reshape(x, (x.shape[0] // AT_ONCE, AT_ONCE, x.shape[1])), axis=0)


@triton.jit
def add_rows(
    x_ptr, y_ptr, begin, end, block, N, used_cols, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Store the sum of rows `begin` to `end` of x (S, N), of one block of columns, in y (N,): BLOCK_S rows at a time.

    Of the N columns those from `used_cols` on are stored as zeros.
    """
    cols = block.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_S, BLOCK_N), dtype=tl.float32)
    for start in range(begin, end, BLOCK_S):
        rows = (start + tl.arange(0, BLOCK_S)).to(tl.int64)[:, None]
        mask = (rows < end) & (cols < used_cols)
        total += tl.load(x_ptr + rows * N + cols, mask=mask, other=0.0)
    tl.store(y_ptr + cols, tl.sum(total, axis=0)[None, :], mask=cols < N)


@triton.jit(do_not_specialize=["S", "E"])
def column_sums_kernel(
    partial_ptr, offs_ptr, y_ptr, z_ptr, S, N, E,
    GROUPS: tl.constexpr, PDL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum the rows of partial (S, N) to y (N,), or those of partial (2, S, N) to y and z: grid (blocks of columns, 1 or
    2). Where the columns are rows in GROUPS, those that belong to none are not read, and their sums are zeros.
    """
    pdl_trigger_and_wait(PDL)
    used = num_used_rows(offs_ptr, E, N) if GROUPS else N
    if tl.program_id(1) == 0:
        add_rows(partial_ptr, y_ptr, 0, S, tl.program_id(0), N, used, BLOCK_S, BLOCK_N)
    else:
        second = partial_ptr + S.to(tl.int64) * N
        add_rows(second, z_ptr, 0, S, tl.program_id(0), N, used, BLOCK_S, BLOCK_N)
