"""Permute, the grouped MLP and, where it follows, Combine as one joint op: tokens in, tokens out.

The routed copy of x is never saved: fc1's GEMM reads the tokens by index, and so does its weight gradient. With Combine
inside, the gradient of y is read by index too, in fc2's input gradient and weight gradient. A layer saves x (T, D),
h (R, 2F), probs, offs, index and pos, and no other activation.
Where a routed copy, made for a moment, is faster than reading by index, `ROWS` says so for the shape.
Shapes: x (T, D), pos (T, K), index (R,), y (T, D) with Combine, else (R, D).
Numerics: as of `GroupedMLP`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fuseops import kernels as K
from fuseops.ops.op import Call, FusedOp, Grads, Op, Out
from fuseops.ops.permute import Combine, check_pos, check_rows

from .grouped_mlp import GroupedMLP, GroupedMLPSaved, Tensors


class RoutedMLPSaved(NamedTuple):
    x: Tensor | None  # (T, D)
    h: Tensor | None
    probs: Tensor | None
    offs: Tensor | None
    fc1: Tensor | None  # parameters themselves
    fc2: Tensor | None
    bias1: Tensor | None
    bias2: Tensor | None
    index: Tensor | None  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    pos: Tensor | None


def _moved(name: str) -> str:
    """A name of the MLP, or a need, among the members of this op."""
    member, _, field = name.partition(".")
    return f"{int(member) + 1}.{field}" if field else name


class RoutedMLP(FusedOp):
    """y = combine(fc2(act(fc1(permute(x))) * probs)), or without the combine."""

    Saved = RoutedMLPSaved
    recomputes = GroupedMLP.recomputes
    names = {
        **{field: _moved(name) for field, name in GroupedMLP.names.items()},
        "index": "0.index",
        "pos": "0.pos",
    }

    def __init__(self, *members: Op[Any]) -> None:
        super().__init__(*members)
        self.mlp = GroupedMLP(*members[1:4])
        self.combines = isinstance(members[-1], Combine)
        self.saves_for = {_moved(n): self._fields(n) for n in self.mlp.saves_for}

    def _fields(self, need: str) -> tuple[str, ...]:
        """What the gradient reads: the MLP's fields, and how the rows of x and dy are found."""
        by_x = {"x": ("pos",), "0.weight": ("index",)}.get(need, ())
        return (*self.mlp.saves_for[need], *by_x, *(("index",) if self.combines else ()))

    def fwd(
        self, x: Tensor, t: tuple[Tensors, ...], calls: tuple[Call, ...], keep: frozenset[str]
    ) -> Out:
        check_rows(self.members[0], x)
        index, pos = t[0]["index"], t[0]["pos"]
        check_pos("Permute", pos, x.shape[0])
        saved = self.mlp.inputs(x, t[1:4])
        h = self.mlp.hidden(saved, calls[1], index)
        y = self.mlp.output(saved, h, calls[3])
        if self.combines:
            y = K.combine_fwd(y, pos, saved.offs)  # type: ignore[arg-type]
        return Out(y, RoutedMLPSaved(*saved._replace(h=h), index, pos))

    def bwd(
        self,
        saved: RoutedMLPSaved,
        dy: Tensor,
        calls: tuple[Call, ...],
        dside: Mapping[str, Tensor | None],
    ) -> tuple[Grads, ...]:
        *inner, index, pos = saved
        s = GroupedMLPSaved(*inner)
        dy_index = index if self.combines else None
        grads = self.mlp.gradients(s, dy, calls[1:4], index, dy_index)
        dx = grads[0].x
        if dx is not None:
            dx = K.combine_fwd(dx, pos, s.offs)  # type: ignore[arg-type]
        after = (Grads(),) if self.combines else ()
        return Grads(dx), *grads, *after
