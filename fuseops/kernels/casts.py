"""Casts between dtypes, and tiled transposes with the cast in the same pass.

Maths: y = x rounded to nearest even. To FP8 values and infinities beyond the range become its
ends and NaN stays NaN, without a scale (quantize has scales); other dtypes overflow to infinity.
Shapes: cast: x (...); cast_transpose: x (R, N) or a batch (B, R, N) -> rowwise like x, columnwise
(..., N, R).
Layout: the last axis of x is contiguous, rows and matrices of a batch may be strided. A layout
that is not wanted is an empty tensor.
Hardware: sm_80 and later; FP8 from sm_89 on, older ones run the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuseops.kernels import reference, tiles
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.launch import current_arch, device, launch
from fuseops.kernels.quantize import FORMATS, LAYOUTS, SM_89
from fuseops.kernels.registry import kernel_op
from fuseops.kernels.tiles import as_rows, pow2, require

DTYPES = (torch.bfloat16, torch.float16, torch.float32, *FORMATS)


def _cast_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Tiles of 1024 elements, 8 a thread; or more."""
    n = pow2(dims[-1], most=1024)
    sizes = ((1024, 4), (2048, 4), (2048, 8))
    return [{"BLOCK_R": size // n, "BLOCK_N": n, "num_warps": warps} for size, warps in sizes]


def _transpose_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    sizes = [(64, 64, 4), (128, 64, 8), (64, 128, 8)]
    if dims[-1] % 16 == 0:  # rows that are not aligned would spill
        sizes.append((128, 128, 8))
    return [{"BLOCK_R": r, "BLOCK_N": n, "num_warps": warps} for r, n, warps in sizes]


def _transpose_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """Small tiles of few rows, enough of them for every multiprocessor; tall ones, or square ones from
    float32 and of many rows.
    """
    small, tall, _, *square = _transpose_candidates(dims, itemsize)
    if rows <= 1024:
        return small
    return square[0] if square and (itemsize == 4 or rows > 16384) else tall


CAST = Space("cast", _cast_candidates)
TRANSPOSE = Space("cast_transpose", _transpose_candidates, _transpose_default)


def _cases(*tails: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    f32, bf16 = torch.float32, torch.bfloat16
    pairs = [(f32, bf16), (bf16, f32), (f32, torch.float16), (bf16, FORMATS[0])]
    for src, dst in pairs + [(bf16, bf16)] * (len(tails) > 1):
        for tail in tails:
            yield (torch.empty(8192, 4096, dtype=src, device="meta"), dst, *tail)
    yield (torch.empty(8191, 100, dtype=f32, device="meta"), bf16, *tails[-1])


@kernel_op(twin=reference.cast, cases=lambda: _cases(()))
def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another dtype, rounded to nearest even; FP8 saturates."""
    _check(x, dtype)
    if _lacks_fp8(x, dtype):
        return reference.cast(x, dtype)
    x2, y = _flat(x), torch.empty(x.shape, dtype=dtype, device=x.device)
    rows, n = x2.shape
    config = CAST.pick(rows, (n,), x)
    launch(
        device("casts").cast_kernel, tiles.tile_grid(rows, n, config),
        x2, y, rows, n, x2.stride(0), **config,
    )  # fmt: skip
    return y


@kernel_op(twin=reference.cast_transpose, cases=lambda: _cases(("col",), ("both",)))
def cast_transpose(x: Tensor, dtype: torch.dtype, layout: str = "both") -> tuple[Tensor, Tensor]:
    """(rowwise (..., R, N), columnwise (..., N, R)); a layout not wanted is empty."""
    _check(x, dtype)
    require(x.dim() in (2, 3), f"x is {tuple(x.shape)}, expected (R, N) or (B, R, N).")
    require(layout in LAYOUTS, f"layout is '{layout}', expected one of {', '.join(LAYOUTS)}.")
    if _lacks_fp8(x, dtype):
        return reference.cast_transpose(x, dtype, layout)
    if layout == "both" and x.dtype == torch.float32 and dtype in FORMATS:
        # conversions that are stored as words and as bytes are what ptxas gets wrong (aot.misread)
        return cast.launcher(x, dtype), cast_transpose.launcher(x, dtype, "col")[1]
    x3 = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    x3 = x3 if x.dim() == 3 else x3[None]
    batch, rows, n = x3.shape
    require(batch < 1 << 16, f"x is a batch of {batch}, expected fewer than 65536.")
    shapes = x.shape, (*x.shape[:-2], n, rows)
    row, col = (
        torch.empty(shape if layout != other else 0, dtype=dtype, device=x.device)
        for shape, other in zip(shapes, ("col", "row"), strict=True)
    )
    config = TRANSPOSE.pick(rows, (n,), x)
    launch(
        device("casts").cast_transpose_kernel, (*tiles.tile_grid(rows, n, config), batch),
        x3, row, col, rows, n, x3.stride(0), x3.stride(1),
        ROW=layout != "col", COL=layout != "row", ALIGN=16 if rows % 16 == 0 else 1, **config,
    )  # fmt: skip
    return row, col


def _lacks_fp8(x: Tensor, dtype: torch.dtype) -> bool:
    return (dtype in FORMATS or x.dtype in FORMATS) and current_arch(x.device) < SM_89


def _flat(x: Tensor) -> Tensor:
    """Rows of a tensor, as wide as a tile where all of it lies in one piece."""
    width = 1 << 12
    if x.is_contiguous() and x.numel() % width == 0:
        return x.view(-1, width)
    return as_rows(x) if x.dim() else x.view(1, 1)


def _check(x: Tensor, dtype: torch.dtype) -> None:
    for name, given in (("x", x.dtype), ("the wanted dtype", dtype)):
        require(
            given in DTYPES, f"{name} is {given}, expected one of {', '.join(map(str, DTYPES))}."
        )
