"""Weight gradients of groups of a few rows, which are all stores: many small programs keep them in flight."""

import triton
import triton.language as tl

from .grouped_mm import group_rows
from .reduce import pdl_trigger_and_wait


@triton.jit
def rows_at(ptr, index_ptr, at, here, stride, INDEXED: tl.constexpr):
    """Where these rows of an operand begin."""
    at = at.to(tl.int64)
    if INDEXED:
        at = tl.load(index_ptr + at, mask=here, other=0).to(tl.int64)
    return ptr + (at * stride)[:, None]


@triton.jit
def columns(rows, here, cols, width):
    """These columns of rows, zeros beyond both."""
    return tl.load(rows + cols[None, :], mask=here[:, None] & (cols < width)[None, :], other=0.0)


@triton.jit(do_not_specialize=["R"])
def grouped_wgrad_few_kernel(
    dw_ptr, dy_ptr, x_ptr, dy_index_ptr, x_index_ptr, offs_ptr, R, N, K, stride_dy, stride_x,
    DY_INDEXED: tl.constexpr, X_INDEXED: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dw[e] (+)= dy[rows of e].T @ x[rows of e]; an empty group gives zero.

    A program holds BLOCK_M columns of the first BLOCK_K rows of dy and walks over one of SPLITS parts of the columns
    of x, those of the next block on their way.
    """
    pdl_trigger_and_wait(PDL)
    num_m, num_n = tl.cdiv(N, BLOCK_M), tl.cdiv(K, BLOCK_N)
    program, part = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    group, block_m = program // num_m, program % num_m
    start, size = group_rows(offs_ptr, group, R)
    first, last = num_n * part // SPLITS, num_n * (part + 1) // SPLITS
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    line, each = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_N)
    here = line < size
    of_dy = rows_at(dy_ptr, dy_index_ptr, start + line, here, stride_dy, DY_INDEXED)
    of_x = rows_at(x_ptr, x_index_ptr, start + line, here, stride_x, X_INDEXED)
    dy = columns(of_dy, here, rows, N)
    x = columns(of_x, here, first * BLOCK_N + each, K)
    out = dw_ptr + (group.to(tl.int64) * N + rows)[:, None] * K
    for block in tl.range(first, last, num_stages=1):
        cols = block * BLOCK_N + each
        following = columns(of_x, here & (block + 1 < last), cols + BLOCK_N, K)
        sums = tl.dot(dy.T, x, input_precision=PRECISION)
        for k in tl.range(BLOCK_K, size, BLOCK_K, num_stages=1):
            more = k + line < size
            next_dy = rows_at(dy_ptr, dy_index_ptr, start + k + line, more, stride_dy, DY_INDEXED)
            next_x = rows_at(x_ptr, x_index_ptr, start + k + line, more, stride_x, X_INDEXED)
            a, b = columns(next_dy, more, rows, N), columns(next_x, more, cols, K)
            sums = tl.dot(a.T, b, sums, input_precision=PRECISION)
        mask = (rows < N)[:, None] & (cols < K)[None, :]
        if ACCUMULATE:
            sums += tl.load(out + cols[None, :], mask=mask, other=0.0)
        tl.store(out + cols[None, :], sums.to(dw_ptr.dtype.element_ty), mask=mask)
        x = following
