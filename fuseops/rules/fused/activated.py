"""Back through the activation between the two GEMMs of an MLP, dense or grouped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fuseops import kernels as K
from fuseops.kernels.activation import Form
from fuseops.ops.linear import flat, to_high_precision, wgrad_input
from fuseops.ops.op import Call
from fuseops.recipes import Operand

from . import coded_swiglu
from .gemm_bwd import WEIGHTS

Through = tuple[Operand | None, Operand | None, Tensor | None]


def through_activation(
    form: Form | None,
    probs: Tensor | None,
    offs: Tensor | None,
    between: list[Any],
    calls: Sequence[Call],
    need_dh: bool,
    reads_dh: bool,
    spare: bool = False,
) -> Through:
    """dh, the activation as fc2's weight gradient reads it, and dprobs, of what is wanted.

    probs: what the activation multiplies by, if it does.  between: h and da, which are taken out.  calls: of fc1, the
    activation and fc2.  reads_dh: as of `coded_swiglu.why_apart`.  spare: dh may take the place of h.
    One pass over h makes all of it, but for tensors that a recipe quantizes: there the peak would be, and the
    activation is made when da has gone.
    """
    first, act, last = calls
    roles = last.precision.roles
    da, h = between.pop(), between.pop()
    if h is None or form is None:
        return None, None, None
    dh: Tensor | None = None
    a: Any = None
    dprobs: Tensor | None = None
    if roles is not None:
        if da is not None and first.needs:
            rows = flat(h)
            apart = coded_swiglu.why_apart(form, rows, first, last, reads_dh)
            if apart is None and coded_swiglu.whole_squares(da):
                return coded_swiglu.backward(flat(da), rows, probs, offs, first, last)
            del rows
        h = to_high_precision(h)
    need_a = not last.needs.isdisjoint(WEIGHTS)
    with_a = need_a and roles is None
    if da is not None:
        if h.dim() != da.dim():
            h = h.reshape(*da.shape[:-1], h.shape[-1])
        if not need_dh:
            dprobs = K.act_dprobs(da, h, *form)
        elif probs is None and not with_a:
            dh = K.act_bwd(da, h, *form)
        else:
            wanted: Any = probs, form[0], "probs" in act.needs, with_a, *form[1:]
            if spare and h.is_contiguous() and K.scaled_act_bwd_into.launches((h, da, probs), {}):
                dprobs, a = K.scaled_act_bwd_into(h, da, *wanted)
                dh = h
            else:
                dh, dprobs, a = K.scaled_act_bwd(da, h, *wanted)
        del da
    if not need_a:
        return dh, None, dprobs
    if a is None or not with_a:
        a = K.act_fwd(h, *form) if probs is None else K.scaled_act_fwd(h, probs, *form)
    del h
    return dh, a if roles is None else wgrad_input(a, last, offs), dprobs
