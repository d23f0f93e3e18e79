"""The grouped MLP is one joint op: fc1, an activation (times probability), fc2.

Saves x, h (the pre-activation), probs and offs only. The backward recomputes the activation for fc2's weight gradient,
in the pass that makes dh. Under a recompute policy h is not saved either, and fc1 runs again.
Shapes: x (R, D), h (R, 2F) or (R, F), a (R, F), probs (R,), offs (E,).
Numerics: every GEMM and activation rounds as the op alone does; `a` of the backward comes from another kernel than `a`
of the forward, so it may differ in the last place, and fc2's weight gradient by as much.
Under a recipe SwiGLU and its backward write quantized operands (`quantized_swiglu`), and rows by index are permuted as
codes. The only additional passes quantize the tokens, and make the columns of weight gradients from rows, after dx. The
backward quantizes x again, to the same codes, so high-precision tensors are saved, or less with `hidden="float8"`: fc1
then writes h as codes, which both directions of SwiGLU read.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.kernels.activation import Form
from fuseops.kernels.configs import Switch
from fuseops.kernels.grouped_paths import EPILOGUE_ACTS, act_path
from fuseops.kernels.registry import cached_decision, held_once
from fuseops.ops.activations import form_of
from fuseops.ops.checks import check_offs, check_probs
from fuseops.ops.grouped_linear import (
    GroupedLinearSaved,
    grouped_linear,
    rows_of,
)
from fuseops.ops.linear import (
    input_operand,
    saved_input,
    to_high_precision,
    weight_rows,
)
from fuseops.ops.op import (
    Call,
    Calls,
    FusedOp,
    Grads,
    MemberTensors,
    Op,
    Out,
    SideGrads,
    fast_replace,
)
from fuseops.ops.splits import check_splits
from fuseops.ops.tiles import tiles_of
from fuseops.recipes import Operand
from fuseops.torch_private import is_fake

from . import dswiglu, quantized_swiglu, wgrad_order
from .act_backward import activation_backward
from .gemm_bwd import SUMS, WEIGHTS, RowSource, grouped_backward

FinishDx = Callable[[Tensor, Tensor | None], Tensor]  # (dx, dprobs) -> dx

EPILOGUE = Switch(
    # The activation as the epilogue of fc1's GEMM. On an H200 it gains 0 to 5 % where h is written, more where it is
    # not or rows are read by index; with a short summed axis nothing hides the epilogue.
    "swiglu_epilogue",
    "EPILOGUE",
    lambda rows, dims: bool(dims[3]) or not dims[4] or dims[2] >= 1024,
    dims=("groups", "n", "k", "by_index", "need_h"),
)


class GroupedMLPSaved(NamedTuple):
    x: Operand | None  # (R, D), of routed tokens (T, D)
    h: Operand | None
    probs: Tensor | None
    offs: Tensor | None
    fc1: Tensor | None  # parameters themselves
    fc2: Tensor | None
    bias1: Tensor | None
    bias2: Tensor | None
    form: Form | None  # of the activation in the forward
    down1: Tensor | None = None  # parameters themselves
    up1: Tensor | None = None
    down2: Tensor | None = None
    up2: Tensor | None = None
    # of routed tokens
    index: Tensor | None = None  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    pos: Tensor | None = None
    home: Tensor | None = None  # in the place of x, as the tokens of this rank were sent
    slots: Tensor | None = None
    arrivals: Tensor | None = None


FC1 = {"x": "x", "offs": "offs", "fc1": "weight", "bias1": "bias", "down1": "down", "up1": "up"}
ACT = {"h": "x", "probs": "probs", "form": "form"}
FC2 = {"fc2": "weight", "bias2": "bias", "down2": "down", "up2": "up"}
"""{field: its name in the Saved of the member}, by member."""


class GroupedMLP(FusedOp):
    """y = fc2(act(fc1(x)) * probs), grouped, for every activation, with or without probs and biases."""

    Saved = GroupedMLPSaved
    takes_saved = True
    recipes = True
    takes_quantized = True
    recomputes = ("h",)
    fc1_index = 0  # of fc1 among the members

    def __init__(self, *members: Op[Any]) -> None:
        super().__init__(*members)
        fc1, self.act, fc2 = trio = members[self.fc1_index : self.fc1_index + 3]
        self.names: dict[str, str] = {
            field: f"{i}.{name}"
            for i, fields in enumerate((FC1, ACT, FC2), self.fc1_index)
            for field, name in fields.items()
        }
        self.scaled, self.scale1, self.scale2 = ("probs" in op.reads for op in (self.act, fc1, fc2))
        a = ("h", "offs", "form", "probs") if self.scaled else ("h", "offs", "form")
        low1, low2 = (
            tuple(f"{name}{i}" for name in ("down", "up") if name in op.parameter_names())
            for i, op in ((1, fc1), (2, fc2))
        )
        dh = (*a, "fc2", *low2)
        one, act, two = (f"{self.fc1_index + i}." for i in range(len(trio)))
        self.saves_for: dict[str, tuple[str, ...]] = {
            "x": (*dh, "fc1", *low1),
            f"{one}weight": (*dh, "x"),
            f"{one}bias": (*dh, *(("probs",) if self.scale1 else ())),
            f"{one}probs": (*dh, "bias1"),
            f"{act}probs": ("h", "offs", "form", "fc2", *low2),
            f"{two}weight": a,
            f"{two}bias": ("offs", "probs") if self.scale2 else ("offs",),
            f"{two}probs": ("offs", "bias2"),
        }
        if low1:
            self.saves_for |= {f"{one}down": (*dh, "x", "up1"), f"{one}up": (*dh, "x", "down1")}
        if low2:
            self.saves_for |= {f"{two}down": (*a, "up2"), f"{two}up": (*a, "down2")}

    def fwd(self, x: Operand, t: MemberTensors, calls: Calls, keep: frozenset[str]) -> Out:
        saved = self.saved_inputs(x, t)
        h, a = self.fc1_and_act(saved, calls, "h" in keep)
        y = self.output(saved, a, calls[2])
        return Out(
            y, fast_replace(saved, h=h, x=saved_input(x, calls[0], saved.offs, again=h is None))
        )

    def bwd(
        self, owned: list[GroupedMLPSaved], dy: Tensor, calls: Calls, dside: SideGrads
    ) -> tuple[Grads, ...]:
        saved_rest, dh_owned = split_h(owned.pop())
        dh_owned.append(dy)
        return self.gradients(saved_rest, dh_owned, calls, lambda *width: (saved_rest.x, None))

    def choices(self, x: Tensor, t: MemberTensors, calls: Calls) -> str:
        if calls[0].precision.roles is not None:
            return ""
        given, facts = self.operands(self.saved_inputs(x, t)), dswiglu.facts_of(calls)
        why = dswiglu.expected_unfused_reason(given, None, facts, x.shape[0])
        return dswiglu.describe(why)

    # --- the parts, over the calls of fc1, act and fc2. With an index, row r is row index[r] of x or dy.

    def saved_inputs(self, x: Operand, t: MemberTensors) -> GroupedMLPSaved:
        """The saved fields, without h."""
        fc1, act, fc2 = t[self.fc1_index : self.fc1_index + 3]
        check_offs(fc1["offs"], fc1["weight"].shape[0])
        probs = next((m["probs"] for m in (fc1, act, fc2) if "probs" in m), None)
        return GroupedMLPSaved(
            *(x, None, probs, fc1["offs"], fc1["weight"], fc2["weight"]),
            *(fc1.get("bias"), fc2.get("bias"), form_of(self.act)),
            *(fc1.get("down"), fc1.get("up"), fc2.get("down"), fc2.get("up")),
        )

    def operands(self, s: GroupedMLPSaved) -> dswiglu.Operands:
        """The inputs of the backward through fc2 and the activation, except dy and h."""
        form: Form = s.form  # type: ignore[assignment]
        return dswiglu.Operands(form, s.probs if self.scaled else None, s.fc2, s.offs)

    def hidden(self, s: GroupedMLPSaved, call: Call, index: Tensor | None = None) -> Operand:
        """h = fc1(x) in the format in which it is saved, for forward and recomputation. The GEMM may quantize it."""
        x: Operand = s.x  # type: ignore[assignment]
        weight: Tensor = s.fc1  # type: ignore[assignment]
        offs: Tensor = s.offs  # type: ignore[assignment]
        roles, width = call.precision.roles, weight.shape[1]
        may_write_codes = roles is not None and not self.scale1
        if may_write_codes and quantized_swiglu.gemm_quantizes_hidden(roles, x.dtype, width):  # type: ignore[arg-type]
            rows = rows_of(x) if index is None else len(index)
            check_splits(offs, rows, offs.device)
            q = input_operand(x, call, offs, index, columns=False)
            tiles = tiles_of(call, offs, rows)
            codes = quantized_swiglu.fc1_to_codes(
                q, weight_rows(weight, call), offs, tiles, s.bias1
            )
            if codes is not None:
                return codes
        scale, low_rank = s.probs if self.scale1 else None, (s.down1, s.up1)
        h, _ = grouped_linear(
            x, weight, s.bias1, offs, scale, call, index, low_rank=low_rank, columns=False
        )
        return h if roles is None else quantized_swiglu.quantize_hidden(h, roles)

    def fc1_and_act(
        self, s: GroupedMLPSaved, calls: Calls, need_h: bool, index: Tensor | None = None
    ) -> tuple[Operand | None, Operand]:
        """(h, None unless `need_h`; the activation), in one kernel where that is faster."""
        call = calls[0]
        if call.precision.roles is not None:
            h = self.hidden(s, call, index)
            kept, needs_dh_tensor = h if need_h else None, not call.needs.isdisjoint(SUMS)
            if quantized_swiglu.unfused_reason(s.form, h, call, calls[2], needs_dh_tensor) is None:
                probs = s.probs if self.scaled else None
                return kept, quantized_swiglu.forward(h, probs, s.offs, calls[2])
            return kept, self.activation(to_high_precision(h), s)
        x: Tensor = s.x  # type: ignore[assignment]
        offs: Tensor = s.offs  # type: ignore[assignment]
        weight: Tensor = call.precision.cast(s.fc1)  # type: ignore[assignment]
        probs, rows = s.probs if self.scaled else None, (x if index is None else index).shape[0]
        form: Form = s.form  # type: ignore[assignment]
        tensors = x, weight, index, probs, s.bias1
        if cached_decision(
            _act_in_epilogue, tensors, form, self.scale1, s.down1 is not None, need_h
        ):
            check_splits(offs, rows, x.device)
            tiles, bias = tiles_of(call, offs, rows), call.precision.cast(s.bias1)
            return K.grouped_swiglu(x, weight, offs, tiles, bias, index, probs, need_h, *form)
        h = self.hidden(s, call, index)
        return h if need_h else None, self.activation(h, s)  # type: ignore[arg-type]

    def output(self, s: GroupedMLPSaved, a: Operand, call: Call) -> Tensor:
        """y = fc2(a), in the precision of its call."""
        scale = s.probs if self.scale2 else None
        low_rank = s.down2, s.up2
        return grouped_linear(
            a, s.fc2, s.bias2, s.offs, scale, call, low_rank=low_rank, columns=False  # type: ignore[arg-type]
        )[0]  # fmt: skip

    def activation(self, h: Tensor, s: GroupedMLPSaved) -> Tensor:
        form: Form = s.form  # type: ignore[assignment]
        if not self.scaled:
            return K.act_fwd(h, *form)
        check_probs(type(self.act).__name__, h, s.probs)  # type: ignore[arg-type]
        return K.scaled_act_fwd(h, s.probs, *form)  # type: ignore[arg-type]

    def gradients(
        self,
        s: GroupedMLPSaved,
        owned: list[Any],
        calls: Calls,
        source: RowSource,
        dy_index: Tensor | None = None,
        finish_dx: FinishDx = lambda dx, dprobs: dx,
        dx_first: bool = False,
    ) -> tuple[Grads, Grads, Grads]:
        """The Grads of fc1, the activation and fc2, of what their calls need.

        owned: [h, dy], which are popped.  source: the rows of x, for a GEMM of this many features.  finish_dx: applied
        to dx (R, D).  dx_first: fc2's weight gradient waits, with a and dy, until `finish_dx` has dx, which may travel
        then. A recipe may also defer it, for a lower peak (`wgrad_order`).
        For the peak, dh is written over h if nothing else holds it; otherwise h is freed before weight gradients are
        made, dy after fc2's, and the rows of dx before the last of them.
        """
        (first, act, last), (fc1, fc2) = calls, self._gemms(s)
        dy: Any = owned.pop()
        quantized, parts, fused = first.precision.roles is not None, 0, False
        reuse_h = not (quantized or torch.compiler.is_compiling())
        reuse_h = reuse_h and (owned[0] is None or held_once(owned))
        h, dprobs = owned.pop(), None
        if h is None and not last.needs.isdisjoint(("x", *WEIGHTS)):
            x, x_index = source(s.fc1.shape[1])  # type: ignore[union-attr]
            h = self.hidden(fast_replace(s, x=x), first, x_index)
            del x
        if quantized:
            parts = wgrad_order.choose_parts(dy, s.fc1, s.fc2, calls, dy_index)
            dx_first = dx_first or wgrad_order.wgrad_waits_for_dx(s.fc2, calls, dy_index)
        elif s.down2 is None:
            rows = (dy if dy_index is None else dy_index).shape[0]
            operands, facts = self.operands(s), dswiglu.facts_of(calls)
            fused = dswiglu.unfused_reason(operands, dy, h, dy_index, facts, rows) is None
        call = fast_replace(last, needs=last.needs - {"x"}) if fused else last
        fc2_grads, fc2_wgrad = grouped_backward(fc2, [dy], call, dy_index, True, parts > 0)
        dh: Operand | None = None
        a: Operand | None = None
        if fused:
            dh, a, dprobs = dswiglu.fused_backward(operands, dy, h, dy_index, last, reuse_h)
        else:
            h_and_da, fc2_grads = [h, fc2_grads.x], fast_replace(fc2_grads, x=None)
            h, probs = None, s.probs if self.scaled else None
            need_dh, needs_dh_tensor = bool(first.needs), not first.needs.isdisjoint(SUMS)
            given = s.form, probs, s.offs, h_and_da, calls, need_dh, needs_dh_tensor, reuse_h
            dh, a, dprobs = activation_backward(*given)
        dh_owned, a_owned = [dh], [(a, None)]
        width = None if dh is None else dh.shape[1]
        del h, dh, a, dy
        if not (dx_first or parts):
            fc2_wgrad(a_owned.pop)
        if width is None:
            fc1_grads, fc1_wgrad = Grads(), None
        else:
            fc1_grads, fc1_wgrad = grouped_backward(fc1, dh_owned, first)
            if fc1_grads.x is not None:
                fc1_grads = fast_replace(fc1_grads, x=finish_dx(fc1_grads.x, dprobs))
        if dx_first and not parts:
            fc2_wgrad(a_owned.pop)
        if fc1_wgrad is not None:
            fc1_wgrad(partial(source, width), parts)
        if parts:
            fc2_wgrad(a_owned.pop, parts)
        return fc1_grads, Grads(side={"probs": dprobs} if "probs" in act.needs else None), fc2_grads

    def _gemms(self, s: GroupedMLPSaved) -> tuple[GroupedLinearSaved, GroupedLinearSaved]:
        """The saved fields of fc1 and fc2 as ops, without x."""
        scale1, scale2 = (s.probs if scaled else None for scaled in (self.scale1, self.scale2))
        return (
            GroupedLinearSaved(None, s.fc1, s.offs, s.bias1, scale1, s.down1, s.up1),
            GroupedLinearSaved(None, s.fc2, s.offs, s.bias2, scale2, s.down2, s.up2),
        )


def split_h(saved: GroupedMLPSaved) -> tuple[GroupedMLPSaved, list[Any]]:
    """(the fields without h, [h]): a callee pops h and can free it, which an argument of the caller would prevent."""
    return fast_replace(saved, h=None), [saved.h]


def _act_in_epilogue(
    x: Tensor,
    weight: Tensor,
    index: Tensor | None,
    probs: Tensor | None,
    bias: Tensor | None,
    form: Form,
    scaled: bool,
    adapted: bool,
    need_h: bool,
) -> bool:
    """Whether the activation is the epilogue of fc1's GEMM: the kernel supports it, without adapters and a scaled bias,
    and measurements say that it is faster.
    """
    (kind, *options), rows = form, (x if index is None else index).shape[0]
    # with a bias, only clamped SwiGLU was tested on a GPU
    unsupported_bias = bias is not None and (scaled or kind != "clamped_swiglu")
    if kind not in EPILOGUE_ACTS or unsupported_bias or adapted:
        return False
    if probs is not None and (probs.shape != (rows,) or probs.dtype is not torch.float32):
        return False
    if torch.compiler.is_compiling() or is_fake(x) or x.stride(1) != 1:
        return False
    if not K.grouped_swiglu.launches((x, weight), {}):
        return False
    if not act_path(x, weight, index, kind, *options[:1]):
        return False
    dims = (*weight.shape, index is not None, need_h)
    return EPILOGUE.enabled(rows, dims, x)
