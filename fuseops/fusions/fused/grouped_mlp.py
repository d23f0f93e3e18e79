"""The grouped MLP as one joint op: fc1, SwiGLU times probability, fc2.

Saves x, h (the pre-activation), probs and offs only. The activation is computed again in the backward, where fc2's
weight gradient reads it. Under a recompute policy h goes too, and fc1 runs again.
Shapes: x (R, D), h (R, 2F), a (R, F), probs (R,), offs (E,).
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from fuseops import kernels as K
from fuseops.ops.op import Call, FusedOp, Grads, Out
from fuseops.ops.routing import check_offs, check_probs


class GroupedMLPSaved(NamedTuple):
    x: Tensor | None
    h: Tensor | None
    probs: Tensor | None
    offs: Tensor | None
    fc1: Tensor | None  # parameters themselves
    fc2: Tensor | None


class GroupedMLP(FusedOp):
    """y = fc2(swiglu(fc1(x)) * probs), grouped."""

    Saved = GroupedMLPSaved
    saves_for = {
        "x": ("h", "probs", "offs", "fc1", "fc2"),
        "0.weight": ("x", "h", "probs", "offs", "fc2"),
        "1.probs": ("h", "offs", "fc2"),
        "2.weight": ("h", "probs", "offs"),
    }
    recomputes = ("h",)
    names = {
        "x": "0.x",
        "h": "1.x",
        "probs": "1.probs",
        "offs": "0.offs",
        "fc1": "0.weight",
        "fc2": "2.weight",
    }

    def fwd(
        self,
        x: Tensor,
        t: tuple[Mapping[str, Tensor], ...],
        calls: tuple[Call, ...],
        keep: frozenset[str],
    ) -> Out:
        fc1, fc2, offs, probs = t[0]["weight"], t[2]["weight"], t[0]["offs"], t[1]["probs"]
        check_offs(offs, fc1.shape[0])
        check_probs("ScaledSwiGLU", x, probs)
        h = K.grouped_mm(x, calls[0].precision.cast(fc1), offs)  # type: ignore[arg-type]
        a = K.scaled_act_fwd(h, probs, "swiglu")
        y = K.grouped_mm(a, calls[2].precision.cast(fc2), offs)  # type: ignore[arg-type]
        return Out(y, GroupedMLPSaved(x, h, probs, offs, fc1, fc2))

    def bwd(
        self,
        saved: GroupedMLPSaved,
        dy: Tensor,
        calls: tuple[Call, ...],
        dside: Mapping[str, Tensor | None],
    ) -> tuple[Grads, ...]:
        x, h, probs, offs, fc1, fc2 = saved
        first, act, last = (call.needs for call in calls)
        cast1, cast2 = calls[0].precision.cast(fc1), calls[2].precision.cast(fc2)
        if h is None:
            h = K.grouped_mm(x, cast1, offs)  # type: ignore[arg-type]
        a = dw1 = dw2 = dx = dprobs = None
        if "x" in last:
            da = K.grouped_mm(dy, cast2.transpose(1, 2), offs)  # type: ignore[union-attr, arg-type]
            if not first:
                dprobs = K.act_dprobs(da, h, "swiglu")
            else:
                # the pass that makes dh has a in hand, which fc2's weight gradient reads
                wanted = "probs" in act, "weight" in last
                dh, dprobs, a = K.scaled_act_bwd(da, h, probs, "swiglu", *wanted)  # type: ignore[arg-type]
                if "weight" in first:
                    dw1 = K.grouped_wgrad(dh, x, offs)  # type: ignore[arg-type]
                if "x" in first:
                    dx = K.grouped_mm(dh, cast1.transpose(1, 2), offs)  # type: ignore[union-attr, arg-type]
        if "weight" in last:
            a = K.scaled_act_fwd(h, probs, "swiglu") if a is None else a  # type: ignore[arg-type]
            dw2 = K.grouped_wgrad(dy, a, offs)  # type: ignore[arg-type]
        side = {"probs": dprobs} if "probs" in act else None
        return Grads(dx, {"weight": dw1}), Grads(side=side), Grads(params={"weight": dw2})
