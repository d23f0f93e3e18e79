"""Reference of `fuseops.kernels.rope`."""

from __future__ import annotations

import torch
from torch import Tensor

from .precision import wide


def apply_rope(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool = False
) -> Tensor:
    """Pairs of columns of x rotated by their angle, or back.   x (..., T, H, D), cos and sin (T, P) or (..., T, P)"""
    pairs = cos.shape[-1]
    first, second = rotary_pairs(wide(x), pairs, interleaved)
    c, s = (t.unsqueeze(-2).to(first.dtype) for t in (cos, -sin if inverse else sin))
    turned = [first * c - second * s, second * c + first * s]
    y = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([y.to(x.dtype), x[..., 2 * pairs :]], -1)


def apply_rope_pair(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """The same of queries and keys."""
    yq, yk = (apply_rope(x, cos, sin, interleaved, inverse) for x in (q, k))
    return yq, yk


def rotary_pairs(x: Tensor, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second number of each pair: neighbours, or those half of the rotated width apart."""
    if interleaved:
        return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    return x[..., :pairs], x[..., pairs : 2 * pairs]
