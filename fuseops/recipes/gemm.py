"""The three GEMMs of a linear op over quantized operands, dense or grouped.

fprop y = x w^T and dgrad dx = dy w read rows, wgrad dw = dy^T x reads columns. Where no kernel multiplies the codes,
the operands are expanded and the high-precision kernels multiply them: exact, since power-of-two scales times codes are
bfloat16 numbers; scales of other values are multiplied in float32. Two operands meet in the wider dtype of both.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops import kernels as K

from .numbers import watching
from .operands import Operand
from .quantized import Quantized, features, values
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
    if isinstance(a, Quantized) and isinstance(weight, Quantized) and a.dtype in OUTPUTS:
        codes, turned = a.row, weight.row if layout == "row" else weight.col
        kind = _kernel(a, weight)
        if kind is not None and codes is not None and turned is not None:
            return K.fp8_mm(*codes, *turned, kind, offs, tiles, None, a.dtype)
    left, right = _meet(_stands_for(a, "row"), _stands_for(weight, layout))
    y = F.linear(left, right) if offs is None else K.grouped_mm(left, right, offs, tiles)
    return y.to(a.dtype)


def _columns(
    dy: Operand, x: Operand, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, str] | None:
    """Both columns with their scales, and how those lie, as the FP8 kernel takes them."""
    if not (isinstance(dy, Quantized) and isinstance(x, Quantized)) or dtype not in OUTPUTS:
        return None
    kind = _kernel(dy, x)
    if dy.col is None or x.col is None or kind is None:
        return None
    squares = kind == "block" and x.scaling.columns == SQUARE
    return *dy.col, *x.col, "square" if squares else kind


def _kernel(a: Quantized, b: Quantized) -> str | None:
    """How the kernels call the scales of two operands; None where none multiplies their codes."""
    return a.scaling.kernel if a.scaling.kernel == b.scaling.kernel else None


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
    left, right, ends = _tokens_first(dy, x, offs)
    if ends is None:
        return K.wide_mm(left.t(), right.t()).to(dtype)
    if left.dtype is dtype:
        return K.grouped_wgrad(left, right, ends)
    dw = left.new_empty(len(ends), left.shape[1], right.shape[1], dtype=torch.float32)
    K.grouped_wgrad_into(dw, left, right, ends, accumulate=False)
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
    left, right, ends = _tokens_first(dy, x, offs)
    K.grouped_wgrad_into(main_grad, left, right, ends, accumulate=accumulate)  # type: ignore[arg-type]


def _tokens_first(
    dy: Operand, x: Operand, offs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the columns of both stand for, tokens first, and where their groups end; of one operand in high precision
    and one quantized, the rows.
    """
    if isinstance(dy, Quantized) and isinstance(x, Quantized) and dy.col and x.col:
        turned = dy.scaling.hadamard == x.scaling.hadamard  # by both, which cancels
        left, right = _meet(*(values(q, "col") if turned else features(q) for q in (dy, x)))
        return left.t(), right.t(), None if offs is None else K.column_offs(offs)
    return *_meet(_stands_for(dy, "row"), _stands_for(x, "row")), offs


def _stands_for(t: Operand, layout: str) -> Tensor:
    """What an operand, or a weight, stands for: of another layout where that one is not there."""
    if not isinstance(t, Quantized):
        return t if layout == "row" else t.mT
    if getattr(t, layout) is None and layout == "col":
        return values(t, "row").mT
    return values(t, layout)


def _meet(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider dtype."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)
