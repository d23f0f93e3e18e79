"""Permutation of MoE tokens into rows sorted by expert, and back.

`pos` (T, K) holds the row of each copy of a token, -1 where it has none; `index` (R,) the token of each row. Rows at
and beyond offs[-1] are padding. A program owns a tile of tokens or rows and one block of columns; it walks over the K
copies, BLOCK_K of them unrolled, so that their loads of `pos` are in flight together. `probs` (R,) scale rows of a
combine where SCALED.
"""

import triton
import triton.language as tl

from fuseops.kernels.device.groups import num_used_rows


@triton.jit
def load_copy_row(pos_ptr, tokens, k, token_mask, num_used, K: tl.constexpr):
    """Load (row of the k-th copy of each token, mask of those that exist)."""
    row = tl.load(pos_ptr + tokens * K + k, mask=token_mask & (k < K), other=-1).to(tl.int64)
    return row, (row >= 0) & (row < num_used)


@triton.jit
def store_zeros(y_ptr, first, R, N, block, blocks, cols, BLOCK_R: tl.constexpr):
    """Store zeros to columns of rows first to R, which ``blocks`` programs share, `block` being this one."""
    for start in range(first + block * BLOCK_R, R, blocks * BLOCK_R):
        rows = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask = (rows < R)[:, None] & (cols < N)
        tl.store(y_ptr + (rows * N)[:, None] + cols, 0.0, mask=mask)


@triton.jit(do_not_specialize=["T", "R", "blocks"])
def scatter_rows_kernel(
    x_ptr, pos_ptr, offs_ptr, y_ptr, T, R, N, E, blocks, stride_x,
    K: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[pos[t, k]] = x[t]. A program loads a tile of tokens once, stores it K times, then zeroes its share of padding
    rows.
    """
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    block = pid // num_n
    tokens = block.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    token_mask = tokens < T
    num_used = num_used_rows(offs_ptr, E, R)
    x = tl.load(
        x_ptr + (tokens * stride_x)[:, None] + cols,
        mask=token_mask[:, None] & (cols < N),
        other=0.0,
    )
    for first_k in range(0, K, BLOCK_K):
        for j in tl.static_range(BLOCK_K):
            row, kept = load_copy_row(pos_ptr, tokens, first_k + j, token_mask, num_used, K)
            tl.store(y_ptr + (row * N)[:, None] + cols, x, mask=kept[:, None] & (cols < N))
    store_zeros(y_ptr, num_used, R, N, block, blocks, cols, BLOCK_R)


@triton.jit(do_not_specialize=["R", "parts"])
def gather_rows_kernel(
    x_ptr, index_ptr, offs_ptr, y_ptr, R, N, E, parts, stride_x,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[r] = x[index[r]]. A program owns one of ``parts`` equal parts of one group, and its share of padding.

    Programs that run together take the same part of all groups. Where a group's rows are in order of their tokens,
    these are copies of the same tokens, so that x is read from DRAM once: y is stored with evict_first, and does not
    drive x out of L2.
    """
    num_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    program = pid // num_n
    part, group = program // E, program % E
    num_used = num_used_rows(offs_ptr, E, R)
    # by itself, in 64 bits at once: after `load_group_rows` it took six registers more
    begin = tl.load(offs_ptr + group - 1, mask=group > 0, other=0).to(tl.int64)
    size = tl.minimum(tl.load(offs_ptr + group), R) - begin
    first_row, end_row = begin + size * part // parts, begin + size * (part + 1) // parts
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    for start in range(first_row, end_row, BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        row_mask = rows < end_row
        token = tl.load(index_ptr + rows, mask=row_mask, other=0).to(tl.int64)
        mask = row_mask[:, None] & (cols < N)
        y = tl.load(x_ptr + (token * stride_x)[:, None] + cols, mask=mask, other=0.0)
        tl.store(y_ptr + (rows * N)[:, None] + cols, y, mask=mask, eviction_policy="evict_first")
    store_zeros(y_ptr, num_used, R, N, program, parts * E, cols, BLOCK_R)


@triton.jit(do_not_specialize=["T", "R"])
def combine_fwd_kernel(
    x_ptr, pos_ptr, offs_ptr, probs_ptr, y_ptr, T, R, N, E, stride_x,
    K: tl.constexpr, BLOCK_K: tl.constexpr, SCALED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[t] = sum over k of x[pos[t, k]] (* probs), in the order of k, in float32."""
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    tokens = (pid // num_n).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = ((pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    token_mask = tokens < T
    num_used = num_used_rows(offs_ptr, E, R)
    acc = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
    for first_k in range(0, K, BLOCK_K):
        for j in tl.static_range(BLOCK_K):
            row, kept = load_copy_row(pos_ptr, tokens, first_k + j, token_mask, num_used, K)
            mask = kept[:, None] & (cols < N)
            x = tl.load(x_ptr + (row * stride_x)[:, None] + cols, mask=mask, other=0.0)
            x = x.to(tl.float32)
            if SCALED:
                x *= tl.load(probs_ptr + row, mask=kept, other=0.0)[:, None]
            acc += x
    y = acc.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (tokens * N)[:, None] + cols, y, mask=token_mask[:, None] & (cols < N))
