"""FP8 operands of GEMMs in blocks of 128: rows of codes with a scale for 128 features of a token, and transposed
columns, the same codes at one power-of-two scale a square of 128 x 128. Triton, sm_89 and later.

A program owns a tile of 128 tokens by 128 features of one group, held as four slices, of every fourth token: slice J is
rows J, J + 4, ... So four codes of one feature, of four neighbouring tokens, meet in one thread, and travel to their
place in the transposed tensor as one 32-bit word.

Traps: a code that is both stored by itself (rows) and packed into words (columns) passes `opaque_words` first. Tokens
beyond the end of a group have the smallest scale, 2^-63, and so never set that of their square.
"""

import triton
import triton.language as tl

from fuseops.kernels.device.groups import rows_of_block
from fuseops.kernels.device.quantize import FLT_MAX, amax_of, widened
from fuseops.kernels.device.quantize_columns import store_columns
from fuseops.kernels.device.reduce import pdl_trigger_and_wait


@triton.jit
def power_of_two_scale(amax, SHIFT: tl.constexpr):
    """Compute (inverse scales, scales) of amax: the limit, 1.75 * 2^SHIFT, over amax, rounded down to a power of two,
    at most 2^63. In integers on the exponent, since a division would be most of the work of a tile.
    """
    bits = tl.minimum(amax, FLT_MAX).to(tl.int32, bitcast=True)
    mantissa_above = ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(254 + SHIFT - (bits >> 23) - mantissa_above, 190)
    inv = (exponent << 23).to(tl.float32, bitcast=True)
    return inv, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def quantize_slice(x, like_ptr, SHIFT: tl.constexpr):
    """Quantize a slice (BLOCK_R / 4, BLOCK_N) to the format of `like_ptr`, one scale a token.   -> (codes, scales)"""
    inv, scale = power_of_two_scale(amax_of(x, 1), SHIFT)
    return opaque_words((widened(x) * inv[:, None]).to(like_ptr.dtype.element_ty)), scale


@triton.jit
def opaque_words(q):
    """Pass codes q through an opaque move, four to a 32-bit word, that the compiler does not see into.

    A conversion whose result is packed for one use and used by itself for another is what ptxas gets wrong
    (`fuseops.kernels.aot.misread`).
    """
    bits = tl.inline_asm_elementwise(
        "mov.b32 $0, $1;",
        "=r,r",
        [q.to(tl.uint8, bitcast=True)],
        dtype=tl.uint8,
        is_pure=True,
        pack=4,
    )
    return bits.to(q.dtype, bitcast=True)


@triton.jit
def shift_codes(q, scale, square_scale):
    """Rescale codes of tokens to the scale of their square: return float32 numbers that `square_scale`, a power of two
    and the largest of the tokens' scales, dequantizes.
    """
    exp_gap = (square_scale.to(tl.int32, bitcast=True) - scale.to(tl.int32, bitcast=True)) >> 23
    ratio = tl.maximum(127 - exp_gap, 0) << 23
    return q.to(tl.float32) * ratio.to(tl.float32, bitcast=True)[:, None]


@triton.jit
def slice_mask(J: tl.constexpr, row0, end, col0, N, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute the coordinates of slice J, every fourth row of a tile.
    -> (rows (BLOCK_R / 4,), columns (BLOCK_N,), mask)
    """
    r = row0 + tl.arange(0, BLOCK_R // 4) * 4 + J
    c = col0 + tl.arange(0, BLOCK_N)
    return r, c, (r < end)[:, None] & (c < N)[None, :]


@triton.jit
def load_tokens(
    x_ptr, J: tl.constexpr, row0, end, col0, N, col_base, stride_x,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load slice J of x, zeros beyond it; feature 0 stands at column `col_base`."""
    r, c, mask = slice_mask(J, row0, end, col0, N, BLOCK_R, BLOCK_N)
    ptrs = x_ptr + r.to(tl.int64)[:, None] * stride_x + (col_base + c)[None, :]
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def store_rows(
    row_ptr, scale_ptr, q, scale, J: tl.constexpr, row0, end, col0, R, N, col_base, width,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store slice J as rows of codes (R, width), from column `col_base` on, and its scales."""
    r, c, mask = slice_mask(J, row0, end, col0, N, BLOCK_R, BLOCK_N)
    tl.store(row_ptr + r.to(tl.int64)[:, None] * width + (col_base + c)[None, :], q, mask=mask)
    block = ((col_base + col0) // BLOCK_N).to(tl.int64)
    tl.store(scale_ptr + block * R + r, scale, mask=r < end)


@triton.jit
def store_operand(
    qa, qb, qc, qd, sa, sb, sc, sd, row_ptr, scale_ptr, col_ptr, square_ptr,
    row0, end, col0, R, N, col_base, width, block, blocks,
    ROW: tl.constexpr, COL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store the four slices of a tile with codes q and scales s of their tokens: ROW, as rows and their scales; COL,
    transposed, in the columns of block `block` of `blocks`, requantized to one scale for the square, the largest.
    """
    if ROW:
        store_rows(
            row_ptr, scale_ptr, qa, sa, 0, row0, end, col0, R, N, col_base, width, BLOCK_R, BLOCK_N
        )
        store_rows(
            row_ptr, scale_ptr, qb, sb, 1, row0, end, col0, R, N, col_base, width, BLOCK_R, BLOCK_N
        )
        store_rows(
            row_ptr, scale_ptr, qc, sc, 2, row0, end, col0, R, N, col_base, width, BLOCK_R, BLOCK_N
        )
        store_rows(
            row_ptr, scale_ptr, qd, sd, 3, row0, end, col0, R, N, col_base, width, BLOCK_R, BLOCK_N
        )
    if COL:
        square_scale = tl.max(tl.maximum(tl.maximum(sa, sb), tl.maximum(sc, sd)), axis=0)
        tl.store(
            square_ptr + ((col_base + col0) // BLOCK_N).to(tl.int64) * blocks + block, square_scale
        )
        out0 = block * BLOCK_R
        store_columns(
            col_ptr + col_base.to(tl.int64) * blocks * BLOCK_R,
            shift_codes(qa, sa, square_scale), shift_codes(qb, sb, square_scale),
            shift_codes(qc, sc, square_scale), shift_codes(qd, sd, square_scale),
            1.0, out0, col0, out0 + BLOCK_R, blocks * BLOCK_R, N, BLOCK_R, BLOCK_R, BLOCK_N,
        )  # fmt: skip


@triton.jit
def tile_of_block(
    pid, num_n, offs_ptr, R, E, GROUPS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Find the block of tokens of a program. With GROUPS each group's tokens begin a block of their own.
    -> (block, its first token, the end of its group, number of blocks)
    """
    block = pid // num_n
    if GROUPS:
        _, _, row0, group_end = rows_of_block(block, offs_ptr, R, E, BLOCK_R, BLOCK_E)
        return block, row0, group_end, R // BLOCK_R + E
    else:
        return block, block * BLOCK_R, R, tl.cdiv(R, BLOCK_R)


@triton.jit(do_not_specialize=["R"])
def quantize_operand_kernel(
    x_ptr, offs_ptr, row_ptr, scale_ptr, col_ptr, square_ptr, R, N, E, stride_x,
    SHIFT: tl.constexpr, ROW: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of x (R, N): grid (blocks of tokens * blocks of features)."""
    pdl_trigger_and_wait(PDL)
    pid, num_n = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    block, row0, end, blocks = tile_of_block(pid, num_n, offs_ptr, R, E, GROUPS, BLOCK_E, BLOCK_R)
    col0 = pid % num_n * BLOCK_N
    col_base = col0 * 0
    a = load_tokens(x_ptr, 0, row0, end, col0, N, col_base, stride_x, BLOCK_R, BLOCK_N)
    b = load_tokens(x_ptr, 1, row0, end, col0, N, col_base, stride_x, BLOCK_R, BLOCK_N)
    c = load_tokens(x_ptr, 2, row0, end, col0, N, col_base, stride_x, BLOCK_R, BLOCK_N)
    d = load_tokens(x_ptr, 3, row0, end, col0, N, col_base, stride_x, BLOCK_R, BLOCK_N)
    qa, sa = quantize_slice(a, col_ptr, SHIFT)
    qb, sb = quantize_slice(b, col_ptr, SHIFT)
    qc, sc = quantize_slice(c, col_ptr, SHIFT)
    qd, sd = quantize_slice(d, col_ptr, SHIFT)
    store_operand(
        qa, qb, qc, qd, sa, sb, sc, sd, row_ptr, scale_ptr, col_ptr, square_ptr,
        row0, end, col0, R, N, col_base, N, block, blocks, ROW, True, BLOCK_R, BLOCK_N,
    )  # fmt: skip


@triton.jit
def gather_slice(
    data_ptr, scale_ptr, index_ptr, J: tl.constexpr, row0, end, col0, T, N, stride,
    INDEX: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load slice J of codes (T, N) and of their scales (ceil(N / 128), T), of the tokens index[row] where INDEX."""
    r, c, mask = slice_mask(J, row0, end, col0, N, BLOCK_R, BLOCK_N)
    token = r.to(tl.int64)
    if INDEX:
        token = tl.load(index_ptr + r, mask=r < end, other=0).to(tl.int64)
    codes = data_ptr.to(tl.pointer_type(tl.uint8))
    # other rows are copies of the same tokens
    ptrs = codes + token[:, None] * stride + c[None, :]
    q = tl.load(ptrs, mask=mask, other=0, eviction_policy="evict_last")
    block = (col0 // BLOCK_N).to(tl.int64)
    scale = tl.load(scale_ptr + block * T + token, mask=r < end, other=2.0**-63)
    return q.to(data_ptr.dtype.element_ty, bitcast=True), scale


@triton.jit
def rasterize_in_chunks(pid, num_n, programs, chunk):
    """Rasterize a grid for L2: all of `programs` have `chunk` blocks of features before any has the next ones.
    -> (block of features, program among `programs`)

    The tokens that many rows are copies of stay in L2 so long, and more of what is written as columns meanwhile lies
    side by side.
    """
    chunk0 = pid // (programs * chunk) * chunk
    in_chunk = pid - chunk0 * programs
    chunk_width = tl.minimum(chunk, num_n - chunk0)
    return chunk0 + in_chunk % chunk_width, in_chunk // chunk_width


@triton.jit
def parts_beside(program, E, beside):
    """Order programs so that `beside` neighbouring parts of a group, whose columns adjoin, run together.
    -> program of `program_blocks`
    """
    rest = program // beside
    return (rest // E * beside + program % beside) * E + rest % E


@triton.jit
def program_blocks(program, offs_ptr, R, E, parts, GROUPS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Find the blocks of tokens of a program, one of `parts` equal parts of a group: program = part * E + group.
    -> (begin_block, end_block, group_start, group_end, group_first_block, num_blocks)

    Blocks of group g begin at group_start // BLOCK_R + g; the last group has all up to num_blocks, padding rows too.
    Programs that run together take the same part of all groups. Where a group's rows are in order of their tokens,
    these are copies of the same tokens, which memory is read for once.
    """
    part, group = program, 0
    group_start, group_end, group_first_block = R * 0, R, R * 0
    group_end_block = (R + BLOCK_R - 1) // BLOCK_R
    num_blocks = group_end_block
    if GROUPS:
        part, group = program // E, program % E
        group_start = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
        group_end = tl.load(offs_ptr + group)
        group_first_block = group_start // BLOCK_R + group
        num_blocks = R // BLOCK_R + E
        group_end_block = tl.where(group == E - 1, num_blocks, group_end // BLOCK_R + group + 1)
        group_end = tl.minimum(group_end, R)
    group_blocks = group_end_block - group_first_block
    return (
        group_first_block + group_blocks * part // parts,
        group_first_block + group_blocks * (part + 1) // parts,
        group_start,
        group_end,
        group_first_block,
        num_blocks,
    )


@triton.jit(do_not_specialize=["R", "T", "parts", "chunk", "beside"])
def permute_operand_kernel(
    data_ptr, scale_ptr, index_ptr, offs_ptr, row_ptr, row_scale_ptr, col_ptr, square_ptr,
    R, T, N, E, parts, stride, chunk, beside,
    ROW: tl.constexpr, COL: tl.constexpr, INDEX: tl.constexpr, GROUPS: tl.constexpr,
    PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gather rows of codes and their scales by index, and store them as rows and as columns. A program walks over the
    blocks of tokens of a part of a group (`program_blocks`), of one block of features.
    """
    pdl_trigger_and_wait(PDL)
    block_n, program = rasterize_in_chunks(tl.program_id(0), tl.cdiv(N, BLOCK_N), parts * E, chunk)
    begin_block, end_block, group_start, group_end, group_first_block, num_blocks = program_blocks(
        parts_beside(program, E, beside), offs_ptr, R, E, parts, GROUPS, BLOCK_R
    )
    col0 = block_n * BLOCK_N
    for block in range(begin_block, end_block):
        row0 = group_start + (block - group_first_block) * BLOCK_R
        qa, sa = gather_slice(
            data_ptr, scale_ptr, index_ptr, 0, row0, group_end, col0, T, N, stride,
            INDEX, BLOCK_R, BLOCK_N,
        )  # fmt: skip
        qb, sb = gather_slice(
            data_ptr, scale_ptr, index_ptr, 1, row0, group_end, col0, T, N, stride,
            INDEX, BLOCK_R, BLOCK_N,
        )  # fmt: skip
        qc, sc = gather_slice(
            data_ptr, scale_ptr, index_ptr, 2, row0, group_end, col0, T, N, stride,
            INDEX, BLOCK_R, BLOCK_N,
        )  # fmt: skip
        qd, sd = gather_slice(
            data_ptr, scale_ptr, index_ptr, 3, row0, group_end, col0, T, N, stride,
            INDEX, BLOCK_R, BLOCK_N,
        )  # fmt: skip
        store_operand(
            qa, qb, qc, qd, sa, sb, sc, sd, row_ptr, row_scale_ptr, col_ptr, square_ptr,
            row0, group_end, col0, R, N, col0 * 0, N, block, num_blocks, ROW, COL, BLOCK_R, BLOCK_N,
        )  # fmt: skip


@triton.jit
def store_weight_slice(
    row_ptr, q, J: tl.constexpr, row0, col0, N, K, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Store slice J of the codes of a square of one weight matrix (N, K)."""
    r, c, mask = slice_mask(J, row0, N, col0, K, BLOCK_R, BLOCK_N)
    tl.store(row_ptr + r.to(tl.int64)[:, None] * K + c[None, :], q, mask=mask)


@triton.jit
def quantize_weight_kernel(
    w_ptr, row_ptr, scale_ptr, col_ptr, col_scale_ptr, N, K,
    SHIFT: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, ALIGN: tl.constexpr,
    PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Quantize one 128 x 128 square of one matrix (N, K) with one scale, stored as it lies (ROW) and transposed (COL).
    ALIGN divides N.
    """
    pdl_trigger_and_wait(PDL)
    num_r, num_n = tl.cdiv(N, BLOCK_R), tl.cdiv(K, BLOCK_N)
    pid = tl.program_id(0)
    expert, square = pid // (num_r * num_n), pid % (num_r * num_n)
    block_r, block_n = square // num_n, square % num_n
    row0, col0 = block_r * BLOCK_R, block_n * BLOCK_N
    base = expert.to(tl.int64) * N * K
    w_ptr += base
    a = load_tokens(w_ptr, 0, row0, N, col0, K, 0, K, BLOCK_R, BLOCK_N)
    b = load_tokens(w_ptr, 1, row0, N, col0, K, 0, K, BLOCK_R, BLOCK_N)
    c = load_tokens(w_ptr, 2, row0, N, col0, K, 0, K, BLOCK_R, BLOCK_N)
    d = load_tokens(w_ptr, 3, row0, N, col0, K, 0, K, BLOCK_R, BLOCK_N)
    amax = tl.maximum(tl.max(amax_of(a, 1), axis=0), tl.max(amax_of(b, 1), axis=0))
    amax = tl.maximum(amax, tl.max(amax_of(c, 1), axis=0))
    inv, scale = power_of_two_scale(tl.maximum(amax, tl.max(amax_of(d, 1), axis=0)), SHIFT)
    if ROW:
        tl.store(scale_ptr + pid, scale)
        row_dtype: tl.constexpr = row_ptr.dtype.element_ty
        row_ptr += base
        store_weight_slice(
            row_ptr, (widened(a) * inv).to(row_dtype), 0, row0, col0, N, K, BLOCK_R, BLOCK_N
        )
        store_weight_slice(
            row_ptr, (widened(b) * inv).to(row_dtype), 1, row0, col0, N, K, BLOCK_R, BLOCK_N
        )
        store_weight_slice(
            row_ptr, (widened(c) * inv).to(row_dtype), 2, row0, col0, N, K, BLOCK_R, BLOCK_N
        )
        store_weight_slice(
            row_ptr, (widened(d) * inv).to(row_dtype), 3, row0, col0, N, K, BLOCK_R, BLOCK_N
        )
    if COL:
        tl.store(col_scale_ptr + (expert * num_n + block_n) * num_r + block_r, scale)
        end = N // ALIGN * ALIGN  # N, in a form that tells the compiler its divisor
        store_columns(
            col_ptr + base, a, b, c, d, inv, row0, col0, end, end, K, ALIGN, BLOCK_R, BLOCK_N
        )
