"""The end of one block and the begin of the next: a residual is added, kept for the next addition, and normed."""

from typing import Any, cast

from torch import Tensor

from fuseops.ops.linear import LinearSaved, linear
from fuseops.ops.op import Calls, FusedOp, Grads, MemberTensors, NothingSaved, Out, SideGrads
from fuseops.ops.structure import AddSaved, tap_gradient


class AddNorm(FusedOp):
    """h = x + residual, published; y = norm(h), of an RMSNorm or a LayerNorm.   Forward only; saves what its members
    save.

    x may be that of a Linear in front, whose GEMM would else take the addition, where it costs more.
    x, residual, h, y (..., N).  Raises ShapeError for a residual of another shape.
    """

    recipes = True

    def fwd(self, x: Tensor, t: MemberTensors, calls: Calls) -> Out:
        *front, add, tap, norm = cast("tuple[Any, ...]", self.members)
        before: list[Any] = []
        if front:
            x, kept = linear(x, t[0]["weight"], t[0]["bias"], calls[0])
            before.append(LinearSaved(kept, t[0]["weight"]))
        residual = add.operand(x, t[-3][add.reads[0]])
        alike = residual.dtype is x.dtype
        # else torch's promotion decides of what dtype h is
        h, beside = (x, residual) if alike else (x + residual, None)
        found = norm.normed(h, t[-1], norm.epsilon(h.dtype), beside)
        added = AddSaved(None if alike else (x.dtype, residual.dtype))
        shape = tuple(norm.normalized_shape)
        own = norm.saved_of(found, t[-1]["weight"], shape)
        return Out(found.y, (*before, added, NothingSaved(), own), {tap.writes[0]: found.h})


class NormAdd(FusedOp):
    """dx = dresidual = dh + the gradient of the norm, with one rounding; dh is that of what was published."""

    def bwd(
        self, saved: tuple[Any, ...], dy: Tensor | None, calls: Calls, dside: SideGrads
    ) -> tuple[Grads, ...]:
        add, _, norm = cast(Any, self.members)
        dh, needs = tap_gradient(dside), calls[2].needs
        params = dict.fromkeys(needs - {"x"})
        if dy is not None:
            found = norm.grads(saved[2], dy, needs, dh)
            params |= found.params or {}
            dh = found.x
        own = Grads() if dh is None else add.bwd(saved[0], dh)
        return own, Grads(), Grads(None, params)
