"""The input gradient of a grouped GEMM, with the gradient of the activation before it in the epilogue, which reads the
pre-activation and writes its gradient, the activation and the gradient of the probabilities.

Maths: da[rows of e] = dy[rows of e] @ weight[e].T;  dgate = da probs up silu'(gate), dup = da probs silu(gate),
a = silu(gate) up probs, dprobs = sum over columns of da silu(gate) up; gate and up are the halves of h. Of squared
ReLU ("srelu") dh = 2 da probs max(h, 0), a = max(h, 0)^2 probs. da is rounded as if it were stored, so that two
kernels give the same. Padding rows are zero in all of them.
Shapes: dy (R, D), weight (E, F, D), h (R, 2F), or (R, F) without a gate, offs (E,), probs (R,) float32 -> dh as h,
a (R, F), dprobs (R,) float32, empty without probs; with an index row r of dy is dy[index[r]].
`grouped_dswiglu_into` writes dh over h: a tile's part of h is in shared memory before dh is written there, and what a
tile reads of others, rows and columns beyond its own, is masked.
Layout, dtypes, launches: as grouped_mm; the GEMM, and the sum over its column blocks of dprobs, in a fixed
order. `grouped_paths.act_bwd_path` says where; elsewhere the GEMM and the activation are two kernels.
Hardware: sm_80 and later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels.activation import GATES, scaled_act_bwd, scaled_act_bwd_into
from fuseops.kernels.bias import sum_partials
from fuseops.kernels.grouped import checked_product, gemm_op, grouped_mm
from fuseops.kernels.grouped_launch import Product, launch_mm, launch_rings, table_size
from fuseops.kernels.grouped_paths import BACKWARD_ACTS, SWIGLU_BWD_SPACES, act_bwd_path
from fuseops.kernels.groups import padding_mask
from fuseops.kernels.records import Arguments, of_fields
from fuseops.kernels.registry import Cases, floats, ints, on_meta
from fuseops.kernels.tiles import cdiv, check_shape, upcast


@dataclass
class ActivationGradient(Arguments):
    """An `ActivationGradient` has the operands of an input gradient and the activation gradient after it, except h.

    kind  "swiglu" or "srelu"
    """

    dy: Tensor
    weight: Tensor
    offs: Tensor
    tiles: Tensor | None = None
    probs: Tensor | None = None
    index: Tensor | None = None
    kind: str = "swiglu"

    @property
    def product(self) -> Product:
        """The product da."""
        return Product(self.dy, self.weight, self.offs, self.tiles, None, self.index, self.probs)


def _grouped_dswiglu(h: Tensor, p: ActivationGradient) -> tuple[Tensor, Tensor, Tensor]:
    da = grouped_mm.twin(p.dy, p.weight, p.offs, None, None, p.index)
    padding = padding_mask(p.offs, h.shape[0])
    scale = upcast(da).new_ones(h.shape[0]) if p.probs is None else p.probs
    scale, h = scale.masked_fill(padding[:, 0], 0.0), h.masked_fill(padding, 0.0)
    dh, dprobs, a = scaled_act_bwd.twin(da, h, scale, p.kind, p.probs is not None, True)
    return dh, a, dprobs


def _grouped_dswiglu_into(h: Tensor, p: ActivationGradient) -> tuple[Tensor, Tensor]:
    dh, a, dprobs = _grouped_dswiglu(h, p)
    h.copy_(dh)
    return a, dprobs


def _fake_into(h: Tensor, p: ActivationGradient) -> tuple[Tensor, Tensor]:
    sums = h.new_empty(0 if p.probs is None else h.shape[0], dtype=torch.float32)
    return h.new_empty(h.shape[0], p.weight.shape[1]), sums


def _fake(h: Tensor, p: ActivationGradient) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(h), *_fake_into(h, p)


def _flops(h: Tensor, dy: Tensor, weight: Tensor, *_: Any) -> int:
    return 2 * h.shape[0] * dy.shape[1] * weight.shape[1]


def _cases() -> Cases:
    groups, rows, k, n = 8, 16384, 2048, 1024
    offs, tiles = ints(groups), ints(table_size(rows, groups))
    probs, index = floats(rows), ints(rows)
    for dtype in (torch.bfloat16, torch.float16):
        dy, h = on_meta(rows, k, dtype=dtype), on_meta(rows, 2 * n, dtype=dtype)
        weight = on_meta(groups, k, n, dtype=dtype).transpose(1, 2)
        yield h, dy, weight, offs, tiles, probs
        yield h, dy, weight, offs, tiles, probs, index
        yield on_meta(rows, n, dtype=dtype), dy, weight, offs, tiles, probs, None, "srelu"
    yield h, dy, weight, offs, tiles


@gemm_op(twin=_grouped_dswiglu, fake=_fake, flops=_flops, cases=_cases)
@of_fields(ActivationGradient)
def grouped_dswiglu(h: Tensor, p: ActivationGradient) -> tuple[Tensor, Tensor, Tensor]:
    """(dh, a, dprobs) of a = act(h) * probs for da = dy[rows of e] @ weight[e].T, zeros at padding rows."""
    dh = h.new_empty(h.shape)
    return dh, *_backward(dh, h, p)


@gemm_op(
    twin=_grouped_dswiglu_into,
    fake=_fake_into,
    flops=_flops,
    nbytes=grouped_dswiglu.nbytes,
    mutates=("h",),
    announces=False,  # a spare h: see `registry.held_once`
    cases=lambda: islice(_cases(), 1),
)
@of_fields(ActivationGradient)
def grouped_dswiglu_into(h: Tensor, p: ActivationGradient) -> tuple[Tensor, Tensor]:
    """(a, dprobs) of `grouped_dswiglu`, whose dh overwrites h, contiguous; by the same kernel."""
    if not h.is_contiguous():
        raise FuseOpsError(f"h has strides {h.stride()}, expected contiguous: dh takes its place.")
    return _backward(h, h, p)


def _backward(dh: Tensor, h: Tensor, given: ActivationGradient) -> tuple[Tensor, Tensor]:
    """Write dh, which may be h.   -> a, dprobs"""
    dy, weight, p, kind = given.dy, given.weight, given.product, given.kind
    rows, n = p.rows, weight.shape[1]
    if kind not in BACKWARD_ACTS:
        raise FuseOpsError(
            f"a product goes back through one of {', '.join(BACKWARD_ACTS)}, not {kind!r}."
        )
    p = checked_product(p)
    check_shape("h", h, (rows, n * (1 + (kind in GATES))))
    path = act_bwd_path(p.x, p.weight, h, p.index)
    if not path or not rows or h.dtype != dy.dtype:
        da = dy.new_empty(rows, n)
        launch_mm(replace(p, probs=None), da)
        return _activation_bwd(dh, da, h, p, kind)
    p = p if path == "gather" else p.gathered()
    config = SWIGLU_BWD_SPACES[path].pick(rows, tuple(weight.shape), dy)
    a = h.new_empty(rows, n)
    blocks = 0 if p.probs is None else cdiv(n, config["BLOCK_N"])
    sums = torch.empty(blocks, rows, dtype=torch.float32, device=h.device)
    launch_rings(p, path, config, dh, form=(kind, 0), act=a, h=h, sums=sums)
    return a, sums.view(-1) if p.probs is None else sum_partials(sums)


def _activation_bwd(
    dh: Tensor, da: Tensor, h: Tensor, p: Product, kind: str
) -> tuple[Tensor, Tensor]:
    """The activation gradient by a kernel of its own; padding rows of h are not used.   -> a, dprobs"""
    padding = torch.arange(len(h), device=h.device) >= p.offs[-1]
    scale = torch.ones(len(h), device=h.device) if p.probs is None else p.probs
    dh.copy_(h.masked_fill(padding[:, None], 0.0))
    dprobs, a = scaled_act_bwd_into.launcher(
        dh, da, scale.masked_fill(padding, 0.0), kind, p.probs is not None, True
    )
    return a, dprobs
