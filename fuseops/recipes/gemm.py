"""The three GEMMs of a linear op over plain or quantized operands, dense or grouped.

fprop y = x w^T (x rowwise), dgrad dx = dy w (dy rowwise), wgrad dw = dy^T x (both columnwise). With `offs` the rows are
grouped and the weight is (E, N, K). A weight is quantized where it is used, and never saved in quantized form.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops import kernels as K
from fuseops.kernels.reference.grouped import group_of_row

from . import blocks
from .quantized import COL, ROW, Format, Quantized

Operand = Tensor | Quantized


def quantize(x: Tensor, form: Format, offs: Tensor | None = None) -> Quantized:
    """x in the format and the layouts that `form` asks for.   (..., K) -> Quantized over (M, K)"""
    offs = offs if form.granularity == "group" else None
    if form.blocks:
        return blocks.quantize(x, form, offs)
    flat = x.reshape(-1, x.shape[-1])
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


def _multiplied(a: Tensor, weight: Tensor, q: Quantized) -> Tensor:
    """a weight^T over operands that were quantized in blocks, in the dtype that q stands for."""
    y = F.linear(a, weight) if q.offs is None else K.grouped_mm(a, weight, q.offs)
    return y.to(q.dtype)


# --- operands of which one is not quantized: what the others stand for, multiplied in float32


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _value(t: Operand) -> Tensor:
    """What the rowwise data of an operand stands for."""
    wide = _wide(t.dtype)
    if not isinstance(t, Quantized):
        return t.to(wide)
    if t.scale is not None and t.scale.dim() == 2:
        return blocks.rowwise(t).to(wide)
    row, scale = t.present(ROW).to(wide), t.present("scale")
    if t.offs is None:
        return row * scale
    by_row = torch.cat([scale, scale.new_zeros(1)])[group_of_row(t.offs, row.shape[0])]
    return row * by_row.unsqueeze(-1)


def _weight_value(weight: Tensor, form: Format | None, dtype: torch.dtype) -> Tensor:
    """What a weight stands for after it went through its format."""
    if form is None:
        return weight.to(_wide(dtype))
    if form.blocks:
        return blocks.through(weight, form, dtype).to(_wide(dtype))
    data, scale = _quantize_weight(weight, form)
    return data.to(_wide(dtype)) * (scale[:, None, None] if weight.dim() == 3 else scale)


def _wide_mm(a: Operand, weight: Tensor, offs: Tensor | None) -> Tensor:
    """a weight^T, in the dtype that a stands for."""
    value = _value(a)
    y = F.linear(value, weight) if offs is None else K.grouped_mm(value, weight, offs)
    return y.to(a.dtype)


# --- the three GEMMs


def fprop(x: Operand, weight: Tensor, form: Format | None, offs: Tensor | None = None) -> Tensor:
    """y = x w^T from the rowwise data of x.   (..., K), (N, K) or (E, N, K) -> (..., N)"""
    if form is None or not isinstance(x, Quantized):
        return _wide_mm(x, _weight_value(weight, form, x.dtype), offs)
    if form.blocks:
        return _multiplied(blocks.rowwise(x), blocks.through(weight, form, x.dtype), x)
    data, scale = _quantize_weight(weight, form)
    return _scaled(x.present(ROW), data, x.present("scale") * scale, x)


def dgrad(dy: Operand, weight: Tensor, form: Format | None, offs: Tensor | None = None) -> Tensor:
    """dx = dy w from the rowwise data of dy.   (..., N), (N, K) or (E, N, K) -> (..., K)"""
    if form is None or not isinstance(dy, Quantized):
        return _wide_mm(dy, _weight_value(weight, form, dy.dtype).transpose(-2, -1), offs)
    if form.blocks:
        transposed = blocks.through(weight, form, dy.dtype).transpose(-2, -1)
        return _multiplied(blocks.rowwise(dy), transposed, dy)
    data, scale = _quantize_weight(weight, form)
    return _scaled(dy.present(ROW), data.transpose(-2, -1), dy.present("scale") * scale, dy)


def wgrad(
    dy: Operand, x: Operand, dtype: torch.dtype | None = None, offs: Tensor | None = None
) -> Tensor:
    """dw = dy^T x from the columnwise data of both, rowwise where one is not quantized.

    -> (N, K) or (E, N, K), in `dtype` or that of x
    """
    dtype = dtype or x.dtype
    if not (isinstance(x, Quantized) and isinstance(dy, Quantized)):
        left, right = (_value(t).flatten(0, -2) for t in (dy, x))
        dw = left.t() @ right if offs is None else K.grouped_wgrad(left, right, offs)
        return dw.to(dtype)
    if x.col_scale is not None:
        return _block_wgrad(dy, x).to(dtype)
    left, right, scale = dy.present(COL), x.present(COL), dy.present("scale") * x.present("scale")
    if x.offs is not None:
        return K.scaled_grouped_wgrad(left.t(), right.t(), scale, x.offs, dtype)
    return K.scaled_mm(left, right, scale, dtype)


def _block_wgrad(dy: Quantized, x: Quantized) -> Tensor:
    """`wgrad` of blocks, in float32."""
    left, right = blocks.colwise(dy), blocks.colwise(x)
    if x.offs is None:
        return K.wide_mm(left.t(), right.t())
    shape = len(x.offs), left.shape[1], right.shape[1]
    dw = left.new_empty(shape, dtype=torch.float32)
    K.grouped_wgrad_into(dw, left, right, K.column_offs(x.offs), accumulate=False)
    return dw
