"""How an FP8 GEMM is launched: as `grouped_launch`, with a plan for each kind of call.

A plan whose path is not "cooperative" launches nothing: its calls multiply dequantized operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuseops.kernels import configs, fp8_paths
from fuseops.kernels.grouped_launch import Check, count_place, first_entry, table_size
from fuseops.kernels.launch import Prepared, device, num_sms
from fuseops.kernels.plans import Again, Plan, kept, kind, misaligned, places, planned, rows_kind
from fuseops.kernels.tiles import cdiv

COOPERATIVE = "cooperative"
Multiply = Callable[..., Any]


def launch_mm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    scaling: str,
    offs: Tensor | None,
    tiles: Tensor | None,
    bias: Tensor | None,
    *,
    dtype: torch.dtype,
    fast: bool,
    otherwise: Multiply,
    check: Check | None = None,
) -> Any:
    """The output of `fp8_mm`; `otherwise` multiplies where the kernel does not. Of FP8 dtype (codes, scales)."""
    rows = x.shape[0]
    where = places(x, x_scale, weight, weight_scale, offs, tiles, bias)
    extra = None
    if offs is not None and tiles is not None:
        extra = tiles.dtype, tiles.shape[0] - table_size(rows, offs.numel())
    key = (
        "fp8_mm", x.device, x.dtype, x.shape[1:], x.stride(), *_scale_kind(x_scale, scaling, x.shape),
        kind(weight), kind(weight_scale), scaling, kind(offs), extra, kind(bias), dtype, fast,
        rows_kind(rows), where[0],
    )  # fmt: skip
    plan = planned.now.get(key)
    if plan is None:
        if check is not None:
            operands = check(x, x_scale, weight, weight_scale, scaling, offs, tiles, bias)
            return launch_mm(*operands, dtype=dtype, fast=fast, otherwise=otherwise)
        path = fp8_paths.mm_path(x, weight, dtype)
        plan = Plan(path, lambda *_: None)
        if path == COOPERATIVE:
            plan = _mm_plan(
                x, x_scale, weight, weight_scale, scaling, offs, tiles, bias, dtype, fast
            )
        planned.now[key] = plan
    if plan.path != COOPERATIVE:
        return otherwise(x, x_scale, weight, weight_scale, scaling, offs, tiles, bias, dtype)
    y = x.new_empty(rows, weight.shape[-2], dtype=dtype)
    y_scale = None
    if dtype.itemsize == 1:
        y_scale = x_scale.new_empty(weight.shape[-2] // 128, rows)
        where = *where, y_scale.data_ptr()
    plan(
        (*where, y.data_ptr(), rows),
        x, x_scale, weight, weight_scale, offs, tiles, bias, y, y_scale,
    )  # fmt: skip
    return y if y_scale is None else (y, y_scale)


def _scale_kind(scale: Tensor, scaling: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """`kind` of a scale of codes of this shape, whatever their number of rows, or of columns."""
    rows, blocks = shape[0], cdiv(shape[-1], 128)
    expected = {
        "block": (blocks, rows), "square": (cdiv(rows, 128), blocks), "row": (rows,)
    }.get(scaling)  # fmt: skip
    strides = tuple(step % 4 for step in scale.stride())  # what a descriptor asks for
    packed = scale.is_contiguous() or scale.stride()
    return scale.dtype, scale.shape == expected or scale.shape, packed, strides


def _mm_plan(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    scaling: str,
    offs: Tensor | None,
    tiles: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> Plan:
    n, k = weight.shape[-2:]
    groups, rows = 1 if offs is None else len(offs), x.shape[0]
    in_place = fast and scaling != "block"
    space = fp8_paths.MM_FAST if in_place else fp8_paths.MM
    config = space.pick(rows, (groups, n, k), x)
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    aligned = not misaligned(x, x_scale, weight, weight_scale, offs, tiles, bias)
    module, prepared = _prepared(
        config, aligned, WGRAD=False, GROUPED=offs is not None, SCALING=scaling, IN_PLACE=in_place,
        HAS_BIAS=bias is not None, ACCUMULATE=False,
    )  # fmt: skip
    x_of = kept(lambda x: module.describe_codes(x, block_m))
    w_of = kept(lambda w: module.describe_codes(w, block_n))
    y_of = kept(module.describe_rows)
    most, num_n, blocks = num_sms(x.device), cdiv(n, block_n), cdiv(k, 128)
    steps = int(x_scale.numel() > 1), int(weight_scale.numel() > 1)

    def run(
        x: Any,
        x_scale: Any,
        weight: Any,
        weight_scale: Any,
        offs: Any,
        tiles: Any,
        bias: Any,
        y: Any,
        y_scale: Any,
    ) -> Again | None:
        rows = x.shape[0]
        num_m = cdiv(rows, block_m) if offs is None else rows // block_m + groups
        table = (
            (0, 0)
            if offs is None
            else (first_entry(rows, groups, block_m), count_place(rows, groups, block_m))
        )
        out = y if dtype == torch.float32 else y_of(y)
        return prepared(
            (min(most, num_m * num_n),), y, x_of(x), w_of(weight), out, x_scale, weight_scale,
            _or(bias, y), _or(y_scale, y), _or(offs, y), _or(tiles, y), *table, rows, groups, rows, n, blocks,
            *steps,
        )  # fmt: skip

    return Plan(COOPERATIVE, run)


def launch_wgrad(
    dw: Tensor,
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    scaling: str,
    offs: Tensor | None,
    tiles: Tensor | None,
    *,
    accumulate: bool,
    otherwise: Callable[..., None],
    check: Check | None = None,
) -> None:
    """The weight gradient in dw, or added to a float32 one; `otherwise` where the kernel does not."""
    columns = dy.shape[-1]
    where = places(dw, dy, dy_scale, x, x_scale, offs, tiles)
    key = (
        "fp8_wgrad", kind(dw), dy.device, dy.dtype, x.dtype, dy.shape[:-1], x.shape[:-1],
        dy.is_contiguous() and x.is_contiguous(), x.shape[-1] - columns, columns % 128,
        *_scale_kind(dy_scale, scaling, dy.shape), *_scale_kind(x_scale, scaling, x.shape), scaling,
        kind(offs), None if tiles is None else (tiles.dtype, tiles.stride()), accumulate,
        rows_kind(columns), where[0],
    )  # fmt: skip
    plan = planned.now.get(key)
    if plan is None:
        if check is not None:
            operands = check(dw, dy, dy_scale, x, x_scale, scaling, offs, tiles)
            return launch_wgrad(*operands, accumulate=accumulate, otherwise=otherwise)
        path = fp8_paths.wgrad_path(dy, x, dw.dtype)
        plan = Plan(path, lambda *_: None)
        if path == COOPERATIVE:
            plan = _wgrad_plan(dw, dy, dy_scale, x, x_scale, scaling, offs, tiles, accumulate)
        planned.now[key] = plan
    if plan.path != COOPERATIVE:
        return otherwise(dw, dy, dy_scale, x, x_scale, scaling, offs, tiles, accumulate)
    plan((*where, columns), dw, dy, dy_scale, x, x_scale, offs, tiles)
    return None


def _wgrad_plan(
    dw: Tensor,
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    scaling: str,
    offs: Tensor | None,
    tiles: Tensor | None,
    accumulate: bool,
) -> Plan:
    n, k, columns = dy.shape[0], x.shape[0], dy.shape[1]
    groups, vectors = 1 if offs is None else len(offs), scaling == "block"
    space = fp8_paths.WGRAD
    if vectors:
        exact = dw.dtype == torch.float32
        space = fp8_paths.WGRAD_VECTORS_INTO if exact else fp8_paths.WGRAD_VECTORS
    config = space.pick(columns, (groups, n, k), x)
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    aligned = not misaligned(dw, dy, dy_scale, x, x_scale, offs, tiles)
    module, prepared = _prepared(
        config, aligned, WGRAD=True, GROUPED=offs is not None, SCALING=scaling, IN_PLACE=False,
        HAS_BIAS=False, ACCUMULATE=accumulate,
    )  # fmt: skip
    dy_of = kept(lambda t: module.describe_codes(t, block_m))
    x_of = kept(lambda t: module.describe_codes(t, block_n))
    dy_scales_of = kept(lambda s: module.describe_vectors(s, block_m))
    x_scales_of = kept(lambda s: module.describe_vectors(s, block_n))
    dw_of = kept(module.describe_weight)
    grid = (min(num_sms(x.device), groups * cdiv(n, block_m) * cdiv(k, block_n)),)
    steps = int(dy_scale.numel() > 1), int(x_scale.numel() > 1)

    def run(
        dw: Any, dy: Any, dy_scale: Any, x: Any, x_scale: Any, offs: Any, tiles: Any
    ) -> Again | None:
        columns = dy.shape[1]
        left = dy_scales_of(dy_scale) if vectors else dy_scale
        right = x_scales_of(x_scale) if vectors else x_scale
        out = dw if dw.dtype == torch.float32 else dw_of(dw)
        return prepared(
            grid, dw, dy_of(dy), x_of(x), out, left, right, dw, dw, _or(offs, dw), _or(tiles, dw), 2, 0,
            columns, groups, n, k, cdiv(columns, 128), *steps,
        )  # fmt: skip

    return Plan(COOPERATIVE, run)


def _prepared(config: configs.Config, aligned: bool, **options: Any) -> tuple[Any, Prepared]:
    module = device("fp8_gemm")
    kernel = module.fp8_gemm_kernel
    return module, Prepared(kernel, aligned, **options, **config, num_warps=4, maxnreg=168)


def _or(t: Tensor | None, other: Tensor) -> Tensor:
    """A tensor that the kernel does not look at, in place of None."""
    return other if t is None else t
