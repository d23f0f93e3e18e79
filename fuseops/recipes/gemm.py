"""The three GEMMs of a linear op over quantized operands, dense or grouped.

fprop y = x w^T and dgrad dx = dy w read rows, wgrad dw = dy^T x reads columns. Where no kernel multiplies the codes,
the operands are expanded and the high-precision kernels multiply them: exact, since codes times scales of blocks, which
are powers of two or E4M3, are bfloat16 numbers. What such scales stand over, one float32 number a tensor or a group,
multiplies the product: before it is rounded, and of groups, whose GEMMs round, behind that, so twice. Scales of whole
tensors in FP8 are multiplied in float32. Two operands meet in the wider dtype of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops import kernels as K
from fuseops.kernels.tiles import FLOATS

from .numbers import Measuring, watching
from .operands import Operand
from .quantized import Factors, Quantized, factors, features, in_order, layout_of, scaled_tiles
from .scaling import SQUARE, VECTOR

TilesOf = Callable[[Tensor, int], Tensor | None]
"""Of the ends of groups and the number of columns: the tile table of a product over these."""


def fprop(
    x: Operand,
    weight: Operand,
    offs: Tensor | None = None,
    tiles: Tensor | None = None,
    name: str = "",
    bias: Tensor | None = None,
) -> Tensor:
    """y = x w^T (+ b).   (R, K), (N, K) or (E, N, K), (N,) -> (R, N)

    name: of the op, here and below, for who watches.  bias: without offs
    """
    y = _multiplied(x, weight, "row", offs, tiles, bias)
    if Measuring.numbers and (seen := watching()):
        seen.compare(name, "forward", y, partial(_exact, offs=offs, bias=bias), x, weight)
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
    if Measuring.numbers and (seen := watching()):
        seen.compare(name, "input gradient", dx, partial(_exact, offs=offs, turn=True), dy, weight)
    return dx


def _exact(
    rows: Tensor,
    weight: Tensor,
    offs: Tensor | None,
    turn: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """The product of what operands were."""
    rows, weight = rows.reshape(-1, rows.shape[-1]).float(), weight.float()
    weight = weight.mT if turn else weight
    if offs is not None:
        return K.grouped_mm(rows, weight, offs)
    return F.linear(rows, weight, None if bias is None else bias.float())


def _exact_wgrad(dy: Tensor, x: Tensor, offs: Tensor | None) -> Tensor:
    left, right = (t.reshape(-1, t.shape[-1]).float() for t in (dy, x))
    return left.t() @ right if offs is None else K.grouped_wgrad(left, right, offs)


def _multiplied(
    a: Operand,
    weight: Operand,
    layout: str,
    offs: Tensor | None,
    tiles: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """A product of rows with a weight, whose layout has the summed axis last, and the bias, which a kernel for codes in
    large blocks adds before it rounds.
    """
    if isinstance(a, Quantized) and isinstance(weight, Quantized) and a.dtype in FLOATS:
        codes, turned = a.row, weight.row if layout == "row" else weight.col
        other = weight.scaling if layout == "row" else weight.scaling.colwise or weight.scaling
        kind = other.kernel if other.kernel == a.scaling.kernel else None
        vectors = other.block == VECTOR  # which kernels read of rows alone
        if not vectors and kind is not None and codes is not None and turned is not None:
            bias = None if bias is None else bias.to(a.dtype)
            return K.fp8_mm(*codes, *turned, kind, offs, tiles, bias, a.dtype)
    y = _multiplied_otherwise(a, weight, layout, offs, tiles)
    return y if bias is None else y + bias.to(y.dtype)


def _multiplied_otherwise(
    a: Operand, weight: Operand, layout: str, offs: Tensor | None, tiles: Tensor | None
) -> Tensor:
    """The same where no kernel multiplies codes in large blocks."""
    if a.dtype in FLOATS and _small(a, "row", weight, layout):
        whole = _whole(a, "row", weight, layout, offs)  # type: ignore[arg-type]
        parts = *scaled_tiles(a, "row"), *scaled_tiles(weight, layout)  # type: ignore[arg-type]
        return K.micro_mm(*parts, offs, whole, a.dtype)
    if offs is None:
        return _dense(a, "row", _stands_for(weight, layout), a.dtype)
    return _grouped(a, weight, layout, offs, tiles)


STEP = 128
"""At multiples of so many features, and of sixteen times as many rows, products over groups are cut."""


def _grouped(
    a: Operand, weight: Operand, layout: str, offs: Tensor, tiles: Tensor | None
) -> Tensor:
    """`_multiplied` of groups. What codes stand for is there for some rows, and some of the weight's, at a time."""
    a = in_order(a) if isinstance(a, Quantized) else a
    many, others = _cut(a, "row", 16 * STEP), _cut(weight, layout, STEP)

    def of_rows(at: slice) -> Tensor:
        left, ends, table = _stands_for(_part(a, "row", at), "row"), offs, tiles
        if len(many) > 1:
            ends, table = (offs - at.start).clamp(0, at.stop - at.start), None
        parts = []
        for some in others:
            rows, right, whole = _meet(left, _stands_for(_part(weight, layout, some), layout))
            y = K.grouped_mm(rows, right, ends, table)
            if whole is not None:
                by_row = (
                    whole.expand(1) if whole.dim() == 0 else K.scale_of_row(whole, ends, len(y))
                )
                y.mul_(by_row[:, None])
            parts.append(y.to(a.dtype))
            del right
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    return K.by_pieces(many, of_rows)


def _cut(q: Operand, layout: str, step: int) -> list[slice]:
    """Where the rows of a layout are cut: those of codes that are expanded, with scales that lie as they do."""
    found = getattr(q, layout) if isinstance(q, Quantized) else None
    if found is None or q.scaling.of(layout).family.codes:  # type: ignore[union-attr]
        return [slice(0, None)]
    return K.pieces(found.data, step)


def _part(q: Operand, layout: str, piece: slice) -> Operand:
    """Some rows of a layout."""
    if piece.stop is None:
        return q
    (data, scale, *whole), high = getattr(q, layout), q.scaling.of(layout).grain[0]  # type: ignore[union-attr]
    some = slice(piece.start // high, -(-piece.stop // high))
    part = layout_of(data[..., piece, :], scale[..., some, :], *whole)
    return replace(q, **{layout: part})  # type: ignore[type-var]


def _small(a: Operand, layout: str, b: Operand, other: str) -> bool:
    """Whether kernels multiply the codes of these layouts, in small blocks."""
    if not (isinstance(a, Quantized) and isinstance(b, Quantized)):
        return False
    mine, yours = getattr(a, layout), getattr(b, other)
    if mine is None or yours is None or not K.multiplies(mine.data):
        return False
    forms = a.scaling.of(layout), b.scaling.of(other)
    return all(form.small for form in forms) and forms[0].scale is forms[1].scale


def _whole(
    a: Quantized, layout: str, b: Quantized, other: str, offs: Tensor | None
) -> Tensor | None:
    """The number over the blocks of both, of all or of each group.   -> (1,) or (E,), None where there is none"""
    found = [*getattr(a, layout)[2:], *getattr(b, other)[2:]]
    if not found:
        return None
    return math.prod(found[1:], start=found[0]).expand(1 if offs is None else len(offs))


def _dense(a: Operand, layout: str, right: Factors, dtype: torch.dtype) -> Tensor:
    """a @ right.T, rounded once. What codes stand for, and sums in float32, are there piece by piece."""
    found = a if isinstance(a, Tensor) else getattr(a, layout).data
    largest = found.new_empty(1).expand(found.shape[0], max(found.shape[1], right[0].shape[0]))
    a = in_order(a) if isinstance(a, Quantized) else a
    # scales that kernels read lie in another order
    whole = isinstance(a, Quantized) and a.scaling.of(layout).family.codes
    cut = [slice(0, None)] if whole else K.pieces(largest)

    def of_rows(at: slice) -> Tensor:
        part = a[at] if isinstance(a, Tensor) else _part(a, layout, at)
        left, other, factor = _meet(_stands_for(part, layout), right)
        summed = min(left.shape[1], other.shape[1])  # of tokens in columns, behind which are zeros
        product = K.wide_mm(left[:, :summed], other[:, :summed])
        return (product if factor is None else product * factor).to(dtype)

    return K.by_pieces(cut, of_rows)


def _columns(
    dy: Operand, x: Operand, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, str] | None:
    """Both columns with their scales, and how those lie, as the FP8 kernel takes them."""
    if not (isinstance(dy, Quantized) and isinstance(x, Quantized)) or dtype not in FLOATS:
        return None
    kind = (dy.scaling.colwise or dy.scaling).kernel
    if dy.col is None or x.col is None or kind is None or dy.scaling.columns != x.scaling.columns:
        return None
    if kind != (x.scaling.colwise or x.scaling).kernel:
        return None
    squares = kind == "block" and x.scaling.columns == SQUARE
    return *dy.col, *x.col, "square" if squares else kind


def wgrad(
    dy: Operand,
    x: Operand,
    dtype: torch.dtype,
    offs: Tensor | None = None,
    name: str = "",
    tiles_of: TilesOf | None = None,
) -> Tensor:
    """dw = dy^T x.   (R, N), (R, K) -> (N, K) or (E, N, K)      tiles_of: asked where a kernel reads a table"""
    dw = _wgrad(dy, x, dtype, offs, tiles_of)
    if Measuring.numbers and (seen := watching()):
        seen.compare(name, "weight gradient", dw, partial(_exact_wgrad, offs=offs), dy, x)
    return dw


def _wgrad(
    dy: Operand,
    x: Operand,
    dtype: torch.dtype,
    offs: Tensor | None,
    tiles_of: TilesOf | None = None,
) -> Tensor:
    columns = _columns(dy, x, dtype)
    if columns is not None:
        return K.fp8_wgrad(*columns, offs, _table(columns[0], offs, tiles_of), dtype)
    if dtype in FLOATS and _small(dy, "col", x, "col") and _same_columns(dy, x):
        parts = *scaled_tiles(dy, "col"), *scaled_tiles(x, "col")  # type: ignore[arg-type]
        return K.micro_wgrad(*parts, offs, _whole(dy, "col", x, "col", offs), dtype)  # type: ignore[arg-type]
    if offs is None and _same_columns(dy, x):
        return _dense(dy, "col", factors(x, "col"), dtype)  # type: ignore[arg-type]
    if offs is None:
        left, right, whole, _ = _tokens_first(dy, x, offs)
        return _dense(left.t(), "row", (right.t(), whole), dtype)
    if not _have_columns(dy, x):
        return _by_group(*_tokens_first(dy, x, offs), dtype)
    dy = in_order(dy)  # type: ignore[arg-type]
    same, ends = _same_columns(dy, x), K.column_offs(offs)
    side = _columns_stand_for(x, same)

    def of_features(at: slice) -> Tensor:
        left, right, whole = _meet(_columns_stand_for(_part(dy, "col", at), same), side)
        return _by_group(left.t(), right.t(), whole, ends, dtype)

    return K.by_pieces(_cut(dy, "col", STEP), of_features)


def _table(columns: Tensor, offs: Tensor | None, tiles_of: TilesOf | None) -> Tensor | None:
    return None if offs is None or tiles_of is None else tiles_of(offs, columns.shape[1])


def _by_group(
    left: Tensor, right: Tensor, whole: Tensor | None, ends: Any, dtype: torch.dtype
) -> Tensor:
    """The weight gradient of `_tokens_first`."""
    if left.dtype is dtype:
        dw = K.grouped_wgrad(left, right, ends)
    else:
        dw = left.new_empty(len(ends), left.shape[1], right.shape[1], dtype=torch.float32)
        K.grouped_wgrad_into(dw, left, right, ends, accumulate=False)
    if whole is not None:
        dw.mul_(whole.reshape(-1, 1, 1))
    return dw.to(dtype)


def wgrad_into(
    main_grad: Tensor,
    dy: Operand,
    x: Operand,
    offs: Tensor,
    accumulate: bool,
    name: str = "",
    tiles_of: TilesOf | None = None,
) -> None:
    """main_grad (+)= wgrad of groups, unrounded.   main_grad (E, N, K) float32

    Of squares what is overwritten may have another dtype, and be some rows or columns of larger matrices.
    """
    if Measuring.numbers and watching():
        wgrad(dy, x, torch.float32, offs, name)
    columns = _columns(dy, x, main_grad.dtype)
    if columns is not None:
        tiles = _table(columns[0], offs, tiles_of)
        K.fp8_wgrad_into(main_grad, *columns, offs, tiles, accumulate)
        return
    dw = _wgrad(dy, x, main_grad.dtype, offs)
    main_grad.add_(dw) if accumulate else main_grad.copy_(dw)


def _tokens_first(
    dy: Operand, x: Operand, offs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """What the columns of both stand for, tokens first, the factor of their product, and where their groups end; of
    one operand in high precision and one quantized, the rows.
    """
    if _have_columns(dy, x):
        same = _same_columns(dy, x)
        left, right, whole = _meet(*[_columns_stand_for(q, same) for q in (dy, x)])
        return left.t(), right.t(), whole, None if offs is None else K.column_offs(offs)
    left, right, whole = _meet(_stands_for(dy, "row"), _stands_for(x, "row"))
    if whole is not None and offs is not None and whole.dim() == 0:
        whole = whole.expand(len(offs))
    return left, right, whole, offs


def _same_columns(dy: Operand, x: Operand) -> bool:
    """Whether both have columns that went through a Hadamard transform, which cancels, or neither."""
    if not _have_columns(dy, x):
        return False
    return dy.scaling.of("col").hadamard == x.scaling.of("col").hadamard  # type: ignore[union-attr]


def _have_columns(*operands: Operand) -> bool:
    return all(isinstance(q, Quantized) and q.col is not None for q in operands)


def _columns_stand_for(q: Any, turned: bool) -> Factors:
    """turned: as they are, with the Hadamard transform that they may have gone through"""
    return factors(q, "col") if turned else (features(q), None)


def _stands_for(t: Operand, layout: str) -> Factors:
    """What an operand, or a weight, stands for, as `factors`: of another layout where that one is not there."""
    if not isinstance(t, Quantized):
        return t if layout == "row" else t.mT, None
    if getattr(t, layout) is None and layout == "col":
        found, whole = factors(t, "row")
        return found.mT, whole
    return factors(t, layout)


def _meet(a: Factors, b: Factors) -> tuple[Tensor, Tensor, Tensor | None]:
    """Both in the wider dtype, and what their product is to be multiplied by."""
    dtype, wholes = torch.promote_types(a[0].dtype, b[0].dtype), [a[1], b[1]]
    found = [whole for whole in wholes if whole is not None]
    return a[0].to(dtype), b[0].to(dtype), math.prod(found[1:], start=found[0]) if found else None
