"""Kernel of fuseops.kernels.rope."""

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import pdl_trigger_and_wait


@triton.jit
def _turn(
    x_ptr, y_ptr, cos, sin, heads, H, D, P,
    INTERLEAVED: tl.constexpr, REST: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Some heads of one token, (BLOCK_H, 1) pointers to their columns. REST: columns behind the pairs, which stay."""
    pairs = tl.arange(0, BLOCK_P)[None, :]
    mask = (heads < H) & (pairs < P)
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_P)[None, :]
        mask = (heads < H) & (both < 2 * P)
        x = tl.load(x_ptr + both, mask=mask, other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_P, 2)))
        y = tl.join(first * cos - second * sin, second * cos + first * sin)
        y = tl.reshape(y, (BLOCK_H, 2 * BLOCK_P))
        tl.store(y_ptr + both, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        first = tl.load(x_ptr + pairs, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + P + pairs, mask=mask, other=0.0).to(tl.float32)
        y = first * cos - second * sin
        tl.store(y_ptr + pairs, y.to(y_ptr.dtype.element_ty), mask=mask)
        y = second * cos + first * sin
        tl.store(y_ptr + P + pairs, y.to(y_ptr.dtype.element_ty), mask=mask)
    for start in range(2 * P, D if REST else 0, BLOCK_P):
        stays = (heads < H) & (start + pairs < D)
        tl.store(y_ptr + start + pairs, tl.load(x_ptr + start + pairs, mask=stays), mask=stays)


@triton.jit(do_not_specialize=["tokens"])
def rope_kernel(
    x_ptr, k_ptr, cos_ptr, sin_ptr, y_ptr, yk_ptr, tokens, H, HK, D, P,
    stride_b, stride_t, stride_h, k_b, k_t, k_h, cos_b, cos_t, sin_b, sin_t,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr, PAIR: tl.constexpr,
    PDL: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """A program rotates some heads of one token: of x, and behind them those of k where there is a PAIR."""
    pdl_trigger_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    block, blocks = tl.program_id(1), tl.cdiv(H, BLOCK_H)
    pairs = tl.arange(0, BLOCK_P)[None, :]
    cos = tl.load(cos_ptr + batch * cos_b + token * cos_t + pairs, mask=pairs < P, other=0.0)
    sin = tl.load(sin_ptr + batch * sin_b + token * sin_t + pairs, mask=pairs < P, other=0.0)
    cos, sin = cos.to(tl.float32), sin.to(tl.float32)
    if INVERSE:
        sin = -sin
    heads = tl.arange(0, BLOCK_H)[:, None]
    if not PAIR or block < blocks:
        first = block * BLOCK_H + heads
        xs = x_ptr + batch * stride_b + token * stride_t + first.to(tl.int64) * stride_h
        ys = y_ptr + row * H * D + first.to(tl.int64) * D
        _turn(xs, ys, cos, sin, first, H, D, P, INTERLEAVED, REST, BLOCK_H, BLOCK_P)
    else:
        second = (block - blocks) * BLOCK_H + heads
        ks = k_ptr + batch * k_b + token * k_t + second.to(tl.int64) * k_h
        yks = yk_ptr + row * HK * D + second.to(tl.int64) * D
        _turn(ks, yks, cos, sin, second, HK, D, P, INTERLEAVED, REST, BLOCK_H, BLOCK_P)
