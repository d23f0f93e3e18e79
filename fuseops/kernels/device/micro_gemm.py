"""Kernel of fuseops.kernels.micro_gemm: products of codes in small blocks, on the tensor cores of Blackwell."""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor as TensorDescriptor

from fuseops.kernels.device.quantize_columns import group_at_block


@triton.jit
def swizzled_scales(ptr, block, first, tiles, COUNT: tl.constexpr, FP4: tl.constexpr):
    """The scales of 128 rows, from tile `first` on.   -> (128, 4 COUNT)"""
    tile = first + tl.arange(0, COUNT)
    at = (block.to(tl.int64) * tiles + tile)[:, None] * 512 + tl.arange(0, 512)[None, :]
    bits = tl.load(ptr + at, mask=(tile < tiles)[:, None], other=0)
    bits = tl.trans(tl.reshape(bits, (COUNT, 32, 4, 4)), (2, 1, 0, 3))
    bits = tl.reshape(bits, (128, 4 * COUNT))
    return bits.to(tl.float8e4nv, bitcast=True) if FP4 else bits


@triton.jit(do_not_specialize=["M", "E"])
def micro_mm_kernel(
    y_ptr, a_desc, a_scale_ptr, b_desc, b_scale_ptr, whole_ptr, offs_ptr, M, N, S, E,
    GROUPS: tl.constexpr, TURNED: tl.constexpr, WHOLE: tl.constexpr, A_FORM: tl.constexpr, B_FORM: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile (128, 128) of y (M, N), summed over S: of rows of one group with its matrix or, TURNED, of one group's
    columns, in y (E, M, N).
    """
    FP4: tl.constexpr = A_FORM == "e2m1"
    PACK: tl.constexpr = 2 if FP4 else 1
    WIDTH: tl.constexpr = 64 if FP4 else 128  # of a tile of scales
    num_m, num_n = tl.cdiv(M, 128), tl.cdiv(N, 128)
    block, n = tl.program_id(0) // num_n, tl.program_id(0) % num_n
    group, begin, end, first = 0, 0, S, 0
    if TURNED:
        group, block = block // num_m, block % num_m
        if GROUPS:
            begin = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
            end = tl.maximum(tl.load(offs_ptr + group) - begin, 0)
            begin = (begin // 128 + group) * 128
            end = tl.minimum(begin + tl.cdiv(end, 128) * 128, S)
        row0, b_block, limit, kept = block * 128, n, M, M
    else:
        row0, limit, kept = block * 128, M, M
        if GROUPS:
            group, first, kept = group_at_block(block, offs_ptr, E, 128, BLOCK_E)
            row0 = first + (block - first // 128 - group) * 128
            limit = tl.where(group == E - 1, M, tl.minimum(kept, M))
        b_block = group * num_n + n
    b_row = n * 128 + (0 if TURNED else group * N)
    tiles = tl.cdiv(S, WIDTH)
    acc = tl.zeros((128, 128), tl.float32)
    for k in range(begin, end, BLOCK_K):
        a = a_desc.load([row0, k // PACK])
        b = b_desc.load([b_row, k // PACK])
        a_scale = swizzled_scales(a_scale_ptr, block, k // WIDTH, tiles, BLOCK_K // WIDTH, FP4)
        b_scale = swizzled_scales(b_scale_ptr, b_block, k // WIDTH, tiles, BLOCK_K // WIDTH, FP4)
        acc = tl.dot_scaled(a, a_scale, A_FORM, b.T, b_scale, B_FORM, acc)
    if WHOLE:
        acc *= tl.load(whole_ptr + group)
    rows, cols = tl.arange(0, 128), n * 128 + tl.arange(0, 128)
    acc = tl.where((rows < kept - row0)[:, None], acc, 0.0)  # rows behind the last group
    at = (row0 + (group * M if TURNED else 0)).to(tl.int64) * N
    tl.store(
        y_ptr + at + (rows[:, None] * N + cols[None, :]),
        acc.to(y_ptr.dtype.element_ty),
        mask=(rows < limit - row0)[:, None] & (cols < N)[None, :],
    )
