"""Bias and an activation, backward: the activation's gradient and the bias gradient from one pass."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fuseops import kernels as K
from fuseops.ops.activations import form_of
from fuseops.ops.op import Call, FusedOp, Grads


class BiasAct(FusedOp):
    """dx = dy * act'(h), dbias = sum of dx, where h is the activation's saved input (the bias is already in it)."""

    recipes = True

    def bwd(
        self,
        saved: tuple[Any, ...],
        dy: Tensor,
        calls: tuple[Call, ...],
        dside: Mapping[str, Tensor | None],
    ) -> tuple[Grads, ...]:
        h, form = saved[1].x, saved[1].form or form_of(self.members[1])
        if "bias" not in calls[0].needs:
            return Grads(K.act_bwd(dy, h, *form)), Grads()
        dx, dbias = K.act_bwd_bias(dy, h, *form)
        return Grads(dx, {"bias": dbias}), Grads()
