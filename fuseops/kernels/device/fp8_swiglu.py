"""Kernels of fuseops.kernels.operands: SwiGLU and its backward, whose results are written as FP8 operands.

Tiles are those of `device.operands`. The pre-activation h is read as it is, or as codes with a scale for 128 features
of a token, which are its values in bfloat16.
"""

import triton
import triton.language as tl

from fuseops.kernels.device.act import act_slope
from fuseops.kernels.device.operands import (
    load_tokens,
    quantize_slice,
    slice_mask,
    store_operand,
    tile_of_block,
)
from fuseops.kernels.device.reduce import pdl_trigger_and_wait


@triton.jit
def load_hidden(
    h_ptr, h_scale_ptr, J: tl.constexpr, row0, end, col0, R, F, first, stride_h,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Slice J of the gates, or of what they gate, as float32."""
    if h_ptr.dtype.element_ty.primitive_bitwidth == 8:
        bits = h_ptr.to(tl.pointer_type(tl.uint8))
        q = load_tokens(bits, J, row0, end, col0, F, first, stride_h, BLOCK_R, BLOCK_N)
        r, _, _ = slice_mask(J, row0, end, col0, F, BLOCK_R, BLOCK_N)
        block = ((first + col0) // BLOCK_N).to(tl.int64)
        scale = tl.load(h_scale_ptr + block * R + r, mask=r < end, other=0.0)
        return q.to(h_ptr.dtype.element_ty, bitcast=True).to(tl.float32) * scale[:, None]
    else:
        h = load_tokens(h_ptr, J, row0, end, col0, F, first, stride_h, BLOCK_R, BLOCK_N)
        return h.to(tl.float32)


@triton.jit
def rounded(x, h_ptr):
    """x as a tensor of h's dtype would hold it: of bfloat16 where h is codes."""
    if h_ptr.dtype.element_ty.primitive_bitwidth == 8:
        return x.to(tl.bfloat16)
    else:
        return x.to(h_ptr.dtype.element_ty)


@triton.jit
def swiglu_slice(
    h_ptr, h_scale_ptr, probs_ptr, J: tl.constexpr, row0, end, col0, R, F, stride_h,
    SCALED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Slice J of swiglu(h), times the probability of its tokens, rounded as h is."""
    gate = load_hidden(h_ptr, h_scale_ptr, J, row0, end, col0, R, F, 0, stride_h, BLOCK_R, BLOCK_N)
    up = load_hidden(h_ptr, h_scale_ptr, J, row0, end, col0, R, F, F, stride_h, BLOCK_R, BLOCK_N)
    y, _ = act_slope(gate, "silu", 0.0, 0.0)
    y *= up
    if SCALED:
        r = row0 + tl.arange(0, BLOCK_R // 4) * 4 + J
        y *= tl.load(probs_ptr + r, mask=r < end, other=0.0)[:, None]
    return rounded(y, h_ptr)


@triton.jit(do_not_specialize=["R"])
def swiglu_operand_kernel(
    h_ptr, h_scale_ptr, probs_ptr, offs_ptr, row_ptr, scale_ptr, col_ptr, square_ptr,
    R, N, E, stride_h,
    SHIFT: tl.constexpr, SCALED: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pdl_trigger_and_wait(PDL)
    pid, num_n = tl.program_id(0), tl.cdiv(N, BLOCK_N)
    block, row0, end, blocks = tile_of_block(pid, num_n, offs_ptr, R, E, GROUPS, BLOCK_E, BLOCK_R)
    col0 = pid % num_n * BLOCK_N
    # fmt: off
    a = swiglu_slice(h_ptr, h_scale_ptr, probs_ptr, 0, row0, end, col0, R, N, stride_h, SCALED, BLOCK_R, BLOCK_N)
    qa, sa = quantize_slice(a, row_ptr, SHIFT)
    b = swiglu_slice(h_ptr, h_scale_ptr, probs_ptr, 1, row0, end, col0, R, N, stride_h, SCALED, BLOCK_R, BLOCK_N)
    qb, sb = quantize_slice(b, row_ptr, SHIFT)
    c = swiglu_slice(h_ptr, h_scale_ptr, probs_ptr, 2, row0, end, col0, R, N, stride_h, SCALED, BLOCK_R, BLOCK_N)
    qc, sc = quantize_slice(c, row_ptr, SHIFT)
    d = swiglu_slice(h_ptr, h_scale_ptr, probs_ptr, 3, row0, end, col0, R, N, stride_h, SCALED, BLOCK_R, BLOCK_N)
    qd, sd = quantize_slice(d, row_ptr, SHIFT)
    # fmt: on
    store_operand(
        qa,
        qb,
        qc,
        qd,
        sa,
        sb,
        sc,
        sd,
        row_ptr,
        scale_ptr,
        col_ptr,
        square_ptr,
        row0,
        end,
        col0,
        R,
        N,
        col0 * 0,
        N,
        block,
        blocks,
        ROW,
        COL,
        BLOCK_R,
        BLOCK_N,
    )  # fmt: skip


@triton.jit
def dswiglu_slice(
    da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, like_ptr, J: tl.constexpr, row0, end, col0,
    R, F, stride_da, stride_h,
    PART: tl.constexpr, SHIFT: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(codes, scales) of dgate, dup or swiglu(h) * probs in slice J, which are rounded as h is before; what it adds to
    dprobs goes to ``partial`` with the first.
    """
    da = load_tokens(da_ptr, J, row0, end, col0, F, 0, stride_da, BLOCK_R, BLOCK_N).to(tl.float32)
    gate = load_hidden(h_ptr, h_scale_ptr, J, row0, end, col0, R, F, 0, stride_h, BLOCK_R, BLOCK_N)
    up = load_hidden(h_ptr, h_scale_ptr, J, row0, end, col0, R, F, F, stride_h, BLOCK_R, BLOCK_N)
    f, df = act_slope(gate, "silu", 0.0, 0.0)
    y, dy = f * up, da
    if SCALED:
        r, _, mask = slice_mask(J, row0, end, col0, F, BLOCK_R, BLOCK_N)
        if PART == 0:
            block = (col0 // BLOCK_N).to(tl.int64)
            dot = tl.sum(tl.where(mask, da * y, 0.0), axis=1)
            tl.store(partial_ptr + block * R + r, dot, mask=r < end)
        probs = tl.load(probs_ptr + r, mask=r < end, other=0.0)[:, None]
        dy, y = da * probs, y * probs
    if PART == 0:
        y = dy * df * up
    elif PART == 1:
        y = dy * f
    return quantize_slice(rounded(y, h_ptr), like_ptr, SHIFT)


@triton.jit
def dswiglu_part(
    da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, row_ptr, scale_ptr, col_ptr, square_ptr,
    row0, end, col0, R, N, stride_da, stride_h, block, blocks,
    PART: tl.constexpr, SHIFT: tl.constexpr, SCALED: tl.constexpr, ROW: tl.constexpr,
    COL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The operand of dgate, of dup, or columns of the activation, of a tile."""
    # fmt: off
    qa, sa = dswiglu_slice(da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, col_ptr, 0, row0, end, col0, R, N,
                           stride_da, stride_h, PART, SHIFT, SCALED, BLOCK_R, BLOCK_N)
    qb, sb = dswiglu_slice(da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, col_ptr, 1, row0, end, col0, R, N,
                           stride_da, stride_h, PART, SHIFT, SCALED, BLOCK_R, BLOCK_N)
    qc, sc = dswiglu_slice(da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, col_ptr, 2, row0, end, col0, R, N,
                           stride_da, stride_h, PART, SHIFT, SCALED, BLOCK_R, BLOCK_N)
    qd, sd = dswiglu_slice(da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, col_ptr, 3, row0, end, col0, R, N,
                           stride_da, stride_h, PART, SHIFT, SCALED, BLOCK_R, BLOCK_N)
    # fmt: on
    width = N if PART == 2 else 2 * N
    first = col0 * 0 + (N if PART == 1 else 0)
    store_operand(
        qa, qb, qc, qd, sa, sb, sc, sd, row_ptr, scale_ptr, col_ptr, square_ptr,
        row0, end, col0, R, N, first, width, block, blocks, ROW, COL, BLOCK_R, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=["R"])
def dswiglu_operand_kernel(
    da_ptr, h_ptr, h_scale_ptr, probs_ptr, offs_ptr, row_ptr, scale_ptr, col_ptr, square_ptr,
    a_ptr, a_square_ptr, partial_ptr, R, N, E, stride_da, stride_h,
    SHIFT: tl.constexpr, A_SHIFT: tl.constexpr, SCALED: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, ACT: tl.constexpr, GROUPS: tl.constexpr,
    PDL: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Programs side by side make dgate, dup and the activation of one tile: in one they would fill the registers, and
    what they read again is in the cache.
    """
    pdl_trigger_and_wait(PDL)
    PARTS: tl.constexpr = 2 + ACT
    part, pid, num_n = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS, tl.cdiv(N, BLOCK_N)
    block, row0, end, blocks = tile_of_block(pid, num_n, offs_ptr, R, E, GROUPS, BLOCK_E, BLOCK_R)
    col0 = pid % num_n * BLOCK_N
    # fmt: off
    if part == 0:
        dswiglu_part(da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, row_ptr, scale_ptr, col_ptr, square_ptr,
                     row0, end, col0, R, N, stride_da, stride_h, block, blocks,
                     0, SHIFT, SCALED, ROW, COL, BLOCK_R, BLOCK_N)
    elif part == 1:
        dswiglu_part(da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, row_ptr, scale_ptr, col_ptr, square_ptr,
                     row0, end, col0, R, N, stride_da, stride_h, block, blocks,
                     1, SHIFT, SCALED, ROW, COL, BLOCK_R, BLOCK_N)
    else:
        dswiglu_part(da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, a_ptr, a_square_ptr, a_ptr, a_square_ptr,
                     row0, end, col0, R, N, stride_da, stride_h, block, blocks,
                     2, A_SHIFT, SCALED, False, ACT, BLOCK_R, BLOCK_N)
    # fmt: on
