"""The backward of the activation between the two GEMMs of an MLP, dense or grouped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fuseops import kernels as K
from fuseops.kernels.activation import Form
from fuseops.ops.linear import flat, to_high_precision, wgrad_input
from fuseops.ops.op import Call
from fuseops.recipes import Operand

from . import quantized_swiglu
from .gemm_bwd import WEIGHTS

ActivationGrads = tuple[Operand | None, Operand | None, Tensor | None]


def activation_backward(
    form: Form | None,
    probs: Tensor | None,
    offs: Tensor | None,
    h_and_da: list[Any],
    calls: Sequence[Call],
    need_dh: bool,
    needs_dh_tensor: bool,
    reuse_h: bool = False,
) -> ActivationGrads:
    """(dh, the operand of fc2's weight gradient, dprobs), None for those that are not needed.

    probs: factors of the activation, or None.  h_and_da: popped, so that both are freed early.  calls: of fc1, the
    activation and fc2.  needs_dh_tensor: as in `quantized_swiglu.unfused_reason`.  reuse_h: dh may overwrite h.
    One pass over h makes all three. Under a recipe the activation is made after da is freed, for a lower peak.
    """
    fc1_call, act_call, fc2_call = calls
    roles = fc2_call.precision.roles
    da, h = h_and_da.pop(), h_and_da.pop()
    if h is None or form is None:
        return None, None, None
    dh: Tensor | None = None
    a: Any = None
    dprobs: Tensor | None = None
    if roles is not None:
        if da is not None and fc1_call.needs:
            rows = flat(h)
            unfused = quantized_swiglu.unfused_reason(
                form, rows, fc1_call, fc2_call, needs_dh_tensor
            )
            if unfused is None and quantized_swiglu.halves_fit_squares(da):
                return quantized_swiglu.backward(flat(da), rows, probs, offs, fc1_call, fc2_call)
            del rows
        h = to_high_precision(h)
    need_a = not fc2_call.needs.isdisjoint(WEIGHTS)
    fused_a = need_a and roles is None
    if da is not None:
        if h.dim() != da.dim():
            h = h.reshape(*da.shape[:-1], h.shape[-1])
        if not need_dh:
            dprobs = K.act_dprobs(da, h, *form)
        elif probs is None and not fused_a:
            dh = K.act_bwd(da, h, *form)
        else:
            options: Any = probs, form[0], "probs" in act_call.needs, fused_a, *form[1:]
            if reuse_h and h.is_contiguous() and K.scaled_act_bwd_into.launches((h, da, probs), {}):
                dprobs, a = K.scaled_act_bwd_into(h, da, *options)
                dh = h
            else:
                dh, dprobs, a = K.scaled_act_bwd(da, h, *options)
        del da
    if not need_a:
        return dh, None, dprobs
    if a is None or not fused_a:
        a = K.act_fwd(h, *form) if probs is None else K.scaled_act_fwd(h, probs, *form)
    del h
    return dh, a if roles is None else wgrad_input(a, fc2_call, offs), dprobs
