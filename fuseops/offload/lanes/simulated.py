"""Lanes on a simulated clock: they give the cost of a schedule, and detect races in it.

Nothing is copied. Every lane has a clock in seconds and a vector clock over all lanes. Two conflicting accesses to a
buffer that no event orders are an error, even if their times do not overlap: on a GPU the outcome would be luck.
Allocating and freeing device memory are writes on the compute lane, since memory is reused in compute's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from fuseops.errors import FuseOpsError

from .arena import Arena, Slab
from .protocol import LANES, Buf, Event, Lane, Lanes, Place

_INDEX = {lane: k for k, lane in enumerate(LANES)}

Clock = tuple[int, ...]  # a vector clock: how many steps of each lane are known to be over


class OrderError(FuseOpsError):
    """No event orders two accesses to the same bytes, of which at least one is a write."""


class Stamp(NamedTuple):
    """A stamp is one access to a buffer: a step of a lane."""

    lane: Lane
    step: int
    what: str


class SimulatedBuf(Buf):
    """A `SimulatedBuf` is a buffer with its last accesses."""

    __slots__ = ("before", "freed", "holders", "read", "slab", "written")

    def __init__(self, name: str, nbytes: int, place: Place, slab: Slab | None) -> None:
        super().__init__(name, nbytes, place)
        self.slab = slab
        self.holders = 1  # reference count
        self.freed = False
        self.before: list[Stamp] = []  # accesses to the same bytes by earlier buffers
        self.written: Stamp | None = None
        self.read: dict[Lane, Stamp] = {}  # the last read of each lane

    def accesses(self) -> list[Stamp]:
        """The accesses that a write must be ordered after."""
        return [*self.before, *self.read.values(), *([self.written] if self.written else [])]


class Wait(NamedTuple):
    """A `Wait` is the time that one lane waited for another.   what: the work that it waited for"""

    lane: Lane
    on: Lane
    start: float
    end: float
    what: str


class Busy(NamedTuple):
    """A `Busy` is one op or copy on a lane of the simulation, in seconds."""

    lane: str
    name: str
    start: float
    end: float
    nbytes: int = 0  # that were copied


class SimulatedEvent(Event):
    """A `SimulatedEvent` is a point of a lane: its time, its vector clock, and the last work before it."""

    __slots__ = ("clock", "seconds", "work")

    def __init__(self, lane: Lane, seconds: float, clock: Clock, work: Busy | None) -> None:
        super().__init__(lane)
        self.seconds, self.clock, self.work = seconds, clock, work


Cost = Callable[[Lane, float, bool], float]


class SimulatedLanes(Lanes):
    """`SimulatedLanes` run a schedule on simulated clocks.

    cost  (lane, cost of the op, whether the other copy lane is busy at its start) -> seconds; by default the cost
    """

    synchronous = False

    def __init__(self, cost: Cost = lambda lane, cost, duplex: cost) -> None:
        self.arena = Arena(lambda nbytes: None)
        self.now: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        self.waits: list[Wait] = []
        self.busy: list[Busy] = []
        self.nbytes = 0  # on the device now
        self._cost = cost
        self._last: dict[Lane, Busy] = {}
        self._clocks: dict[Lane, list[int]] = {lane: [0] * len(LANES) for lane in LANES}
        self._ghosts: list[SimulatedBuf] = []  # freed host bytes, until they are written again

    # --- the protocol

    def alloc(self, nbytes: int, device: Place, name: str) -> SimulatedBuf:
        slab = self.arena.take(nbytes) if device == "host" else None
        buf = SimulatedBuf(name, nbytes, device, slab)
        buf.owner = self.compute()
        if slab is not None:
            buf.after = slab.after
            buf.before = self._earlier_accesses(slab)
        else:
            self._access("compute", (), (buf,), f"alloc {name}")
            self.nbytes += nbytes
        return buf

    def hold(self, buf: SimulatedBuf) -> None:
        """Add a reference to device bytes: they are freed after one more `free`."""
        buf.holders += 1

    def free(self, buf: Any) -> None:
        if buf.slab is not None:
            buf.slab.after = buf.after
            self.arena.give_back(buf.slab)
            self._ghosts.append(buf)
            buf.freed = True
            return
        buf.holders -= 1
        if not buf.holders:
            self._access("compute", (), (buf,), f"free {buf.name}")
            buf.freed = True
            self.nbytes -= buf.nbytes

    def op(
        self,
        lane: Lane,
        reads: Sequence[Any],
        writes: Sequence[Any],
        cost: float,
        name: str = "",
    ) -> None:
        name = name or ", ".join(dict.fromkeys(buf.name for buf in (*writes, *reads)))
        self._access(lane, reads, writes, name)
        start = self.now[lane]
        other: Lane = "h2d" if lane == "d2h" else "d2h"
        self.now[lane] = start + self._cost(lane, cost, self.now[other] > start)
        nbytes = sum(buf.nbytes for buf in writes) if lane in ("d2h", "h2d") else 0
        self._last[lane] = Busy(lane, name, start, self.now[lane], nbytes)
        self.busy.append(self._last[lane])

    def record(self, lane: Lane) -> SimulatedEvent:
        clock, work = tuple(self._clocks[lane]), self._last.get(lane)
        event = SimulatedEvent(lane, self.now[lane], clock, work)
        if lane == "compute":
            event.mark_waited(self.compute())
        return event

    def wait(self, lane: Lane, event: Any) -> None:
        known = self._clocks[lane]
        self._clocks[lane] = [max(pair) for pair in zip(known, event.clock, strict=True)]
        if lane == "compute":
            event.mark_waited(self.compute())
        self._stall(lane, event.lane, event.seconds, event.work)

    def move(
        self, lane: Lane, sources: Sequence[Buf], target: Buf, offsets: Sequence[int]
    ) -> SimulatedEvent:
        self.op(lane, sources, [target], target.nbytes)
        return self.record(lane)

    def stall_behind(self, lane: Lane) -> None:
        """Stall compute, which needs the copy engine, until the copies of the lane are over. This is no ordering by an
        event.
        """
        self._stall("compute", lane, self.now[lane], self._last.get(lane))

    # --- inside

    def _stall(self, lane: Lane, on: Lane, until: float, work: Busy | None) -> None:
        """A lane waits until a time."""
        before = self.now[lane]
        self.now[lane] = max(before, until)
        what = "" if work is None else work.name
        self.waits.append(Wait(lane, on, before, self.now[lane], what))

    def _access(
        self,
        lane: Lane,
        reads: Sequence[SimulatedBuf],
        writes: Sequence[SimulatedBuf],
        what: str,
    ) -> None:
        if lane not in _INDEX:
            raise FuseOpsError(f"no lane {lane!r}; there are {', '.join(LANES)}.")
        clock = self._clocks[lane]
        clock[_INDEX[lane]] += 1
        stamp = Stamp(lane, clock[_INDEX[lane]], what)
        for buf in reads:
            self._after(stamp, buf, [buf.written] if buf.written else [])
            buf.read[lane] = stamp
        for buf in writes:
            self._after(stamp, buf, buf.accesses())
            buf.before, buf.written, buf.read = [], stamp, {}

    def _after(self, stamp: Stamp, buf: SimulatedBuf, earlier: Iterable[Stamp]) -> None:
        if buf.freed:
            raise OrderError(f"{stamp.what!r} on {stamp.lane} uses {buf.name} after its free.")
        clock = self._clocks[stamp.lane]
        for other in earlier:
            if clock[_INDEX[other.lane]] < other.step:
                raise OrderError(
                    f"{stamp.what!r} on {stamp.lane} and {other.what!r} on {other.lane} both use "
                    f"{buf.name} ({buf.nbytes} bytes, {buf.place}), and no event orders them: "
                    f"{stamp.lane} has to wait for an event of {other.lane} first."
                )

    def _earlier_accesses(self, slab: Slab) -> list[Stamp]:
        """The accesses of earlier buffers to these host bytes."""
        end, found = slab.offset + slab.capacity, []
        for ghost in list(self._ghosts):
            old = ghost.slab
            if old is None or old.region != slab.region:
                continue
            if old.offset < end and slab.offset < old.offset + old.capacity:
                found += ghost.accesses()
                if slab.offset <= old.offset and old.offset + old.capacity <= end:
                    self._ghosts.remove(ghost)
        return found
