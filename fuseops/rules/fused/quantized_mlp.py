"""The grouped MLP over quantized operands: what `GroupedMLP` does under a recipe.

No pass reads or writes what the high-precision one does not, but for the tokens' own quantization and the columns of
weight gradients, which are made of the codes of rows when dx is there: SwiGLU and its backward write codes, rows by
index are permuted as codes. The backward
quantizes x again, to the same codes, so what is saved is what high precision saves, or less with `hidden="float8"`: fc1
writes h as codes then, and both directions of SwiGLU read them.
Numerics: as of the ops one by one. What SwiGLU writes is rounded as its tensor would be before it is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

from torch import Tensor

from fuseops.kernels.tiles import cdiv
from fuseops.ops.grouped_linear import (
    GroupedLinearSaved,
    grouped_linear_bwd,
    input_gradient,
    rows_of,
    weight_gradient,
)
from fuseops.ops.linear import (
    WEIGHT,
    Indexed,
    grad_in_turn,
    grad_operand,
    high,
    input_operand,
    of_codes,
    weight_rows,
    wgrad_input,
)
from fuseops.ops.op import Call, Grads, replaced
from fuseops.ops.splits import check_splits
from fuseops.ops.tiles import tiles_of, tiles_of_columns
from fuseops.recipes import Operand, Roles, Scaling, gemm, operand
from fuseops.recipes.operands import amax_of_rows
from fuseops.recipes.quantized import BLOCK, some_features

from . import coded_swiglu, quantized_order

Params = Mapping[str, Tensor | None]
SUMS = frozenset({"bias", "probs"})  # gradients that sum dy as it is
Source = Callable[..., tuple[Operand | None, Tensor | None]]
Finish = Callable[[Tensor, Tensor | None], Tensor]  # of dx and dprobs


def activated(
    mlp: Any, s: Any, calls: tuple[Call, ...], index: Tensor | None
) -> tuple[Operand, Operand]:
    """fc1 and the activation of it: h as it is saved, and a as fc2 reads it."""
    h = _hidden(mlp, s, calls[0], index)
    if _apart(s, h, calls):
        return h, mlp.activation(high(h), s)
    return h, coded_swiglu.forward(h, s.probs if mlp.scaled else None, s.offs, calls[2])


def _apart(s: Any, h: Operand, calls: tuple[Call, ...]) -> bool:
    reads_dh = not calls[0].needs.isdisjoint(("bias", "probs"))
    return coded_swiglu.why_apart(s.form, h, calls[0], calls[2], reads_dh) is not None


def _hidden(mlp: Any, s: Any, call: Call, index: Tensor | None) -> Operand:
    """fc1, as h is saved: what the backward reads, the forward reads too. Codes come out of the GEMM where they can."""
    roles = cast("Roles", call.precision.roles)
    if mlp.scale1 or not coded_swiglu.hidden_from_gemm(roles, s.x.dtype, s.fc1.shape[1]):
        return coded_swiglu.saved(mlp.hidden(s, call, index), roles)
    rows = rows_of(s.x) if index is None else len(index)
    check_splits(s.offs, rows, s.offs.device)
    x = input_operand(s.x, call, s.offs, index, columns=False)
    weight = weight_rows(s.fc1, call)
    h = coded_swiglu.hidden(x, weight, s.offs, tiles_of(call, s.offs, rows), s.bias1)
    return coded_swiglu.saved(mlp.hidden(s, call, index), roles) if h is None else h


def gradients(
    mlp: Any,
    s: Any,
    held: list[Any],
    calls: tuple[Call, ...],
    source: Source,
    dy_index: Tensor | None,
    finish: Finish,
    dx_first: bool,
) -> tuple[Grads, Grads, Grads]:
    """The Grads of fc1, the activation and fc2, as `GroupedMLP.gradients` gives them, over quantized operands.

    Where the peak would be above that of high precision, fc2's weight gradient is made last, and what it reads waits;
    the columns of tokens are there in parts, if that is not enough (`quantized_order`).
    """
    first, act, last = calls
    fc1 = GroupedLinearSaved(None, s.fc1, s.offs, s.bias1, s.probs if mlp.scale1 else None)
    fc2 = GroupedLinearSaved(None, s.fc2, s.offs, s.bias2, s.probs if mlp.scale2 else None)
    offs, w1, w2 = cast("tuple[Tensor, Tensor, Tensor]", (s.offs, s.fc1, s.fc2))
    dy: Any = held.pop()
    h: Any = held.pop()
    above = grouped_linear_bwd(fc2, dy, last, dy_index=dy_index, needs=last.needs & SUMS)
    parts = quantized_order.parts(dy, w1, w2, calls, dy_index)
    q, left = grad_in_turn(dy, last, offs, dy_index, stays=True, by_token=parts > 0)
    del dy
    if h is None and not last.needs.isdisjoint(("x", "weight")):
        x, x_index = source()
        h = _hidden(mlp, replaced(s, x=x), first, x_index)
        del x
    between = [h, input_gradient(q, w2, offs, last) if "x" in last.needs else None]
    del h, q
    dh, a, dprobs = _through_activation(mlp, s, between, calls)
    dw1: Params = {}
    waits: list[Any] = [left, a] if "weight" in last.needs else []
    del a, left
    of_dh: Indexed | None = None
    dw2 = {} if dx_first or parts else _fc2_weight(waits, w2, offs, last)
    below = Grads()
    if dh is not None:
        below = grouped_linear_bwd(fc1, dh, first, needs=first.needs & SUMS)
        q, of_dh = grad_in_turn(dh, first, offs)
        del dh
        if "x" in first.needs:
            dx = input_gradient(q, w1, offs, first)
            below = replaced(below, x=finish(dx, dprobs))
            del dx
        del q
    if dx_first and not parts:
        dw2 = _fc2_weight(waits, w2, offs, last)
    if of_dh is not None and "weight" in first.needs:
        of_dh = _columns(of_dh, offs, first)
        dw1 = {"weight": _fc1_weight(of_dh[0], source, w1, offs, first, parts)}
    del of_dh
    dw2 = dw2 or _fc2_weight(waits, w2, offs, last, parts)
    side = {"probs": dprobs} if "probs" in act.needs else None
    return (
        replaced(below, params={**(below.params or {}), **dw1}),
        Grads(side=side),
        replaced(above, params={**(above.params or {}), **dw2}),
    )


def _through_activation(
    mlp: Any, s: Any, between: list[Any], calls: tuple[Call, ...]
) -> tuple[Operand | None, Operand | None, Tensor | None]:
    """(dh, a as fc2's weight gradient reads it, dprobs).   between: h and da, which are taken out

    A pass of codes reads h once. Else a is made in a pass of its own, when da has gone: there the peak would be.
    """
    first, act, last = calls
    da, h = between.pop(), between.pop()
    if h is None:
        return None, None, None
    if (
        da is not None
        and first.needs
        and not _apart(s, h, calls)
        and coded_swiglu.whole_squares(da)
    ):
        return coded_swiglu.backward(da, h, s.probs if mlp.scaled else None, s.offs, first, last)
    h, dh, dprobs = high(h), None, None
    if da is not None:
        wanted = bool(first.needs), "probs" in act.needs, False
        dh, dprobs, _ = mlp.activation_bwd(da, h, s, *wanted)
        del da
    if "weight" not in last.needs:
        return dh, None, dprobs
    a = mlp.activation(h, s)
    del h
    return dh, wgrad_input(a, last, s.offs), dprobs


def _fc1_weight(
    dh: Operand, source: Source, weight: Tensor, offs: Tensor, call: Call, parts: int
) -> Tensor | None:
    """The gradient of fc1's weight, of x with its columns in parts where there are several."""
    x, index = cast("tuple[Operand, Tensor | None]", source())
    if parts <= 1:
        return weight_gradient(dh, x, offs, call, index)
    tables = partial(tiles_of_columns, call)
    tokens, columns = _some_columns(x, cast("Scaling", _roles(call).input), offs, index)

    def multiplied(dw: Tensor, part: Operand) -> None:
        gemm.wgrad_into(dw, dh, columns(part), offs, False, call.name, tables)

    return _in_parts(weight, 2, tokens, parts, multiplied)


def _fc2_weight(
    waits: list[Any], weight: Tensor, offs: Tensor, call: Call, parts: int = 0
) -> Params:
    """The gradient of fc2's weight.   waits: dy and a, which are taken out; none where it is not needed

    parts: in how many the columns of dy are there, of a dy that waits by token
    """
    if not waits:
        return {}
    a = waits.pop()
    if parts <= 1:
        dy, index = _columns(waits.pop(), offs, call)
        return {"weight": weight_gradient(dy, a, offs, call, None, index)}
    tables = partial(tiles_of_columns, call)
    dy, index = waits.pop()
    tokens, columns = _some_columns(dy, cast("Scaling", _roles(call).grad_output), offs, index)

    def multiplied(dw: Tensor, part: Operand) -> None:
        gemm.wgrad_into(dw, columns(part), a, offs, False, call.name, tables)

    return {"weight": _in_parts(weight, 1, tokens, parts, multiplied)}


def _some_columns(
    x: Operand, scaling: Scaling, offs: Tensor, index: Tensor | None
) -> tuple[Operand, Callable[[Operand], Operand]]:
    """(tokens, what makes the columns of rows by index of some of their features): of codes where columns are made of
    those, else of copies of rows, which one scale a group keeps the amax of all features for.
    """
    amax = None
    if of_codes(scaling):
        x = operand(x, scaling)
    elif isinstance(x, Tensor) and index is not None:
        amax = amax_of_rows(x, scaling, offs, index)
    return x, partial(
        operand, scaling=scaling, offs=offs, row=False, col=True, index=index, amax=amax
    )


def _in_parts(
    weight: Tensor,
    axis: int,
    tokens: Operand,
    parts: int,
    multiplied: Callable[[Tensor, Operand], None],
) -> Tensor:
    """The gradient of a weight, written some of the tokens' features at a time: those that lie along this axis."""
    dw = weight.new_empty(weight.shape, dtype=tokens.dtype)
    width = weight.shape[axis]
    step = BLOCK * cdiv(width, BLOCK * parts)
    for begin in range(0, width, step):
        size = min(step, width - begin)
        multiplied(dw.narrow(axis, begin, size), some_features(tokens, begin, size))
    return dw


def _columns(left: Indexed, offs: Tensor, call: Call) -> Indexed:
    """What the weight gradient multiplies."""
    if _roles(call).high_wgrad:
        return left
    return grad_operand(left[0], call, WEIGHT, offs, left[1]), None


def _roles(call: Call) -> Roles:
    return cast("Roles", call.precision.roles)
