"""Kernels of fuseops.kernels.operands: SwiGLU and its backward, quantized to FP8 operands in the same pass.

A program has a tile of 128 tokens by 128 features, as four slices of every fourth token, like those of `operands`: each
slice is loaded, computed and quantized to codes before the next, so that only codes of the tile live in registers. h
(R, 2 F), gate and up side by side, is read as it is, or as FP8 codes with a scale for 128 features of a token, which
are dequantized to bfloat16 values. On Hopper, `fp8_dswiglu` reads each input once instead.
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
    h_ptr, h_scale_ptr, J: tl.constexpr, row0, end, col0, R, F, first_col, stride_h,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load slice J of gate (first_col 0) or up (first_col F) as float32, dequantized where h is codes."""
    if h_ptr.dtype.element_ty.primitive_bitwidth == 8:
        byte_ptr = h_ptr.to(tl.pointer_type(tl.uint8))
        codes = load_tokens(byte_ptr, J, row0, end, col0, F, first_col, stride_h, BLOCK_R, BLOCK_N)
        token, _, _ = slice_mask(J, row0, end, col0, F, BLOCK_R, BLOCK_N)
        n_block = ((first_col + col0) // BLOCK_N).to(tl.int64)
        scale = tl.load(h_scale_ptr + n_block * R + token, mask=token < end, other=0.0)
        return codes.to(h_ptr.dtype.element_ty, bitcast=True).to(tl.float32) * scale[:, None]
    else:
        h = load_tokens(h_ptr, J, row0, end, col0, F, first_col, stride_h, BLOCK_R, BLOCK_N)
        return h.to(tl.float32)


@triton.jit
def round_like_h(x, h_ptr):
    """Round x to the dtype of h, or to bfloat16 where h is codes."""
    if h_ptr.dtype.element_ty.primitive_bitwidth == 8:
        return x.to(tl.bfloat16)
    else:
        return x.to(h_ptr.dtype.element_ty)


@triton.jit
def swiglu_slice(
    h_ptr, h_scale_ptr, probs_ptr, J: tl.constexpr, row0, end, col0, R, F, stride_h,
    SCALED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute slice J of swiglu(h), times the probs of its tokens where SCALED, rounded as h is."""
    gate = load_hidden(h_ptr, h_scale_ptr, J, row0, end, col0, R, F, 0, stride_h, BLOCK_R, BLOCK_N)
    up = load_hidden(h_ptr, h_scale_ptr, J, row0, end, col0, R, F, F, stride_h, BLOCK_R, BLOCK_N)
    y, _ = act_slope(gate, "silu", 0.0, 0.0)
    y *= up
    if SCALED:
        token = row0 + tl.arange(0, BLOCK_R // 4) * 4 + J
        y *= tl.load(probs_ptr + token, mask=token < end, other=0.0)[:, None]
    return round_like_h(y, h_ptr)


@triton.jit(do_not_specialize=["R"])
def swiglu_operand_kernel(
    h_ptr, h_scale_ptr, probs_ptr, offs_ptr, row_ptr, scale_ptr, col_ptr, square_ptr,
    R, N, E, stride_h,
    SHIFT: tl.constexpr, SCALED: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Quantize a tile of swiglu(h) (R, N), as rows and as columns."""
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
    OUTPUT: tl.constexpr, SHIFT: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return (codes, scales) of slice J of an OUTPUT: 0 dgate, 1 dup, 2 swiglu(h) * probs, rounded as h is before.

    With dgate, da . swiglu(h) of these features is stored to partial (F / 128, R): summed over blocks, it is dprobs.
    """
    da = load_tokens(da_ptr, J, row0, end, col0, F, 0, stride_da, BLOCK_R, BLOCK_N).to(tl.float32)
    gate = load_hidden(h_ptr, h_scale_ptr, J, row0, end, col0, R, F, 0, stride_h, BLOCK_R, BLOCK_N)
    up = load_hidden(h_ptr, h_scale_ptr, J, row0, end, col0, R, F, F, stride_h, BLOCK_R, BLOCK_N)
    silu, dsilu = act_slope(gate, "silu", 0.0, 0.0)
    y, dy = silu * up, da
    if SCALED:
        token, _, mask = slice_mask(J, row0, end, col0, F, BLOCK_R, BLOCK_N)
        if OUTPUT == 0:
            n_block = (col0 // BLOCK_N).to(tl.int64)
            dot = tl.sum(tl.where(mask, da * y, 0.0), axis=1)
            tl.store(partial_ptr + n_block * R + token, dot, mask=token < end)
        probs = tl.load(probs_ptr + token, mask=token < end, other=0.0)[:, None]
        dy, y = da * probs, y * probs
    if OUTPUT == 0:
        y = dy * dsilu * up
    elif OUTPUT == 1:
        y = dy * silu
    return quantize_slice(round_like_h(y, h_ptr), like_ptr, SHIFT)


@triton.jit
def dswiglu_output(
    da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, row_ptr, scale_ptr, col_ptr, square_ptr,
    row0, end, col0, R, N, stride_da, stride_h, block, blocks,
    OUTPUT: tl.constexpr, SHIFT: tl.constexpr, SCALED: tl.constexpr, ROW: tl.constexpr,
    COL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Quantize and store a tile of an OUTPUT: dgate and dup are the halves of one operand (R, 2 N)."""
    # fmt: off
    qa, sa = dswiglu_slice(da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, col_ptr, 0, row0, end, col0, R, N,
                           stride_da, stride_h, OUTPUT, SHIFT, SCALED, BLOCK_R, BLOCK_N)
    qb, sb = dswiglu_slice(da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, col_ptr, 1, row0, end, col0, R, N,
                           stride_da, stride_h, OUTPUT, SHIFT, SCALED, BLOCK_R, BLOCK_N)
    qc, sc = dswiglu_slice(da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, col_ptr, 2, row0, end, col0, R, N,
                           stride_da, stride_h, OUTPUT, SHIFT, SCALED, BLOCK_R, BLOCK_N)
    qd, sd = dswiglu_slice(da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, col_ptr, 3, row0, end, col0, R, N,
                           stride_da, stride_h, OUTPUT, SHIFT, SCALED, BLOCK_R, BLOCK_N)
    # fmt: on
    width = N if OUTPUT == 2 else 2 * N
    first_col = col0 * 0 + (N if OUTPUT == 1 else 0)
    store_operand(
        qa, qb, qc, qd, sa, sb, sc, sd, row_ptr, scale_ptr, col_ptr, square_ptr,
        row0, end, col0, R, N, first_col, width, block, blocks, ROW, COL, BLOCK_R, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=["R"])
def dswiglu_operand_kernel(
    da_ptr, h_ptr, h_scale_ptr, probs_ptr, offs_ptr, row_ptr, scale_ptr, col_ptr, square_ptr,
    a_ptr, a_square_ptr, partial_ptr, R, N, E, stride_da, stride_h,
    SHIFT: tl.constexpr, A_SHIFT: tl.constexpr, SCALED: tl.constexpr,
    ROW: tl.constexpr, COL: tl.constexpr, ACT: tl.constexpr, GROUPS: tl.constexpr,
    PDL: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Quantize a tile of dgate, of dup or, with ACT, of the activation: neighbouring programs have the outputs of one
    tile. One program for all would fill the registers, and what the others read again is in the L2 cache.
    """
    pdl_trigger_and_wait(PDL)
    OUTPUTS: tl.constexpr = 2 + ACT
    out, pid, num_n = tl.program_id(0) % OUTPUTS, tl.program_id(0) // OUTPUTS, tl.cdiv(N, BLOCK_N)
    block, row0, end, blocks = tile_of_block(pid, num_n, offs_ptr, R, E, GROUPS, BLOCK_E, BLOCK_R)
    col0 = pid % num_n * BLOCK_N
    # fmt: off
    if out == 0:
        dswiglu_output(da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, row_ptr, scale_ptr, col_ptr, square_ptr,
                     row0, end, col0, R, N, stride_da, stride_h, block, blocks,
                     0, SHIFT, SCALED, ROW, COL, BLOCK_R, BLOCK_N)
    elif out == 1:
        dswiglu_output(da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, row_ptr, scale_ptr, col_ptr, square_ptr,
                     row0, end, col0, R, N, stride_da, stride_h, block, blocks,
                     1, SHIFT, SCALED, ROW, COL, BLOCK_R, BLOCK_N)
    else:
        dswiglu_output(da_ptr, h_ptr, h_scale_ptr, probs_ptr, partial_ptr, a_ptr, a_square_ptr, a_ptr, a_square_ptr,
                     row0, end, col0, R, N, stride_da, stride_h, block, blocks,
                     2, A_SHIFT, SCALED, False, ACT, BLOCK_R, BLOCK_N)
    # fmt: on
