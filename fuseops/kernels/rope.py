"""Rotary position embedding: rotates pairs of columns by an angle of the position and the pair.

Maths (arXiv 2104.09864): (a, b) -> (a cos - b sin, b cos + a sin), float32, one rounding at the store. A pair is
columns i and P + i, or 2 i and 2 i + 1 where `interleaved`; columns from 2 P on stay as they are. `inverse` turns back,
which is the gradient.
Shapes: x (..., T, H, D) -> the same, cos and sin (T, P), or (..., T, P) with the leading axes of x; 2 P <= D.
Layout: columns are contiguous, tokens and heads may be strided, so that x may be a transposed view; y is contiguous.
Hardware: sm_80 and later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.launch import device, launch, pdl_overlap
from fuseops.kernels.registry import Cases, floats, kernel_op, on_meta
from fuseops.kernels.tiles import cdiv, pow2, require, upcast


def _apply_rope(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool = False
) -> Tensor:
    pairs = cos.shape[-1]
    x1, x2 = rotary_pairs(upcast(x), pairs, interleaved)
    c, s = (t.unsqueeze(-2).to(x1.dtype) for t in (cos, -sin if inverse else sin))
    rotated = [x1 * c - x2 * s, x2 * c + x1 * s]
    if interleaved:  # by reshape: a batch of output gradients does not go through flatten
        y = torch.stack(rotated, -1).reshape(*x1.shape[:-1], 2 * pairs)
    else:
        y = torch.cat(rotated, -1)
    return torch.cat([y.to(x.dtype), x[..., 2 * pairs :]], -1)


def _apply_rope_pair(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    yq, yk = (_apply_rope(x, cos, sin, interleaved, inverse) for x in (q, k))
    return yq, yk


def rotary_pairs(x: Tensor, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second number of each pair: neighbours, or those half of the rotated width apart."""
    if interleaved:
        return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    return x[..., :pairs], x[..., pairs : 2 * pairs]


def _candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """All pairs of as many heads as give a thread 8 or 16 elements."""
    pairs = pow2(dims[0])
    return [
        {"BLOCK_H": max(total // (2 * pairs), 1), "BLOCK_P": pairs, "num_warps": warps}
        for total, warps in ((2048, 4), (1024, 4))
    ]


SPACE = Space("rope", _candidates, dims=("pairs",))


def _cases() -> Cases:
    for dtype in (torch.bfloat16, torch.float32):
        x = on_meta(2, 4096, 32, 128, dtype=dtype)
        for interleaved, pairs in ((False, 64), (True, 64), (False, 32)):
            angles = floats(4096, pairs)
            yield from ((x, angles, angles, interleaved, inverse) for inverse in (False, True))


def _pair_cases() -> Cases:
    angles = floats(4096, 64)
    for dtype in (torch.bfloat16, torch.float32):
        q, k = (on_meta(2, 4096, h, 128, dtype=dtype) for h in (32, 8))
        yield from ((q, k, angles, angles, False, inverse) for inverse in (False, True))


@kernel_op(twin=_apply_rope, cases=_cases)
def apply_rope(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool = False
) -> Tensor:
    """x with its pairs of columns rotated by the angles of cos and sin, or back with `inverse`."""
    return _rotate((x,), cos, sin, interleaved, inverse)[0]


@kernel_op(twin=_apply_rope_pair, cases=_pair_cases)
def apply_rope_pair(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """`apply_rope` of queries and keys, which may differ in the number of heads, in one launch."""
    require(
        q.dtype is k.dtype and q.shape[:-2] == k.shape[:-2] and q.shape[-1] == k.shape[-1],
        f"q is {q.dtype} {tuple(q.shape)} and k {k.dtype} {tuple(k.shape)}, expected to differ in heads at most.",
    )
    yq, yk = _rotate((q, k), cos, sin, interleaved, inverse)
    return yq, yk


def _rotate(
    xs: tuple[Tensor, ...], cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> list[Tensor]:
    """Launch the kernel over one tensor or two."""
    x = xs[0]
    require(x.dim() >= 3, f"x is {tuple(x.shape)}, expected (..., T, H, D).")
    (t, h, d), p = x.shape[-3:], cos.shape[-1]
    fits = cos.shape == sin.shape and cos.shape[:-1] in (x.shape[-3:-2], x.shape[:-2])
    if not fits or 2 * p > d:
        raise FuseOpsError(
            f"cos is {tuple(cos.shape)} and sin {tuple(sin.shape)}, expected ({t}, P) or "
            f"({', '.join(map(str, x.shape[:-2]))}, P) with P <= {d // 2}."
        )
    rows = [_rows(each) for each in xs]
    cos3, sin3 = (_angles(angles, t, p) for angles in (cos, sin))
    ys = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in xs]
    first, last = rows[0], rows[-1]
    config = SPACE.pick(first.shape[0] * t * h, (p,), x)
    blocks = sum(cdiv(each.shape[2], config["BLOCK_H"]) for each in rows)
    launch(
        device("rope").rope_kernel, (first.shape[0] * t, blocks),
        first, last, cos3, sin3, ys[0], ys[-1], t, h, last.shape[2], d, p,
        *first.stride()[:3], *last.stride()[:3], *_strides(cos3), *_strides(sin3),
        INTERLEAVED=interleaved, INVERSE=inverse, PARTIAL=2 * p < d, HAS_K=len(xs) == 2,
        **pdl_overlap(x.device), **config,
    )  # fmt: skip
    return ys


def _rows(x: Tensor) -> Tensor:
    """(B, T, H, D) with contiguous columns."""
    t, h, d = x.shape[-3:]
    x = x.reshape(-1, t, h, d) if x.numel() else x.new_empty(0, t, h, d)
    return x if d == 1 or x.stride(3) == 1 else x.contiguous()


def _angles(angles: Tensor, t: int, p: int) -> Tensor:
    """(1 or B, T, P) with contiguous columns."""
    angles = angles.reshape(-1, t, p) if angles.numel() else angles.new_empty(1, t, p)
    return angles if p == 1 or angles.stride(2) == 1 else angles.contiguous()


def _strides(angles: Tensor) -> tuple[int, int]:
    """Of the batch, which is 0 where all share the angles, and of the token."""
    return 0 if angles.shape[0] == 1 else angles.stride(0), angles.stride(1)
