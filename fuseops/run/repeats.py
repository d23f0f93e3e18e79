"""A segment whose calls are alike does again what one of them did: a transcript of it stands in for its Python.

Forward and backward are each written down at the third call of a kind (or a later one, once launchers are replayed),
when both have kept the contract of ops. What is written holds while nothing is written to an op, no setting of launches
changes, and operands are alike (`kernels.transcript`). Nobody may have to see the calls of ops, or what they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops.kernels.replay import replaying
from fuseops.kernels.transcript import transcribable, transcribed
from fuseops.ops import scopes
from fuseops.plan.key import DICT
from fuseops.plan.segment import Rows, Segment
from fuseops.torch_private import dict_version

from .saving import pack, unpack
from .steps import Once, Written

FIRST = 1  # calls of a kind that go before, beside that which looks at the contract
MOST_TRIES = 8  # of a kind
MOST_WRITTEN = 4  # of one shape: strides may differ
MOST_SHAPES = 64


class Forward(NamedTuple):
    """A `Forward` says what a node computes: y, what autograd saves, where each kept field is among that, and dtypes of
    x before its ops.
    """

    y: Any
    flat: Sequence[Tensor]
    rows: Sequence[Any]
    entered: tuple[torch.dtype, ...]


class Alike:
    """An `Alike` holds what is written down of calls of one shape.

    again     functions, each with what it says besides tensors
    """

    def __init__(self) -> None:
        self.again: list[tuple[Callable[[list[Tensor]], Any], Any]] = []
        self.calls = self.tries = 0

    def due(self, operands: Sequence[Tensor]) -> bool:
        """Whether a call with these operands, which is unlike those that are written down, is to be so too."""
        self.calls += 1
        if self.calls <= FIRST or self.tries >= MOST_TRIES or len(self.again) >= MOST_WRITTEN:
            return False
        self.tries += 1
        return transcribable(operands)


class Repeats:
    """`Repeats` hold what is written down of one segment."""

    def __init__(self, seg: Segment) -> None:
        self.replays = replaying.now  # which settings of launches change
        self.owns = [*map(DICT, seg.ops)]
        self.versions = [*map(dict_version, self.owns)]
        self.shapes: dict[Any, Alike] = {}

    def stand(self) -> bool:
        """Whether nothing was written to an op since, and the settings of launches are the same."""
        if self.replays is not replaying.now:
            return False
        return [*map(dict_version, self.owns)] == self.versions

    def of(self, kind: Any) -> Alike:
        found = self.shapes.get(kind)
        if found is None:
            if len(self.shapes) >= MOST_SHAPES:
                self.shapes.clear()
            found = self.shapes[kind] = Alike()
        return found


def _repeats(seg: Segment, once: Once, unseen: bool) -> Repeats | None:
    """What is written down of a segment; None while somebody looks at its calls."""
    if not (unseen and seg.repeatable) or once.look is not None:
        return None
    if scopes.thread.inside.debug is not None:
        return None
    found: Repeats | None = seg.repeats
    if found is None or not found.stand():
        found = seg.repeats = Repeats(seg)
    return found


def forward(seg: Segment, run: Written, x: Any, t: list[Any], once: Once, unseen: bool) -> Forward:
    """Run the forward of a segment.

    run: its steps (`steps.write_forward`), on t.  unseen: nobody has to see calls of kernels
    """
    repeats = _repeats(seg, once, unseen)
    if repeats is None:
        y, kept, entered = run(x, t, once)
        return Forward(y, *pack(seg, kept), entered)
    operands = [x, *[given for given in t if given is not None]]
    alike = repeats.of(x.shape)
    for again, said in alike.again:
        out = again(operands)
        if out is not None:
            return Forward(*out, *said)
    if not alike.due(operands):
        y, kept, entered = run(x, t, once)
        return Forward(y, *pack(seg, kept), entered)
    with transcribed(operands) as seen:
        y, kept, entered = run(x, t, once)
    flat, rows = pack(seg, kept)
    if type(rows) is Rows and not any(y is given for given in operands):
        written = seen.written((y, (*flat,)))
        if written is not None:
            alike.again.append((written, (rows, entered)))
    return Forward(y, flat, rows, entered)


class Returning(NamedTuple):
    """A `Returning` is what a backward of a segment is given: where the kept fields are among what autograd `saved`,
    and that, which is taken out of the list; and what `Segment.bwd` takes.
    """

    rows: Sequence[Any]
    saved: list[Tensor]
    dy: Any
    dsides: Any
    entered: Any


def backward(seg: Segment, run: Written, given: Returning, once: Once, unseen: bool) -> Any:
    """Run the backward of a segment: `forward`, on the way back."""
    rows, saved, dy, dsides, entered = given
    repeats = _repeats(seg, once, unseen)
    if repeats is None or type(rows) is not Rows or dy is None:
        return run(_taken(rows, saved), dy, dsides, entered, once)
    alike = repeats.of((dy.shape, id(rows), entered))
    operands = [dy, *saved]
    saved.clear()
    for again, _ in alike.again:
        out = again(operands)
        if out is not None:
            return out
    saved += operands[1:]
    if not alike.due(operands):
        operands.clear()
        return run(_taken(rows, saved), dy, dsides, entered, once)
    with transcribed(operands) as seen:
        operands.clear()
        grads = run(_taken(rows, saved), dy, dsides, entered, once)
    written = seen.written(grads)
    if written is not None:
        alike.again.append((written, rows))  # held: its number is nobody else's meanwhile
    return grads


def _taken(rows: Sequence[Any], saved: list[Tensor]) -> list[Any]:
    kept = unpack(rows, saved)
    saved.clear()
    return kept
