"""The grouped MLP over quantized operands: what `GroupedMLP` does under a recipe.

No pass reads or writes what the high-precision one does not, but for the tokens' own quantization: SwiGLU and its
backward write codes, rows by index are permuted as codes, and columns are made of the codes of rows. The backward
quantizes x again, to the same codes, so what is saved is what high precision saves, or less with `hidden="float8"`: fc1
writes h as codes then, and both directions of SwiGLU read them.
Numerics: as of the ops one by one. What SwiGLU writes is rounded as its tensor would be before it is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.ops.grouped_linear import (
    GroupedLinearSaved,
    grouped_linear_bwd,
    input_gradient,
    rows_of,
    weight_gradient,
)
from fuseops.ops.linear import grad_operand, high, input_operand, weight_rows
from fuseops.ops.op import Call, Grads, replaced
from fuseops.ops.splits import check_splits
from fuseops.ops.tiles import tiles_of
from fuseops.recipes import Layout, Operand, Quantized, Roles, Scaling, operand
from fuseops.recipes.numbers import watching
from fuseops.recipes.quantized import BLOCK
from fuseops.recipes.scaling import SQUARE

Params = Mapping[str, Tensor | None]
Source = Callable[..., tuple[Operand | None, Tensor | None]]
Finish = Callable[[Tensor, Tensor | None], Tensor]  # of dx and dprobs


def activated(
    mlp: Any, s: Any, calls: tuple[Call, ...], index: Tensor | None
) -> tuple[Operand, Operand]:
    """fc1 and the activation of it: h as it is saved, and a as fc2 reads it."""
    h = _hidden(mlp, s, calls[0], index)
    if not _writes_codes(s, h, calls):
        return h, mlp.activation(high(h), s)
    scaling = cast("Scaling", cast("Roles", calls[2].precision.roles).input)
    data, scale = _hidden_codes(h)
    probs = s.probs if mlp.scaled else None
    parts = K.swiglu_operand(data, probs, None, scaling.data, True, False, scale)
    return h, Quantized(Layout(*parts[:2]), None, scaling, s.offs, h.dtype)


def _hidden(mlp: Any, s: Any, call: Call, index: Tensor | None) -> Operand:
    """fc1, as h is saved: what the backward reads, the forward reads too. Codes come out of the GEMM where they can."""
    roles = cast("Roles", call.precision.roles)
    codes = roles.hidden == Scaling() and not mlp.scale1 and s.fc1.shape[1] % (2 * BLOCK) == 0
    if not codes or s.x.dtype is not torch.bfloat16 or watching() is not None:
        return _coded(mlp.hidden(s, call, index), roles)
    rows = rows_of(s.x) if index is None else len(index)
    check_splits(s.offs, rows, s.offs.device)
    forward = replaced(call, needs=call.needs.difference(("weight",)))
    x = input_operand(s.x, forward, roles, s.offs, index)
    weight = weight_rows(s.fc1, forward)
    if not isinstance(x, Quantized) or not isinstance(weight, Quantized):
        return _coded(mlp.hidden(s, call, index), roles)
    operands = *cast("Layout", x.row), *cast("Layout", weight.row)
    tiles = tiles_of(call, s.offs, rows)
    parts = K.fp8_mm_operand(*operands, "block", s.offs, tiles, s.bias1)
    return Quantized(Layout(*parts), None, Scaling(), None, s.x.dtype)


def _coded(h: Tensor, roles: Roles) -> Operand:
    return h if roles.hidden is None else operand(h, roles.hidden)


def gradients(
    mlp: Any,
    s: Any,
    held: list[Any],
    calls: tuple[Call, ...],
    source: Source,
    dy_index: Tensor | None,
    finish: Finish,
) -> tuple[Grads, Grads, Grads]:
    """`GroupedMLP.gradients`."""
    first, act, last = calls
    fc1 = GroupedLinearSaved(None, s.fc1, s.offs, s.bias1, s.probs if mlp.scale1 else None)
    fc2 = GroupedLinearSaved(None, s.fc2, s.offs, s.bias2, s.probs if mlp.scale2 else None)
    offs, w1, w2 = cast("tuple[Tensor, Tensor, Tensor]", (s.offs, s.fc1, s.fc2))
    dy: Any = held.pop()
    h: Any = held.pop()
    above = grouped_linear_bwd(fc2, dy, _only(last, "bias", "probs"), dy_index=dy_index)
    q = _operand_of(dy, last, offs, dy_index)
    if not _high_wgrad(last):
        dy = None
    if h is None and not last.needs.isdisjoint(("x", "weight")):
        x, x_index = source()
        h = _hidden(mlp, replaced(s, x=x), first, x_index)
        del x
    da = input_gradient(q, w2, offs, last) if "x" in last.needs else None
    dh, a, dprobs = _through_activation(mlp, s, da, h, calls)
    del da, h
    dw2: Params = {}
    if "weight" in last.needs:
        left, by = (dy, dy_index) if _high_wgrad(last) else (q, None)
        dw2 = {
            "weight": weight_gradient(
                cast("Operand", left), cast("Operand", a), offs, last, None, by
            )
        }
    del a, dy, q
    below, dw1 = Grads(), {}
    if dh is not None:
        below = grouped_linear_bwd(fc1, dh, _only(first, "bias", "probs"))
        q = _operand_of(dh, first, offs, None)
        if "x" in first.needs:
            dx = input_gradient(q, w1, offs, first)
            below = replaced(below, x=finish(dx, dprobs))
            del dx
        if "weight" in first.needs:
            x, x_index = source()
            left = dh if _high_wgrad(first) else q
            dw = weight_gradient(left, cast("Operand", x), offs, first, x_index)
            dw1 = {"weight": dw}
    side = {"probs": dprobs} if "probs" in act.needs else None
    return (
        replaced(below, params={**(below.params or {}), **dw1}),
        Grads(side=side),
        replaced(above, params={**(above.params or {}), **dw2}),
    )


def _through_activation(
    mlp: Any,
    s: Any,
    da: Tensor | None,
    h: Operand | None,
    calls: tuple[Call, ...],
) -> tuple[Operand | None, Operand | None, Tensor | None]:
    """(dh, a as fc2's weight gradient reads it, dprobs), in one pass over h."""
    first, act, last = calls
    if h is None:
        return None, None, None
    need_a = "weight" in last.needs
    if da is None:
        return None, mlp.activation(high(h), s) if need_a else None, None
    if not (first.needs and _writes_codes(s, h, calls)) or da.shape[1] % BLOCK:
        wide = high(h)
        wanted = bool(first.needs), "probs" in act.needs, need_a
        high_dh, dprobs, high_a = mlp.activation_bwd(da, wide, s, *wanted)
        if need_a and high_a is None:
            high_a = mlp.activation(wide, s)
        return high_dh, high_a, dprobs
    row, col = "x" in first.needs, "weight" in first.needs
    of_dh = cast("Scaling", cast("Roles", first.precision.roles).grad_output)
    of_a = cast("Scaling", cast("Roles", last.precision.roles).input)
    probs = s.probs if mlp.scaled else None
    data, scale = _hidden_codes(h)
    parts = K.dswiglu_operand(
        da, data, probs, s.offs, of_dh.data, of_a.data, row, col, need_a, scale
    )
    dh_rows, dh_columns = Layout(*parts[:2]), Layout(*parts[2:4])
    dh = Quantized(dh_rows if row else None, dh_columns if col else None, of_dh, s.offs, h.dtype)
    a = Quantized(None, Layout(*parts[4:6]), of_a, s.offs, h.dtype) if need_a else None
    return dh, a, parts[6]


def _hidden_codes(h: Operand) -> tuple[Tensor, Tensor | None]:
    """h as the activation's kernels read it: codes with their scales, which stand for bfloat16, or the tensor."""
    if not isinstance(h, Quantized) or h.row is None or h.dtype is not torch.bfloat16:
        return high(h), None
    return h.row


def _writes_codes(s: Any, h: Operand, calls: tuple[Call, ...]) -> bool:
    """Whether the activation's kernels write operands: SwiGLU as [gate | up], in vectors and squares, without a bias
    whose gradient reads dh. Not while somebody watches the numbers, who wants the tensors that the codes are of.
    """
    if watching() is not None:
        return False
    kind, *options = cast("tuple[Any, ...]", s.form)
    if (
        kind != "swiglu"
        or any(options)
        or (isinstance(h, Tensor) and h.dim() != 2)
        or not calls[0].needs.isdisjoint(("bias", "probs"))
    ):
        return False
    roles = [call.precision.roles for call in (calls[0], calls[2])]
    scalings = [t for r in roles if r is not None for t in (r.input, r.grad_output)]
    squares = all(t is not None and t.columns == SQUARE for t in scalings)
    return squares and all(r is not None and r.columns for r in roles)


def _operand_of(dy: Operand, call: Call, offs: Tensor, index: Tensor | None) -> Operand:
    """dy as the GEMMs of the gradients read it; as it is where none does."""
    if call.needs.isdisjoint(("x", "weight")):
        return dy
    return grad_operand(dy, call, cast("Roles", call.precision.roles), offs, index)


def _high_wgrad(call: Call) -> bool:
    return cast("Roles", call.precision.roles).high_wgrad


def _only(call: Call, *needs: str) -> Call:
    return replaced(call, needs=call.needs.intersection(needs))
