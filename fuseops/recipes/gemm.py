"""The three GEMMs of a linear op over quantized operands, dense or grouped.

fprop y = x w^T and dgrad dx = dy w read rows, wgrad dw = dy^T x reads columns. Where no kernel multiplies the codes,
the operands are expanded and the high-precision kernels multiply them: exact, since power-of-two scales times codes are
bfloat16 numbers; scales of other values are multiplied in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops import kernels as K

from .quantized import Quantized, values


def fprop(x: Quantized, weight: Quantized, tiles: Tensor | None = None) -> Tensor:
    """y = x w^T.   (R, K), (N, K) or (E, N, K) -> (R, N)"""
    return _multiplied(values(x, "row"), values(weight, "row"), x, tiles)


def dgrad(dy: Quantized, weight: Quantized, tiles: Tensor | None = None) -> Tensor:
    """dx = dy w.   (R, N), (N, K) or (E, N, K) -> (R, K)"""
    return _multiplied(values(dy, "row"), values(weight, "col"), dy, tiles)


def _multiplied(a: Tensor, b: Tensor, like: Quantized, tiles: Tensor | None) -> Tensor:
    b = b.to(a.dtype)
    y = F.linear(a, b) if like.offs is None else K.grouped_mm(a, b, like.offs, tiles)
    return y.to(like.dtype)


def wgrad(dy: Quantized, x: Quantized, dtype: torch.dtype) -> Tensor:
    """dw = dy^T x.   (R, N), (R, K) -> (N, K) or (E, N, K)"""
    left, right = values(dy, "col"), values(x, "col")
    if x.offs is None:
        return K.wide_mm(left, right.to(left.dtype)).to(dtype)
    left, right = left.t(), right.t().to(left.dtype)
    dw = left.new_empty(len(x.offs), left.shape[1], right.shape[1], dtype=torch.float32)
    K.grouped_wgrad_into(dw, left, right, K.column_offs(x.offs), accumulate=False)
    return dw.to(dtype)


def wgrad_into(main_grad: Tensor, dy: Quantized, x: Quantized, accumulate: bool) -> None:
    """main_grad (+)= wgrad of groups, unrounded.   main_grad (E, N, K) float32"""
    left, right = values(dy, "col").t(), values(x, "col").t()
    ends = K.column_offs(x.offs)  # type: ignore[arg-type]
    K.grouped_wgrad_into(main_grad, left, right.to(left.dtype), ends, accumulate=accumulate)
