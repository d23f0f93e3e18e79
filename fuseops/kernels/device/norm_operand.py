"""RMSNorm whose result is an FP8 operand: rows of codes in the forward, and in the backward the transposed columns of
the same codes. Triton, sm_89 and later. Slices of a tile are those of `operands`.
"""

import triton
import triton.language as tl

from fuseops.kernels.device.norm import normalize_rows
from fuseops.kernels.device.operands import (
    load_tokens,
    power_of_two_scale,
    quantize_slice,
    slice_mask,
    store_operand,
)
from fuseops.kernels.device.quantize import amax_of, widened
from fuseops.kernels.device.reduce import pdl_trigger_and_wait


@triton.jit(do_not_specialize=["R"])
def rmsnorm_operand_kernel(
    x_ptr, residual_ptr, weight_ptr, row_ptr, scale_ptr, h_ptr, rstd_ptr,
    R, N, stride_x, stride_residual, eps, weight_offset,
    SHIFT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Normalize BLOCK_R whole rows a program, and quantize them with a scale for 128 features of a row.

    BLOCK_N is N rounded up to a power of two, 128 at least. Scales are (ceil(N / 128), R).
    """
    pdl_trigger_and_wait(PDL)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    y = normalize_rows(
        x_ptr + (rows * stride_x)[:, None], residual_ptr, weight_ptr, weight_ptr, h_ptr, rstd_ptr,
        rstd_ptr, rows, R, N, stride_residual, eps, weight_offset, HAS_RESIDUAL, HAS_WEIGHT, False,
        "rms", BLOCK_N,
    )  # fmt: skip
    y = y.to(x_ptr.dtype.element_ty)  # rounded as its tensor would be
    y = tl.reshape(y, (BLOCK_R * (BLOCK_N // 128), 128))
    inv, scale = power_of_two_scale(amax_of(y, 1), SHIFT)
    q = (widened(y) * inv[:, None]).to(row_ptr.dtype.element_ty)
    q = tl.reshape(q, (BLOCK_R, BLOCK_N))
    cols = tl.arange(0, BLOCK_N)[None, :]
    tl.store(row_ptr + (rows * N)[:, None] + cols, q, mask=(rows < R)[:, None] & (cols < N))
    scale = tl.reshape(scale, (BLOCK_R, BLOCK_N // 128))
    blocks = tl.arange(0, BLOCK_N // 128)[None, :]
    scale_ptrs = scale_ptr + blocks.to(tl.int64) * R + rows[:, None]
    tl.store(scale_ptrs, scale, mask=(rows < R)[:, None] & (blocks < tl.cdiv(N, 128)))


@triton.jit
def normalize_slice(
    x_ptr, rstd_ptr, weight, J: tl.constexpr, row0, R, col0, N, stride_x,
    HAS_WEIGHT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load slice J of x and normalize it with the stored rstd, rounded as its tensor would be."""
    x = load_tokens(x_ptr, J, row0, R, col0, N, col0 * 0, stride_x, BLOCK_R, BLOCK_N)
    r, _, _ = slice_mask(J, row0, R, col0, N, BLOCK_R, BLOCK_N)
    y = x.to(tl.float32) * tl.load(rstd_ptr + r, mask=r < R, other=0.0)[:, None]
    if HAS_WEIGHT:
        y *= weight[None, :]
    return y.to(x_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["R"])
def rmsnorm_columns_kernel(
    x_ptr, rstd_ptr, weight_ptr, col_ptr, square_ptr, R, N, stride_x, weight_offset,
    SHIFT: tl.constexpr, HAS_WEIGHT: tl.constexpr, PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Normalize, quantize and transpose a tile of 128 tokens by 128 features: the columns of the codes that
    `rmsnorm_operand_kernel` stores as rows, made again from x and rstd.
    """
    pdl_trigger_and_wait(PDL)
    pid, num_n, blocks = tl.program_id(0), tl.cdiv(N, BLOCK_N), tl.cdiv(R, BLOCK_R)
    block, col0 = pid // num_n, pid % num_n * BLOCK_N
    row0 = block * BLOCK_R
    cols = col0 + tl.arange(0, BLOCK_N)
    weight = cols.to(tl.float32)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < N, other=0.0).to(tl.float32) + weight_offset
    # fmt: off
    a = normalize_slice(x_ptr, rstd_ptr, weight, 0, row0, R, col0, N, stride_x, HAS_WEIGHT, BLOCK_R, BLOCK_N)
    b = normalize_slice(x_ptr, rstd_ptr, weight, 1, row0, R, col0, N, stride_x, HAS_WEIGHT, BLOCK_R, BLOCK_N)
    c = normalize_slice(x_ptr, rstd_ptr, weight, 2, row0, R, col0, N, stride_x, HAS_WEIGHT, BLOCK_R, BLOCK_N)
    d = normalize_slice(x_ptr, rstd_ptr, weight, 3, row0, R, col0, N, stride_x, HAS_WEIGHT, BLOCK_R, BLOCK_N)
    # fmt: on
    qa, sa = quantize_slice(a, col_ptr, SHIFT)
    qb, sb = quantize_slice(b, col_ptr, SHIFT)
    qc, sc = quantize_slice(c, col_ptr, SHIFT)
    qd, sd = quantize_slice(d, col_ptr, SHIFT)
    store_operand(
        qa, qb, qc, qd, sa, sb, sc, sd, col_ptr, square_ptr, col_ptr, square_ptr,
        row0, R, col0, R, N, col0 * 0, N, block, blocks, False, True, BLOCK_R, BLOCK_N,
    )  # fmt: skip
