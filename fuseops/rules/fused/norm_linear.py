"""RMSNorm and Linear as one forward op. The normalised activation is saved for the Linear's weight gradient only."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fuseops import kernels as K
from fuseops.ops.linear import LinearSaved, linear
from fuseops.ops.norms import RMSNormSaved
from fuseops.ops.op import Call, FusedOp, Out


class NormLinear(FusedOp):
    """y = rmsnorm(x) W^T + b.   Forward only; saves what its members save."""

    recipes = True

    def fwd(self, x: Tensor, t: tuple[Mapping[str, Tensor], ...], calls: tuple[Call, ...]) -> Out:
        norm: Any = self.members[0]
        gamma, weight = t[0]["weight"], t[1]["weight"]
        h, rstd = K.rmsnorm_fwd(x, gamma, norm.epsilon(x.dtype), 0.0, len(norm.normalized_shape))
        if calls[1].precision.compute is not None:
            h = h.to(calls[1].precision.compute)
        y, kept = linear(h, weight, t[1]["bias"], calls[1])
        return Out(y, (RMSNormSaved(x, gamma, rstd), LinearSaved(kept, weight)))
