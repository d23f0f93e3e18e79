"""Quantization to FP8 with one scale a group of rows, or one a matrix of a weight: amax, then codes in both layouts.

A program owns BLOCK_R (128) rows of one group (FORM "groups"), of the tensor ("one") or of one matrix ("matrices",
where E is the rows of a matrix), and some columns. Blocks of groups are those of `groups`.
With INDEX row r is row index[r] of x.

Codes are stored row-major and transposed. Four codes of a column make a 32-bit word of the transposed layout, so a tile
is loaded as four slices of every fourth row each: one thread holds the same place of all four and packs them, and the
transposition exchanges words between threads, not bytes.
"""

import triton
import triton.language as tl

from fuseops.kernels.device.groups import rows_of_block
from fuseops.kernels.device.quantize import FLT_MAX, inverse_scale
from fuseops.kernels.device.quantize_columns import load_slices, store_columns, store_slices
from fuseops.kernels.device.reduce import pdl_trigger_and_wait


@triton.jit
def decode_block(
    block, offs_ptr, R, E, FORM: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Decode a block into (group, first row of the group, first row of the block, end of the group)."""
    if FORM == "groups":
        return rows_of_block(block, offs_ptr, R, E, BLOCK_R, BLOCK_E)
    elif FORM == "matrices":
        blocks_per_matrix = tl.cdiv(E, BLOCK_R)
        group = block // blocks_per_matrix
        return group, group * E, group * E + block % blocks_per_matrix * BLOCK_R, group * E + E
    else:
        return block * 0, block * 0, block * BLOCK_R, R


@triton.jit
def gather_slice(
    x_ptr, index_ptr, SLICE: tl.constexpr, row0, end, col0, N, stride_x,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load rows SLICE, SLICE + 4, ... of a tile, as `load_slices` does, where rows are given by index."""
    rows = row0 + tl.arange(0, BLOCK_R // 4) * 4 + SLICE
    x_rows = tl.load(index_ptr + rows, mask=rows < end, other=0).to(tl.int64)
    cols = col0 + tl.arange(0, BLOCK_N)
    x_ptrs = x_ptr + x_rows[:, None] * stride_x + cols[None, :]
    return tl.load(x_ptrs, mask=(rows < end)[:, None] & (cols < N)[None, :], other=0.0)


@triton.jit(do_not_specialize=["R"])
def group_amax_kernel(
    x_ptr, index_ptr, offs_ptr, amax_ptr, R, N, E, stride_x,
    FORM: tl.constexpr, INDEX: tl.constexpr, PDL: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """amax (E,), zeroed: reduce a block of rows by SPAN columns a program, then atomic_max on the float's bits.

    Bits of non-negative floats order as integers do, and a maximum does not depend on the order, so that bits repeat.
    """
    pdl_trigger_and_wait(PDL)
    group, _, row0, end = decode_block(tl.program_id(0), offs_ptr, R, E, FORM, BLOCK_E, BLOCK_R)
    rows = row0 + tl.arange(0, BLOCK_R)
    x_rows = rows.to(tl.int64)
    if INDEX:
        x_rows = tl.load(index_ptr + rows, mask=rows < end, other=0).to(tl.int64)
    first_col = tl.program_id(1) * SPAN
    abs_max = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for col0 in range(first_col, tl.minimum(first_col + SPAN, N), BLOCK_N):
        cols = col0 + tl.arange(0, BLOCK_N)
        x_ptrs = x_ptr + x_rows[:, None] * stride_x + cols[None, :]
        x = tl.load(x_ptrs, mask=(rows < end)[:, None] & (cols < N)[None, :], other=0.0)
        abs_max = tl.maximum(abs_max, tl.abs(x.to(tl.float32)))
    amax = tl.minimum(tl.maximum(tl.max(tl.max(abs_max, axis=1), axis=0), 0.0), FLT_MAX)
    amax_bits_ptr = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(amax_bits_ptr + group, amax.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit(do_not_specialize=["role"])
def delayed_inverse_kernel(
    amax_ptr, scales_ptr, amaxes_ptr, inv_ptr, role, E,
    LIMIT: tl.constexpr, FACTOR: tl.constexpr, RECORD: tl.constexpr, PDL: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Take the inverse scales (E,) of one role from `scales` (3, E), or where they are 0 from amax; RECORD: raise
    `amaxes` (3, E) to amax.
    """
    pdl_trigger_and_wait(PDL)
    groups = tl.arange(0, BLOCK_E)
    mask = groups < E
    amax = tl.load(amax_ptr + groups, mask=mask, other=0.0)
    largest = tl.full((BLOCK_E,), LIMIT, tl.float32)
    own = tl.div_rn(largest, tl.where(amax == 0, largest, amax)) * FACTOR
    given = tl.load(scales_ptr + role * E + groups, mask=mask, other=0.0)
    tl.store(inv_ptr + groups, tl.where(given == 0, tl.minimum(own, FLT_MAX), given), mask=mask)
    if RECORD:
        amaxes_ptrs = amaxes_ptr + role * E + groups
        seen = tl.load(amaxes_ptrs, mask=mask, other=0.0)
        tl.store(amaxes_ptrs, tl.maximum(seen, amax), mask=mask)


@triton.jit(do_not_specialize=["R"])
def quantize_groups_kernel(
    x_ptr, index_ptr, offs_ptr, amax_or_inv_ptr, row_ptr, col_ptr, scale_ptr, R, N, E, stride_x,
    LIMIT: tl.constexpr, FORM: tl.constexpr, INDEX: tl.constexpr, HAS_INV_SCALE: tl.constexpr, ROW: tl.constexpr,
    COL: tl.constexpr, PDL: tl.constexpr, ALIGN: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Quantize a tile with its group's scale to row-major codes (ROW) and to transposed codes (COL).

    In the transposed layout each group begins at a multiple of 128 columns; matrices lie each by itself, with rows that
    ALIGN divides. amax_or_inv_ptr holds each group's amax, or with HAS_INV_SCALE its inverse scale.
    """
    pdl_trigger_and_wait(PDL)
    num_n = tl.cdiv(N, BLOCK_N)
    block, col0 = tl.program_id(0) // num_n, tl.program_id(0) % num_n * BLOCK_N
    group, begin, row0, end = decode_block(block, offs_ptr, R, E, FORM, BLOCK_E, BLOCK_R)
    inv_scale = tl.load(amax_or_inv_ptr + group)
    if not HAS_INV_SCALE:
        inv_scale = inverse_scale(inv_scale, LIMIT, False)
    if (row0 == begin) & (col0 == 0):
        tl.store(scale_ptr + group, tl.div_rn(1.0, inv_scale))
    if INDEX:
        s0 = gather_slice(x_ptr, index_ptr, 0, row0, end, col0, N, stride_x, BLOCK_R, BLOCK_N)
        s1 = gather_slice(x_ptr, index_ptr, 1, row0, end, col0, N, stride_x, BLOCK_R, BLOCK_N)
        s2 = gather_slice(x_ptr, index_ptr, 2, row0, end, col0, N, stride_x, BLOCK_R, BLOCK_N)
        s3 = gather_slice(x_ptr, index_ptr, 3, row0, end, col0, N, stride_x, BLOCK_R, BLOCK_N)
    else:
        s0, s1, s2, s3 = load_slices(x_ptr, row0, col0, end, N, stride_x, BLOCK_R, BLOCK_N)
    if ROW:
        store_slices(row_ptr, s0, s1, s2, s3, inv_scale, row0, col0, end, N, BLOCK_R, BLOCK_N)
    if COL:
        if FORM == "matrices":
            matrix_rows = E // ALIGN * ALIGN  # E, written so that the compiler knows its divisor
            store_columns(
                col_ptr + group.to(tl.int64) * matrix_rows * N, s0, s1, s2, s3, inv_scale,
                row0 - begin, col0, matrix_rows, matrix_rows, N, ALIGN, BLOCK_R, BLOCK_N,
            )  # fmt: skip
        else:
            num_blocks = R // BLOCK_R + E if FORM == "groups" else tl.cdiv(R, BLOCK_R)
            col_row0 = block * BLOCK_R
            store_columns(
                col_ptr, s0, s1, s2, s3, inv_scale, col_row0, col0,
                col_row0 + BLOCK_R, num_blocks * BLOCK_R, N, BLOCK_R, BLOCK_R, BLOCK_N,
            )  # fmt: skip
