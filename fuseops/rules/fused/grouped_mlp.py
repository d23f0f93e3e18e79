"""The grouped MLP is one joint op: fc1, an activation (times probability), fc2.

Saves x, h (the pre-activation), probs and offs only. The activation is computed again in the backward, by the pass that
makes dh, for fc2's weight gradient. Under a recompute policy h goes too, and fc1 runs again.
Shapes: x (R, D), h (R, 2F) or (R, F), a (R, F), probs (R,), offs (E,).
Numerics: every GEMM and activation rounds as the op alone does; `a` of the backward comes from another kernel than `a`
of the forward, so it may differ in the last place, and fc2's weight gradient by as much.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.kernels.configs import Switch
from fuseops.kernels.grouped_paths import ENDS, act_path
from fuseops.kernels.registry import decided
from fuseops.ops.activations import Form, form_of
from fuseops.ops.checks import check_offs, check_probs
from fuseops.ops.grouped_linear import GroupedLinearSaved, grouped_linear, grouped_linear_bwd
from fuseops.ops.linear import saved_input
from fuseops.ops.op import Call, FusedOp, Grads, Op, Out, replaced
from fuseops.ops.splits import check_splits
from fuseops.ops.tiles import tiles_of
from fuseops.recipes import Operand
from fuseops.torch_private import held_once, is_fake

from . import dswiglu, quantized_mlp

Tensors = Mapping[str, Tensor]
Params = Mapping[str, Tensor | None]
# a tensor, and the index of its rows: None for all, in order
Rows = tuple[Operand | None, Tensor | None]
WEIGHTS = frozenset({"weight", "down", "up"})
GEMMS = WEIGHTS | {"x"}
Source = Callable[..., Rows]
Finish = Callable[[Tensor, Tensor | None], Tensor]  # of dx and dprobs


EPILOGUE = Switch(
    # of fc1. On an H200 it gains 0 to 5 % where h is written, more where it is not
    # or rows are read by index; where the product is short nothing hides it.
    "swiglu_epilogue",
    "EPILOGUE",
    lambda rows, dims: bool(dims[3]) or not dims[4] or dims[2] >= 1024,
    dims=("groups", "n", "k", "by_index", "need_h"),
)


class GroupedMLPSaved(NamedTuple):
    x: Operand | None
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


class GroupedMLP(FusedOp):
    """y = fc2(act(fc1(x)) * probs), grouped, for every activation, with or without probs and biases."""

    Saved = GroupedMLPSaved
    takes_saved = True
    recipes = True
    takes_quantized = True
    recomputes = ("h",)
    names = {
        "x": "0.x",
        "h": "1.x",
        "probs": "1.probs",
        "offs": "0.offs",
        "fc1": "0.weight",
        "fc2": "2.weight",
        "bias1": "0.bias",
        "bias2": "2.bias",
        "form": "1.form",
        "down1": "0.down",
        "up1": "0.up",
        "down2": "2.down",
        "up2": "2.up",
    }

    def __init__(self, *members: Op[Any]) -> None:
        super().__init__(*members)
        fc1, act, fc2 = members
        self.scaled, self.scale1, self.scale2 = ("probs" in op.reads for op in (act, fc1, fc2))
        a = ("h", "offs", "form", "probs") if self.scaled else ("h", "offs", "form")
        low1, low2 = (
            tuple(f"{name}{i}" for name in ("down", "up") if name in op.parameter_names())
            for i, op in ((1, fc1), (2, fc2))
        )
        dh = (*a, "fc2", *low2)
        self.saves_for: dict[str, tuple[str, ...]] = {
            "x": (*dh, "fc1", *low1),
            "0.weight": (*dh, "x"),
            "0.bias": (*dh, *(("probs",) if self.scale1 else ())),
            "0.probs": (*dh, "bias1"),
            "1.probs": ("h", "offs", "form", "fc2", *low2),
            "2.weight": a,
            "2.bias": ("offs", "probs") if self.scale2 else ("offs",),
            "2.probs": ("offs", "bias2"),
        }
        if low1:
            self.saves_for |= {"0.down": (*dh, "x", "up1"), "0.up": (*dh, "x", "down1")}
        if low2:
            self.saves_for |= {"2.down": (*a, "up2"), "2.up": (*a, "down2")}

    def fwd(
        self, x: Operand, t: tuple[Tensors, ...], calls: tuple[Call, ...], keep: frozenset[str]
    ) -> Out:
        saved = self.inputs(x, t)
        h, a = self.activated(saved, calls, "h" in keep)
        y = self.output(saved, a, calls[2])
        return Out(y, replaced(saved, h=h, x=saved_input(x, calls[0], saved.offs, again=h is None)))

    def bwd(
        self,
        held: list[GroupedMLPSaved],
        dy: Tensor,
        calls: tuple[Call, ...],
        dside: Mapping[str, Tensor | None],
    ) -> tuple[Grads, ...]:
        rest, taken = without_h(held.pop())
        taken.append(dy)
        return self.gradients(rest, taken, calls, lambda *width: (rest.x, None))

    def choices(self, x: Tensor, t: tuple[Tensors, ...], calls: tuple[Call, ...]) -> str:
        if calls[0].precision.roles is not None:
            return ""
        given, facts = self.operands(self.inputs(x, t)), dswiglu.facts_of(calls)
        why = dswiglu.expected_why_apart(given, None, facts, x.shape[0])
        return dswiglu.in_words(why)

    # --- the parts, which ops that route rows use as well: with an index, row r of x or of dy is its row index[r]

    def inputs(self, x: Operand, t: tuple[Tensors, ...]) -> GroupedMLPSaved:
        """What there is to save, but for h."""
        fc1, _, fc2 = t
        check_offs(fc1["offs"], fc1["weight"].shape[0])
        probs = next((m["probs"] for m in t if "probs" in m), None)
        return GroupedMLPSaved(
            *(x, None, probs, fc1["offs"], fc1["weight"], fc2["weight"]),
            *(fc1.get("bias"), fc2.get("bias"), form_of(self.members[1])),
            *(fc1.get("down"), fc1.get("up"), fc2.get("down"), fc2.get("up")),
        )

    def operands(self, s: GroupedMLPSaved) -> dswiglu.Operands:
        """What the backward through fc2 and the activation reads, but for dy and h."""
        form: Form = s.form  # type: ignore[assignment]
        return dswiglu.Operands(form, s.probs if self.scaled else None, s.fc2, s.offs)

    def hidden(self, s: GroupedMLPSaved, call: Call, index: Tensor | None = None) -> Tensor:
        """h = fc1(x), once more or for the first time, in the precision of its call."""
        scale = s.probs if self.scale1 else None
        low_rank = s.down1, s.up1
        return grouped_linear(
            s.x, s.fc1, s.bias1, s.offs, scale, call, index, low_rank=low_rank, columns=False  # type: ignore[arg-type]
        )[0]  # fmt: skip

    def activated(
        self,
        s: GroupedMLPSaved,
        calls: tuple[Call, ...],
        need_h: bool,
        index: Tensor | None = None,
    ) -> tuple[Operand | None, Operand]:
        """fc1, where it is needed, and the activation of it, in one kernel where that is faster."""
        call = calls[0]
        if call.precision.roles is not None:
            kept, codes = quantized_mlp.activated(self, s, calls, index)
            return kept if need_h else None, codes
        x: Tensor = s.x  # type: ignore[assignment]
        offs: Tensor = s.offs  # type: ignore[assignment]
        weight: Tensor = call.precision.cast(s.fc1)  # type: ignore[assignment]
        probs, rows = s.probs if self.scaled else None, (x if index is None else index).shape[0]
        form: Form = s.form  # type: ignore[assignment]
        tensors = x, weight, index, probs, s.bias1
        if decided(_in_epilogue, tensors, form, self.scale1, s.down1 is not None, need_h):
            check_splits(offs, rows, x.device)
            tiles, bias = tiles_of(call, offs, rows), call.precision.cast(s.bias1)
            return K.grouped_swiglu(x, weight, offs, tiles, probs, index, need_h, bias, *form)
        h = self.hidden(s, call, index)
        return h if need_h else None, self.activation(h, s)

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
        check_probs(type(self.members[1]).__name__, h, s.probs)  # type: ignore[arg-type]
        return K.scaled_act_fwd(h, s.probs, *form)  # type: ignore[arg-type]

    def gradients(
        self,
        s: GroupedMLPSaved,
        held: list[Any],
        calls: tuple[Call, ...],
        source: Source,
        dy_index: Tensor | None = None,
        finish: Finish = lambda dx, dprobs: dx,
        dx_first: bool = False,
    ) -> tuple[Grads, Grads, Grads]:
        """Of fc1, the activation and fc2: what their calls need, and no work for anything else.

        held: h and dy, which are taken out. source: the rows of x, for a product of that many features. finish: what
        becomes of dx (R, D). dh is written over an h that nobody else holds. Another one goes before the gradients of
        weights are made, dy when fc2's is there, and the rows of dx before the last of them: there the peak would be.
        dx_first: fc2's waits, with a and dy, until `finish` has had dx, which may travel then.
        """
        first, act, last = calls
        if first.precision.roles is not None:
            return quantized_mlp.gradients(self, s, held, calls, source, dy_index, finish, dx_first)
        scale1, scale2 = (s.probs if scaled else None for scaled in (self.scale1, self.scale2))
        fc1 = GroupedLinearSaved(None, s.fc1, s.offs, s.bias1, scale1, s.down1, s.up1)
        fc2 = GroupedLinearSaved(None, s.fc2, s.offs, s.bias2, scale2, s.down2, s.up2)
        dw1: Params = {}
        below = Grads()
        dy: Tensor = held.pop()
        spare = not torch.compiler.is_compiling() and (held[0] is None or held_once(held))
        h, a, dh, dprobs = held.pop(), None, None, None
        if h is None and not last.needs.isdisjoint(("x", *WEIGHTS)):
            x, x_index = source(s.fc1.shape[1])  # type: ignore[union-attr]
            h = self.hidden(replaced(s, x=x), first, x_index)
            del x
        rows = (dy if dy_index is None else dy_index).shape[0]
        operands = self.operands(s)
        why = dswiglu.why_apart(operands, dy, h, dy_index, dswiglu.facts_of(calls), rows)
        fused = why is None and s.down2 is None
        needs = last.needs - (GEMMS if fused else WEIGHTS)
        above = grouped_linear_bwd(fc2, dy, last, dy_index=dy_index, needs=needs)
        da, above = above.x, Grads(None, *above[1:])
        if fused:
            dh, a, dprobs = dswiglu.run(operands, dy, h, dy_index, last, spare)
        elif da is not None:
            wanted = bool(first.needs), "probs" in act.needs, not last.needs.isdisjoint(WEIGHTS)
            dh, dprobs, a = self.activation_bwd(da, h, s, *wanted, spare)
            del da
        if not last.needs.isdisjoint(WEIGHTS) and a is None:
            a = self.activation(h, s)
        left = [] if last.needs.isdisjoint(WEIGHTS) else [dy, a]
        del h, a, dy
        dw2 = {} if dx_first else _fc2_weight(fc2, left, last, dy_index)
        if dh is not None:
            below = grouped_linear_bwd(fc1, dh, first, needs=first.needs - WEIGHTS)
            if below.x is not None:
                below = replaced(below, x=finish(below.x, dprobs))
        dw2 = dw2 or _fc2_weight(fc2, left, last, dy_index)  # if it has waited
        if dh is not None and not first.needs.isdisjoint(WEIGHTS):
            x, x_index = source(dh.shape[1])
            dw1 = _weight(replaced(fc1, x=x), dh, first, x_index, None)
        side = {"probs": dprobs} if "probs" in act.needs else None
        return _with(below, dw1), Grads(side=side), _with(above, dw2)

    def activation_bwd(
        self,
        da: Tensor,
        h: Tensor,
        s: GroupedMLPSaved,
        need_dh: bool,
        need_dprobs: bool,
        need_a: bool,
        spare: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dh, dprobs and the activation, in one pass over h. dh takes the place of a spare h where a kernel runs."""
        kind, *options = s.form  # type: ignore[misc]
        probs = s.probs
        if not need_dh:
            return None, K.act_dprobs(da, h, kind, *options), None
        if not self.scaled:
            if not need_a:
                return K.act_bwd(da, h, kind, *options), None, None
            probs = torch.ones(h.shape[:-1], device=h.device)  # exact
        wanted: Any = (probs, kind, need_dprobs, need_a, *options)
        if spare and h.is_contiguous() and K.scaled_act_bwd_into.launches((h, da, probs), {}):
            dh = h
            dprobs, a = K.scaled_act_bwd_into(h, da, *wanted)
        else:
            dh, dprobs, a = K.scaled_act_bwd(da, h, *wanted)
        return dh, dprobs, a if need_a else None


def without_h(saved: GroupedMLPSaved) -> tuple[GroupedMLPSaved, list[Any]]:
    """h apart, in a list that gives it away: what is named by a caller lives until the call returns."""
    return replaced(saved, h=None), [saved.h]


def _in_epilogue(
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
    """Whether fc1's GEMM ends in the activation: one that it can end in, no bias of its own scale (`scaled`), no
    adapters, a kernel for it, data that says so.
    """
    (kind, *options), rows = form, (x if index is None else index).shape[0]
    # a bias has run on a GPU before clamped SwiGLU alone
    apart = bias is not None and (scaled or kind != "clamped_swiglu")
    if kind not in ENDS or apart or adapted:
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
    return EPILOGUE.says(rows, dims, x)


def _weight(
    saved: GroupedLinearSaved,
    dy: Tensor,
    call: Call,
    x_index: Tensor | None,
    dy_index: Tensor | None,
) -> Params:
    """The gradients of what multiplies."""
    needs = call.needs & WEIGHTS
    return grouped_linear_bwd(saved, dy, call, x_index, dy_index, needs).params or {}


def _fc2_weight(
    saved: GroupedLinearSaved, left: list[Any], call: Call, dy_index: Tensor | None
) -> Params:
    """The same of fc2.  left: dy and a, which are taken out"""
    return _weight(replaced(saved, x=left.pop()), left.pop(), call, None, dy_index) if left else {}


def _with(grads: Grads, params: Params) -> Grads:
    return Grads(grads.x, {**(grads.params or {}), **params}, grads.side)
