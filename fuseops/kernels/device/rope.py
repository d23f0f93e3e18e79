"""Rotary position embeddings of x, or of q and k in one launch. Triton, sm_80 and later."""

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import pdl_trigger_and_wait


@triton.jit
def _rotate_heads(
    x_ptr, y_ptr, cos, sin, heads, H, D, P,
    INTERLEAVED: tl.constexpr, PARTIAL: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of one token. x_ptr and y_ptr are pointers to heads (BLOCK_H, 1), cos and sin (1, BLOCK_P).

    PARTIAL: columns behind the pairs are copied. INTERLEAVED: the two of a pair are neighbours, otherwise P columns
    apart.
    """
    pairs = tl.arange(0, BLOCK_P)[None, :]
    mask = (heads < H) & (pairs < P)
    if INTERLEAVED:
        pair_cols = tl.arange(0, 2 * BLOCK_P)[None, :]
        mask = (heads < H) & (pair_cols < 2 * P)
        x = tl.load(x_ptr + pair_cols, mask=mask, other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_P, 2)))
        y = tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin)
        y = tl.reshape(y, (BLOCK_H, 2 * BLOCK_P))
        tl.store(y_ptr + pair_cols, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        x1 = tl.load(x_ptr + pairs, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptr + P + pairs, mask=mask, other=0.0).to(tl.float32)
        y = x1 * cos - x2 * sin
        tl.store(y_ptr + pairs, y.to(y_ptr.dtype.element_ty), mask=mask)
        y = x2 * cos + x1 * sin
        tl.store(y_ptr + P + pairs, y.to(y_ptr.dtype.element_ty), mask=mask)
    for start in range(2 * P, D if PARTIAL else 0, BLOCK_P):
        tail_mask = (heads < H) & (start + pairs < D)
        tl.store(
            y_ptr + start + pairs, tl.load(x_ptr + start + pairs, mask=tail_mask), mask=tail_mask
        )


@triton.jit(do_not_specialize=["tokens"])
def rope_kernel(
    x_ptr, k_ptr, cos_ptr, sin_ptr, y_ptr, k_out_ptr, tokens, H, HK, D, P,
    stride_xb, stride_xt, stride_xh, stride_kb, stride_kt, stride_kh,
    stride_cos_b, stride_cos_t, stride_sin_b, stride_sin_t,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, PARTIAL: tl.constexpr, HAS_K: tl.constexpr,
    PDL: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Rotate some heads of one token a program: of x, and with HAS_K behind them those of k."""
    pdl_trigger_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    block, blocks = tl.program_id(1), tl.cdiv(H, BLOCK_H)
    pairs = tl.arange(0, BLOCK_P)[None, :]
    cos_ptrs = cos_ptr + batch * stride_cos_b + token * stride_cos_t + pairs
    sin_ptrs = sin_ptr + batch * stride_sin_b + token * stride_sin_t + pairs
    cos = tl.load(cos_ptrs, mask=pairs < P, other=0.0)
    sin = tl.load(sin_ptrs, mask=pairs < P, other=0.0)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    if INVERSE:
        sin = -sin
    heads = tl.arange(0, BLOCK_H)[:, None]
    if not HAS_K or block < blocks:
        x_heads = block * BLOCK_H + heads
        x_rows = x_ptr + batch * stride_xb + token * stride_xt + x_heads.to(tl.int64) * stride_xh
        y_rows = y_ptr + row * H * D + x_heads.to(tl.int64) * D
        _rotate_heads(
            x_rows, y_rows, cos, sin, x_heads, H, D, P, INTERLEAVED, PARTIAL, BLOCK_H, BLOCK_P
        )
    else:
        k_heads = (block - blocks) * BLOCK_H + heads
        k_rows = k_ptr + batch * stride_kb + token * stride_kt + k_heads.to(tl.int64) * stride_kh
        k_out_rows = k_out_ptr + row * HK * D + k_heads.to(tl.int64) * D
        _rotate_heads(
            k_rows, k_out_rows, cos, sin, k_heads, HK, D, P, INTERLEAVED, PARTIAL, BLOCK_H, BLOCK_P
        )
