"""Kernel of fuseops.kernels.add_mm."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def add_mm_kernel(
    add_ptr, x_ptr, w_ptr, y_ptr, M, N, K, stride_add, stride_x, stride_w,
    SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A program holds rows of x and walks over every SPLITS-th block of columns, loads ahead."""
    pid = tl.program_id(0)
    rows = (pid // SPLITS).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    here = (rows < M)[:, None] & (inner < K)[None, :]
    x = tl.load(x_ptr + (rows * stride_x)[:, None] + inner[None, :], mask=here, other=0.0)
    x = x.to(w_ptr.dtype.element_ty)
    for block in tl.range(pid % SPLITS, tl.cdiv(N, BLOCK_N), SPLITS, num_stages=STAGES):
        cols = block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (rows < M)[:, None] & (cols < N)[None, :]
        w = tl.load(
            w_ptr + (inner.to(tl.int64) * stride_w)[:, None] + cols[None, :],
            mask=(inner < K)[:, None] & (cols < N)[None, :],
            other=0.0,
        )
        added = tl.load(
            add_ptr + (rows * stride_add)[:, None] + cols[None, :], mask=mask, other=0.0
        )
        y = tl.dot(x, w) + added.to(tl.float32)
        tl.store(y_ptr + (rows * N)[:, None] + cols[None, :], y.to(added.dtype), mask=mask)
