"""The backward of a Linear in two halves: what dy and the weight give, and the weight gradient when x is there."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from fuseops import torch_private
from fuseops.ops.linear import (
    WEIGHT,
    LinearSaved,
    bias_gradient,
    grad_in_turn,
    grad_operand,
    input_gradient,
    linear_bwd,
    plain_weight_gradient,
    weight_gradient,
)
from fuseops.ops.op import Call, Grads, new
from fuseops.recipes import Operand

WeightGrad = Callable[[Operand], Tensor]


def backward(
    weight: Tensor | None, dy: Operand | None, call: Call, stays: bool = False
) -> tuple[Grads, WeightGrad | None]:
    """dx and dbias of what `call.needs` names, and what gives dweight for x, None where nobody wants it.

    A bias sums dy as it is. Without a dy all are None.   stays: as of `grad_in_turn`
    """
    if dy is None:
        return Grads(None, dict.fromkeys(call.needs - {"x"})), None
    needs, roles = call.needs, call.precision.roles
    if roles is None:
        found = linear_bwd(new(LinearSaved, (None, weight)), dy, call, needs - WEIGHT)
        return found, partial(plain_weight_gradient, dy) if "weight" in needs else None
    lead = dy.shape[:-1] if isinstance(dy, Tensor) else None
    own = {"bias": bias_gradient(dy)} if "bias" in needs else {}
    q, (given, _) = grad_in_turn(dy, call, stays=stays)
    del dy
    dx = input_gradient(q, weight, call) if "x" in needs else None  # type: ignore[arg-type]
    found = Grads(dx if dx is None or lead is None else dx.view(*lead, dx.shape[-1]), own)
    if "weight" not in needs:
        return found, None

    def weight_grad(x: Operand) -> Tensor:
        dy = given if roles.high_wgrad else grad_operand(given, call, WEIGHT)
        return weight_gradient(dy, x, call)

    return found, weight_grad


def shaped(rows: Tensor, like: Operand) -> Tensor:
    """Rows of a product of codes, which have no other axes, with the leading axes of what the codes are of."""
    if rows.dim() == like.dim():
        return rows
    # no view: FSDP2 warns of those that leave its modules
    return torch_private.unsafe_view(rows, (*like.shape[:-1], rows.shape[-1]))
