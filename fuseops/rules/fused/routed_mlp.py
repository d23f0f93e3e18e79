"""Permute, the grouped MLP and an optional Combine as one joint op: tokens in, tokens out.

The routed copy of x is never saved: fc1's GEMM and its weight gradient read the tokens by index. With Combine, both
gradients of fc2 read dy by index too. A layer saves x (T, D), h (R, 2F), probs, offs, index and pos, and no other
activation. An x that arrived from other ranks may be sent again in the backward; the tokens that this rank sent are
saved then, which other ops save anyway.
A `Switch` says for which shapes a temporary routed copy is faster than reading by index.
Shapes: x (T, D), pos (T, K), index (R,), y (T, D) with Combine, else (R, D).
Numerics: as of `GroupedMLP`.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.kernels.activation import Form
from fuseops.kernels.registry import cached_decision
from fuseops.ops.checks import check_pos, check_rows
from fuseops.ops.linear import saved_input
from fuseops.ops.op import Calls, Grads, MemberTensors, Op, Out, SideGrads, fast_replace
from fuseops.ops.permute import (
    DISPATCHED,
    ON_DX,
    REDISPATCH,
    Combine,
    DispatchRecord,
    OnDx,
    Redispatch,
)
from fuseops.recipes import Operand
from fuseops.words import size

from . import dswiglu, wgrad_order
from .gemm_bwd import WEIGHTS, IndexedRows
from .grouped_mlp import GroupedMLP, GroupedMLPSaved, split_h
from .routed_copies import FC1, FC2_BWD, FC2_DSWIGLU, copies_rows

OTHER_PREFERENCE = {"speed": "memory", "memory": "speed"}
DY_ROWS_NOTES = {
    "speed": "rows of dy are copied, {}: prefer='memory' reads them by index, in 1 to 2 % more time",
    "memory": "rows of dy are read by index (prefer='memory'): a copy, {}, takes 1 to 2 % less time",
}
"""Sentences of `explain()` where `prefer` decides whether rows of dy are copied."""

DX_OVERLAP_NOTES = {
    "speed": "dx goes home while both weight gradients are made, for which operands of fc2's wait, {} "
    "(prefer='memory': fc1's alone)",
    "memory": "dx goes home while fc1's weight gradient is made (prefer='speed': fc2's too, whose operands wait, {})",
}
"""Sentences of `explain()` where `prefer` decides how much is computed while dx is sent to other ranks."""


class RoutedMLP(GroupedMLP):
    """y = combine(fc2(act(fc1(permute(x))) * probs)), or without the combine."""

    fc1_index = 1
    again = ("home", "slots", "arrivals")

    def __init__(self, *members: Op[Any]) -> None:
        super().__init__(*members)
        self.combines = isinstance(members[-1], Combine)
        routed = ("index", "pos")
        self.names |= {field: f"0.{field}" for field in (*routed, *self.again)}
        reads_rows = {"x", *(f"{self.fc1_index}.{name}" for name in WEIGHTS)}
        for need, fields in self.saves_for.items():
            if self.combines or need in reads_rows:  # it reads rows of x or dy by index
                self.saves_for[need] = (*fields, *routed)

    @property
    def sums(self) -> torch.dtype | None:
        """The dtype of y, if the MLP ends in a Combine that sets one."""
        last = self.members[-1]
        return last.sums if isinstance(last, Combine) else None

    def fwd(self, x: Operand, t: MemberTensors, calls: Calls, keep: frozenset[str]) -> Out:
        check_rows(self.members[0], x)
        sent: DispatchRecord | None = (calls[0].scratch or {}).pop(DISPATCHED, None)
        if "home" not in keep or (sent is not None and sent.received is not x):
            sent = None
        index, pos = t[0]["index"], t[0]["pos"]
        check_pos("Permute", pos, x.shape[0])
        s = self.saved_inputs(x, t)
        offs: Tensor = s.offs  # type: ignore[assignment]
        x = saved_input(x, calls[1], offs, by_index=True)
        features = s.fc1.shape[1]  # type: ignore[union-attr]
        high = calls[1].precision.roles is None
        copies = high and cached_decision(copies_rows, (x, index), FC1, features)
        rows, rows_index = _routed_rows(x, index, pos, offs, copies)
        h, a = self.fc1_and_act(fast_replace(s, x=rows), calls[1:4], "h" in keep, rows_index)
        del rows
        y = self.output(s, a, calls[3])
        del a
        if self.combines:
            y = K.combine_fwd(y, pos, offs, None, self.sums)
        if sent is None:
            return Out(y, fast_replace(s, x=x, h=h, index=index, pos=pos))
        _, home, slots, arrivals = sent
        again = {"home": home, "slots": slots, "arrivals": arrivals}
        return Out(y, fast_replace(s, x=None, h=h, index=index, pos=pos, **again))

    def bwd(
        self, owned: list[GroupedMLPSaved], dy: Tensor, calls: Calls, dside: SideGrads
    ) -> tuple[Grads, ...]:
        x_of = _x_source(owned[0], calls)
        s, h_and_dy = split_h(owned.pop())
        index, pos, offs = s.index, s.pos, s.offs
        dy_index = None
        if self.combines:
            if self.sums is not None and s.fc2 is not None:
                dy = dy.to(calls[3].precision.compute or s.fc2.dtype)
            dy, dy_index = _routed_rows(dy, index, pos, offs, self._copies_dy(dy, s, index, calls))  # type: ignore[assignment, arg-type]

        def source(*width: int) -> IndexedRows:
            x = x_of()
            if calls[1].precision.roles is not None:
                return x, index  # its codes are permuted
            copies = cached_decision(copies_rows, (x, index), FC1, *width)
            return _routed_rows(x, index, pos, offs, copies)  # type: ignore[arg-type]

        on_dx = _on_dx(calls)

        def finish_dx(dx: Tensor, dprobs: Tensor | None) -> Tensor:
            dtype = None if on_dx is None else self.sums
            sums = K.combine_fwd(dx, pos, offs, None, dtype)  # type: ignore[arg-type]
            dx = sums.to(dx.dtype)
            if on_dx is not None:
                on_dx.send(calls[0].scratch, dx, dprobs, sums)
            return dx

        h_and_dy.append(dy)
        del dy  # `gradients` frees a copy of its rows after the gradients of fc2
        dx_first = on_dx is not None and on_dx.overlaps and calls[3].prefer == "speed"
        grads = self.gradients(s, h_and_dy, calls[1:4], source, dy_index, finish_dx, dx_first)
        after = (Grads(),) if self.combines else ()
        return Grads(grads[0].x), *grads, *after

    def choices(self, x: Tensor, t: MemberTensors, calls: Calls) -> str:
        notes = self._describe_dy_rows(x, t, calls), self._describe_dx_overlap(x, t, calls)
        order = self._describe_order(x, t, calls)
        return "; ".join(filter(None, (*notes, order)))

    def _describe_order(self, x: Any, t: MemberTensors, calls: Calls) -> str:
        """A note on the order of gradients under a recipe, if it is not the default. It assumes that dy is like x."""
        if calls[1].precision.roles is None or not self.combines:
            return ""
        weights = t[1]["weight"], t[3]["weight"]
        index, calls = t[0]["index"], calls[1:4]
        parts = wgrad_order.choose_parts(x, *weights, calls, index)
        return wgrad_order.describe(parts, wgrad_order.wgrad_waits_for_dx(weights[1], calls, index))

    def _describe_dx_overlap(self, x: Any, t: MemberTensors, calls: Calls) -> str:
        """A note on the gradients that are computed while dx is sent, and on the memory that fc2's keeps until then."""
        on_dx, fc2 = _on_dx(calls), t[3]["weight"]
        if on_dx is None or not on_dx.overlaps or "weight" not in calls[3].needs:
            return ""
        roles, index = calls[3].precision.roles, t[0]["index"]
        codes = roles is not None and not roles.high_wgrad
        width = fc2.shape[2]
        if codes or self._copies_dy(x, self.saved_inputs(x, t), index, calls):
            width += fc2.shape[1]
        item = 1 if codes else (calls[3].precision.compute or fc2.dtype).itemsize
        return DX_OVERLAP_NOTES[calls[3].prefer].format(size(index.shape[0] * width * item))

    def _describe_dy_rows(self, x: Tensor, t: MemberTensors, calls: Calls) -> str:
        if calls[1].precision.roles is not None:
            return ""
        index, s = t[0]["index"], self.saved_inputs(x, t)
        copies = self.combines and self._copies_dy(x, s, index, calls)
        rows_index = index if self.combines and not copies else None
        given, rows = self.operands(s), index.shape[0]
        facts = dswiglu.facts_of(calls[1:4])
        note = dswiglu.describe(dswiglu.expected_unfused_reason(given, rows_index, facts, rows))
        prefer = calls[3].prefer
        other = tuple(fast_replace(c, prefer=OTHER_PREFERENCE[prefer]) for c in calls)
        if not self.combines or self._copies_dy(x, s, index, other) == copies:
            return note
        fc2: Tensor = s.fc2  # type: ignore[assignment]
        copied = size(rows * fc2.shape[1] * x.element_size())
        return f"{note}; {DY_ROWS_NOTES[prefer].format(copied)}"

    def _copies_dy(
        self, dy: Tensor, s: GroupedMLPSaved, index: Tensor | None, calls: Calls
    ) -> bool:
        """Whether the rows of dy are copied for fc2's gradients."""
        if calls[1].precision.roles is not None:
            return False
        if not calls[3].needs.isdisjoint(("bias", "probs")):  # sums over rows, not over tokens
            return True
        if index is None or s.fc2 is None:
            return False
        form, probs, fc2, _ = self.operands(s)
        return cached_decision(
            _copies_dy, (dy, fc2, probs, index), form, dswiglu.facts_of(calls[1:4])
        )


def _copies_dy(
    dy: Tensor,
    fc2: Tensor,
    probs: Tensor | None,
    index: Tensor,
    form: Form | None,
    facts: dswiglu.DswigluFacts,
) -> bool:
    given, rows = dswiglu.Operands(form, probs, fc2, None), index.shape[0]
    if facts.prefer == "memory" and dswiglu.gathers_dy(given, index, facts, rows):
        return False
    why = dswiglu.expected_unfused_reason(given, None, facts, rows)
    return copies_rows(dy, index, FC2_DSWIGLU if why is None else FC2_BWD, fc2.shape[2])


def _on_dx(calls: Calls) -> OnDx | None:
    return (calls[0].scratch or {}).get(ON_DX)


def _x_source(saved: GroupedMLPSaved, calls: Calls) -> Callable[[], Any]:
    """A function that returns the x of the forward: the saved one, or one that other ranks start to send here now."""
    x, offs, pos = saved.x, saved.offs, saved.pos
    if saved.home is None:
        return lambda: x
    sends: Redispatch = (calls[0].scratch or {})[REDISPATCH]
    tokens, roles = pos.shape[0], calls[1].precision.roles  # type: ignore[union-attr]
    ready = sends(saved.home, saved.slots, saved.arrivals, tokens, roles)
    return cache(lambda: saved_input(ready(), calls[1], offs, by_index=True))


def _routed_rows(
    x: Operand, index: Tensor | None, pos: Tensor | None, offs: Tensor, copies: bool
) -> IndexedRows:
    """(rows, index to read them by): a routed copy and None, or the tokens and `index`."""
    if copies:
        return K.scatter_rows(x, pos, offs, index.shape[0]), None  # type: ignore[arg-type, union-attr]
    return x, index
