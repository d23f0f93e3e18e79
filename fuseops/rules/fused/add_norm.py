"""The border of two blocks: a residual is added, the sum is published for the next addition, and normed."""

from typing import Any, cast

from torch import Tensor

from fuseops.ops.linear import LinearSaved, linear
from fuseops.ops.op import Calls, FusedOp, Grads, MemberTensors, NothingSaved, Out, SideGrads
from fuseops.ops.structure import AddSaved, tap_gradient


class AddNorm(FusedOp):
    """h = x + residual, published; y = norm(h), of an RMSNorm or a LayerNorm.   Forward only; saves its members' own.

    A Linear in front gives x here, since adding the residual in its GEMM (`LinearAdd`) would cost more.
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
        same_dtype = residual.dtype is x.dtype
        # of other dtypes the sum has torch's promoted one, and is made before the norm's kernel
        h, residual_in_norm = (x, residual) if same_dtype else (x + residual, None)
        normed = norm.normed(h, t[-1], norm.epsilon(h.dtype), residual_in_norm)
        added = AddSaved(None if same_dtype else (x.dtype, residual.dtype))
        shape = tuple(norm.normalized_shape)
        saved = (*before, added, NothingSaved(), norm.saved_of(normed, t[-1]["weight"], shape))
        return Out(normed.y, saved, {tap.writes[0]: normed.h})


class NormAdd(FusedOp):
    """dx = dresidual = dh + the gradient of the norm, with one rounding; dh is the gradient of the Tap's output."""

    def bwd(
        self, saved: tuple[Any, ...], dy: Tensor | None, calls: Calls, dside: SideGrads
    ) -> tuple[Grads, ...]:
        add, _, norm = cast(Any, self.members)
        dh, needs = tap_gradient(dside), calls[2].needs
        params = dict.fromkeys(needs - {"x"})
        if dy is not None:
            norm_grads = norm.grads(saved[2], dy, needs, dh)
            params |= norm_grads.params or {}
            dh = norm_grads.x
        add_grads = Grads() if dh is None else add.bwd(saved[0], dh)
        return add_grads, Grads(), Grads(None, params)
