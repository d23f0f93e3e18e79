"""Grouped weight gradient in Triton for groups of a few rows, where stores of dw bound the time.

No mainloop to speak of: most groups fit into one k step of BLOCK_K rows. So a program keeps its tile of dy in registers
and streams over columns of x, prefetching the next block of x before it stores the current one, and the grid is many
small programs that keep stores in flight. Rows of both operands may be given by index.
"""

import triton
import triton.language as tl

from .groups import load_group_rows
from .reduce import pdl_trigger_and_wait


@triton.jit
def row_ptrs(ptr, index_ptr, rows, mask, stride, INDEXED: tl.constexpr):
    """Return pointers (BLOCK, 1) to rows of an operand, or with INDEXED to its rows index[r]."""
    rows = rows.to(tl.int64)
    if INDEXED:
        rows = tl.load(index_ptr + rows, mask=mask, other=0).to(tl.int64)
    return ptr + (rows * stride)[:, None]


@triton.jit
def load_columns(ptrs, row_mask, cols, num_cols):
    """Load a tile of columns from rows that begin at `ptrs`, zeros where either is out of bounds."""
    return tl.load(
        ptrs + cols[None, :], mask=row_mask[:, None] & (cols < num_cols)[None, :], other=0.0
    )


@triton.jit(do_not_specialize=["R"])
def grouped_wgrad_few_kernel(
    dw_ptr, dy_ptr, x_ptr, dy_index_ptr, x_index_ptr, offs_ptr, R, N, K, stride_dy, stride_x,
    DY_INDEXED: tl.constexpr, X_INDEXED: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dw[e] (+)= dy[rows of e].T @ x[rows of e]; an empty group gives zero.

    A program owns BLOCK_M rows of dw[e], and of SPLITS parts of its columns one, which it walks over BLOCK_N at a time.
    dy and x are tiles of the group's first BLOCK_K rows, x one block ahead; the rows of a longer group are loaded from
    there on anew for every block of columns.
    """
    pdl_trigger_and_wait(PDL)
    num_m, num_n = tl.cdiv(N, BLOCK_M), tl.cdiv(K, BLOCK_N)
    program, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    group, block_m = program // num_m, program % num_m
    start, size = load_group_rows(offs_ptr, group, R)
    first_block, end_block = num_n * split // SPLITS, num_n * (split + 1) // SPLITS
    dw_rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    ks, col_offsets = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    k_mask = ks < size
    dy_ptrs = row_ptrs(dy_ptr, dy_index_ptr, start + ks, k_mask, stride_dy, DY_INDEXED)
    x_ptrs = row_ptrs(x_ptr, x_index_ptr, start + ks, k_mask, stride_x, X_INDEXED)
    dy = load_columns(dy_ptrs, k_mask, dw_rows, N)
    x = load_columns(x_ptrs, k_mask, first_block * BLOCK_N + col_offsets, K)
    dw_ptrs = dw_ptr + (group.to(tl.int64) * N + dw_rows)[:, None] * K
    for block in tl.range(first_block, end_block, num_stages=1):
        cols = block * BLOCK_N + col_offsets
        next_x = load_columns(x_ptrs, k_mask & (block + 1 < end_block), cols + BLOCK_N, K)
        acc = tl.dot(dy.T, x, input_precision=PRECISION)
        for k in tl.range(BLOCK_K, size, BLOCK_K, num_stages=1):
            tail_mask = k + ks < size
            tail_dy_ptrs = row_ptrs(
                dy_ptr, dy_index_ptr, start + k + ks, tail_mask, stride_dy, DY_INDEXED
            )
            tail_x_ptrs = row_ptrs(
                x_ptr, x_index_ptr, start + k + ks, tail_mask, stride_x, X_INDEXED
            )
            tail_dy = load_columns(tail_dy_ptrs, tail_mask, dw_rows, N)
            tail_x = load_columns(tail_x_ptrs, tail_mask, cols, K)
            acc = tl.dot(tail_dy.T, tail_x, acc, input_precision=PRECISION)
        mask = (dw_rows < N)[:, None] & (cols < K)[None, :]
        if ACCUMULATE:
            acc += tl.load(dw_ptrs + cols[None, :], mask=mask, other=0.0)
        tl.store(dw_ptrs + cols[None, :], acc.to(dw_ptr.dtype.element_ty), mask=mask)
        x = next_x
