"""Quantization to FP8 with one scale a group of rows, or one a matrix of a weight, from its own amax.

Maths: inv = limit / amax, correctly rounded, 1 for an amax of 0; q = saturate(x * inv) rounded to nearest even; scale =
1 / inv. NaN stays NaN and does not count in amax; infinities become the ends of the range.
Shapes: x (R, N) -> rows (R, N), columns (N, C), scale (E,). With `offs` the columns of each group begin at a multiple
of 128, C = (R//128 + E) * 128, and what belongs to no row is zero; without it C = ceil(R/128) * 128, scale (). Rows of
padding (at or beyond offs[-1]) are not written.  A weight (E, N, K) -> (E, N, K), (E, K, N), scale (E,);
of (N, K) the same without E.
What is not wanted is empty.
Two reads of x: the largest magnitudes meet by integer maxima of their bits, which no order changes. One where the amax
is given: some features of x have the codes, and the scales, that they have in the whole then.
Hardware: sm_89 and later convert; older ones run the twin, as sizes and strides beyond 2^24 do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuseops.kernels import tiles
from fuseops.kernels.configs import Space
from fuseops.kernels.groups import BLOCK, columns_of
from fuseops.kernels.launch import device, launch, overlap
from fuseops.kernels.quantize import FORMATS, fp8_op, fp8_rows, matrix_shape, too_large
from fuseops.kernels.registry import ints, on_meta, tensor_bytes
from fuseops.kernels.scales import (
    amax_of_groups,
    amax_of_matrices,
    amax_of_tokens,
    codes_of_matrices,
    codes_of_rows,
    columns_in_groups,
    inverse_scale,
)
from fuseops.kernels.tiles import cdiv, require


def _quantize_groups(
    x: Tensor,
    offs: Tensor | None,
    dtype: torch.dtype,
    row: bool = True,
    col: bool = False,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    if amax is None:
        amax = amax_of_groups(amax_of_tokens(x, 1), offs)
    up = inverse_scale(amax, dtype, False)
    data = codes_of_rows(x, up, offs, dtype)
    columns = columns_in_groups(data, offs) if col else data.new_empty(0)
    return data if row else data.new_empty(0), columns, 1 / up


def _quantize_matrices(
    weight: Tensor, dtype: torch.dtype, row: bool = True, col: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    up = inverse_scale(amax_of_matrices(weight), dtype, False)
    data = codes_of_matrices(weight, up, dtype)
    turned = data.mT.contiguous() if col else data.new_empty(0)
    return data if row else data.new_empty(0), turned, 1 / up


SPAN = 1024
Three = tuple[Tensor, Tensor, Tensor]


AMAX, QUANTIZE = (
    Space(name, [{"BLOCK_R": BLOCK, "BLOCK_N": 64, "num_warps": n} for n in warps])
    for name, warps in (("group_amax", (8, 4)), ("quantize_groups", (4, 8)))
)
"""Lines of 128 bytes on both sides: 64 columns of two bytes, 128 rows of one."""


def _group_cases() -> Iterator[tuple[Any, ...]]:
    for dtype, fmt in ((torch.bfloat16, 0), (torch.bfloat16, 1), (torch.float32, 0)):
        for offs in (None, ints(64)):
            yield on_meta(8190, 4096, dtype=dtype), offs, FORMATS[fmt], True, True


def _weight_cases() -> Iterator[tuple[Any, ...]]:
    for dtype in (torch.bfloat16, torch.float32):
        yield on_meta(8, 1024, 4096, dtype=dtype), FORMATS[0], True, True


def _bytes(x: Tensor, row: bool, col: bool) -> int:
    return 2 * tensor_bytes(x) + x.numel() * (row + col)


@fp8_op(
    twin=_quantize_groups,
    cases=_group_cases,
    nbytes=lambda x, offs, dtype, row=True, col=False, amax=None: (
        _bytes(x, row, col) - (amax is not None) * tensor_bytes(x)
    ),
)
def quantize_groups(
    x: Tensor,
    offs: Tensor | None,
    dtype: torch.dtype,
    row: bool = True,
    col: bool = False,
    amax: Tensor | None = None,
) -> Three:
    """(rows, columns, scale) of x, one scale a group, or one for all.

    amax: (E,), or (), float32, of more features than those of x; found here if not given.
    """
    x = fp8_rows(x, dtype)
    rows, n = x.shape
    if not x.numel() or too_large(x):
        return _quantize_groups(x, offs, dtype, row, col, amax)
    groups = 0 if offs is None else len(offs)
    blocks = columns_of(rows, groups) // BLOCK
    data = x.new_empty((rows, n) if row else 0, dtype=dtype)
    columns = x.new_empty((n, blocks * BLOCK) if col else 0, dtype=dtype)
    scale = x.new_empty(() if offs is None else groups, dtype=torch.float32)
    form = {"FORM": "one" if offs is None else "groups", "ALIGN": BLOCK, "ROW": row, "COL": col}
    if amax is not None:
        require(
            amax.shape == scale.shape and amax.dtype == torch.float32,
            f"amax is {amax.dtype} of shape {tuple(amax.shape)}, expected float32 {tuple(scale.shape)}.",
        )
    _launch(x, offs, (data, columns, scale), blocks, (rows, n, groups), form, groups, amax)
    return data, columns, scale


@fp8_op(
    twin=_quantize_matrices,
    cases=_weight_cases,
    nbytes=lambda weight, dtype, row=True, col=True: _bytes(weight, row, col),
)
def quantize_matrices(
    weight: Tensor, dtype: torch.dtype, row: bool = True, col: bool = True
) -> Three:
    """(codes, codes transposed, scale) with one scale a matrix.   (N, K) or (E, N, K)"""
    *lead, n, k = matrix_shape(weight)
    groups = math.prod(lead)
    x = fp8_rows(weight.reshape(groups * n, k), dtype).contiguous()
    if not x.numel() or max(n, k) >= 1 << 24 or n % 16:
        return _quantize_matrices(weight, dtype, row, col)
    data = x.new_empty((*lead, n, k) if row else 0, dtype=dtype)
    turned = x.new_empty((*lead, k, n) if col else 0, dtype=dtype)
    scale = x.new_empty(lead, dtype=torch.float32)
    form = {"FORM": "matrices", "ALIGN": 16, "ROW": row, "COL": col}
    _launch(
        x, None, (data, turned, scale), groups * cdiv(n, BLOCK), (groups * n, k, n), form, groups
    )
    return data, turned, scale


def _launch(
    x: Tensor,
    offs: Tensor | None,
    out: Three,
    blocks: int,
    sizes: tuple[int, int, int],
    form: dict[str, Any],
    groups: int,
    given: Tensor | None = None,
) -> None:
    rows, n, _ = sizes
    ends = x if offs is None else offs.contiguous()
    grouping = {"FORM": form["FORM"], "BLOCK_E": tiles.pow2(groups, least=32)}
    kernels = device("amax")
    if given is None:
        count = max(groups, 1)
        amax = x.new_empty(count, dtype=torch.int32)
        launch(
            kernels.no_amax_kernel, (1,), amax, count,
            BLOCK_E=grouping["BLOCK_E"], num_warps=1, **overlap(x.device),
        )  # fmt: skip
        launch(
            kernels.group_amax_kernel, (blocks, cdiv(n, SPAN)), x, ends, amax, *sizes, x.stride(0),
            SPAN=SPAN, **grouping, **overlap(x.device), **AMAX.pick(rows, (n,), x),
        )  # fmt: skip
    else:
        amax = given.contiguous().view(torch.int32)
    config = QUANTIZE.pick(rows, (n,), x)
    data, turned, scale = out
    launch(
        kernels.quantize_groups_kernel, (blocks * cdiv(n, config["BLOCK_N"]),),
        x, ends, amax, data, turned, scale, *sizes, x.stride(0),
        LIMIT=torch.finfo(data.dtype).max, BLOCK_E=grouping["BLOCK_E"], **form, **overlap(x.device), **config,
    )  # fmt: skip
