"""Kernels of fuseops.kernels.operands: FP8 rows, and columns that are their codes at one exponent a square.

A program has a tile of 128 tokens by 128 features of one group, as four slices, of every fourth token, so that four
codes of one feature meet in one thread and travel to their place in the transposed tensor as one word.
"""

import triton
import triton.language as tl

from fuseops.kernels.device.quantize import amax_of, widened
from fuseops.kernels.device.quantize_columns import group_at_block, store_columns
from fuseops.kernels.device.reduce import pdl_trigger_and_wait

FLT_MAX: tl.constexpr = tl.constexpr(3.4028234663852886e38)


@triton.jit
def power_of_two(amax, SHIFT: tl.constexpr):
    """(inverse scales, scales) of amax: the limit, 1.75 * 2^SHIFT, over amax rounded down to a power of two, at most
    2^63. In integers, since a division would be most of the work of a tile.
    """
    bits = tl.minimum(amax, FLT_MAX).to(tl.int32, bitcast=True)
    above = ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.minimum(254 + SHIFT - (bits >> 23) - above, 190)
    inv = (exponent << 23).to(tl.float32, bitcast=True)
    return inv, ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def coded(x, like_ptr, SHIFT: tl.constexpr):
    """(codes in the format of ``like_ptr``, scales) of a slice, one scale a token."""
    inv, scale = power_of_two(amax_of(x, 1), SHIFT)
    return fenced((widened(x) * inv[:, None]).to(like_ptr.dtype.element_ty)), scale


@triton.jit
def fenced(q):
    """q, four codes to a word that the compiler does not see into: a conversion whose result is packed for one use and
    used by itself for another is what ptxas gets wrong (``fuseops.kernels.aot.misread``).
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
def shifted(q, scale, square):
    """Codes as float32 numbers that ``square``, a power of two, multiplies."""
    less = (square.to(tl.int32, bitcast=True) - scale.to(tl.int32, bitcast=True)) >> 23
    ratio = tl.maximum(127 - less, 0) << 23
    return q.to(tl.float32) * ratio.to(tl.float32, bitcast=True)[:, None]


@triton.jit
def slice_mask(J: tl.constexpr, row0, end, col0, N, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """(tokens of slice J, features, which of them are there)."""
    r = row0 + tl.arange(0, BLOCK_R // 4) * 4 + J
    c = col0 + tl.arange(0, BLOCK_N)
    return r, c, (r < end)[:, None] & (c < N)[None, :]


@triton.jit
def load_tokens(
    x_ptr, J: tl.constexpr, row0, end, col0, N, first, stride_x,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Slice J of x, whose feature 0 stands at column ``first``."""
    r, c, mask = slice_mask(J, row0, end, col0, N, BLOCK_R, BLOCK_N)
    at = x_ptr + r.to(tl.int64)[:, None] * stride_x + (first + c)[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def store_tokens(
    row_ptr, scale_ptr, q, scale, J: tl.constexpr, row0, end, col0, R, N, first, width,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Slice J as rows of codes (R, width), from column ``first``, and its scales (ceil(width/128), R)."""
    r, c, mask = slice_mask(J, row0, end, col0, N, BLOCK_R, BLOCK_N)
    tl.store(row_ptr + r.to(tl.int64)[:, None] * width + (first + c)[None, :], q, mask=mask)
    block = ((first + col0) // BLOCK_N).to(tl.int64)
    tl.store(scale_ptr + block * R + r, scale, mask=r < end)


@triton.jit
def store_operand(
    qa, qb, qc, qd, sa, sb, sc, sd, row_ptr, scale_ptr, col_ptr, square_ptr,
    row0, end, col0, R, N, first, width, block, blocks,
    ROW: tl.constexpr, COL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Codes of a tile and the scales of its tokens, as rows and as columns of the block of tokens."""
    if ROW:
        store_tokens(
            row_ptr, scale_ptr, qa, sa, 0, row0, end, col0, R, N, first, width, BLOCK_R, BLOCK_N
        )
        store_tokens(
            row_ptr, scale_ptr, qb, sb, 1, row0, end, col0, R, N, first, width, BLOCK_R, BLOCK_N
        )
        store_tokens(
            row_ptr, scale_ptr, qc, sc, 2, row0, end, col0, R, N, first, width, BLOCK_R, BLOCK_N
        )
        store_tokens(
            row_ptr, scale_ptr, qd, sd, 3, row0, end, col0, R, N, first, width, BLOCK_R, BLOCK_N
        )
    if COL:
        square = tl.max(tl.maximum(tl.maximum(sa, sb), tl.maximum(sc, sd)), axis=0)
        tl.store(square_ptr + ((first + col0) // BLOCK_N).to(tl.int64) * blocks + block, square)
        to = block * BLOCK_R
        store_columns(
            col_ptr + first.to(tl.int64) * blocks * BLOCK_R,
            shifted(qa, sa, square), shifted(qb, sb, square),
            shifted(qc, sc, square), shifted(qd, sd, square),
            1.0, to, col0, to + BLOCK_R, blocks * BLOCK_R, N, BLOCK_R, BLOCK_R, BLOCK_N,
        )  # fmt: skip


@triton.jit
def tile_of_block(
    pid, num_n, offs_ptr, R, E, GROUPS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr
):
    """(block of tokens, first token, end of its group, number of blocks) of a program."""
    block = pid // num_n
    if GROUPS:
        group, begin, end = group_at_block(block, offs_ptr, E, BLOCK_R, BLOCK_E)
        row0 = begin + (block - begin // BLOCK_R - group) * BLOCK_R
        return block, row0, tl.minimum(end, R), R // BLOCK_R + E
    else:
        return block, block * BLOCK_R, R, tl.cdiv(R, BLOCK_R)


@triton.jit(do_not_specialize=["R"])
def quantize_operand_kernel(
    x_ptr, offs_ptr, row_ptr, scale_ptr, col_ptr, square_ptr, R, N, E, stride_x,
    SHIFT: tl.constexpr, ROW: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pdl_trigger_and_wait(PDL)
    pid, num_n = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    block, row0, end, blocks = tile_of_block(pid, num_n, offs_ptr, R, E, GROUPS, BLOCK_E, BLOCK_R)
    col0 = pid % num_n * BLOCK_N
    first = col0 * 0
    a = load_tokens(x_ptr, 0, row0, end, col0, N, first, stride_x, BLOCK_R, BLOCK_N)
    b = load_tokens(x_ptr, 1, row0, end, col0, N, first, stride_x, BLOCK_R, BLOCK_N)
    c = load_tokens(x_ptr, 2, row0, end, col0, N, first, stride_x, BLOCK_R, BLOCK_N)
    d = load_tokens(x_ptr, 3, row0, end, col0, N, first, stride_x, BLOCK_R, BLOCK_N)
    qa, sa = coded(a, col_ptr, SHIFT)
    qb, sb = coded(b, col_ptr, SHIFT)
    qc, sc = coded(c, col_ptr, SHIFT)
    qd, sd = coded(d, col_ptr, SHIFT)
    store_operand(
        qa, qb, qc, qd, sa, sb, sc, sd, row_ptr, scale_ptr, col_ptr, square_ptr,
        row0, end, col0, R, N, first, N, block, blocks, ROW, True, BLOCK_R, BLOCK_N,
    )  # fmt: skip


@triton.jit
def gather_codes(
    data_ptr, scale_ptr, index_ptr, J: tl.constexpr, row0, end, col0, T, N, stride,
    INDEX: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Slice J of codes and scales, of tokens by index."""
    r, c, mask = slice_mask(J, row0, end, col0, N, BLOCK_R, BLOCK_N)
    token = r.to(tl.int64)
    if INDEX:
        token = tl.load(index_ptr + r, mask=r < end, other=0).to(tl.int64)
    codes = data_ptr.to(tl.pointer_type(tl.uint8))
    q = tl.load(codes + token[:, None] * stride + c[None, :], mask=mask, other=0)
    block = (col0 // BLOCK_N).to(tl.int64)
    scale = tl.load(scale_ptr + block * T + token, mask=r < end, other=2.0**-63)
    return q.to(data_ptr.dtype.element_ty, bitcast=True), scale


@triton.jit
def in_chunks(pid, num_n, programs, chunk):
    """(block of features, program among ``programs``) of a grid in which all of these have ``chunk`` blocks of features
    before any has the next ones.

    The tokens that many rows are copies of stay in L2 so long, and more of what is written as columns meanwhile lies
    side by side.
    """
    first = pid // (programs * chunk) * chunk
    rest = pid - first * programs
    width = tl.minimum(chunk, num_n - first)
    return first + rest % width, rest // width


@triton.jit
def blocks_of_part(program, offs_ptr, R, E, parts, GROUPS: tl.constexpr, BLOCK_R: tl.constexpr):
    """(its first and last block of tokens, the first token and the end of its group, where that group's blocks begin,
    the number of blocks) of one of ``parts`` equal parts of a group.

    Programs that run together take the same part of all groups. Where a group's rows are in order of their tokens,
    these are copies of the same tokens, which memory is read for once.
    """
    part, group = program, 0
    begin, end, first = R * 0, R, R * 0
    last = tl.cdiv(R, BLOCK_R)
    total = last
    if GROUPS:
        part, group = program // E, program % E
        begin = tl.load(offs_ptr + group - 1, mask=group > 0, other=0)
        end = tl.load(offs_ptr + group)
        first = begin // BLOCK_R + group
        total = R // BLOCK_R + E
        last = tl.where(group == E - 1, total, end // BLOCK_R + group + 1)
        end = tl.minimum(end, R)
    size = last - first
    return (
        first + size * part // parts,
        first + size * (part + 1) // parts,
        begin,
        end,
        first,
        total,
    )


@triton.jit(do_not_specialize=["R", "T", "parts", "chunk"])
def permute_operand_kernel(
    data_ptr, scale_ptr, index_ptr, offs_ptr, row_ptr, row_scale_ptr, col_ptr, square_ptr,
    R, T, N, E, parts, stride, chunk,
    ROW: tl.constexpr, COL: tl.constexpr, INDEX: tl.constexpr, GROUPS: tl.constexpr,
    PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pdl_trigger_and_wait(PDL)
    num, program = in_chunks(tl.program_id(0), tl.cdiv(N, BLOCK_N), parts * E, chunk)
    first, last, begin, end, origin, blocks = blocks_of_part(
        program, offs_ptr, R, E, parts, GROUPS, BLOCK_R
    )
    col0 = num * BLOCK_N
    for block in range(first, last):
        row0 = begin + (block - origin) * BLOCK_R
        qa, sa = gather_codes(
            data_ptr, scale_ptr, index_ptr, 0, row0, end, col0, T, N, stride,
            INDEX, BLOCK_R, BLOCK_N,
        )  # fmt: skip
        qb, sb = gather_codes(
            data_ptr, scale_ptr, index_ptr, 1, row0, end, col0, T, N, stride,
            INDEX, BLOCK_R, BLOCK_N,
        )  # fmt: skip
        qc, sc = gather_codes(
            data_ptr, scale_ptr, index_ptr, 2, row0, end, col0, T, N, stride,
            INDEX, BLOCK_R, BLOCK_N,
        )  # fmt: skip
        qd, sd = gather_codes(
            data_ptr, scale_ptr, index_ptr, 3, row0, end, col0, T, N, stride,
            INDEX, BLOCK_R, BLOCK_N,
        )  # fmt: skip
        store_operand(
            qa, qb, qc, qd, sa, sb, sc, sd, row_ptr, row_scale_ptr, col_ptr, square_ptr,
            row0, end, col0, R, N, col0 * 0, N, block, blocks, ROW, COL, BLOCK_R, BLOCK_N,
        )  # fmt: skip


@triton.jit
def weight_slice(
    w_ptr, J: tl.constexpr, base, row0, col0, N, K, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr
):
    r, c, mask = slice_mask(J, row0, N, col0, K, BLOCK_R, BLOCK_N)
    return tl.load(w_ptr + base + r[:, None] * K + c[None, :], mask=mask, other=0.0)


@triton.jit
def store_weight_slice(
    row_ptr,
    q,
    J: tl.constexpr,
    base,
    row0,
    col0,
    N,
    K,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    r, c, mask = slice_mask(J, row0, N, col0, K, BLOCK_R, BLOCK_N)
    tl.store(row_ptr + base + r[:, None] * K + c[None, :], q, mask=mask)


@triton.jit
def quantize_weight_kernel(
    w_ptr, row_ptr, scale_ptr, col_ptr, col_scale_ptr, N, K,
    SHIFT: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, ALIGN: tl.constexpr,
    PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A square of one matrix, as it lies and transposed. ALIGN divides N."""
    pdl_trigger_and_wait(PDL)
    num_r, num_n = tl.cdiv(N, BLOCK_R), tl.cdiv(K, BLOCK_N)
    pid = tl.program_id(0)
    expert, square = pid // (num_r * num_n), pid % (num_r * num_n)
    block_r, block_n = square // num_n, square % num_n
    row0, col0 = block_r * BLOCK_R, block_n * BLOCK_N
    base = expert.to(tl.int64) * N * K
    a = weight_slice(w_ptr, 0, base, row0, col0, N, K, BLOCK_R, BLOCK_N)
    b = weight_slice(w_ptr, 1, base, row0, col0, N, K, BLOCK_R, BLOCK_N)
    c = weight_slice(w_ptr, 2, base, row0, col0, N, K, BLOCK_R, BLOCK_N)
    d = weight_slice(w_ptr, 3, base, row0, col0, N, K, BLOCK_R, BLOCK_N)
    largest = tl.maximum(tl.max(amax_of(a, 1), axis=0), tl.max(amax_of(b, 1), axis=0))
    largest = tl.maximum(largest, tl.max(amax_of(c, 1), axis=0))
    inv, scale = power_of_two(tl.maximum(largest, tl.max(amax_of(d, 1), axis=0)), SHIFT)
    if ROW:
        tl.store(scale_ptr + pid, scale)
        kind: tl.constexpr = row_ptr.dtype.element_ty
        store_weight_slice(
            row_ptr, (widened(a) * inv).to(kind), 0, base, row0, col0, N, K, BLOCK_R, BLOCK_N
        )
        store_weight_slice(
            row_ptr, (widened(b) * inv).to(kind), 1, base, row0, col0, N, K, BLOCK_R, BLOCK_N
        )
        store_weight_slice(
            row_ptr, (widened(c) * inv).to(kind), 2, base, row0, col0, N, K, BLOCK_R, BLOCK_N
        )
        store_weight_slice(
            row_ptr, (widened(d) * inv).to(kind), 3, base, row0, col0, N, K, BLOCK_R, BLOCK_N
        )
    if COL:
        tl.store(col_scale_ptr + (expert * num_n + block_n) * num_r + block_r, scale)
        end = N // ALIGN * ALIGN  # N, in a form that says to the compiler what divides it
        store_columns(
            col_ptr + base, a, b, c, d, inv, row0, col0, end, end, K, ALIGN, BLOCK_R, BLOCK_N
        )
