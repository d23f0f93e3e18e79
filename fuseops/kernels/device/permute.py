"""Kernels of fuseops.kernels.permute."""

import triton
import triton.language as tl


@triton.jit
def rows_used(offs_ptr, E, R):
    """How many rows hold a copy; those behind are padding."""
    return tl.minimum(tl.load(offs_ptr + E - 1), R)


@triton.jit
def row_of(pos_ptr, tokens, k, here, used, K: tl.constexpr):
    """(row of the k-th copy of each token, whether there is one)"""
    row = tl.load(pos_ptr + tokens * K + k, mask=here & (k < K), other=-1).to(tl.int64)
    return row, (row >= 0) & (row < used)


@triton.jit
def store_zeros(y_ptr, first, R, N, block, blocks, cols, BLOCK_R: tl.constexpr):
    """Zeros into these columns of rows first to R, shared by ``blocks`` programs."""
    for start in range(first + block * BLOCK_R, R, blocks * BLOCK_R):
        rows = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask = (rows < R)[:, None] & (cols < N)
        tl.store(y_ptr + (rows * N)[:, None] + cols, 0.0, mask=mask)


@triton.jit(do_not_specialize=["T", "R", "blocks"])
def scatter_rows_kernel(
    x_ptr, pos_ptr, offs_ptr, probs_ptr, y_ptr, T, R, N, E, blocks, stride_x,
    K: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program reads a tile of tokens once and writes it K times, then its share of padding."""
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    block = pid // num_n
    tokens = block.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    here = tokens < T
    used = rows_used(offs_ptr, E, R)
    x = tl.load(
        x_ptr + (tokens * stride_x)[:, None] + cols, mask=here[:, None] & (cols < N), other=0.0
    )
    for first in range(0, K, BLOCK_K):
        for j in tl.static_range(BLOCK_K):
            row, kept = row_of(pos_ptr, tokens, first + j, here, used, K)
            y = x
            if SCALED:
                probs = tl.load(probs_ptr + row, mask=kept, other=0.0)
                y = (x.to(tl.float32) * probs[:, None]).to(x.dtype)
            tl.store(y_ptr + (row * N)[:, None] + cols, y, mask=kept[:, None] & (cols < N))
    store_zeros(y_ptr, used, R, N, block, blocks, cols, BLOCK_R)


@triton.jit(do_not_specialize=["R", "parts"])
def gather_rows_kernel(
    x_ptr, index_ptr, offs_ptr, probs_ptr, y_ptr, R, N, E, parts, stride_x,
    SCALED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program takes one of ``parts`` equal parts of one group, and its share of padding.

    Programs that run together take the same part of all groups. Where a group's rows are in order
    of their tokens, these are the copies of the same tokens, which memory is read for once: what is
    written does not drive them out of L2.
    """
    num_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    program = pid // num_n
    part, group = program // E, program % E
    used = rows_used(offs_ptr, E, R)
    begin = tl.load(offs_ptr + group - 1, mask=group > 0, other=0).to(tl.int64)
    size = tl.minimum(tl.load(offs_ptr + group), R) - begin
    first, last = begin + size * part // parts, begin + size * (part + 1) // parts
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    for start in range(first, last, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        kept = rows < last
        token = tl.load(index_ptr + rows, mask=kept, other=0).to(tl.int64)
        mask = kept[:, None] & (cols < N)
        y = tl.load(x_ptr + (token * stride_x)[:, None] + cols, mask=mask, other=0.0)
        if SCALED:
            probs = tl.load(probs_ptr + rows, mask=kept, other=0.0)
            y = (y.to(tl.float32) * probs[:, None]).to(y.dtype)
        tl.store(y_ptr + (rows * N)[:, None] + cols, y, mask=mask, eviction_policy="evict_first")
    store_zeros(y_ptr, used, R, N, program, parts * E, cols, BLOCK_R)


@triton.jit(do_not_specialize=["T", "R"])
def combine_fwd_kernel(
    x_ptr, pos_ptr, offs_ptr, probs_ptr, y_ptr, T, R, N, E, stride_x,
    K: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The K rows of a token are added in the order of k."""
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    tokens = (pid // num_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    here = tokens < T
    used = rows_used(offs_ptr, E, R)
    total = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for first in range(0, K, BLOCK_K):
        for j in tl.static_range(BLOCK_K):
            row, kept = row_of(pos_ptr, tokens, first + j, here, used, K)
            mask = kept[:, None] & (cols < N)
            x = tl.load(x_ptr + (row * stride_x)[:, None] + cols, mask=mask, other=0.0)
            x = x.to(tl.float32)
            if SCALED:
                x *= tl.load(probs_ptr + row, mask=kept, other=0.0)[:, None]
            total += x
    y = total.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (tokens * N)[:, None] + cols, y, mask=here[:, None] & (cols < N))
