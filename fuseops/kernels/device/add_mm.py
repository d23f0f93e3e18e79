"""Kernel of fuseops.kernels.add_mm."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def add_mm_kernel(
    add_ptr, x_ptr, w_ptr, y_ptr, M, N, K, stride_add, stride_x, stride_w,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of y; the tiles of a row block follow each other, so that x stays in L2."""
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    rows = (pid // num_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = (pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        here = (rows < M)[:, None] & (inner < K)[None, :]
        x = tl.load(x_ptr + (rows * stride_x)[:, None] + inner[None, :], mask=here, other=0.0)
        there = (inner < K)[:, None] & (cols < N)[None, :]
        w = tl.load(
            w_ptr + (inner.to(tl.int64) * stride_w)[:, None] + cols[None, :], mask=there, other=0.0
        )
        total = tl.dot(x.to(w.dtype), w, total)
    added = tl.load(add_ptr + (rows * stride_add)[:, None] + cols[None, :], mask=mask, other=0.0)
    y = (total + added.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + (rows * N)[:, None] + cols[None, :], y, mask=mask)
