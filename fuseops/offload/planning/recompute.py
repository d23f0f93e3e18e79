"""What a step could make again instead of keeping it, and how long that takes: whole layers, by
checkpoint, and saved fields that ops declare they can do without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fuseops.ops.op import FusedOp
from fuseops.ops.op import Op as FuseOp

from .profile import LayerCall, ProfiledOp, Recompute, Saved


class SeenStep(NamedTuple):
    """A step as it was followed."""

    ops: tuple[ProfiledOp, ...]
    saved: tuple[Saved, ...]
    calls: tuple[LayerCall, ...]


def recomputations(seen: SeenStep, again: Callable[[], SeenStep]) -> tuple[Recompute, ...]:
    """All of them. again: the same step under `offload.recompute()`; asked for only where an op that
    saved something declares what it can do without.
    """
    able = {cls.__name__ for base in (FuseOp, FusedOp) for cls in _below(base) if cls.recomputes}
    found = list(_layers(seen))
    if any(s.op in able for s in seen.saved):
        found += _fields(seen, again())
    return tuple(found)


def _below(cls: Any) -> Iterator[Any]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _below(sub)


def _calls_by_layer(calls: Sequence[LayerCall]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for k, call in enumerate(calls):
        found.setdefault(call.layer, []).append(k)
    return found


def _layers(seen: SeenStep) -> Iterator[Recompute]:
    """All calls of a layer together, without what comes in from outside or is saved elsewhere too."""
    for layer, mine in _calls_by_layer(seen.calls).items():
        members = [
            n
            for n, s in enumerate(seen.saved)
            if s.call in mine and s.nbytes and not s.again and s.made >= seen.calls[s.call].enter
        ]
        calls = [seen.calls[k] for k in mine]
        seconds = sum(op.seconds for c in calls for op in seen.ops[c.enter : c.leave])
        yield from _group(seen, layer, "module", members, seconds)


def _fields(seen: SeenStep, without: SeenStep) -> Iterator[Recompute]:
    """Of each layer, what is saved no more under `recompute()`, for the backward's longer time."""
    kept = {(s.call, s.name) for s in without.saved}
    times = [_backward_seconds(step) for step in (seen, without)]
    for layer, mine in _calls_by_layer(seen.calls).items():
        members = [
            n
            for n, s in enumerate(seen.saved)
            if s.call in mine and s.nbytes and (s.call, s.name) not in kept
        ]
        seconds = sum(max(times[1].get(k, 0.0) - times[0].get(k, 0.0), 0.0) for k in mine)
        yield from _group(seen, layer, "op", members, seconds)


def _group(
    seen: SeenStep, layer: str, kind: str, members: list[int], seconds: float
) -> Iterator[Recompute]:
    if members:
        calls = len({seen.saved[n].call for n in members})
        yield Recompute(layer, kind, tuple(members), seconds, calls)


def _backward_seconds(step: SeenStep) -> dict[int, float]:
    """Of each call: from the begin of its backward to that of the next."""
    begins = sorted((c.backward, k) for k, c in enumerate(step.calls) if c.backward >= 0)
    ends = [position for position, _ in begins[1:]] + [len(step.ops)]
    return {
        k: sum(op.seconds for op in step.ops[begin:end])
        for (begin, k), end in zip(begins, ends, strict=True)
    }
