"""A segment whose calls are alike does again what one of them did: a transcript of it stands in for its Python.

Forward and backward are each written down at the third call of a kind (or a later one, once launchers are replayed),
when both have kept the contract of ops. What is written holds while nothing is written to an op, no setting of launches
changes, and operands are alike (`kernels.transcript`). Nobody may have to see the calls of ops, or what they compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor

from fuseops.kernels.replay import active_replays
from fuseops.kernels.transcript import Repeat, transcribable, transcribing
from fuseops.ops import scopes
from fuseops.ops.tiles import shares_only_tables
from fuseops.plan.key import DICT
from fuseops.plan.segment import Rows, Segment
from fuseops.torch_private import dict_version

from .checks import running_step
from .saving import pack, unpack
from .steps import Once, Written

FIRST = 1  # calls of a kind that go before, beside that which looks at the contract
MOST_TRIES = 8  # of a kind
MOST_WRITTEN = 4  # of one shape: strides may differ
MOST_SHAPES = 64


class Alike:
    """An `Alike` holds what is written down of calls of one shape.

    again     functions, each with what it says besides tensors
    """

    def __init__(self) -> None:
        self.again: list[tuple[Repeat, Any]] = []
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
        self.replays = active_replays.current  # other ones, once a setting of launches has changed
        self.owns = [*map(DICT, seg.ops)]
        self.versions = [*map(dict_version, self.owns)]
        self.kinds: dict[Any, Alike] = {}

    def new(self, kind: Any) -> Alike:
        """Calls of a kind that is seen for the first time."""
        if len(self.kinds) >= MOST_SHAPES:
            self.kinds.clear()
        found = self.kinds[kind] = Alike()
        return found


def repeats_of(seg: Segment, once: Once, unseen: bool) -> Repeats | None:
    """What is written down of a segment, until an op is written to or a setting of launches changes. None while
    somebody looks at its calls, for buffers of the caller, and where ops share more than tile tables.

    unseen: nobody has to see the calls of kernels
    """
    if not (unseen and seg.repeatable) or once.look is not None or once.out is not None:
        return None
    if scopes.thread.active.debug is not None or (
        once.scratch and not shares_only_tables(once.scratch)
    ):
        return None
    found: Repeats | None = seg.repeats
    if (
        found is None
        or found.replays is not active_replays.current
        or [*map(dict_version, found.owns)] != found.versions
    ):
        found = seg.repeats = Repeats(seg)
    return found


def forward(
    seg: Segment, run: Written, x: Any, t: list[Any], once: Once, unseen: bool
) -> tuple[Any, Sequence[Tensor], Sequence[Any], Any]:
    """Run the forward of a segment.   -> y, what autograd saves, where each kept field is among that, dtypes of x

    run: its steps (`steps.write_forward`), on t.
    """
    repeats = repeats_of(seg, once, unseen)
    if repeats is not None:
        operands = [x, *[given for given in t if given is not None]]
        alike = repeats.kinds.get(x.shape) or repeats.new(x.shape)
        try:
            for again, (rows, entered) in alike.again:
                out = again(operands, once.scratch)
                if out is not None:
                    y, flat, exported = out
                    t += [None] * (seg.size - len(t))
                    for position, side in zip(seg.export_positions, exported, strict=True):
                        t[position] = side
                    return y, flat, rows, entered
        except Exception:
            repeats = None  # steps run, once what it held is free: their error says which op fails
    if repeats is None or not alike.due(operands):
        y, kept, entered = run(x, t, once)
        return y, *pack(seg, kept), entered
    with transcribing(operands, once.scratch) as seen:
        y, kept, entered = run(x, t, once)
    flat, rows = pack(seg, kept)
    exported = tuple([t[position] for position in seg.export_positions])
    if type(rows) is Rows:
        written = seen.generate((y, (*flat,), exported))
        if written is not None:
            alike.again.append((written, (rows, entered)))
    return y, flat, rows, entered


def backward(
    seg: Segment,
    run: Written,
    rows: Sequence[Any],
    saved: list[Tensor],
    given: tuple[Any, Any, Any],
    once: Once,
    unseen: bool,
) -> Any:
    """Run the backward of a segment.   run: its steps (`steps.write_backward`)

    rows: where the kept fields are among what autograd `saved`, which is taken out of the list.  given: dy, dsides and
    the dtypes of x, which its steps take
    """
    repeats, (dy, dsides, entered) = repeats_of(seg, once, unseen), given
    if repeats is None or type(rows) is not Rows or dy is None:
        return run(_taken(rows, saved), *given, once)
    arrived = [d for d in (dy, *dsides) if d is not None]
    kind = dy.shape, tuple([d is None for d in dsides]), id(rows), entered
    alike = repeats.kinds.get(kind) or repeats.new(kind)
    saved[:0] = arrived
    for again, _ in alike.again:
        out = again(saved, once.scratch)
        if out is not None:
            return out
    due = alike.due(saved)
    with transcribing(saved, once.scratch, running_step) if due else nullcontext() as seen:
        del saved[: len(arrived)]
        grads = run(_taken(rows, saved), *given, once)
    written = None if seen is None else seen.generate(grads)
    if written is not None:
        alike.again.append((written, rows))  # held: its number is nobody else's meanwhile
    return grads


def _taken(rows: Sequence[Any], saved: list[Tensor]) -> list[Any]:
    kept = unpack(rows, saved)
    saved.clear()
    return kept
