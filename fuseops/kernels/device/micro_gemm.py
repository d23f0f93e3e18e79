"""Kernel of fuseops.kernels.micro_gemm: MXFP8 and NVFP4 GEMMs on Blackwell's tensor cores, by `tl.dot_scaled`.

A program computes one 128 x 128 tile of y and loops over K in steps of BLOCK_K. Codes come by TMA descriptors; scales
come from the swizzled layout of `formats.swizzled` by pointers and are reshaped to the (128, K / block) that
`dot_scaled` takes. As blocks of rows, and of columns, begin anew in each group, no tile reads scales of two groups.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor as TensorDescriptor

from fuseops.kernels.device.groups import rows_of_block


@triton.jit
def load_swizzled_scales(ptr, block, first_tile, tiles, COUNT: tl.constexpr, FP4: tl.constexpr):
    """Load the scales of row block `block`, COUNT swizzled tiles of 128 x 4 from `first_tile` on, as (128, 4 COUNT).

    Tiles beyond `tiles` are zeros.
    """
    tile = first_tile + tl.arange(0, COUNT)
    offsets = (block.to(tl.int64) * tiles + tile)[:, None] * 512 + tl.arange(0, 512)[None, :]
    bits = tl.load(ptr + offsets, mask=(tile < tiles)[:, None], other=0)
    bits = tl.trans(tl.reshape(bits, (COUNT, 32, 4, 4)), (2, 1, 0, 3))
    bits = tl.reshape(bits, (128, 4 * COUNT))
    return bits.to(tl.float8e4nv, bitcast=True) if FP4 else bits


@triton.jit(do_not_specialize=["M", "E"])
def micro_mm_kernel(
    y_ptr, a_desc, a_scale_ptr, b_desc, b_scale_ptr, global_scale_ptr, offs_ptr, M, N, K, E,
    GROUPS: tl.constexpr, WGRAD: tl.constexpr, HAS_GLOBAL_SCALE: tl.constexpr,
    A_FORM: tl.constexpr, B_FORM: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile (128, 128) of y (M, N) = a (M, K) @ b (N, K).T, of rows of one group with its matrix or, WGRAD, of
    y (E, M, N), summed over the columns of one group.
    """
    FP4: tl.constexpr = A_FORM == "e2m1"
    PACK: tl.constexpr = 2 if FP4 else 1
    SCALE_TILE_K: tl.constexpr = 64 if FP4 else 128  # what a tile of scales covers
    num_m, num_n = tl.cdiv(M, 128), tl.cdiv(N, 128)
    block, n = tl.program_id(0) // num_n, tl.program_id(0) % num_n
    group, begin, end = 0, 0, K
    if WGRAD:
        group, block = block // num_m, block % num_m
        if GROUPS:
            begin = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
            end = tl.maximum(tl.load(offs_ptr + group) - begin, 0)
            begin = (begin // 128 + group) * 128
            end = tl.minimum(begin + tl.cdiv(end, 128) * 128, K)
        row0, b_block, store_end, group_end = block * 128, n, M, M
    else:
        row0, store_end, group_end = block * 128, M, M
        if GROUPS:
            group, _, row0, group_end = rows_of_block(block, offs_ptr, M, E, 128, BLOCK_E)
            store_end = tl.where(group == E - 1, M, group_end)
        b_block = group * num_n + n
    b_row = n * 128 + (0 if WGRAD else group * N)
    scale_tiles = tl.cdiv(K, SCALE_TILE_K)
    acc = tl.zeros((128, 128), tl.float32)
    for k in range(begin, end, BLOCK_K):
        a = a_desc.load([row0, k // PACK])
        b = b_desc.load([b_row, k // PACK])
        a_scale = load_swizzled_scales(
            a_scale_ptr, block, k // SCALE_TILE_K, scale_tiles, BLOCK_K // SCALE_TILE_K, FP4
        )
        b_scale = load_swizzled_scales(
            b_scale_ptr, b_block, k // SCALE_TILE_K, scale_tiles, BLOCK_K // SCALE_TILE_K, FP4
        )
        acc = tl.dot_scaled(a, a_scale, A_FORM, b.T, b_scale, B_FORM, acc)
    if HAS_GLOBAL_SCALE:
        acc *= tl.load(global_scale_ptr + group)
    rows, cols = tl.arange(0, 128), n * 128 + tl.arange(0, 128)
    acc = tl.where((rows < group_end - row0)[:, None], acc, 0.0)  # rows beyond the last group
    tile_offset = (row0 + (group * M if WGRAD else 0)).to(tl.int64) * N
    tl.store(
        y_ptr + tile_offset + (rows[:, None] * N + cols[None, :]),
        acc.to(y_ptr.dtype.element_ty),
        mask=(rows < store_end - row0)[:, None] & (cols < N)[None, :],
    )
