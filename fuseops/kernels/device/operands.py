"""Kernels of fuseops.kernels.operands: FP8 rows, and columns that are their codes at one exponent a square.

A program has a tile of 128 tokens by 128 features of one group, as four slices, of every fourth token, so that four
codes of one feature meet in one thread and travel to their place in the transposed tensor as one word.
"""

import triton
import triton.language as tl

from fuseops.kernels.device.act import act_slope
from fuseops.kernels.device.quantize import amax_of, widened
from fuseops.kernels.device.quantize_columns import group_at_block, store_columns
from fuseops.kernels.device.reduce import overlapped

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
    overlapped(PDL)
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
    data_ptr, scale_ptr, index_ptr, J: tl.constexpr, row0, end, col0, T, N,
    INDEX: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Slice J of codes and scales, of tokens by index."""
    r, c, mask = slice_mask(J, row0, end, col0, N, BLOCK_R, BLOCK_N)
    token = r.to(tl.int64)
    if INDEX:
        token = tl.load(index_ptr + r, mask=r < end, other=0).to(tl.int64)
    codes = data_ptr.to(tl.pointer_type(tl.uint8))
    q = tl.load(codes + token[:, None] * N + c[None, :], mask=mask, other=0)
    block = (col0 // BLOCK_N).to(tl.int64)
    scale = tl.load(scale_ptr + block * T + token, mask=r < end, other=2.0**-63)
    return q.to(data_ptr.dtype.element_ty, bitcast=True), scale


@triton.jit(do_not_specialize=["R", "T"])
def permute_operand_kernel(
    data_ptr, scale_ptr, index_ptr, offs_ptr, row_ptr, row_scale_ptr, col_ptr, square_ptr, R, T, N, E,
    ROW: tl.constexpr, COL: tl.constexpr, INDEX: tl.constexpr, GROUPS: tl.constexpr,
    PDL: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    overlapped(PDL)
    pid, num_n = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    block, row0, end, blocks = tile_of_block(pid, num_n, offs_ptr, R, E, GROUPS, BLOCK_E, BLOCK_R)
    col0 = pid % num_n * BLOCK_N
    qa, sa = gather_codes(
        data_ptr, scale_ptr, index_ptr, 0, row0, end, col0, T, N, INDEX, BLOCK_R, BLOCK_N
    )
    qb, sb = gather_codes(
        data_ptr, scale_ptr, index_ptr, 1, row0, end, col0, T, N, INDEX, BLOCK_R, BLOCK_N
    )
    qc, sc = gather_codes(
        data_ptr, scale_ptr, index_ptr, 2, row0, end, col0, T, N, INDEX, BLOCK_R, BLOCK_N
    )
    qd, sd = gather_codes(
        data_ptr, scale_ptr, index_ptr, 3, row0, end, col0, T, N, INDEX, BLOCK_R, BLOCK_N
    )
    store_operand(
        qa, qb, qc, qd, sa, sb, sc, sd, row_ptr, row_scale_ptr, col_ptr, square_ptr,
        row0, end, col0, R, N, col0 * 0, N, block, blocks, ROW, COL, BLOCK_R, BLOCK_N,
    )  # fmt: skip


@triton.jit
def swiglu_slice(
    h_ptr, probs_ptr, J: tl.constexpr, row0, end, col0, F, stride_h,
    SCALED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Slice J of swiglu(h), times the probability of its tokens, rounded as h is."""
    gate = load_tokens(h_ptr, J, row0, end, col0, F, 0, stride_h, BLOCK_R, BLOCK_N)
    up = load_tokens(h_ptr, J, row0, end, col0, F, F, stride_h, BLOCK_R, BLOCK_N)
    y, _ = act_slope(gate.to(tl.float32), "silu", 0.0, 0.0)
    y *= up.to(tl.float32)
    if SCALED:
        r = row0 + tl.arange(0, BLOCK_R // 4) * 4 + J
        y *= tl.load(probs_ptr + r, mask=r < end, other=0.0)[:, None]
    return y.to(h_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["R"])
def swiglu_operand_kernel(
    h_ptr, probs_ptr, offs_ptr, row_ptr, scale_ptr, col_ptr, square_ptr, R, N, E, stride_h,
    SHIFT: tl.constexpr, SCALED: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    overlapped(PDL)
    pid, num_n = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    block, row0, end, blocks = tile_of_block(pid, num_n, offs_ptr, R, E, GROUPS, BLOCK_E, BLOCK_R)
    col0 = pid % num_n * BLOCK_N
    a = swiglu_slice(h_ptr, probs_ptr, 0, row0, end, col0, N, stride_h, SCALED, BLOCK_R, BLOCK_N)
    qa, sa = coded(a, row_ptr, SHIFT)
    b = swiglu_slice(h_ptr, probs_ptr, 1, row0, end, col0, N, stride_h, SCALED, BLOCK_R, BLOCK_N)
    qb, sb = coded(b, row_ptr, SHIFT)
    c = swiglu_slice(h_ptr, probs_ptr, 2, row0, end, col0, N, stride_h, SCALED, BLOCK_R, BLOCK_N)
    qc, sc = coded(c, row_ptr, SHIFT)
    d = swiglu_slice(h_ptr, probs_ptr, 3, row0, end, col0, N, stride_h, SCALED, BLOCK_R, BLOCK_N)
    qd, sd = coded(d, row_ptr, SHIFT)
    store_operand(
        qa, qb, qc, qd, sa, sb, sc, sd, row_ptr, scale_ptr, col_ptr, square_ptr,
        row0, end, col0, R, N, col0 * 0, N, block, blocks, ROW, COL, BLOCK_R, BLOCK_N,
    )  # fmt: skip


@triton.jit
def dswiglu_slice(
    da_ptr, h_ptr, probs_ptr, partial_ptr, dh_ptr, a_ptr, part, J: tl.constexpr, row0, end, col0, R, F,
    stride_da, stride_h, SHIFT: tl.constexpr, A_SHIFT: tl.constexpr,
    SCALED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(bits of codes, scales) of dgate, dup or swiglu(h) * probs in slice J, which are rounded as h is before; what it
    adds to dprobs goes to ``partial``.
    """
    da = load_tokens(da_ptr, J, row0, end, col0, F, 0, stride_da, BLOCK_R, BLOCK_N).to(tl.float32)
    gate = load_tokens(h_ptr, J, row0, end, col0, F, 0, stride_h, BLOCK_R, BLOCK_N)
    up = load_tokens(h_ptr, J, row0, end, col0, F, F, stride_h, BLOCK_R, BLOCK_N).to(tl.float32)
    f, df = act_slope(gate.to(tl.float32), "silu", 0.0, 0.0)
    y, dy = f * up, da
    if SCALED:
        r, _, mask = slice_mask(J, row0, end, col0, F, BLOCK_R, BLOCK_N)
        if part == 0:
            block = (col0 // BLOCK_N).to(tl.int64)
            dot = tl.sum(tl.where(mask, da * y, 0.0), axis=1)
            tl.store(partial_ptr + block * R + r, dot, mask=r < end)
        probs = tl.load(probs_ptr + r, mask=r < end, other=0.0)[:, None]
        dy, y = da * probs, y * probs
    value = tl.where(part == 0, dy * df * up, tl.where(part == 1, dy * f, y))
    value = value.to(h_ptr.dtype.element_ty)
    if part == 2:
        q, scale = coded(value, a_ptr, A_SHIFT)
        bits = q.to(tl.uint8, bitcast=True)
    else:
        q_dh, scale = coded(value, dh_ptr, SHIFT)
        bits = q_dh.to(tl.uint8, bitcast=True)
    return bits, scale


@triton.jit(do_not_specialize=["R"])
def dswiglu_operand_kernel(
    da_ptr, h_ptr, probs_ptr, offs_ptr, row_ptr, scale_ptr, col_ptr, square_ptr, a_ptr, a_square_ptr,
    partial_ptr, R, N, E, stride_da, stride_h,
    SHIFT: tl.constexpr, A_SHIFT: tl.constexpr, SCALED: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, ACT: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Programs side by side make dgate, dup and the activation of one tile: in one they would fill the registers, and
    what they read again is in the cache.
    """
    overlapped(PDL)
    PARTS: tl.constexpr = 2 + ACT
    part, pid, num_n = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.cdiv(N, BLOCK_N)
    block, row0, end, blocks = tile_of_block(pid, num_n, offs_ptr, R, E, GROUPS, BLOCK_E, BLOCK_R)
    col0 = pid % num_n * BLOCK_N
    qa, sa = dswiglu_slice(
        da_ptr, h_ptr, probs_ptr, partial_ptr, row_ptr, a_ptr, part, 0, row0, end, col0, R, N,
        stride_da, stride_h, SHIFT, A_SHIFT, SCALED, BLOCK_R, BLOCK_N,
    )  # fmt: skip
    qb, sb = dswiglu_slice(
        da_ptr, h_ptr, probs_ptr, partial_ptr, row_ptr, a_ptr, part, 1, row0, end, col0, R, N,
        stride_da, stride_h, SHIFT, A_SHIFT, SCALED, BLOCK_R, BLOCK_N,
    )  # fmt: skip
    qc, sc = dswiglu_slice(
        da_ptr, h_ptr, probs_ptr, partial_ptr, row_ptr, a_ptr, part, 2, row0, end, col0, R, N,
        stride_da, stride_h, SHIFT, A_SHIFT, SCALED, BLOCK_R, BLOCK_N,
    )  # fmt: skip
    qd, sd = dswiglu_slice(
        da_ptr, h_ptr, probs_ptr, partial_ptr, row_ptr, a_ptr, part, 3, row0, end, col0, R, N,
        stride_da, stride_h, SHIFT, A_SHIFT, SCALED, BLOCK_R, BLOCK_N,
    )  # fmt: skip
    if part == 2:
        kind: tl.constexpr = a_ptr.dtype.element_ty
        store_operand(
            qa.to(kind, bitcast=True), qb.to(kind, bitcast=True),
            qc.to(kind, bitcast=True), qd.to(kind, bitcast=True),
            sa, sb, sc, sd, a_ptr, a_square_ptr, a_ptr, a_square_ptr,
            row0, end, col0, R, N, col0 * 0, N, block, blocks, False, ACT, BLOCK_R, BLOCK_N,
        )  # fmt: skip
    else:
        kind_dh: tl.constexpr = row_ptr.dtype.element_ty
        store_operand(
            qa.to(kind_dh, bitcast=True), qb.to(kind_dh, bitcast=True),
            qc.to(kind_dh, bitcast=True), qd.to(kind_dh, bitcast=True),
            sa, sb, sc, sd, row_ptr, scale_ptr, col_ptr, square_ptr,
            row0, end, col0, R, N, part * N, 2 * N, block, blocks, ROW, COL, BLOCK_R, BLOCK_N,
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
    overlapped(PDL)
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
