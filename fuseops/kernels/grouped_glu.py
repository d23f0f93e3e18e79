"""A grouped GEMM with an activation in its epilogue, which writes both the product and its activation.

Maths: h[rows of e] = x[rows of e] @ weight[e].T;  a = silu(gate) * up * probs, gate and up the halves of h, or
max(h, 0)^2 * probs ("srelu"), or clamped as in `activation`, of h as it is stored, so that a pass over h gives the
same a. Padding rows are zero in both.
Shapes: x (R, D), weight (E, 2F, D), offs (E,), probs (R,) float32 -> h (R, 2F), a (R, F), F for 2F without a gate; with
an index row r of the operand is x[index[r]]. Without need_h, h is not written and has no rows.
Layout, dtypes, launches: as grouped_mm; one launch where `grouped_paths.act_path` says so, the GEMM
and the activation elsewhere.
Hardware: sm_80 and later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels.activation import GATES, Form, act_fwd, scaled_act_fwd
from fuseops.kernels.grouped import checked_product, gemm_op, grouped_mm
from fuseops.kernels.grouped_launch import Product, launch_mm, launch_rings, table_size
from fuseops.kernels.grouped_paths import EPILOGUE_ACTS, SWIGLU_SPACES, act_path
from fuseops.kernels.groups import padding_mask
from fuseops.kernels.records import of_fields
from fuseops.kernels.registry import Cases, floats, ints, on_meta


@dataclass
class ActivatedProduct(Product):
    """An `ActivatedProduct` is a `Product` that ends in an activation of this form.

    need_h  False gives an h of no rows
    kind    "swiglu", "clamped_swiglu" or "srelu"
    interleave, alpha, limit, offset: as of `act_fwd`; gate and up are halves, or alternate (1)
    """

    need_h: bool = True
    kind: str = "swiglu"
    interleave: int = 0
    alpha: float = 1.702
    limit: float = 7.0
    offset: float = 1.0

    @property
    def form(self) -> Form:
        """The arguments of `act_fwd` after x."""
        return self.kind, self.interleave, self.alpha, self.limit, self.offset


def _grouped_swiglu(p: ActivatedProduct) -> tuple[Tensor, Tensor]:
    h = grouped_mm.twin(p.x, p.weight, p.offs, None, p.bias, p.index)
    kept = h if p.need_h else h[:0]
    if p.probs is None:
        return kept, act_fwd.twin(h, *p.form)
    padding = padding_mask(p.offs, h.shape[0])[:, 0]
    return kept, scaled_act_fwd.twin(h, p.probs.masked_fill(padding, 0.0), *p.form)


def _outputs(p: ActivatedProduct) -> tuple[Tensor, Tensor]:
    rows, n = p.rows, p.weight.shape[1]
    h, width = p.x.new_empty(rows if p.need_h else 0, n), n // 2 if p.kind in GATES else n
    return h, p.x.new_empty(rows, width)


def _flops(p: ActivatedProduct) -> int:
    return 2 * p.rows * p.x.shape[1] * p.weight.shape[1]


def _cases() -> Cases:
    groups, rows, k = 8, 16384, 2048
    offs, tiles = ints(groups), ints(table_size(rows, groups))
    probs, index = floats(rows), ints(rows)
    for dtype in (torch.bfloat16, torch.float16):
        x = on_meta(rows, k, dtype=dtype)
        narrow, wide = (on_meta(groups, n, k, dtype=dtype) for n in (2048, 4096))
        yield x, wide, offs, tiles, None, None, probs
        yield x, narrow, offs, tiles, None, index, probs
        yield x, narrow, offs, tiles, None, index, probs, False
        for need_h in (True, False):
            bias, rest = on_meta(groups, 2048, dtype=dtype), (None, probs, need_h)
            yield x, narrow, offs, tiles, None, *rest, "srelu"
            yield x, narrow, offs, tiles, bias, *rest, "clamped_swiglu", 1
    yield x, wide, offs, tiles


@gemm_op(twin=_grouped_swiglu, fake=_outputs, flops=_flops, cases=_cases)
@of_fields(ActivatedProduct)
def grouped_swiglu(given: ActivatedProduct) -> tuple[Tensor, Tensor]:
    """(h, a): x[rows of e] @ weight[e].T (+ bias[e]), and its activation times probs, zeros at padding rows."""
    x, weight, kind, form = given.x, given.weight, given.kind, given.form
    n = weight.shape[1]
    if kind not in EPILOGUE_ACTS:
        raise FuseOpsError(f"a product ends in one of {', '.join(EPILOGUE_ACTS)}, not in {kind!r}.")
    p = checked_product(given)
    if n % (1 + (kind in GATES)):
        raise FuseOpsError(f"weight is {tuple(weight.shape)}, expected (E, 2F, D).")
    path = act_path(p.x, p.weight, p.index, kind, given.interleave)
    if not path or not p.rows:
        h = x.new_empty(p.rows, n)
        launch_mm(replace(p, probs=None), h)
        return h if given.need_h else h[:0], _activation(h, p, form)
    p = p if path == "gather" else p.gathered()
    h, a = _outputs(given)
    config = SWIGLU_SPACES[path].pick(p.rows, tuple(weight.shape), x)
    launch_rings(p, path, config, h if given.need_h else a, form=form, act=a)
    return h, a


def _activation(h: Tensor, p: Product, form: Form) -> Tensor:
    if p.probs is None:
        return act_fwd.launcher(h, *form)
    rows = torch.arange(h.shape[0], device=h.device)
    return scaled_act_fwd.launcher(h, p.probs.masked_fill(rows >= p.offs[-1], 0.0), *form)
