"""The three GEMMs of a linear op over quantized operands, dense or grouped.

fprop y = x w^T and dgrad dx = dy w read rows, wgrad dw = dy^T x reads columns. Where no kernel multiplies the codes,
the operands are expanded and the high-precision kernels multiply them: exact, since power-of-two scales times codes are
bfloat16 numbers; scales of other values are multiplied in float32.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops import kernels as K

from .numbers import watching
from .operands import Operand
from .quantized import Quantized, values
from .scaling import SQUARE

OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


def fprop(
    x: Operand,
    weight: Operand,
    offs: Tensor | None = None,
    tiles: Tensor | None = None,
    name: str = "",
) -> Tensor:
    """y = x w^T.   (R, K), (N, K) or (E, N, K) -> (R, N)      name: of the op, here and below, for who watches"""
    y = _multiplied(x, weight, "row", offs, tiles)
    if (seen := watching()) is not None:
        seen.compare(name, "forward", y, partial(_exact, offs=offs), x, weight)
    return y


def dgrad(
    dy: Operand,
    weight: Operand,
    offs: Tensor | None = None,
    tiles: Tensor | None = None,
    name: str = "",
) -> Tensor:
    """dx = dy w.   (R, N), (N, K) or (E, N, K) -> (R, K)"""
    dx = _multiplied(dy, weight, "col", offs, tiles)
    if (seen := watching()) is not None:
        seen.compare(name, "input gradient", dx, partial(_exact, offs=offs, turn=True), dy, weight)
    return dx


def _exact(rows: Tensor, weight: Tensor, offs: Tensor | None, turn: bool = False) -> Tensor:
    """The product of what operands were."""
    rows, weight = rows.reshape(-1, rows.shape[-1]).float(), weight.float()
    weight = weight.mT if turn else weight
    return F.linear(rows, weight) if offs is None else K.grouped_mm(rows, weight, offs)


def _exact_wgrad(dy: Tensor, x: Tensor, offs: Tensor | None) -> Tensor:
    left, right = (t.reshape(-1, t.shape[-1]).float() for t in (dy, x))
    return left.t() @ right if offs is None else K.grouped_wgrad(left, right, offs)


def _multiplied(
    a: Operand, weight: Operand, layout: str, offs: Tensor | None, tiles: Tensor | None
) -> Tensor:
    """A product of rows with a weight, whose layout has the summed axis last."""
    if isinstance(a, Quantized) and isinstance(weight, Quantized):
        codes, turned = a.row, weight.row if layout == "row" else weight.col
        if codes is not None and turned is not None and a.dtype in OUTPUTS:
            kind = "tensor" if a.scaling.block is None else "block"
            return K.fp8_mm(*codes, *turned, kind, offs, tiles, None, a.dtype)
        left, right = values(a, "row"), values(weight, layout)
    else:  # one of them is high precision: what both stand for, in float32
        left = _wide(a)
        right = _wide(weight) if layout == "row" else _wide(weight).mT
    right = right.to(left.dtype)
    y = F.linear(left, right) if offs is None else K.grouped_mm(left, right, offs, tiles)
    return y.to(a.dtype)


def _columns(
    dy: Operand, x: Operand, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, str] | None:
    """Both columns with their scales, and how those lie, as the FP8 kernel takes them."""
    if not (isinstance(dy, Quantized) and isinstance(x, Quantized)) or dtype not in OUTPUTS:
        return None
    if dy.col is None or x.col is None:
        return None
    squares = "square" if x.scaling.columns == SQUARE else "block"
    return *dy.col, *x.col, "tensor" if x.scaling.block is None else squares


def wgrad(
    dy: Operand, x: Operand, dtype: torch.dtype, offs: Tensor | None = None, name: str = ""
) -> Tensor:
    """dw = dy^T x.   (R, N), (R, K) -> (N, K) or (E, N, K)"""
    dw = _wgrad(dy, x, dtype, offs)
    if (seen := watching()) is not None:
        seen.compare(name, "weight gradient", dw, partial(_exact_wgrad, offs=offs), dy, x)
    return dw


def _wgrad(dy: Operand, x: Operand, dtype: torch.dtype, offs: Tensor | None) -> Tensor:
    columns = _columns(dy, x, dtype)
    if columns is not None:
        return K.fp8_wgrad(*columns, offs, None, dtype)
    if not (isinstance(dy, Quantized) and isinstance(x, Quantized)):
        left, right = _wide(dy), _wide(x)
        dw = left.t() @ right if offs is None else K.grouped_wgrad(left, right, offs)
        return dw.to(dtype)
    left, right = values(dy, "col"), values(x, "col")
    if offs is None:
        return K.wide_mm(left, right.to(left.dtype)).to(dtype)
    dw = left.new_empty(len(offs), left.shape[0], right.shape[0], dtype=torch.float32)
    _wgrad_into(dw, dy, x, offs, accumulate=False)
    return dw.to(dtype)


def wgrad_into(
    main_grad: Tensor, dy: Operand, x: Operand, offs: Tensor, accumulate: bool, name: str = ""
) -> None:
    """main_grad (+)= wgrad of groups, unrounded.   main_grad (E, N, K) float32"""
    if watching() is not None:
        wgrad(dy, x, torch.float32, offs, name)
    _wgrad_into(main_grad, dy, x, offs, accumulate)


def _wgrad_into(main_grad: Tensor, dy: Operand, x: Operand, offs: Tensor, accumulate: bool) -> None:
    columns = _columns(dy, x, main_grad.dtype)
    if columns is not None:
        K.fp8_wgrad_into(main_grad, *columns, offs, None, accumulate)
        return
    if isinstance(dy, Quantized) and isinstance(x, Quantized):
        left, right, ends = values(dy, "col").t(), values(x, "col").t(), K.column_offs(offs)
    else:
        left, right, ends = _wide(dy), _wide(x), offs
    K.grouped_wgrad_into(main_grad, left, right.to(left.dtype), ends, accumulate=accumulate)


def _wide(t: Operand) -> Tensor:
    """What an operand, or a weight, stands for, in float32 (float64 of float64)."""
    if isinstance(t, Quantized):
        found = values(t, "row") if t.row is not None else values(t, "col").mT
        return found.to(_accumulator(t.dtype))
    return t.to(_accumulator(t.dtype))


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
