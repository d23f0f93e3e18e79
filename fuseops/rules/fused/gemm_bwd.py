"""The backward of a GEMM, dense or grouped, in two halves: the gradients that need dy and the weight, then those that
need x.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from fuseops import torch_private
from fuseops.ops.grouped_linear import GroupedLinearSaved, grouped_linear_bwd
from fuseops.ops.grouped_linear import input_gradient as grouped_input_gradient
from fuseops.ops.grouped_linear import weight_gradient as grouped_weight_gradient
from fuseops.ops.linear import (
    WEIGHT,
    LinearSaved,
    bias_gradient,
    grad_operand,
    input_gradient,
    linear_bwd,
    plain_weight_gradient,
    staged_grad_operands,
    weight_gradient,
)
from fuseops.ops.op import Call, Grads, fast_replace, make_tuple
from fuseops.recipes import Operand

from . import wgrad_order

WEIGHTS = frozenset({"weight", "down", "up"})  # gradients that need x
SUMS = frozenset({"bias", "probs"})  # gradients that are sums over dy in high precision
WeightGrad = Callable[[Operand], Tensor]
# a tensor, and the index of its rows: None for all, in order
IndexedRows = tuple[Operand | None, Tensor | None]
RowSource = Callable[..., IndexedRows]


def backward(
    weight: Tensor | None, dy: Operand | None, call: Call, dy_stays: bool = False
) -> tuple[Grads, WeightGrad | None]:
    """(Grads with dx and dbias, a function from x to dweight), each where `call.needs` names it.

    dbias is the sum of dy in high precision. Without dy all gradients are None.
    dy_stays: as in `staged_grad_operands`
    """
    if dy is None:
        return Grads(None, dict.fromkeys(call.needs - {"x"})), None
    needs, roles = call.needs, call.precision.roles
    if roles is None:
        grads = linear_bwd(make_tuple(LinearSaved, (None, weight)), dy, call, needs - WEIGHT)
        return grads, partial(plain_weight_gradient, dy) if "weight" in needs else None
    lead = dy.shape[:-1] if isinstance(dy, Tensor) else None
    own = {"bias": bias_gradient(dy)} if "bias" in needs else {}
    q, (dy_source, _) = staged_grad_operands(dy, call, stays=dy_stays)
    del dy
    dx = input_gradient(q, weight, call) if "x" in needs else None  # type: ignore[arg-type]
    grads = Grads(dx if dx is None or lead is None else dx.view(*lead, dx.shape[-1]), own)
    if "weight" not in needs:
        return grads, None

    def weight_grad(x: Operand) -> Tensor:
        dy = dy_source if roles.high_wgrad else grad_operand(dy_source, call, WEIGHT)
        return weight_gradient(dy, x, call)

    return grads, weight_grad


def shaped(rows: Tensor, like: Operand) -> Tensor:
    """Rows of a quantized GEMM, which is 2-d, with the leading axes of `like`."""
    if rows.dim() == like.dim():
        return rows
    # not `view`: FSDP2 warns of views that leave its modules
    return torch_private.unsafe_view(rows, (*like.shape[:-1], rows.shape[-1]))


# --- grouped

GroupedWeightGrads = Callable[..., None]
"""Computes the gradients of weights: (source of the rows of x, number of parts of their columns) -> None."""


def grouped_backward(
    saved: GroupedLinearSaved,
    owned: list[Any],
    call: Call,
    dy_index: Tensor | None = None,
    dy_stays: bool = False,
    by_token: bool = False,
) -> tuple[Grads, GroupedWeightGrads]:
    """(Grads without those of weights, a function that adds these for the rows of x), as `call.needs` names them.

    owned: [dy], which is popped: an argument could live until the call returns, under dynamo's frame evaluator.
    dy_stays, by_token: see `staged_grad_operands`
    """
    dy = owned.pop()
    quantized, dy_rows = call.precision.roles is not None, (dy, dy_index)
    needs = call.needs & SUMS if quantized else call.needs - WEIGHTS
    grads = Grads(None, {}, {})
    if needs:
        grads = grouped_linear_bwd(saved, dy, call, dy_index=dy_index, needs=needs)
    if quantized:
        offs: Tensor = saved.offs  # type: ignore[assignment]
        q, dy_rows = staged_grad_operands(dy, call, offs, dy_index, dy_stays, by_token)
        del dy
        if "x" in call.needs:
            grads = fast_replace(grads, x=grouped_input_gradient(q, saved.weight, offs, call))  # type: ignore[arg-type]
    pending = [] if call.needs.isdisjoint(WEIGHTS) else [dy_rows]
    return grads, partial(add_weight_grads, saved, pending, call, grads.params)


def add_weight_grads(
    saved: GroupedLinearSaved,
    dy_rows: list[Any],
    call: Call,
    params: Any,
    source: RowSource,
    parts: int = 0,
) -> None:
    """Add the gradients of the weights to `params`.   dy_rows: [(dy, index)], which is popped; [] if none is needed"""
    if not dy_rows:
        return
    if call.precision.roles is None:
        (dy, dy_index), (x, x_index) = dy_rows.pop(), source()
        saved, needs = fast_replace(saved, x=x), call.needs & WEIGHTS
        params.update(grouped_linear_bwd(saved, dy, call, x_index, dy_index, needs).params)
        return
    weight, offs = saved.weight, saved.offs
    if parts > 1:
        params["weight"] = wgrad_order.wgrad_in_parts(weight, dy_rows, source, offs, call, parts)  # type: ignore[arg-type]
        return
    dy, dy_index = wgrad_order.columns_of_dy(dy_rows.pop(), offs, call)  # type: ignore[arg-type]
    x, x_index = source()
    params["weight"] = grouped_weight_gradient(dy, x, offs, call, x_index, dy_index)  # type: ignore[arg-type]
