"""Operands with a scale a block: vectors of 128 along the axis that a GEMM sums, squares of 128 x 128 of weights.

The scales are powers of two, so data times scale is exact in bfloat16: the GEMM multiplies those products, and any
tensor core that takes bfloat16 does it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops import kernels as K

from .quantized import COL, ROW, Format, Quantized

BLOCK = 128


def quantize(x: Tensor, form: Format, offs: Tensor | None) -> Quantized:
    """x in the layouts that `form` asks for; with `offs`, columns whose blocks begin anew in each group.

    (..., K) -> Quantized over (M, K)
    """
    flat = x.reshape(-1, x.shape[-1])
    wanted = form.layouts & {ROW} if offs is not None else form.layouts
    row = col = scale = col_scale = None
    if wanted:
        layout = "both" if len(wanted) == 2 else min(wanted)
        row, col, scale, col_scale = K.quantize_blocks(flat, form.dtype, 1, layout, pow2=True)
    if offs is not None and COL in form.layouts:
        col, col_scale = K.quantize_group_blocks(flat, offs, form.dtype, pow2=True)
    has_row, has_col = ROW in form.layouts, COL in form.layouts
    return Quantized(
        row.view(x.shape) if has_row and row is not None else None,
        col if has_col else None,
        scale if has_row else None,
        offs,
        x if form.high else None,
        x.dtype,
        col_scale if has_col else None,
    )


def rowwise(q: Quantized) -> Tensor:
    """What the rowwise data stands for.   -> (..., K), in `product_dtype`"""
    data = q.present("row")
    flat = data.reshape(-1, data.shape[-1])
    scale = q.present("scale").repeat_interleave(BLOCK, 0)[: flat.shape[1]]
    return _product(flat, scale.t(), q.dtype).view(data.shape)


def colwise(q: Quantized) -> Tensor:
    """What the columnwise data stands for, rows first.   -> (M, K), in `product_dtype`

    With groups M is that of `K.column_offs`, and rows of no group are zeros.
    """
    data, scale = q.present("col").t(), q.present("col_scale")
    rows = data.shape[0]
    if q.offs is None:
        return _product(data, scale.repeat_interleave(BLOCK, 0)[:rows], q.dtype)
    return _product(data, scale[K.block_of_column(q.offs, rows)], q.dtype)


def through(weight: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """What a weight stands for after it went through squares.   (N, K) or (E, N, K) -> the same, in `product_dtype`

    A square lies in one expert: rows of zeros fill up the last one of each, which changes no amax.
    """
    n, k = weight.shape[-2:]
    filled = F.pad(weight, (0, 0, 0, -n % BLOCK)) if weight.dim() == 3 else weight
    flat = filled.reshape(-1, k)
    data, _, scale, _ = K.quantize_blocks(flat, form.dtype, BLOCK, ROW, pow2=True)
    squares = scale.repeat_interleave(BLOCK, 0)[: len(flat)].repeat_interleave(BLOCK, 1)[:, :k]
    return _product(data, squares, dtype).view(filled.shape)[..., :n, :]


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which the operands of a GEMM over tensors of `dtype` are exact, and none is out of range."""
    return torch.bfloat16 if dtype is torch.bfloat16 else torch.float32


def _product(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (data.float() * scale).to(product_dtype(dtype))
