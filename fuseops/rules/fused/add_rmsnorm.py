"""The end of one block and the begin of the next: a residual is added, kept for the next addition, and normed."""

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from fuseops import kernels as K
from fuseops.ops.linear import LinearSaved, linear
from fuseops.ops.norms import RMSNormSaved
from fuseops.ops.op import Call, FusedOp, Grads, Out
from fuseops.ops.structure import AddSaved, NothingSaved


class AddRMSNorm(FusedOp):
    """h = x + residual, published; y = rmsnorm(h).   Forward only; saves what its members save.

    x may be that of a Linear in front, whose GEMM would else take the addition, where it costs more.
    x, residual, h, y (..., N).  Raises ShapeError for a residual of another shape.
    """

    recipes = True

    def fwd(self, x: Tensor, t: tuple[Mapping[str, Tensor], ...], calls: tuple[Call, ...]) -> Out:
        *front, add, tap, norm = cast("tuple[Any, ...]", self.members)
        before: list[Any] = []
        if front:
            x, kept = linear(x, t[0]["weight"], t[0]["bias"], calls[0])
            before.append(LinearSaved(kept, t[0]["weight"]))
        residual, weight = add.operand(x, t[-3][add.reads[0]]), t[-1]["weight"]
        alike = residual.dtype is x.dtype
        if alike:
            y, h, rstd = K.add_rmsnorm_fwd(
                x, residual, weight, norm.epsilon(x.dtype), norm.weight_offset
            )
        else:  # torch's promotion decides of what dtype h is
            h = x + residual
            y, rstd = K.rmsnorm_fwd(h, weight, norm.epsilon(h.dtype), norm.weight_offset)
        added = AddSaved(None if alike else (x.dtype, residual.dtype))
        saved = *before, added, NothingSaved(), RMSNormSaved(h, weight, rstd)
        return Out(y, saved, {tap.writes[0]: h})


class RMSNormAdd(FusedOp):
    """dx = dresidual = dh + the gradient of the norm, with one rounding; dh is that of what was published."""

    def bwd(
        self,
        saved: tuple[Any, ...],
        dy: Tensor | None,
        calls: tuple[Call, ...],
        dside: Mapping[str, Tensor | None],
    ) -> tuple[Grads, ...]:
        add, tap, norm = cast(Any, self.members)
        wanted = "weight" in calls[2].needs
        dh, dweight = dside.get(tap.writes[0]), None
        h, weight, rstd = saved[2]
        if dy is not None and h is not None:
            dh, dweight = K.rmsnorm_bwd(dy, h, weight, rstd, dh, wanted, norm.weight_offset)
        own = Grads() if dh is None else add.bwd(saved[0], dh)
        return own, Grads(), Grads(None, {"weight": dweight} if wanted else None)
