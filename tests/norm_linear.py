"""A forward rule that takes an RMSNorm and a Linear as one: for tests of rules that overlap. It saves nothing."""

from collections.abc import Mapping

from torch import Tensor

import fuseops as fo


class NormLinear(fo.FusedOp):
    """y = rmsnorm(x) W^T + b."""

    def fwd(self, x: Tensor, t: tuple[Mapping[str, Tensor], ...], calls: tuple) -> fo.Out:
        norm, linear = self.members
        first = norm.fwd(x, **t[0])
        out = linear.fwd(first.y, **t[1], call=calls[1])
        return fo.Out(out.y, (first.saved, out.saved))


NORM_LINEAR = fo.Rule("user_norm_linear", (fo.ops.RMSNorm, fo.ops.Linear), NormLinear)
