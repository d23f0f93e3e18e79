"""A grouped GEMM that ends in SwiGLU: both the product and its activation are written.

Maths: h[rows of e] = x[rows of e] @ weight[e].T;  a = silu(gate) * up * probs, gate and up the halves of h
as it is stored, so that a pass over h gives the same a. Padding rows are zero in both.
Shapes: x (R, D), weight (E, 2F, D), offs (E,), probs (R,) float32 -> h (R, 2F), a (R, F); with an index
row r of the operand is x[index[r]]. Without need_h, h is not written and has no rows.
Layout, dtypes, launches: as grouped_mm; one launch where `grouped_paths.swiglu_path` says so, the GEMM
and the activation elsewhere.
Hardware: sm_80 and later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels import reference
from fuseops.kernels.activation import act_fwd, scaled_act_fwd
from fuseops.kernels.grouped import checked_probs, grouped_mm, mm_flops, product
from fuseops.kernels.grouped_launch import launch_rings, table_size
from fuseops.kernels.grouped_paths import SWIGLU_SPACES, swiglu_path
from fuseops.kernels.registry import kernel_op
from fuseops.kernels.tiles import as_rows


def _fake(
    x: Tensor, weight: Tensor, offs: Tensor, tiles: Any = None, probs: Any = None, index: Any = None,
    need_h: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, n = (x if index is None else index).shape[0], weight.shape[1]
    return x.new_empty(rows if need_h else 0, n), x.new_empty(rows, n // 2)


def _cases() -> Iterator[tuple[Any, ...]]:
    groups, rows, k = 8, 16384, 2048
    make = lambda *shape, dtype=torch.int32: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    offs, tiles = make(groups), make(table_size(rows, groups))
    probs, index = make(rows, dtype=torch.float32), make(rows)
    for dtype in (torch.bfloat16, torch.float16):
        x = make(rows, k, dtype=dtype)
        narrow, wide = (make(groups, n, k, dtype=dtype) for n in (2048, 4096))
        yield x, wide, offs, tiles, probs
        yield x, narrow, offs, tiles, probs, index
        yield x, narrow, offs, tiles, probs, index, False
    yield x, wide, offs, tiles


@kernel_op(
    twin=reference.grouped_swiglu, fake=_fake, flops=mm_flops, traces_twin=False, cases=_cases
)
def grouped_swiglu(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    tiles: Tensor | None = None,
    probs: Tensor | None = None,
    index: Tensor | None = None,
    need_h: bool = True,
) -> tuple[Tensor, Tensor]:
    """(h, a): x[rows of e] @ weight[e].T, and its SwiGLU times probs, zeros at padding rows.

    need_h: False gives an h of no rows.
    """
    rows, (groups, n, k) = (x if index is None else index).shape[0], weight.shape
    if n % 2 or x.dim() != 2 or x.shape[1] != k or offs.shape != (groups,):
        raise FuseOpsError(
            f"x is {tuple(x.shape)}, weight {tuple(weight.shape)} and offs {tuple(offs.shape)}, "
            "expected (R, D), (E, 2F, D) and (E,)."
        )
    probs = None if probs is None else checked_probs(probs, rows)
    x, path = as_rows(x), swiglu_path(as_rows(x), weight, index)
    if not path or not rows or x.dtype != weight.dtype:
        h = grouped_mm.launcher(x, weight, offs, tiles, None, index)
        return h if need_h else h[:0], _activation(h, offs, probs)
    p = product(x, weight, offs, tiles, index)
    p = p if path == "gather" else p.gathered()
    h, a = x.new_empty(rows if need_h else 0, n), x.new_empty(rows, n // 2)
    config = SWIGLU_SPACES[path].pick(rows, tuple(weight.shape), x)
    launch_rings(p, path, config, h if need_h else a, act=a, probs=probs)
    return h, a


def _activation(h: Tensor, offs: Tensor, probs: Tensor | None) -> Tensor:
    if probs is None:
        return act_fwd.launcher(h, "swiglu")
    rows = torch.arange(h.shape[0], device=h.device)
    return scaled_act_fwd.launcher(h, probs.masked_fill(rows >= offs[-1], 0.0), "swiglu")
