"""GEMM of a router's input gradient with an addend, y = x @ w + add, for a K (experts) that fits into one block.

There is no k loop: a program keeps its rows of x in registers and streams over column blocks of w.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def add_mm_kernel(
    add_ptr, x_ptr, w_ptr, y_ptr, M, N, K, stride_add, stride_x, stride_w,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """y (M, N) = x (M, K) @ w (K, N) + add (M, N), K at most BLOCK_K, in the dtype of add.

    A program owns BLOCK_M rows and every SPLITS-th block of columns; the loop is pipelined over STAGES, loads ahead.
    """
    pid = tl.program_id(0)
    rows = (pid // SPLITS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    ks = tl.arange(0, BLOCK_K)
    x_mask = (rows < M)[:, None] & (ks < K)[None, :]
    x = tl.load(x_ptr + (rows * stride_x)[:, None] + ks[None, :], mask=x_mask, other=0.0)
    x = x.to(w_ptr.dtype.element_ty)
    for block in tl.range(pid % SPLITS, tl.cdiv(N, BLOCK_N), SPLITS, num_stages=STAGES):
        cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        w = tl.load(
            w_ptr + (ks.to(tl.int64) * stride_w)[:, None] + cols[None, :],
            mask=(ks < K)[:, None] & (cols < N)[None, :],
            other=0.0,
        )
        add = tl.load(add_ptr + (rows * stride_add)[:, None] + cols[None, :], mask=mask, other=0.0)
        y = tl.dot(x, w) + add.to(tl.float32)
        tl.store(y_ptr + (rows * N)[:, None] + cols[None, :], y.to(add.dtype), mask=mask)
