"""Kernels of fuseops.kernels.amax: one scale a group of rows, or one a matrix, from its own amax.

A program has 128 rows of one group (FORM "groups", "one") or of one matrix ("matrices", of E rows each). With INDEX row
r is row index[r] of x.
"""

import triton
import triton.language as tl

from fuseops.kernels.device.quantize import FLT_MAX, inverse_scale
from fuseops.kernels.device.quantize_columns import (
    group_at_block,
    load_slices,
    store_columns,
    store_slices,
)
from fuseops.kernels.device.reduce import pdl_trigger_and_wait


@triton.jit
def rows_of_block(
    block, offs_ptr, R, E, FORM: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr
):
    """(group, its first row, first row of the block, end of the group)."""
    if FORM == "groups":
        group, begin, end = group_at_block(block, offs_ptr, E, BLOCK_R, BLOCK_E)
        row0 = begin + (block - begin // BLOCK_R - group) * BLOCK_R
        return group, begin, row0, tl.minimum(end, R)
    elif FORM == "matrices":
        blocks = tl.cdiv(E, BLOCK_R)
        group = block // blocks
        return group, group * E, group * E + block % blocks * BLOCK_R, group * E + E
    else:
        return block * 0, block * 0, block * BLOCK_R, R


@triton.jit
def slice_by_index(
    x_ptr, index_ptr, J: tl.constexpr, row0, end, col0, N, stride_x,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The J-th of the four slices of a tile, as `load_slices` gives them, of rows by index."""
    r = row0 + tl.arange(0, BLOCK_R // 4) * 4 + J
    row = tl.load(index_ptr + r, mask=r < end, other=0).to(tl.int64)
    c = col0 + tl.arange(0, BLOCK_N)
    at = x_ptr + row[:, None] * stride_x + c[None, :]
    return tl.load(at, mask=(r < end)[:, None] & (c < N)[None, :], other=0.0)


@triton.jit
def no_amax_kernel(amax_ptr, E, PDL: tl.constexpr, BLOCK_E: tl.constexpr):
    """Zeros, that the largest magnitudes are found from: a launch, so that all of them are replayed."""
    pdl_trigger_and_wait(PDL)
    e = tl.arange(0, BLOCK_E)
    tl.store(amax_ptr + e, tl.zeros((BLOCK_E,), tl.float32), mask=e < E)


@triton.jit(do_not_specialize=["R"])
def group_amax_kernel(
    x_ptr, index_ptr, offs_ptr, amax_ptr, R, N, E, stride_x,
    FORM: tl.constexpr, INDEX: tl.constexpr, PDL: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The amax of each group, by maxima of its bits, which order as integers do. SPAN columns a program."""
    pdl_trigger_and_wait(PDL)
    group, _, row0, end = rows_of_block(tl.program_id(0), offs_ptr, R, E, FORM, BLOCK_E, BLOCK_R)
    r = row0 + tl.arange(0, BLOCK_R)
    row = r.to(tl.int64)
    if INDEX:
        row = tl.load(index_ptr + r, mask=r < end, other=0).to(tl.int64)
    first = tl.program_id(1) * SPAN
    largest = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for col0 in range(first, tl.minimum(first + SPAN, N), BLOCK_N):
        c = col0 + tl.arange(0, BLOCK_N)
        at = x_ptr + row[:, None] * stride_x + c[None, :]
        x = tl.load(at, mask=(r < end)[:, None] & (c < N)[None, :], other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    amax = tl.minimum(tl.maximum(tl.max(tl.max(largest, axis=1), axis=0), 0.0), FLT_MAX)
    bits = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(bits + group, amax.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=["R"])
def quantize_groups_kernel(
    x_ptr, index_ptr, offs_ptr, by_ptr, row_ptr, col_ptr, scale_ptr, R, N, E, stride_x,
    LIMIT: tl.constexpr, FORM: tl.constexpr, INDEX: tl.constexpr, UP: tl.constexpr, ROW: tl.constexpr,
    COL: tl.constexpr, PDL: tl.constexpr, ALIGN: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Codes as they lie and transposed: of rows with groups at multiples of 128, of matrices each by itself, whose
    rows ALIGN divides. By each group's amax, or with UP by what its numbers are multiplied by.
    """
    pdl_trigger_and_wait(PDL)
    num_n = tl.cdiv(N, BLOCK_N)
    block, col0 = tl.program_id(0) // num_n, tl.program_id(0) % num_n * BLOCK_N
    group, begin, row0, end = rows_of_block(block, offs_ptr, R, E, FORM, BLOCK_E, BLOCK_R)
    inv = tl.load(by_ptr + group)
    if not UP:
        inv = inverse_scale(inv, LIMIT, False)
    if (row0 == begin) & (col0 == 0):
        tl.store(scale_ptr + group, tl.div_rn(1.0, inv))
    if INDEX:
        a = slice_by_index(x_ptr, index_ptr, 0, row0, end, col0, N, stride_x, BLOCK_R, BLOCK_N)
        b = slice_by_index(x_ptr, index_ptr, 1, row0, end, col0, N, stride_x, BLOCK_R, BLOCK_N)
        c = slice_by_index(x_ptr, index_ptr, 2, row0, end, col0, N, stride_x, BLOCK_R, BLOCK_N)
        d = slice_by_index(x_ptr, index_ptr, 3, row0, end, col0, N, stride_x, BLOCK_R, BLOCK_N)
    else:
        a, b, c, d = load_slices(x_ptr, row0, col0, end, N, stride_x, BLOCK_R, BLOCK_N)
    if ROW:
        store_slices(row_ptr, a, b, c, d, inv, row0, col0, end, N, BLOCK_R, BLOCK_N)
    if COL:
        if FORM == "matrices":
            height = E // ALIGN * ALIGN  # E, in a form that says to the compiler what divides it
            store_columns(
                col_ptr + group.to(tl.int64) * height * N, a, b, c, d, inv,
                row0 - begin, col0, height, height, N, ALIGN, BLOCK_R, BLOCK_N,
            )  # fmt: skip
        else:
            blocks = R // BLOCK_R + E if FORM == "groups" else tl.cdiv(R, BLOCK_R)
            to = block * BLOCK_R
            store_columns(
                col_ptr, a, b, c, d, inv, to, col0, to + BLOCK_R, blocks * BLOCK_R, N,
                BLOCK_R, BLOCK_R, BLOCK_N,
            )  # fmt: skip
