"""The backward of a Linear in two halves: what dy and the weight give, and the weight gradient when x is there."""

from collections.abc import Callable

from torch import Tensor

from fuseops import torch_private
from fuseops.ops.linear import BIAS, WEIGHT, LinearSaved, X, grad_in_turn, linear_bwd
from fuseops.ops.op import Call, Grads, replaced
from fuseops.recipes import Operand

WeightGrad = Callable[[Operand], Tensor]


def forward_only(call: Call) -> Call:
    """The call of a forward whose backward makes x again, and the columns of it that a recipe asks for."""
    roles = call.precision.roles
    return call if roles is None else replaced(call, needs=call.needs - WEIGHT)


def backward(
    weight: Tensor | None, dy: Operand | None, call: Call, stays: bool = False
) -> tuple[Grads, WeightGrad | None]:
    """dx and dbias of what `call.needs` names, and what gives dweight for x, None where nobody wants it.

    A bias sums dy as it is. Without a dy all are None.   stays: as of `grad_in_turn`
    """
    if dy is None:
        return Grads(None, dict.fromkeys(call.needs - {"x"})), None
    needs, given = call.needs, dy
    if call.precision.roles is None:
        found = linear_bwd(LinearSaved(None, weight), dy, call, needs - WEIGHT)
    else:
        lead = dy.shape[:-1] if isinstance(dy, Tensor) else None
        none = LinearSaved(None, None)
        own = linear_bwd(none, dy, call, BIAS).params if "bias" in needs else {}
        q, (given, _) = grad_in_turn(dy, call, stays=stays)
        del dy
        dx = linear_bwd(LinearSaved(None, weight), q, call, X).x if "x" in needs else None
        found = Grads(dx if dx is None or lead is None else dx.view(*lead, dx.shape[-1]), own)
    if "weight" not in needs:
        return found, None

    def weight_grad(x: Operand) -> Tensor:
        params = linear_bwd(LinearSaved(x, None), given, call, WEIGHT).params or {}
        return params["weight"]  # type: ignore[return-value]

    return found, weight_grad


def shaped(rows: Tensor, like: Operand) -> Tensor:
    """Rows of a product of codes, which have no other axes, with the leading axes of what the codes are of."""
    if rows.dim() == like.dim():
        return rows
    # no view: FSDP2 warns of those that leave its modules
    return torch_private.unsafe_view(rows, (*like.shape[:-1], rows.shape[-1]))
