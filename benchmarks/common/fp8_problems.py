"""What the benchmark of FP8 GEMMs computes: operands, candidates, and whether ours is right."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops.kernels import fp8, grouped
from fuseops.kernels.groups import column_bounds

from . import measure
from .measure import Call

E4M3 = torch.float8_e4m3fn
KINDS = ("fwd", "dgrad", "wgrad", "wgrad_into")
Operands = dict[str, Any]


def codes(*shape: int) -> Tensor:
    """Normal codes, as a block that its amax scales has them."""
    found = torch.empty(shape, dtype=E4M3, device="cuda")
    for part in found.view(-1, shape[-1]).split(1 << 15):
        part.copy_(measure.rnd(*part.shape, scale=110.0).clamp_(-448, 448))
    return found


def scales(*shape: int, around: int = -7) -> Tensor:
    """Powers of two that change from block to block, up to 64-fold: one read from a wrong place shows."""
    return torch.exp2(torch.randint(around - 3, around + 4, shape, device="cuda").float())


def operands(groups: int, rows: int, n: int, k: int, offs: Tensor) -> Operands:
    """Rows of x and dy, the weight and its transpose, columns of x and dy; and the same numbers in bf16."""
    x, w, dy = codes(rows, k), codes(groups, n, k), codes(rows, n)
    sx, sdy = scales(k // 128, rows), scales(n // 128, rows)
    sw = scales(groups, n // 128, k // 128, around=-12)
    columns = (rows // 128 + groups) * 128
    blank = torch.ones(columns, dtype=torch.bool, device="cuda")
    for (begin, _), (start, end) in zip(column_bounds(offs), _bounds(offs), strict=True):
        blank[begin : begin + end - start] = False
    turned = {}
    for name, size in (("x", k), ("dy", n)):
        data = codes(size, columns)
        data.view(torch.uint8)[:, blank] = 0
        turned[name] = data, scales(size // 128, columns // 128)
    exact = {
        "x": fp8.dequantize(x, sx, "block", torch.bfloat16),
        "w": fp8.dequantize(w, sw, "square", torch.bfloat16),
        "dy": fp8.dequantize(dy, sdy, "block", torch.bfloat16),
    }
    return {
        "offs": offs, "rows": rows,
        "fwd": (x, sx, w, sw),
        "dgrad": (dy, sdy, w.mT.contiguous(), sw.mT.contiguous()),
        "wgrad": (*turned["dy"], *turned["x"]), "bf16": exact,
        "main": torch.zeros(groups, n, k, device="cuda"),
    }  # fmt: skip


def _bounds(offs: Tensor) -> list[tuple[int, int]]:
    ends = offs.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def candidates(kind: str, t: Operands) -> dict[str, Call]:
    """Ours in FP8 and in bf16, torch's in both, and a dense product of as many operations, scaled per tensor."""
    offs, rows, main = t["offs"], t["rows"], t["main"]
    x, w, dy = t["bf16"]["x"], t["bf16"]["w"], t["bf16"]["dy"]
    table = lambda: grouped.group_tiles(offs, rows)  # noqa: E731
    one = torch.ones((), device="cuda")
    dense = lambda a, b: torch._scaled_mm(  # noqa: E731
        a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    if kind in ("fwd", "dgrad"):
        operands = t[kind]
        left, weight = (x, w) if kind == "fwd" else (dy, w.transpose(1, 2))
        by_row, by_column = (
            left.new_ones(rows, dtype=torch.float32),
            torch.ones(weight.shape[:2], device="cuda"),
        )
        return {
            "fp8": lambda: fp8.fp8_mm(*operands, "block", offs, table()),
            "bf16": lambda: grouped.grouped_mm(left, weight, offs, table()),
            "torch_bf16": lambda: F.grouped_mm(left, weight.transpose(1, 2), offs=offs),
            "dense_fp8": lambda: dense(operands[0], operands[2][0]),
            "torch_fp8": lambda: torch._scaled_grouped_mm(
                operands[0], operands[2].mT, by_row, by_column, offs=offs,
                out_dtype=torch.bfloat16, use_fast_accum=True,
            ),
        }  # fmt: skip
    columns = t["wgrad"]
    if kind == "wgrad":
        return {
            "fp8": lambda: fp8.fp8_wgrad(*columns, "square", offs, table()),
            "bf16": lambda: grouped.grouped_wgrad(dy, x, offs, table()),
            "torch_bf16": lambda: F.grouped_mm(dy.t(), x, offs=offs),
            "dense_fp8": lambda: dense(columns[0], columns[2]),
        }
    return {
        "fp8": lambda: fp8.fp8_wgrad_into(main, *columns, "square", offs, table()),
        "bf16": lambda: grouped.grouped_wgrad_into(main, dy, x, offs, table()),
    }


def flops_of(t: Operands) -> int:
    _, n, k = t["bf16"]["w"].shape
    return 2 * int(t["offs"][-1]) * n * k


def wrong(t: Operands) -> dict[str, str]:
    """What is not as codes times scales say, in float32: three groups of every kind."""
    offs, found = t["offs"], {}
    bounds, columns = _bounds(offs), column_bounds(offs)
    chosen = sorted({0, len(bounds) // 2, len(bounds) - 1})
    for kind in ("fwd", "dgrad"):
        a, a_scale, w, w_scale = t[kind]
        y = fp8.fp8_mm(a, a_scale, w, w_scale, "block", offs)
        errors = []
        for e in chosen:
            rows = slice(*bounds[e])
            left = fp8.dequantize(a[rows], a_scale[:, rows], "block")
            right = fp8.dequantize(w[e], w_scale[e], "square")
            errors.append(_error(y[rows], left @ right.t()))
        if max(errors) > 4e-3:
            found[kind] = f"relative errors {errors}"
    dy, dy_scale, x, x_scale = t["wgrad"]
    dw = fp8.fp8_wgrad(dy, dy_scale, x, x_scale, "square", offs)
    main = torch.ones(dw.shape, device="cuda")
    fp8.fp8_wgrad_into(main, dy, dy_scale, x, x_scale, "square", offs)
    for kind, got in (("wgrad", dw), ("wgrad_into", main - 1)):
        errors = []
        for e in chosen:
            used = slice(*columns[e])
            blocks = slice(used.start // 128, used.stop // 128)
            left = fp8.dequantize(dy[:, used], dy_scale[:, blocks], "square")
            right = fp8.dequantize(x[:, used], x_scale[:, blocks], "square")
            errors.append(_error(got[e], left @ right.t()))
        if max(errors) > 4e-3:
            found[kind] = f"relative errors {errors}"
    return found


def _error(got: Tensor, want: Tensor) -> float:
    if not got.numel():
        return 0.0
    if not want.any():
        return math.inf if got.any() else 0.0
    return measure.relative_error(got, want)
