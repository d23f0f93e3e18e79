"""Linear, an optional Bias and an activation as one forward op: the bias is added before the only rounding."""

from typing import Any

from fuseops import kernels as K
from fuseops.ops.activations import ActivationSaved, form_of
from fuseops.ops.linear import LinearSaved, linear
from fuseops.ops.op import Calls, FusedOp, MemberTensors, NothingSaved, Out


class LinearAct(FusedOp):
    """y = act(x W^T + b), b of the Linear or of a Bias.   Forward only; saves its members' fields."""

    recipes = True
    takes_quantized = True

    def fwd(self, x: Any, t: MemberTensors, calls: Calls) -> Out:
        form = form_of(self.members[-1])
        weight = t[0]["weight"]
        bias = t[1]["bias"] if len(t) == 3 else t[0]["bias"]
        h, kept = linear(x, weight, bias, calls[0])
        saved: list[Any] = [LinearSaved(kept, weight), ActivationSaved(h, form)]
        if len(t) == 3:
            saved.insert(1, NothingSaved())
        return Out(K.act_fwd(h, *form), tuple(saved))
