"""The three GEMMs of a linear op over plain or quantized operands, dense or grouped.

fprop y = x w^T (x rowwise), dgrad dx = dy w (dy rowwise), wgrad dw = dy^T x (both columnwise). With `offs` the rows are
grouped and the weight is (E, N, K). A weight is quantized where it is used, and never saved in quantized form.
"""

import torch
from torch import Tensor

from fuseops import kernels as K

from .quantized import COL, ROW, Format, Quantized


def quantize(x: Tensor, form: Format, offs: Tensor | None = None) -> Quantized:
    """x in the format and the layouts that `form` asks for.   (..., K) -> Quantized over (M, K)"""
    flat = x.reshape(-1, x.shape[-1])
    offs = offs if form.granularity == "group" else None
    if offs is None:
        # transposed here: the kernel's own columnwise store failed once on an unaligned input (H200)
        row, _, scale, _ = K.quantize_tensor(flat, form.dtype)
    else:
        row, scale = K.grouped_quantize(flat, offs, form.dtype)
    col = row.t().contiguous() if COL in form.layouts else None
    return Quantized(
        row.view(x.shape) if ROW in form.layouts else None,
        col,
        scale,
        offs,
        x if form.high else None,
        x.dtype,
    )


def _quantize_weight(weight: Tensor, form: Format) -> tuple[Tensor, Tensor]:
    if weight.dim() == 3:
        return K.expert_quantize(weight, form.dtype)
    data, _, scale, _ = K.quantize_tensor(weight, form.dtype)
    return data, scale


def _scaled(a: Tensor, weight: Tensor, scale: Tensor, q: Quantized) -> Tensor:
    if q.offs is not None:
        return K.scaled_grouped_mm(a, weight, scale, q.offs, q.dtype)
    y = K.scaled_mm(a.reshape(-1, a.shape[-1]), weight, scale, q.dtype)
    return y.view(*a.shape[:-1], weight.shape[0])


def _present(t: Tensor | None) -> Tensor:
    if t is None:
        raise ValueError(
            "the layout that this GEMM reads was not made: the op's layouts() leaves it out"
        )
    return t


def fprop(x: Quantized, weight: Tensor, form: Format) -> Tensor:
    """y = x w^T from the rowwise data of x.   (..., K), (N, K) or (E, N, K) -> (..., N)"""
    data, scale = _quantize_weight(weight, form)
    return _scaled(_present(x.row), data, x.scale * scale, x)


def dgrad(dy: Quantized, weight: Tensor, form: Format) -> Tensor:
    """dx = dy w from the rowwise data of dy.   (..., N), (N, K) or (E, N, K) -> (..., K)"""
    data, scale = _quantize_weight(weight, form)
    return _scaled(_present(dy.row), data.transpose(-2, -1), dy.scale * scale, dy)


def wgrad(dy: Quantized, x: Quantized, dtype: torch.dtype | None = None) -> Tensor:
    """dw = dy^T x from the columnwise data of both.   -> (N, K) or (E, N, K), in `dtype` or that of x"""
    dtype = dtype or x.dtype
    scale = dy.scale * x.scale
    left, right = _present(dy.col), _present(x.col)
    if x.offs is not None:
        return K.scaled_grouped_wgrad(left.t(), right.t(), scale, x.offs, dtype)
    return K.scaled_mm(left, right, scale, dtype)
