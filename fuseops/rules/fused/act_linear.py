"""A Linear with a bias and an activation, backward: the activation's gradient and the bias gradient from one pass."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fuseops import kernels as K
from fuseops.ops.activations import ActivationSaved, form_of
from fuseops.ops.linear import LinearSaved, linear_bwd
from fuseops.ops.op import Call, FusedOp, Grads, replaced


class ActLinear(FusedOp):
    """dh = dy * act'(h) and dbias = sum of dh in one pass, then the gradients of the Linear from dh."""

    recipes = True

    def bwd(
        self,
        saved: tuple[LinearSaved, ActivationSaved],
        dy: Tensor,
        calls: tuple[Call, ...],
        dside: Mapping[str, Tensor | None],
    ) -> tuple[Grads, ...]:
        own, (h, form) = saved
        call: Any = calls[0]
        form = form or form_of(self.members[1])
        if "bias" not in call.needs:
            return linear_bwd(own, K.act_bwd(dy, h, *form), call), Grads()  # type: ignore[arg-type]
        dh, dbias = K.act_bwd_bias(dy, h, *form)  # type: ignore[arg-type]
        grads = linear_bwd(own, dh, replaced(call, needs=call.needs - {"bias"}))
        return replaced(grads, params={**(grads.params or {}), "bias": dbias}), Grads()
