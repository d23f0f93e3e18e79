"""Grouped GEMMs over rows sorted by group, with the boundaries on the device: nothing asks the host.

Maths: y[rows of e] = x[rows of e] @ weight[e].T (+ bias[e]);  dw[e] (+)= dy[rows of e].T @ x[rows of e]
Accumulated in float32 in a fixed order, rounded once at the store: bits repeat. Padding rows (at or
beyond offs[-1]) give zero in y and are never read by dw; an empty group gives zero (or adds none).
Shapes: x (R, K), weight (E, N, K), bias (E, N), dy and y (R, N), dw (E, N, K), offs (E,) int32 row
ends on the device. With an index an operand may have any number of rows: its row r is its row
index[r], and the indices of padding rows are never read. The gradient of x is
`grouped_mm(dy, weight.transpose(1, 2), offs)`.
Layout: any strides; axes that no descriptor can describe are read by pointers, and a weight or rows
without a contiguous axis are copied. No alignment of groups, N or K.
Dtypes: bf16, fp16, float32 (in tf32 where `torch.backends.cuda.matmul.allow_tf32`).
Launches: the tile table, shared by all GEMMs over the same offs (`tiles=`), and the GEMM.
Hardware: sm_80 and later; `grouped_launch` says which kernel runs. The reference loop reads `offs`,
so traced code and fake tensors see the registered ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels import reference
from fuseops.kernels.grouped_launch import launch_mm, launch_tiles, launch_wgrad, table_size
from fuseops.kernels.reference.grouped import group_of_row
from fuseops.kernels.registry import kernel_op
from fuseops.kernels.tiles import as_rows

MAX_GROUPS = 1 << 11
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _tiles_fake(offs: Tensor, rows: int) -> Tensor:
    return offs.new_empty(table_size(rows, len(offs)))


def _mm_fake(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    tiles: Tensor | None = None,
    bias: Tensor | None = None,
    index: Tensor | None = None,
) -> Tensor:
    return x.new_empty((x if index is None else index).shape[0], weight.shape[1])


def _wgrad_fake(
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    tiles: Tensor | None = None,
    dy_index: Tensor | None = None,
    x_index: Tensor | None = None,
) -> Tensor:
    return x.new_empty(offs.shape[0], dy.shape[1], x.shape[1])


def _mm_flops(
    x: Any, weight: Any, offs: Any, tiles: Any = None, bias: Any = None, index: Any = None, **_: Any
) -> int:
    """Every row counts once, padding too: the counter sees shapes."""
    return int(2 * (index or x)[0] * x[1] * weight[1])


def _wgrad_flops(
    dy: Any, x: Any, offs: Any, tiles: Any = None, dy_index: Any = None, x_index: Any = None,
    **_: Any,
) -> int:  # fmt: skip
    return int(2 * (x_index or x)[0] * x[1] * dy[1])


def _add_flops(
    main_grad: Any, dy: Any, x: Any, offs: Any, tiles: Any = None, accumulate: bool = True,
    dy_index: Any = None, x_index: Any = None, **_: Any,
) -> int:  # fmt: skip
    return _wgrad_flops(dy, x, offs, tiles, dy_index, x_index)


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _offs(groups: int) -> Tensor:
    return _meta(groups, dtype=torch.int32)


def _tiles_cases() -> Iterator[tuple[Any, ...]]:
    yield from ((_offs(groups), 65536) for groups in (8, 32, 64, 128, 1024))


def _mm_cases() -> Iterator[tuple[Any, ...]]:
    groups, rows, n, k = 8, 16384, 4096, 2048
    offs, tiles = _offs(groups), _meta(table_size(rows, groups), dtype=torch.int32)
    for dtype in DTYPES:
        x, w = _meta(rows, k, dtype=dtype), _meta(groups, n, k, dtype=dtype)
        yield x, w, offs, tiles
        yield x, _meta(groups, k, n, dtype=dtype).transpose(1, 2), offs, tiles
        if dtype.itemsize == 2:
            tokens, index = _meta(rows // 2, k, dtype=dtype), _meta(rows, dtype=torch.int32)
            narrow = _meta(groups, n // 2, k, dtype=dtype)
            yield tokens, narrow, offs, tiles, None, index
            narrow = _meta(groups, k, n // 2, dtype=dtype).transpose(1, 2)
            yield tokens, narrow, offs, tiles, None, index
            yield x, w, offs, tiles, _meta(groups, n, dtype=dtype)
    x, w, bias = _meta(rows, k + 32), _meta(groups, n, k + 32), _meta(groups, n)
    yield x, w, offs, tiles
    yield x, w, offs, tiles, bias
    yield x, _meta(groups, k + 32, n).transpose(1, 2), offs, tiles
    yield _meta(rows, 33), _meta(groups, 65, 33), offs, tiles


def _into_cases() -> Iterator[tuple[Any, ...]]:
    """One: the kernels are those of `grouped_mm`."""
    x, weight, *rest = next(_mm_cases())
    yield x.new_empty(len(x), weight.shape[1]), x, weight, *rest


def _wgrad_cases() -> Iterator[tuple[Any, ...]]:
    groups, rows, n, k = 8, 16384, 4096, 2048
    offs, tiles = _offs(groups), _meta(table_size(rows, groups), dtype=torch.int32)
    index = _meta(rows, dtype=torch.int32)
    for dtype in DTYPES:
        wide, narrow = _meta(rows, n, dtype=dtype), _meta(rows, k, dtype=dtype)
        yield wide, narrow, offs, tiles
        if dtype.itemsize == 2:
            tokens = _meta(rows // 2, k, dtype=dtype)
            yield narrow, wide, offs, tiles
            yield tokens, narrow, offs, tiles, index
            yield narrow, tokens, offs, tiles, None, index
    yield _meta(rows, 65), _meta(rows, 33), offs, tiles


def _add_cases() -> Iterator[tuple[Any, ...]]:
    for number, (dy, x, offs, tiles, *index) in enumerate(_wgrad_cases()):
        main_grad = _meta(len(offs), dy.shape[1], x.shape[1], dtype=torch.float32)
        yield main_grad, dy, x, offs, tiles, True, *index
        if number < 4:
            yield main_grad, dy, x, offs, tiles, False, *index


@kernel_op(twin=reference.group_tiles, fake=_tiles_fake, traces_twin=False, cases=_tiles_cases)
def group_tiles(offs: Tensor, rows: int) -> Tensor:
    """The tile table of `rows` rows in groups that end at `offs`: pass it to every GEMM over them.

    int32: the number of row blocks of 64, and of 128; the groups by falling size; then one entry
    (group | row block in the group << 11) for each row block of 64, up to its bound R // 64 + E,
    the same for 128 and for 256, unused entries zero; the number of row blocks of 256.
    """
    return launch_tiles(offs, rows, _checked_tiles)


def _checked_tiles(offs: Tensor, rows: int) -> tuple[Tensor, int]:
    if offs.dim() != 1 or not 0 < offs.shape[0] <= MAX_GROUPS or offs.dtype != torch.int32:
        raise FuseOpsError(
            f"offs is {offs.dtype}{tuple(offs.shape)}, expected int32 (E,) with 1 to {MAX_GROUPS} groups."
        )
    return offs.contiguous(), rows


@kernel_op(
    twin=reference.grouped_mm,
    fake=_mm_fake,
    flops=_mm_flops,
    traces_twin=False,
    cases=_mm_cases,
)
def grouped_mm(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    tiles: Tensor | None = None,
    bias: Tensor | None = None,
    index: Tensor | None = None,
) -> Tensor:
    """x[rows of e] @ weight[e].T + bias[e], padding rows zero.   -> (R, N)

    tiles: `group_tiles(offs, R)`, made here if not given.
    index: (R,) int32 or int64: row r of the operand is x[index[r]], for an x of any number of rows.
    """
    if tiles is None:
        tiles = _tiles(offs, weight.shape[0], x, index)
    return launch_mm(x, weight, bias, offs, tiles, index, None, _checked_mm)


@kernel_op(
    twin=reference.grouped_mm_into,
    fake=lambda *args, **kwargs: None,
    flops=lambda y, *args, **kwargs: _mm_flops(*args, **kwargs),
    mutates=("y",),
    traces_twin=False,
    cases=_into_cases,
)
def grouped_mm_into(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    tiles: Tensor | None = None,
    bias: Tensor | None = None,
    index: Tensor | None = None,
) -> None:
    """Write `grouped_mm` to y (R, N), contiguous and of the dtype of x; it is one of the same kernels."""
    if tiles is None:
        tiles = _tiles(offs, weight.shape[0], x, index)
    launch_mm(x, weight, bias, offs, tiles, index, y, _checked_mm)


def _checked_mm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offs: Tensor,
    tiles: Tensor,
    index: Tensor | None,
    y: Tensor | None,
) -> tuple[Any, ...]:
    """Operands of `launch_mm`: x with contiguous columns, weight with a contiguous axis 1 or 2."""
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise FuseOpsError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}, expected (R, K) and (E, N, K)."
        )
    if bias is not None and bias.shape != weight.shape[:2]:
        raise FuseOpsError(f"bias is {tuple(bias.shape)}, expected {tuple(weight.shape[:2])}.")
    rows = _rows(x, index, "index")
    _check(x, weight, offs, tiles, weight.shape[0], rows)
    shape = (rows, weight.shape[1])
    if y is not None and (y.shape != shape or y.dtype != x.dtype or not y.is_contiguous()):
        raise FuseOpsError(
            f"y is {y.dtype}{tuple(y.shape)} with strides {y.stride()}, expected contiguous {x.dtype} {shape}."
        )
    if 1 not in weight.stride()[1:]:
        weight = weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    index = None if index is None else index.contiguous()
    return as_rows(x), weight, bias, offs.contiguous(), tiles.contiguous(), index, y


@kernel_op(
    twin=reference.grouped_wgrad,
    fake=_wgrad_fake,
    flops=_wgrad_flops,
    traces_twin=False,
    cases=_wgrad_cases,
)
def grouped_wgrad(
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    tiles: Tensor | None = None,
    dy_index: Tensor | None = None,
    x_index: Tensor | None = None,
) -> Tensor:
    """dy[rows of e].T @ x[rows of e] in the dtype of x.   (R, N), (R, K), (E,) int32 -> (E, N, K)

    dy_index, x_index: (R,) int32 or int64: row r of that operand is its row index[r].
    """
    dw = x.new_empty(offs.numel(), dy.shape[-1], x.shape[-1])
    if tiles is None:
        tiles = _tiles(offs, offs.numel(), dy, dy_index)
    return launch_wgrad(dw, dy, x, offs, tiles, False, dy_index, x_index, _checked_wgrad)


@kernel_op(
    twin=reference.grouped_wgrad_into,
    fake=lambda *args, **kwargs: None,
    flops=_add_flops,
    mutates=("main_grad",),
    traces_twin=False,
    cases=_add_cases,
)
def grouped_wgrad_into(
    main_grad: Tensor,
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    tiles: Tensor | None = None,
    accumulate: bool = True,
    dy_index: Tensor | None = None,
    x_index: Tensor | None = None,
) -> None:
    """Add `grouped_wgrad` to the float32 `main_grad` (E, N, K) unrounded, or overwrite it."""
    if main_grad.dtype != torch.float32 or not main_grad.is_contiguous():
        raise FuseOpsError(
            f"main_grad is {main_grad.dtype} with strides {main_grad.stride()}, "
            "expected a contiguous float32 buffer."
        )
    if tiles is None:
        tiles = _tiles(offs, offs.numel(), dy, dy_index)
    launch_wgrad(main_grad, dy, x, offs, tiles, accumulate, dy_index, x_index, _checked_wgrad)


def _checked_wgrad(
    dw: Tensor,
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    tiles: Tensor,
    accumulate: bool,
    dy_index: Tensor | None,
    x_index: Tensor | None,
) -> tuple[Any, ...]:
    """Operands of `launch_wgrad`: dy and x with contiguous columns."""
    rows = _rows(dy, dy_index, "dy_index")
    if x.dim() != 2 or dy.dim() != 2 or rows != _rows(x, x_index, "x_index"):
        raise FuseOpsError(
            f"dy is {tuple(dy.shape)} and x {tuple(x.shape)}, expected (R, N) and (R, K), "
            "or an index of R rows."
        )
    shape = (offs.numel(), dy.shape[1], x.shape[1])
    if dw.shape != shape:
        raise FuseOpsError(f"main_grad is {tuple(dw.shape)}, expected {shape}.")
    _check(x, dy, offs, tiles, offs.numel(), rows)
    dy_index, x_index = (None if i is None else i.contiguous() for i in (dy_index, x_index))
    operands = as_rows(dy), as_rows(x), offs.contiguous(), tiles.contiguous()
    return dw, *operands, accumulate, dy_index, x_index


def _rows(x: Tensor, index: Tensor | None, name: str) -> int:
    """Number of rows that an operand has in the product."""
    if index is None:
        return x.shape[0]
    if index.dim() != 1 or index.dtype not in (torch.int32, torch.int64):
        raise FuseOpsError(
            f"{name} is {index.dtype}{tuple(index.shape)}, expected (R,) of int32 or int64."
        )
    return index.shape[0]


def _check(x: Tensor, other: Tensor, offs: Tensor, tiles: Tensor, groups: int, rows: int) -> None:
    if offs.shape != (groups,) or offs.dtype != torch.int32:
        raise FuseOpsError(f"offs is {offs.dtype}{tuple(offs.shape)}, expected int32 ({groups},).")
    if x.dtype not in DTYPES or other.dtype != x.dtype:
        raise FuseOpsError(
            f"operands are {x.dtype} and {other.dtype}, expected one dtype of bfloat16, float16, float32."
        )
    if tiles.shape != (table_size(rows, groups),) or tiles.dtype != torch.int32:
        raise FuseOpsError(
            f"tiles is {tiles.dtype}{tuple(tiles.shape)}, expected group_tiles(offs, {rows})."
        )


def _tiles(offs: Tensor, groups: int, x: Tensor, index: Tensor | None) -> Tensor:
    """The table, where the caller brings none."""
    if offs.shape != (groups,):
        raise FuseOpsError(f"offs is {tuple(offs.shape)}, expected ({groups},).")
    return group_tiles(offs, x.shape[0] if index is None else index.numel())


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scale: Tensor, offs: Tensor, dtype: torch.dtype
) -> Tensor:
    """grouped_mm with one scale a group, accumulated in float32.   fp8 (R, K), (E, N, K), (E,) float32 -> (R, N)"""
    y = grouped_mm(a.to(torch.float32), b.to(torch.float32), offs)
    by_row = torch.cat([scale, scale.new_zeros(1)])[group_of_row(offs, a.shape[0])]
    return (y * by_row.unsqueeze(-1)).to(dtype)


def scaled_grouped_wgrad(
    dy: Tensor, x: Tensor, scale: Tensor, offs: Tensor, dtype: torch.dtype
) -> Tensor:
    """grouped_wgrad with one scale a group.   fp8 (R, N), (R, K), (E,) float32 -> (E, N, K)"""
    dw = grouped_wgrad(dy.to(torch.float32), x.to(torch.float32), offs)
    return (dw * scale[:, None, None]).to(dtype)
