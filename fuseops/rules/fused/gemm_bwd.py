"""The backward of a GEMM, dense or grouped, in two halves: what dy and the weight give, and the rest when x comes."""

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

from . import quantized_order

WEIGHTS = frozenset({"weight", "down", "up"})  # gradients of what multiplies
SUMS = frozenset({"bias", "probs"})  # those that sum dy as it is
WeightGrad = Callable[[Operand], Tensor]
# a tensor, and the index of its rows: None for all, in order
Rows = tuple[Operand | None, Tensor | None]
Source = Callable[..., Rows]


def backward(
    weight: Tensor | None, dy: Operand | None, call: Call, stays: bool = False
) -> tuple[Grads, WeightGrad | None]:
    """dx and dbias of what `call.needs` names, and what gives dweight for x, None where nobody wants it.

    A bias sums dy as it is. Without a dy all are None.   stays: as of `staged_grad_operands`
    """
    if dy is None:
        return Grads(None, dict.fromkeys(call.needs - {"x"})), None
    needs, roles = call.needs, call.precision.roles
    if roles is None:
        found = linear_bwd(make_tuple(LinearSaved, (None, weight)), dy, call, needs - WEIGHT)
        return found, partial(plain_weight_gradient, dy) if "weight" in needs else None
    lead = dy.shape[:-1] if isinstance(dy, Tensor) else None
    own = {"bias": bias_gradient(dy)} if "bias" in needs else {}
    q, (given, _) = staged_grad_operands(dy, call, stays=stays)
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


# --- of groups

GroupedWeightGrads = Callable[..., None]
"""Makes the gradients of weights, of the rows of x, which it asks for, and in how many parts their columns are made."""


def grouped_backward(
    saved: GroupedLinearSaved,
    held: list[Any],
    call: Call,
    dy_index: Tensor | None = None,
    stays: bool = False,
    by_token: bool = False,
) -> tuple[Grads, GroupedWeightGrads]:
    """What dy and the weight give of what the call needs, and what adds the rest to it when x is there.

    held: dy, which is taken out: what is passed by itself lives until the call returns wherever compiled code has
    its own evaluator of frames.  stays, by_token: as of `staged_grad_operands`.
    """
    dy = held.pop()
    quantized, left = call.precision.roles is not None, (dy, dy_index)
    needs = call.needs & SUMS if quantized else call.needs - WEIGHTS
    found = Grads(None, {}, {})
    if needs:
        found = grouped_linear_bwd(saved, dy, call, dy_index=dy_index, needs=needs)
    if quantized:
        offs: Tensor = saved.offs  # type: ignore[assignment]
        q, left = staged_grad_operands(dy, call, offs, dy_index, stays, by_token)
        del dy
        if "x" in call.needs:
            found = fast_replace(found, x=grouped_input_gradient(q, saved.weight, offs, call))  # type: ignore[arg-type]
    waits = [] if call.needs.isdisjoint(WEIGHTS) else [left]
    return found, partial(grouped_weight, saved, waits, call, found.params)


def grouped_weight(
    saved: GroupedLinearSaved,
    left: list[Any],
    call: Call,
    params: Any,
    source: Source,
    parts: int = 0,
) -> None:
    """Puts the gradients of what multiplies into `params`.   left: dy, which is taken out, where there are any"""
    if not left:
        return
    if call.precision.roles is None:
        (dy, dy_index), (x, x_index) = left.pop(), source()
        given, needs = fast_replace(saved, x=x), call.needs & WEIGHTS
        params.update(grouped_linear_bwd(given, dy, call, x_index, dy_index, needs).params)
        return
    weight, offs = saved.weight, saved.offs
    if parts > 1:
        params["weight"] = quantized_order.in_parts(weight, left, source, offs, call, parts)  # type: ignore[arg-type]
        return
    dy, dy_index = quantized_order.columns(left.pop(), offs, call)  # type: ignore[arg-type]
    x, x_index = source()
    params["weight"] = grouped_weight_gradient(dy, x, offs, call, x_index, dy_index)  # type: ignore[arg-type]
