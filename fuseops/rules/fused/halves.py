"""The backward of a Linear in two halves: what dy and the weight give, and the weight gradient when x is there."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fuseops import torch_private
from fuseops.ops.linear import LinearSaved, grad_operand, linear_bwd, without_rows
from fuseops.ops.op import Call, Grads, replaced
from fuseops.recipes import Operand

WeightGrad = Callable[[Operand], Tensor]


def forward_only(call: Call) -> Call:
    """The call of a forward whose backward makes x again, and the columns of it that a recipe asks for."""
    return replaced(call, needs=call.needs - {"weight"})


def backward(
    weight: Tensor | None, dy: Operand | None, call: Call
) -> tuple[Grads, WeightGrad | None]:
    """dx and dbias of what `call.needs` names, and what gives dweight for x, None where nobody wants it.

    Under a recipe dy becomes an operand once, for both GEMMs; a bias sums dy as it is. Without a dy all are None.
    """
    if dy is None:
        return Grads(None, dict.fromkeys(call.needs - {"x"})), None
    roles, needs = call.precision.roles, call.needs
    q: Any = dy
    if roles is not None and not needs.isdisjoint(("x", "weight")):
        q = grad_operand(dy, call, roles)
    dx = None
    if "x" in needs:
        dx = linear_bwd(LinearSaved(None, weight), q, _only(call, "x")).x
        if isinstance(dy, Tensor):
            dx = dx.view(*dy.shape[:-1], dx.shape[-1])  # type: ignore[union-attr]
    params: dict[str, Tensor | None] = {}
    if "bias" in needs:
        params |= linear_bwd(LinearSaved(None, None), dy, _only(call, "bias")).params or {}
    if "weight" not in needs:
        return Grads(dx, params), None
    given = dy if roles is not None and roles.high_wgrad else without_rows(q)

    def weight_grad(x: Operand) -> Tensor:
        found = linear_bwd(LinearSaved(x, None), given, _only(call, "weight")).params or {}
        return found["weight"]  # type: ignore[return-value]

    return Grads(dx, params), weight_grad


def shaped(rows: Tensor, like: Operand) -> Tensor:
    """Rows of a product of codes, which have no other axes, with the leading axes of what the codes are of."""
    if rows.dim() == like.dim():
        return rows
    # no view: FSDP2 warns of those that leave its modules
    return torch_private.unsafe_view(rows, (*like.shape[:-1], rows.shape[-1]))


def _only(call: Call, need: str) -> Call:
    return replaced(call, needs=frozenset((need,)))
