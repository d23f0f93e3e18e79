"""The second stage of a column sum: partial sums (S, N) -> (N,), always added in the same order."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["S"])
def column_sum_kernel(partial_ptr, y_ptr, S, N, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr):
    """One block of columns of one group: y[g] = sum over s of partial[g, s]."""
    group = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    total = tl.zeros((BLOCK_S, BLOCK_N), dtype=tl.float32)
    for start in range(0, S, BLOCK_S):
        rows = start + tl.arange(0, BLOCK_S)[:, None]
        mask = (rows < S) & (cols < N)
        total += tl.load(partial_ptr + (group * S + rows) * N + cols, mask=mask, other=0.0)
    y = tl.sum(total, axis=0)[None, :]
    tl.store(y_ptr + group * N + cols, y.to(y_ptr.dtype.element_ty), mask=cols < N)
