"""Rows of a group, and groups in blocks of rows, found by the row ends `offs` (E,) on the device. Triton.

Where each group begins a block of its own, group g begins at block begin // BLOCK_R + g: so blocks are numbered without
a table, and each group but the first costs up to one block of padding.
"""

import triton
import triton.language as tl

BEYOND_ROWS = tl.constexpr(0x7FFFFFFF)  # the largest int32, beyond every row


@triton.jit
def load_group_rows(offs_ptr, group, R):
    """Load (start, size) of a group, its first row and number of rows, clamped to R whatever `offs` says."""
    start = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    return start, tl.maximum(tl.minimum(tl.load(offs_ptr + group), R) - start, 0)


@triton.jit
def num_used_rows(offs_ptr, E, R):
    """Load the number of rows that belong to a group; those behind are padding."""
    return tl.minimum(tl.load(offs_ptr + E - 1), R)


@triton.jit
def group_of_rows(rows, offs_ptr, E, BLOCK_E: tl.constexpr):
    """Find the group of every row: how many groups end at or before it (E for padding rows)."""
    groups = tl.arange(0, BLOCK_E)
    ends = tl.load(offs_ptr + groups, mask=groups < E, other=BEYOND_ROWS)
    return tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), axis=1)


@triton.jit
def group_at_block(block, offs_ptr, R, E, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return (g, its first row, its end) of the last group g that begins at or before this block, inside of R rows
    whatever `offs` says.

    Ends of 32 groups are read at a time, one a lane: each warp finds the group by itself, without shared memory.
    """
    group, begin = tl.zeros((32,), tl.int32), tl.zeros((32,), tl.int32)
    end = tl.full((32,), BEYOND_ROWS, tl.int32)
    for first_group in tl.static_range(0, BLOCK_E, 32):
        e = first_group + tl.arange(0, 32)
        ends = tl.load(offs_ptr + e, mask=e < E, other=BEYOND_ROWS)
        is_before = (tl.minimum(ends, R) // BLOCK_R + e < block) & (e < E - 1)
        group += is_before.to(tl.int32)
        begin = tl.maximum(begin, tl.where(is_before, ends, 0))
        end = tl.minimum(end, tl.where(is_before, BEYOND_ROWS, ends))
    # clamped once more, at last: all lanes' ends in the place of these cost some kernels 190 registers
    begin, end = tl.max(begin, axis=0), tl.min(end, axis=0)
    return tl.sum(group, axis=0), tl.minimum(begin, R), tl.minimum(end, R)


@triton.jit
def rows_of_block(block, offs_ptr, R, E, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return (group, its first row, the block's first row, the group's end) of a block, by `group_at_block`."""
    group, begin, end = group_at_block(block, offs_ptr, R, E, BLOCK_R, BLOCK_E)
    return group, begin, begin + (block - begin // BLOCK_R - group) * BLOCK_R, end
