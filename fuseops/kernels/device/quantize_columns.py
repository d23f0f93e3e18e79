"""Kernel of fuseops.kernels.quantize for columnwise layouts, which are transposed; other kernels share its stores.

A tile (BLOCK_R, BLOCK_N) is held as four slices: slice j has rows 4 i + j. So four rows of one column are in one
thread, which packs their codes to a 32-bit word: the layout conversion of the transpose, through shared memory, moves
words, and each thread stores 16 bytes of a column.
"""

import triton
import triton.language as tl

from fuseops.kernels.device.groups import rows_of_block
from fuseops.kernels.device.quantize import amax_of, quantize_like, vector_scales, widened
from fuseops.kernels.device.reduce import pdl_trigger_and_wait


@triton.jit
def load_slices(x_ptr, row0, col0, R, N, stride_x, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load the tile at (row0, col0) as four slices (BLOCK_R // 4, BLOCK_N): row i of slice j is row 4 i + j."""
    base = x_ptr + row0.to(tl.int64) * stride_x + col0
    a = load_slice(base, 0, R - row0, N - col0, stride_x, BLOCK_R, BLOCK_N)
    b = load_slice(base, 1, R - row0, N - col0, stride_x, BLOCK_R, BLOCK_N)
    c = load_slice(base, 2, R - row0, N - col0, stride_x, BLOCK_R, BLOCK_N)
    d = load_slice(base, 3, R - row0, N - col0, stride_x, BLOCK_R, BLOCK_N)
    return a, b, c, d


@triton.jit
def load_slice(
    base, J: tl.constexpr, rows, cols, stride_x, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Load slice J of the tile at base, of which `rows` and `cols` are in the matrix."""
    r, c = tl.arange(0, BLOCK_R // 4)[:, None] * 4 + J, tl.arange(0, BLOCK_N)[None, :]
    return tl.load(base + (r * stride_x + c), mask=(r < rows) & (c < cols), other=0.0)


@triton.jit
def column_amax(a, b, c, d):
    """Return the largest magnitude of each column of a tile in four slices."""
    a, b = tl.abs(a.to(tl.float32)), tl.abs(b.to(tl.float32))
    c, d = tl.abs(c.to(tl.float32)), tl.abs(d.to(tl.float32))
    return amax_of(tl.maximum(tl.maximum(a, b), tl.maximum(c, d)), 0)


@triton.jit
def pack_column_words(a, b, c, d, inv, col_ptr):
    """Return slices times inv as FP8 codes, four rows of a column packed in a word.   -> (BLOCK_R // 4, BLOCK_N)

    In assembly: a compiler that sees halves of the word may use one by itself, too, which ptxas gets wrong
    (``fuseops.kernels.aot.misread``).
    """
    PAIR: tl.constexpr = "e4m3x2" if col_ptr.dtype.element_ty == tl.float8e4nv else "e5m2x2"
    WORD: tl.constexpr = (
        "{ .reg .b16 low, high; cvt.rn.satfinite."
        + PAIR
        + ".f32 low, $2, $1; cvt.rn.satfinite."
        + PAIR
        + ".f32 high, $4, $3; mov.b32 $0, {low, high}; }"
    )
    a, b, c, d = widened(a) * inv, widened(b) * inv, widened(c) * inv, widened(d) * inv
    return tl.inline_asm_elementwise(
        WORD, "=r,f,f,f,f", [a, b, c, d], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def store_columns(
    col_ptr, a, b, c, d, inv, row0, col0, end, R, N,
    ALIGN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store slices times inv as FP8 codes, rows row0 to end, to the transposed tensor (N, R).

    Where ALIGN, which divides R, is a multiple of 4, words of four rows are transposed and stored; row0 is a multiple
    of 4 then, and a word is stored only if all its rows are before `end`. Elsewhere single codes are.
    """
    if ALIGN % 4 == 0:
        words = tl.trans(pack_column_words(a, b, c, d, inv, col_ptr))
        pitch = R // ALIGN * (ALIGN // 4)
        n, r = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_R // 4)[None, :]
        mask = (n < N - col0) & (r < end // 4 - row0 // 4)
        tile_ptr = col_ptr.to(tl.pointer_type(tl.uint32)) + col0.to(tl.int64) * pitch + row0 // 4
        tl.store(tile_ptr + (n * pitch + r), words, mask=mask)
    else:
        base = col_ptr + col0.to(tl.int64) * R + row0
        rows, cols = end - row0, N - col0
        store_column_slice(base, 0, quantize_like(a, inv, col_ptr), rows, cols, R, BLOCK_R, BLOCK_N)
        store_column_slice(base, 1, quantize_like(b, inv, col_ptr), rows, cols, R, BLOCK_R, BLOCK_N)
        store_column_slice(base, 2, quantize_like(c, inv, col_ptr), rows, cols, R, BLOCK_R, BLOCK_N)
        store_column_slice(base, 3, quantize_like(d, inv, col_ptr), rows, cols, R, BLOCK_R, BLOCK_N)


@triton.jit
def store_column_slice(
    base, J: tl.constexpr, codes, rows, cols, R, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Transpose and store the codes of slice J, one byte at a time."""
    n, r = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_R // 4)[None, :] * 4 + J
    tl.store(base + (n * R + r), tl.trans(codes), mask=(n < cols) & (r < rows))


@triton.jit
def store_slices(
    row_ptr, a, b, c, d, inv, row0, col0, R, N, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Store slices times inv as FP8 codes, not transposed, to the tile at (row0, col0) of y (R, N)."""
    base = row_ptr + row0.to(tl.int64) * N + col0
    rows, cols = R - row0, N - col0
    store_slice(base, 0, quantize_like(a, inv, row_ptr), rows, cols, N, BLOCK_R, BLOCK_N)
    store_slice(base, 1, quantize_like(b, inv, row_ptr), rows, cols, N, BLOCK_R, BLOCK_N)
    store_slice(base, 2, quantize_like(c, inv, row_ptr), rows, cols, N, BLOCK_R, BLOCK_N)
    store_slice(base, 3, quantize_like(d, inv, row_ptr), rows, cols, N, BLOCK_R, BLOCK_N)


@triton.jit
def store_slice(
    base, J: tl.constexpr, codes, rows, cols, N, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Store the codes of slice J to rows 4 i + J."""
    r, c = tl.arange(0, BLOCK_R // 4)[:, None] * 4 + J, tl.arange(0, BLOCK_N)[None, :]
    tl.store(base + (r * N + c), codes, mask=(r < rows) & (c < cols))


@triton.jit(do_not_specialize=["R"])
def quantize_group_blocks_kernel(
    x_ptr, offs_ptr, col_ptr, scale_ptr, R, N, E, stride_x,
    LIMIT: tl.constexpr, POW2: tl.constexpr, PDL: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Quantize one block: 128 rows of a group as 128 columns of the transpose, with a scale for each feature.

    Beyond the rows of the group its columns are zeros, up to where those of the next group begin.
    """
    pdl_trigger_and_wait(PDL)
    pid = tl.program_id(0)
    num_n = tl.cdiv(N, BLOCK_N)
    block, col0 = pid // num_n, pid % num_n * BLOCK_N
    _, _, row0, end = rows_of_block(block, offs_ptr, R, E, BLOCK_R, BLOCK_E)
    a, b, c, d = load_slices(x_ptr, row0, col0, end, N, stride_x, BLOCK_R, BLOCK_N)
    inv, scale = vector_scales(column_amax(a, b, c, d), LIMIT, POW2, BLOCK_N)
    cols = col0 + tl.arange(0, BLOCK_N)
    tl.store(scale_ptr + block.to(tl.int64) * N + cols, scale, mask=cols < N)
    col_row0, col_width = block * BLOCK_R, (R // BLOCK_R + E) * BLOCK_R
    store_columns(
        col_ptr, a, b, c, d, inv[None, :], col_row0, col0, col_row0 + BLOCK_R, col_width, N, BLOCK_R, BLOCK_R, BLOCK_N,
    )  # fmt: skip
