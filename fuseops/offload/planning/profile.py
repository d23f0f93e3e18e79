"""Profiles: what one training step saves and when, the input of the planner. Pure.

A position is a point between two ops: position p is after p ops were issued. Ops are those that do work on the device,
forward and backward, in order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

DRY_RUN, RECORDED = "dry run", "recorded"


class ProfiledOp(NamedTuple):
    """A `ProfiledOp` is one op of the step, with its time and bytes.

    seconds    on the device, measured or estimated
    resident   bytes on the device while it runs, at most, with nothing offloaded
    lane       "compute", or "network" for transfers between ranks, which overlap with compute
    join       of the network: position of the op that waits for it; -1: none before the end of the step
    from_host  it copies from the host itself, after all earlier reloads, as one engine copies in order
    """

    name: str
    seconds: float
    resident: int
    lane: str = "compute"
    join: int = -1
    from_host: bool = False


class Resave(NamedTuple):
    """A `Resave` says that another call of a layer saves the same storage too, for example as its input."""

    call: int
    at: int
    read: int


class Saved(NamedTuple):
    """A `Saved` is one storage that autograd saves, from where it is made to its last read.

    call    index of the layer call that saves it, -1 outside of all
    made    position at which its storage was made, -1 before the step
    at      position at which it is saved
    held    position from which autograd alone holds it: a release before that frees nothing
    read    position at which the backward reads it first
    freed   position at which it is freed, when nothing is offloaded
    why     why no plan can move it; None: it may be offloaded
    again   other calls that save it too
    codes   its bytes as codes; 0: it must not be rounded
    """

    name: str
    op: str
    call: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    made: int
    at: int
    held: int
    read: int
    freed: int
    why: str | None = None
    again: tuple[Resave, ...] = ()
    codes: int = 0

    @property
    def reads(self) -> tuple[int, ...]:
        """Positions at which the backward of each call that saves it reads it."""
        return self.read, *(again.read for again in self.again)


class LayerCall(NamedTuple):
    """A `LayerCall` is one call of a layer: where its forward begins and ends, and where its backward begins (-1: it
    has none).

    writes  a buffer that its forward writes, so that it does not run twice
    """

    layer: str
    ordinal: int
    enter: int
    leave: int
    backward: int
    writes: str | None = None


class Recompute(NamedTuple):
    """A `Recompute` is a group of saved storages that can be dropped together, and the cost of recomputing them."""

    name: str
    # "op": fields that the op declares; "dispatch": what arrived at experts, sent again; "module": a whole layer, by
    # checkpoint
    kind: str
    saved: tuple[int, ...]  # indices
    seconds: float  # of all calls together
    calls: int = 1
    instead: tuple[int, ...] = ()  # bytes that are saved in the place of each

    @property
    def seconds_per_call(self) -> float:
        """Seconds of one call."""
        return self.seconds / self.calls

    def dropped_bytes(self, saved: Sequence[Saved]) -> dict[int, int]:
        """Index -> bytes that dropping saves.   saved: of the profile"""
        instead = self.instead or (0,) * len(self.saved)
        return {
            k: max(saved[k].nbytes - held, 0) for k, held in zip(self.saved, instead, strict=True)
        }


class StepEvent(NamedTuple):
    """A `StepEvent` is one event between two ops of a profile.

    what   "forward", "save", "share", "leave", "held", "backward", "read", "reread" or "freed"
    which  index of the call or saved storage
    call   the other call that shares or rereads
    """

    position: int
    what: str
    which: int
    call: int = -1


@dataclass(frozen=True, repr=False)
class Profile:
    """A `Profile` describes one step, recorded or run dry: its ops, what they save, and the calls of layers.

    assumed  assumptions behind the figures, in words
    """

    model: str
    kind: str
    ops: tuple[ProfiledOp, ...]
    saved: tuple[Saved, ...]
    calls: tuple[LayerCall, ...]
    recompute: tuple[Recompute, ...] = ()
    assumed: tuple[str, ...] = ()

    @cached_property
    def clock(self) -> tuple[float, ...]:
        """Seconds at every position, without stalls other than waits for the network."""
        found, free = [0.0], 0.0
        arrived: dict[int, float] = {}
        for position, op in enumerate(self.ops):
            begun = max([found[-1], *(arrived[k] for k in self.joins.get(position, ()))])
            if op.lane == "network":
                free = arrived[position] = max(free, begun) + op.seconds
            found.append(begun if op.lane == "network" else begun + op.seconds)
        found[-1] = max(found[-1], free)
        return tuple(found)

    @cached_property
    def joins(self) -> Mapping[int, list[int]]:
        """Position -> the transfers between ranks that it waits for."""
        found = defaultdict(list)
        for position, op in enumerate(self.ops):
            if op.join >= 0:
                found[op.join].append(position)
        return found

    @property
    def network(self) -> float:
        """Seconds of transfers between ranks."""
        return sum(op.seconds for op in self.ops if op.lane == "network")

    @property
    def seconds(self) -> float:
        """The seconds of the step without stalls for copies."""
        return self.clock[-1]

    @property
    def peak(self) -> int:
        """The most bytes on the device, with nothing offloaded."""
        return max((op.resident for op in self.ops), default=0)

    @cached_property
    def events(self) -> tuple[StepEvent, ...]:
        """All events, in the order of the step."""
        found = []
        for k, call in enumerate(self.calls):
            found.append(((call.enter, 0, k, 0), StepEvent(call.enter, "forward", k)))
            found.append(((call.leave, 0, k, 2), StepEvent(call.leave, "leave", k)))
            if call.backward >= 0:
                found.append(((call.backward, 2, -k, 0), StepEvent(call.backward, "backward", k)))
        for k, saved in enumerate(self.saved):
            at, held = max(saved.at, 0), max(saved.held, saved.at)
            found.append(((at, 0, saved.call, 1), StepEvent(at, "save", k)))
            found.append(((held, 1, 0, 0), StepEvent(held, "held", k)))
            found.append(((saved.read, 3, 0, 0), StepEvent(saved.read, "read", k)))
            for by, at, read in saved.again:
                found.append(((at, 0, by, 1), StepEvent(at, "share", k, by)))
                found.append(((read, 3, 1, 0), StepEvent(read, "reread", k, by)))
            found.append(((saved.freed, 4, 0, 0), StepEvent(saved.freed, "freed", k)))
        return tuple(event for _, event in sorted(found))

    @cached_property
    def boundaries(self) -> tuple[StepEvent, ...]:
        """Where the forward or the backward of a layer begins, in the order of the step."""
        return tuple(h for h in self.events if h.what in ("forward", "backward"))

    def restored_at(self, k: int) -> int:
        """The position at which a dropped storage is recomputed: the backward of its layer, or its first read if
        earlier.
        """
        saved = self.saved[k]
        backward = self.calls[saved.call].backward if saved.call >= 0 else -1
        return min(saved.read, backward) if backward >= 0 else saved.read

    def recomputed_at(self, group: Recompute) -> dict[int, int]:
        """Call -> the position at which its part of a dropped group is recomputed."""
        found: dict[int, int] = {}
        for k in group.saved:
            call, at = self.saved[k].call, self.restored_at(k)
            found[call] = min(at, found.get(call, at))
        return found

    def owner_at(self, position: int) -> str:
        """Which layer's forward or backward runs there: "in the backward of blocks.3"."""
        passed = bisect_right(self.boundaries, position, key=lambda boundary: boundary.position)
        if not passed:
            return "before the first layer"
        last = self.boundaries[passed - 1]
        call = self.calls[last.which]
        layer = call.layer or "the model"
        if last.what == "backward":
            return f"in the backward of {layer}"
        return f"{'in' if position < call.leave else 'after'} the forward of {layer}"
