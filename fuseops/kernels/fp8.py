"""GEMMs of FP8 operands, dense or over rows sorted by group.

Maths: y[rows of e] = x[rows of e] @ weight[e].T (+ bias[e]);  dw[e] (+)= dy[:, columns of e] @ x[:, columns of e].T,
where each operand is its codes times their scales. With blocks and squares the tensor cores sum 128 products, with
about 14 bits, and float32 sums take them in, scaled; "row" and "tensor" are scaled at the store. Fixed order: bits
repeat. Rounded once at the store.
Shapes: x (R, K), weight (E, N, K) or, without offs, (N, K); y (R, N); offs (E,) int32 row ends on the device. Codes are
contiguous along K, which is what is summed. The gradient of x is `fp8_mm` of dy and the transposed codes of the weight.

    scaling     scale of rows          scale of the weight                       scale of columns (N, C)
    block       (ceil(K/128), R)       (E, ceil(N/128), ceil(K/128))             (ceil(C/128), N)
    square      -                      -                                         (ceil(N/128), ceil(C/128))
    row         (R,)                   (E, N)                                    -
    tensor      () or (E,)             () or (E,)                                () or (E,)

Columns, of a weight gradient, are the transpose of rows: those of group e begin at (offs[e-1] // 128 + e) * 128, so
C = (R // 128 + E) * 128, and what belongs to no row up to the next multiple of 128 is zero. Without offs, C is R.
Dtypes: codes e4m3, or e5m2; scales float32, of blocks and squares powers of two; y and dw bf16, fp16 or float32.
Padding rows (at or beyond offs[-1]) give zero and are never read into a result; an empty group gives zero.
Hardware: `fp8_paths` says which kernel runs; without one, operands are dequantized and the kernels of `grouped`
multiply them. No look at `offs` on the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels.formats import E4M3, dequantize_format
from fuseops.kernels.fp8_launch import (
    AddedColumns,
    RoundedColumns,
    RoundedProduct,
    ScaledColumns,
    ScaledProduct,
    checked_mm,
    checked_wgrad,
    launch_mm,
    launch_wgrad,
)
from fuseops.kernels.fp8_paths import COOPERATIVE, mm_path, wgrad_path
from fuseops.kernels.grouped import add_or_write, gemm_op, grouped_mm, grouped_wgrad_into, one_group
from fuseops.kernels.grouped_launch import table_size
from fuseops.kernels.groups import BLOCK, column_bounds, column_offs
from fuseops.kernels.quantize import quantize_vectors
from fuseops.kernels.records import of_fields
from fuseops.kernels.registry import Cases, floats, ints, on_meta
from fuseops.kernels.scales import spread_over_groups
from fuseops.kernels.tiles import FLOATS, cdiv

BLOCKS = {"block": (1, BLOCK), "square": (BLOCK, BLOCK)}


def dequantize(
    codes: Tensor, scale: Tensor, scaling: str, dtype: torch.dtype = torch.float32
) -> Tensor:
    """codes (..., R, K) times their scales: of a "block" (ceil(K/128), R), of a "square" (..., ceil(R/128),
    ceil(K/128)), of a "row" (..., R), or of a "tensor", one or one for each of the leading axis. In bf16 this is
    exact for scales that are powers of two.
    """
    if scaling in BLOCKS:
        scale = scale.mT if scaling == "block" else scale
        return dequantize_format(codes, scale, codes.dtype, BLOCKS[scaling], dtype)
    scale = scale.to(dtype)
    if scaling == "row":
        scale = scale.unsqueeze(-1)
    elif scale.numel() > 1:
        scale = scale[:, None, None]
    return codes.to(dtype) * scale


def _fp8_mm(p: RoundedProduct) -> Tensor:
    return _dequantized_mm(p, p.dtype, torch.float32, grouped_mm.twin)


def _fp8_mm_operand(p: ScaledProduct) -> tuple[Tensor, Tensor]:
    data, scale = quantize_vectors.twin(_fp8_mm(RoundedProduct(*p)), E4M3)
    return data, scale


def _fp8_wgrad(g: RoundedColumns) -> Tensor:
    by_tensor = g.scaling == "tensor"
    left, right = (
        codes.float() if by_tensor else dequantize(codes, scale, g.scaling)
        for codes, scale in ((g.dy, g.dy_scale), (g.x, g.x_scale))
    )
    if g.offs is None:
        dw = left @ right.t()
    else:
        dw = torch.stack([left[:, a:b] @ right[:, a:b].t() for a, b in column_bounds(g.offs)])
    if by_tensor:  # scales first, as the kernel has it: codes times one of them may be out of range
        both = g.dy_scale * g.x_scale
        dw *= both if g.offs is None else both.reshape(-1, 1, 1)
    return dw.to(g.dtype)


def _fp8_wgrad_into(main_grad: Tensor, g: AddedColumns) -> None:
    operands = g.dy, g.dy_scale, g.x, g.x_scale, g.scaling, g.offs, None
    add_or_write(main_grad, _fp8_wgrad(RoundedColumns(*operands, torch.float32)), g.accumulate)


def _product(p: RoundedProduct) -> Tensor:
    return p.x.new_empty(p.x.shape[0], p.weight.shape[-2], dtype=p.dtype)


def _codes_of(p: ScaledProduct) -> tuple[Tensor, Tensor]:
    rows, n = p.x.shape[0], p.weight.shape[-2]
    return p.x.new_empty(rows, n, dtype=E4M3), p.x_scale.new_empty(cdiv(n, 128), rows)


def _weight_grad(g: RoundedColumns) -> Tensor:
    groups = () if g.offs is None else g.offs.shape
    return g.x.new_empty(*groups, g.dy.shape[0], g.x.shape[0], dtype=g.dtype)


def _mm_flops(x: Tensor, x_scale: Tensor, weight: Tensor, *_: Any) -> int:
    """The FLOPs of all rows, padding included, since offs is not read."""
    return 2 * x.numel() * weight.shape[-2]


def _wgrad_flops(dy: Tensor, dy_scale: Tensor, x: Tensor, *_: Any) -> int:
    return 2 * dy.numel() * x.shape[0]


_codes = functools.partial(on_meta, dtype=torch.float8_e4m3fn)


def _mm_cases() -> Cases:
    e, rows, n, k = 8, 16384, 4096, 2048
    offs, tiles = ints(e), ints(table_size(rows, e))
    x, w = _codes(rows, k), _codes(e, n, k)
    vectors, squares = floats(k // 128, rows), (n // 128, k // 128)
    bias = on_meta(e, n)
    blocks = x, vectors, w, floats(e, *squares), "block"
    for dtype in FLOATS:
        yield *blocks, offs, tiles, None, dtype
    yield *blocks, offs, tiles, bias
    yield _codes(rows, k, dtype=torch.float8_e5m2), *blocks[1:], offs, tiles
    dense = x, vectors, w[0], floats(*squares), "block"
    yield dense
    yield *dense, None, None, bias[0]
    for fast in (False, True):
        yield x, floats(), w, floats(e), "tensor", offs, tiles, None, torch.bfloat16, fast
        yield x, floats(), w[0], floats(), "tensor", None, None, None, torch.bfloat16, fast
        yield x, floats(), w[0], floats(), "tensor", None, None, bias[0], torch.bfloat16, fast
        yield x, floats(rows), w, floats(e, n), "row", offs, tiles, None, torch.bfloat16, fast


def _wgrad_cases() -> Cases:
    e, columns, n, k = 8, 17408, 4096, 2048
    offs, tiles = ints(e), ints(4096)
    dy, x, blocks = _codes(n, columns), _codes(k, columns), columns // 128
    squares = dy, floats(n // 128, blocks), x, floats(k // 128, blocks), "square"
    yield *squares, offs, tiles
    yield squares
    yield dy, floats(blocks, n), x, floats(blocks, k), "block", offs, tiles
    yield dy, floats(e), x, floats(e), "tensor", offs, tiles
    yield dy, floats(), x, floats(), "tensor"
    yield _codes(n, columns, dtype=torch.float8_e5m2), *squares[1:], offs, tiles


def _into_cases() -> Cases:
    for case in _wgrad_cases():
        main_grad, g = floats(*_weight_grad(RoundedColumns(*case)).shape), ScaledColumns(*case)
        yield main_grad, *g, True
        if g.scaling == "square":
            yield main_grad, *g, False


def _codes_cases() -> Cases:
    for case in _mm_cases():
        *operands, dtype, fast = RoundedProduct(*case)
        if operands[4] == "block" and dtype == torch.bfloat16 and not fast:
            yield tuple(operands)


@gemm_op(twin=_fp8_mm, fake=_product, flops=_mm_flops, cases=_mm_cases)
@of_fields(RoundedProduct)
def fp8_mm(given: RoundedProduct) -> Tensor:
    """x[rows of e] @ weight[e].T (+ bias[e]), padding rows zero.   -> (R, N) of `dtype`"""
    p = checked_mm(given)
    if mm_path(p.x, p.weight, given.dtype) != COOPERATIVE:
        return _dequantized_mm(p, given.dtype, _exact_dtype(p.scaling, given.dtype), grouped_mm)
    y = _product(given)
    launch_mm(p, y, fast=given.fast)
    return y


@gemm_op(twin=_fp8_mm_operand, fake=_codes_of, flops=_mm_flops, cases=_codes_cases)
@of_fields(ScaledProduct)
def fp8_mm_operand(p: ScaledProduct) -> tuple[Tensor, Tensor]:
    """`fp8_mm` in bf16, as e4m3 codes (R, N) with a power of two for 128 columns of a row (ceil(N/128), R)."""
    p = checked_mm(p)
    if mm_path(p.x, p.weight, E4M3) != COOPERATIVE:
        inner = _exact_dtype(p.scaling, torch.bfloat16)
        data, scale = quantize_vectors(_dequantized_mm(p, torch.bfloat16, inner, grouped_mm), E4M3)
        return data, scale
    y, y_scale = _codes_of(p)
    launch_mm(p, y, y_scale)
    return y, y_scale


@gemm_op(twin=_fp8_wgrad, fake=_weight_grad, flops=_wgrad_flops, cases=_wgrad_cases)
@of_fields(RoundedColumns)
def fp8_wgrad(g: RoundedColumns) -> Tensor:
    """dy[:, columns of e] @ x[:, columns of e].T.   (N, C), (K, C) -> (E, N, K), or (N, K) without offs"""
    dw = _weight_grad(g)
    _write_wgrad(dw, g, False)
    return dw


@gemm_op(
    twin=_fp8_wgrad_into,
    flops=lambda main_grad, *columns: _wgrad_flops(*columns),
    mutates=("main_grad",),
    cases=_into_cases,
)
@of_fields(AddedColumns)
def fp8_wgrad_into(main_grad: Tensor, g: AddedColumns) -> None:
    """Add `fp8_wgrad` to the float32 `main_grad` unrounded, or overwrite it.

    What is overwritten may have another dtype, and be some rows or columns of larger matrices.
    """
    rounded = not g.accumulate and main_grad.dtype in FLOATS and main_grad.stride(-1) == 1
    if not rounded and (main_grad.dtype != torch.float32 or not main_grad.is_contiguous()):
        raise FuseOpsError(
            f"main_grad is {main_grad.dtype} with strides {main_grad.stride()}, "
            "expected a contiguous float32 buffer."
        )
    _write_wgrad(main_grad, g, g.accumulate)


def _write_wgrad(dw: Tensor, g: ScaledColumns, accumulate: bool) -> None:
    """Write or add the gradient to dw."""
    g = checked_wgrad(dw, g)
    if wgrad_path(g.dy, g.x, dw.dtype) == COOPERATIVE and _describable(dw):
        launch_wgrad(dw, g, accumulate)
    else:
        _dequantized_wgrad(dw, g, accumulate)


def _describable(dw: Tensor) -> bool:
    """Whether a descriptor can describe dw: aligned to 16 bytes, and contiguous if float32, which is added to."""
    if dw.data_ptr() % 16:
        return False
    if dw.is_contiguous():
        return True
    return dw.dtype != torch.float32 and not any(s * dw.itemsize % 16 for s in dw.stride()[:-1])


# --- by dequantized operands: on other hardware, and for sizes that no descriptor takes


def _dequantized_mm(
    p: ScaledProduct, dtype: torch.dtype, inner: torch.dtype, product: Callable[..., Tensor]
) -> Tensor:
    """`fp8_mm` of operands that are dequantized to the dtype `inner`.   product: of groups"""
    if p.scaling == "tensor" and p.x_scale.numel() > 1:  # one a group
        left = dequantize(p.x, spread_over_groups(p.x_scale, p.offs, len(p.x)), "row", inner)
    else:
        left = dequantize(p.x, p.x_scale, p.scaling, inner)
    of_weight = "square" if p.scaling == "block" else p.scaling
    right = dequantize(p.weight, p.weight_scale, of_weight, inner)
    bias = None if p.bias is None else p.bias.to(inner)
    if p.offs is None:
        return torch.nn.functional.linear(left, right, bias).to(dtype)
    return product(left, right, p.offs, p.tiles, bias).to(dtype)


def _dequantized_wgrad(dw: Tensor, g: ScaledColumns, accumulate: bool) -> None:
    """`fp8_wgrad` of dequantized operands, in dw."""
    by_tensor = g.scaling == "tensor"
    inner = _exact_dtype("square" if by_tensor else g.scaling, dw.dtype)
    left, right = (
        codes.to(inner) if by_tensor else dequantize(codes, scale, g.scaling, inner)
        for codes, scale in ((g.dy, g.dy_scale), (g.x, g.x_scale))
    )
    ends = one_group(g.dy.shape[1], g.dy)[0] if g.offs is None else column_offs(g.offs)
    total = dw.new_empty(len(ends), *dw.shape[-2:], dtype=torch.float32)
    grouped_wgrad_into(total, left.t(), right.t(), ends, None, False)
    if by_tensor:
        total *= (g.dy_scale * g.x_scale).reshape(-1, 1, 1)
    add_or_write(dw, total.view(dw.shape), accumulate)


def _exact_dtype(scaling: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which codes times scales are exact, and in which the result is rounded as the kernel's."""
    pow2 = scaling in ("block", "square")
    return torch.bfloat16 if pow2 and dtype in (torch.bfloat16, torch.float32) else torch.float32
