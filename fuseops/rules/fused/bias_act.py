"""The backward of a Linear or Bias and an activation, with dh and the gradient of the bias in one pass."""

from typing import Any

from torch import Tensor

from fuseops import kernels as K
from fuseops.ops.activations import form_of
from fuseops.ops.linear import Linear, linear_bwd
from fuseops.ops.op import Calls, FusedOp, Grads, SideGrads, fast_replace


class BiasAct(FusedOp):
    """dh = dy * act'(h) and dbias = sum of dh in one pass, over the activation's saved input h (the bias included);
    then the other gradients of a Linear from dh.
    """

    recipes = True

    def bwd(
        self, saved: tuple[Any, ...], dy: Tensor, calls: Calls, dside: SideGrads
    ) -> tuple[Grads, ...]:
        own, (h, form) = saved
        first, act = self.members
        form, call, params = form or form_of(act), calls[0], {}
        if "bias" in call.needs:
            dh, params["bias"] = K.act_bwd_bias(dy, h, *form)
        else:
            dh = K.act_bwd(dy, h, *form)
        grads = Grads(dh)
        if isinstance(first, Linear):
            grads = linear_bwd(own, dh, call, call.needs - {"bias"})
        return fast_replace(grads, params={**(grads.params or {}), **params}), Grads()
