"""The three GEMMs of a linear op over quantized operands, dense or grouped.

fprop y = x w^T and dgrad dx = dy w read rows, wgrad dw = dy^T x reads columns. Where no kernel multiplies the codes,
the operands are dequantized in chunks and high-precision kernels multiply them. That is exact for block scales, which
are powers of two or E4M3: code times scale is a bfloat16 number. A global scale (the second, float32 scale of a tensor
or a group) multiplies the product: before it is rounded in a dense GEMM, after that in a grouped one, which rounds its
result twice. The scale of a tensor-scaled FP8 operand is multiplied in float32. Operands of two dtypes are promoted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops import kernels as K
from fuseops.kernels.tiles import FLOATS

from .numerics import UNNAMED, OpName, QuantizationStats, active_stats
from .operands import Operand
from .quantized import (
    Factors,
    Layout,
    Quantized,
    dequantize_columns,
    factors,
    swizzled_operand,
    unswizzle,
)
from .scaling import SQUARE, VECTOR

TilesOf = Callable[[Tensor, int], Tensor | None]
"""From the ends of the groups and the number of columns to the tile table of a product over them."""


def fprop(
    x: Operand,
    weight: Operand,
    offs: Tensor | None = None,
    tiles: Tensor | None = None,
    name: OpName = UNNAMED,
    bias: Tensor | None = None,
) -> Tensor:
    """y = x w^T (+ b).   (R, K), (N, K) or (E, N, K), (N,) -> (R, N)

    name: of the op, here and below, for `fuseops.debug`.  bias: without offs
    """
    y = _matmul(x, weight, "row", offs, tiles, bias)
    if QuantizationStats.active and (stats := active_stats()):
        stats.record_gemm(name, "forward", y, partial(_exact_mm, offs=offs, bias=bias), x, weight)
    return y


def dgrad(
    dy: Operand,
    weight: Operand,
    offs: Tensor | None = None,
    tiles: Tensor | None = None,
    name: OpName = UNNAMED,
) -> Tensor:
    """dx = dy w.   (R, N), (N, K) or (E, N, K) -> (R, K)"""
    dx = _matmul(dy, weight, "col", offs, tiles)
    if QuantizationStats.active and (stats := active_stats()):
        stats.record_gemm(
            name, "input gradient", dx, partial(_exact_mm, offs=offs, transpose=True), dy, weight
        )
    return dx


def _exact_mm(
    rows: Tensor,
    weight: Tensor,
    offs: Tensor | None,
    transpose: bool = False,
    bias: Tensor | None = None,
) -> Tensor:
    """The product in float32 of the operands before they were quantized."""
    rows, weight = rows.reshape(-1, rows.shape[-1]).float(), weight.float()
    weight = weight.mT if transpose else weight
    if offs is not None:
        return K.grouped_mm(rows, weight, offs)
    return F.linear(rows, weight, None if bias is None else bias.float())


def _exact_wgrad(dy: Tensor, x: Tensor, offs: Tensor | None) -> Tensor:
    left, right = (t.reshape(-1, t.shape[-1]).float() for t in (dy, x))
    return left.t() @ right if offs is None else K.grouped_wgrad(left, right, offs)


def _matmul(
    a: Operand,
    weight: Operand,
    layout: str,
    offs: Tensor | None,
    tiles: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:
    """a @ w^T (+ bias) over the rows of a and the layout of the weight that has the summed axis last.

    The FP8 kernel adds the bias before it rounds, the fallback after that.
    """
    if isinstance(a, Quantized) and isinstance(weight, Quantized) and a.dtype in FLOATS:
        codes, weight_codes = a.row, weight.row if layout == "row" else weight.col
        scaling = weight.scaling if layout == "row" else weight.scaling.colwise or weight.scaling
        kind = scaling.gemm_kind if scaling.gemm_kind == a.scaling.gemm_kind else None
        vectors = scaling.block == VECTOR  # the kernel takes these of `a` only
        if not vectors and kind is not None and codes is not None and weight_codes is not None:
            bias = None if bias is None else bias.to(a.dtype)
            return K.fp8_mm(*codes[:2], *weight_codes[:2], kind, offs, tiles, bias, a.dtype)
    y = _matmul_fallback(a, weight, layout, offs, tiles)
    return y if bias is None else y + bias.to(y.dtype)


def _matmul_fallback(
    a: Operand, weight: Operand, layout: str, offs: Tensor | None, tiles: Tensor | None
) -> Tensor:
    """`_matmul` without bias by the micro kernel, or over dequantized operands."""
    if a.dtype in FLOATS and _micro_kernel_takes(a, "row", weight, layout):
        global_scale = _global_scale(a, "row", weight, layout, offs)  # type: ignore[arg-type]
        parts = *swizzled_operand(a, "row"), *swizzled_operand(weight, layout)  # type: ignore[arg-type]
        return K.micro_mm(*parts, offs, global_scale, a.dtype)
    if offs is None:
        return _dense_matmul(a, "row", _dequantized_layout(weight, layout), a.dtype)
    return _grouped_matmul(a, weight, layout, offs, tiles)


CHUNK = 128
"""The granularity of chunks of features in a grouped GEMM; chunks of rows have sixteen times that."""


def _grouped_matmul(
    a: Operand, weight: Operand, layout: str, offs: Tensor, tiles: Tensor | None
) -> Tensor:
    """`_matmul` over groups, of which one chunk of a and one of the weight are dequantized at a time."""
    a = unswizzle(a) if isinstance(a, Quantized) else a
    row_chunks, weight_chunks = _chunks(a, "row", 16 * CHUNK), _chunks(weight, layout, CHUNK)

    def chunk_product(chunk: slice) -> Tensor:
        left, ends, table = _dequantized_layout(_slice_rows(a, "row", chunk), "row"), offs, tiles
        if len(row_chunks) > 1:
            ends, table = (offs - chunk.start).clamp(0, chunk.stop - chunk.start), None
        parts = []
        for features in weight_chunks:
            part = _slice_rows(weight, layout, features)
            rows, right, scale = _promote(left, _dequantized_layout(part, layout))
            y = K.grouped_mm(rows, right, ends, table)
            if scale is not None:
                by_row = (
                    scale.expand(1)
                    if scale.dim() == 0
                    else K.spread_over_groups(scale, ends, len(y), 0.0)
                )
                y.mul_(by_row[:, None])
            parts.append(y.to(a.dtype))
            del right
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    return K.by_pieces(row_chunks, chunk_product)


def _chunks(q: Operand, layout: str, step: int) -> list[slice]:
    """The slices of a layout's rows that are dequantized at a time: one of all rows unless their scales can be cut."""
    codes = getattr(q, layout) if isinstance(q, Quantized) else None
    if codes is None or q.scaling.of(layout).family.has_gemm:  # type: ignore[union-attr]
        return [slice(0, None)]
    return K.pieces(codes.data, step)


def _slice_rows(q: Operand, layout: str, chunk: slice) -> Operand:
    """A slice of the rows of one layout, with their scales."""
    if chunk.stop is None:
        return q
    (data, scale, whole), height = getattr(q, layout), q.scaling.of(layout).code_block[0]  # type: ignore[union-attr]
    blocks = slice(chunk.start // height, -(-chunk.stop // height))
    part = Layout(data[..., chunk, :], scale[..., blocks, :], whole)
    return replace(q, **{layout: part})  # type: ignore[type-var]


def _micro_kernel_takes(a: Operand, a_name: str, b: Operand, b_name: str) -> bool:
    """Whether the kernel for micro blocks multiplies these layouts of a and b."""
    if not (isinstance(a, Quantized) and isinstance(b, Quantized)):
        return False
    a_layout, b_layout = getattr(a, a_name), getattr(b, b_name)
    if a_layout is None or b_layout is None or not K.multiplies(a_layout.data):
        return False
    formats = a.scaling.of(a_name), b.scaling.of(b_name)
    return all(fmt.is_micro for fmt in formats) and formats[0].scale is formats[1].scale


def _global_scale(
    a: Quantized, a_name: str, b: Quantized, b_name: str, offs: Tensor | None
) -> Tensor | None:
    """The product of the global scales of both operands, None where they have none.   -> (1,), or (E,) over groups"""
    scale = _product(getattr(a, a_name).whole, getattr(b, b_name).whole)
    return None if scale is None else scale.expand(K.num_groups(offs) or 1)


def _dense_matmul(a: Operand, layout: str, right: Factors, dtype: torch.dtype) -> Tensor:
    """a @ right.T, rounded once. Dequantized rows and float32 sums exist for one chunk of rows at a time."""
    codes = a if isinstance(a, Tensor) else getattr(a, layout).data
    largest = codes.new_empty(1).expand(codes.shape[0], max(codes.shape[1], right[0].shape[0]))
    a = unswizzle(a) if isinstance(a, Quantized) else a
    # scales that the FP8 kernel reads are transposed, so `_slice_rows` cannot cut them
    one_chunk = isinstance(a, Quantized) and a.scaling.of(layout).family.has_gemm
    chunks = [slice(0, None)] if one_chunk else K.pieces(largest)

    def chunk_product(chunk: slice) -> Tensor:
        part = a[chunk] if isinstance(a, Tensor) else _slice_rows(a, layout, chunk)
        left, other, scale = _promote(_dequantized_layout(part, layout), right)
        summed = min(left.shape[1], other.shape[1])  # columns may end in padding, which is zeros
        product = K.wide_mm(left[:, :summed], other[:, :summed])
        return (product if scale is None else product * scale).to(dtype)

    return K.by_pieces(chunks, chunk_product)


def _fp8_wgrad_operands(
    dy: Operand, x: Operand, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, str] | None:
    """The columns of both with their scales, and the kind of those, for the FP8 kernel; None where it takes neither."""
    if not (isinstance(dy, Quantized) and isinstance(x, Quantized)) or dtype not in FLOATS:
        return None
    kind = (dy.scaling.colwise or dy.scaling).gemm_kind
    if dy.col is None or x.col is None or kind is None or dy.scaling.columns != x.scaling.columns:
        return None
    if kind != (x.scaling.colwise or x.scaling).gemm_kind:
        return None
    squares = kind == "block" and x.scaling.columns == SQUARE
    return *dy.col[:2], *x.col[:2], "square" if squares else kind


def wgrad(
    dy: Operand,
    x: Operand,
    dtype: torch.dtype,
    offs: Tensor | None = None,
    name: OpName = UNNAMED,
    tiles_of: TilesOf | None = None,
) -> Tensor:
    """dw = dy^T x.   (R, N), (R, K) -> (N, K) or (E, N, K)      tiles_of: called where a kernel reads a tile table"""
    dw = _wgrad(dy, x, dtype, offs, tiles_of)
    if QuantizationStats.active and (stats := active_stats()):
        stats.record_gemm(name, "weight gradient", dw, partial(_exact_wgrad, offs=offs), dy, x)
    return dw


def _wgrad(
    dy: Operand,
    x: Operand,
    dtype: torch.dtype,
    offs: Tensor | None,
    tiles_of: TilesOf | None = None,
) -> Tensor:
    columns = _fp8_wgrad_operands(dy, x, dtype)
    if columns is not None:
        return K.fp8_wgrad(*columns, offs, _tile_table(columns[0], offs, tiles_of), dtype)
    if dtype in FLOATS and _micro_kernel_takes(dy, "col", x, "col") and _same_hadamard(dy, x):
        parts = *swizzled_operand(dy, "col"), *swizzled_operand(x, "col")  # type: ignore[arg-type]
        return K.micro_wgrad(*parts, offs, _global_scale(dy, "col", x, "col", offs), dtype)  # type: ignore[arg-type]
    if not _have_columns(dy, x):
        return _wgrad_of_rows(dy, x, dtype, offs)
    keep_hadamard = _same_hadamard(dy, x)
    if offs is None and keep_hadamard:
        return _dense_matmul(dy, "col", factors(x, "col"), dtype)  # type: ignore[arg-type]
    right_columns = _dequantized_columns(x, keep_hadamard)
    if offs is None:
        return _dense_matmul(_dequantized_columns(dy, False)[0], "row", right_columns, dtype)
    dy, ends = unswizzle(dy), K.column_offs(offs)  # type: ignore[arg-type]

    def chunk_dw(chunk: slice) -> Tensor:
        left_columns = _dequantized_columns(_slice_rows(dy, "col", chunk), keep_hadamard)
        left, right, scale = _promote(left_columns, right_columns)
        return _grouped_wgrad(left.t(), right.t(), scale, ends, dtype)

    return K.by_pieces(_chunks(dy, "col", CHUNK), chunk_dw)


def _tile_table(columns: Tensor, offs: Tensor | None, tiles_of: TilesOf | None) -> Tensor | None:
    return None if offs is None or tiles_of is None else tiles_of(offs, columns.shape[1])


def _grouped_wgrad(
    left: Tensor, right: Tensor, scale: Tensor | None, ends: Any, dtype: torch.dtype
) -> Tensor:
    """scale * left^T right for each group, of which the rows end at `ends`."""
    if left.dtype is dtype:
        dw = K.grouped_wgrad(left, right, ends)
    else:
        dw = left.new_empty(len(ends), left.shape[1], right.shape[1], dtype=torch.float32)
        K.grouped_wgrad_into(dw, left, right, ends, accumulate=False)
    if scale is not None:
        dw.mul_(scale.reshape(-1, 1, 1))
    return dw.to(dtype)


def wgrad_into(
    main_grad: Tensor,
    dy: Operand,
    x: Operand,
    offs: Tensor,
    accumulate: bool,
    name: OpName = UNNAMED,
    tiles_of: TilesOf | None = None,
) -> None:
    """main_grad (+)= wgrad of groups, unrounded.   main_grad (E, N, K) float32

    Without `accumulate`, and with columns in squares, main_grad may have another dtype and be a strided slice.
    """
    if QuantizationStats.active and active_stats():
        wgrad(dy, x, torch.float32, offs, name)
    columns = _fp8_wgrad_operands(dy, x, main_grad.dtype)
    if columns is not None:
        tiles = _tile_table(columns[0], offs, tiles_of)
        K.fp8_wgrad_into(main_grad, *columns, offs, tiles, accumulate)
        return
    dw = _wgrad(dy, x, main_grad.dtype, offs)
    main_grad.add_(dw) if accumulate else main_grad.copy_(dw)


def _wgrad_of_rows(dy: Operand, x: Operand, dtype: torch.dtype, offs: Tensor | None) -> Tensor:
    """`_wgrad` where an operand has no columns: both are dequantized from their rows."""
    left, right, scale = _promote(_dequantized_layout(dy, "row"), _dequantized_layout(x, "row"))
    if offs is None:
        return _dense_matmul(left.t(), "row", (right.t(), scale), dtype)
    if scale is not None and scale.dim() == 0:
        scale = scale.expand(len(offs))
    return _grouped_wgrad(left, right, scale, offs, dtype)


def _same_hadamard(dy: Operand, x: Operand) -> bool:
    """Whether the columns of both went through a Hadamard transform, which cancels in the product, or of neither."""
    return dy.scaling.of("col").hadamard == x.scaling.of("col").hadamard  # type: ignore[union-attr]


def _have_columns(*operands: Operand) -> bool:
    return all(isinstance(q, Quantized) and q.col is not None for q in operands)


def _dequantized_columns(q: Any, keep_hadamard: bool) -> Factors:
    """The dequantized columns, before or after the inverse of their Hadamard transform."""
    return factors(q, "col") if keep_hadamard else (dequantize_columns(q), None)


def _dequantized_layout(t: Operand, layout: str) -> Factors:
    """One layout of an operand or a weight, dequantized as by `factors`; columns may come from the rows."""
    if not isinstance(t, Quantized):
        return t if layout == "row" else t.mT, None
    if getattr(t, layout) is None and layout == "col":
        rows, scale = factors(t, "row")
        return rows.mT, scale
    return factors(t, layout)


def _promote(a: Factors, b: Factors) -> tuple[Tensor, Tensor, Tensor | None]:
    """Both in the wider dtype, and the scale of their product."""
    dtype = torch.promote_types(a[0].dtype, b[0].dtype)
    return a[0].to(dtype), b[0].to(dtype), _product(a[1], b[1])


def _product(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The product of two scales, either of which may be missing."""
    return b if a is None else a if b is None else a * b
