"""Lanes with a simulated clock: what a schedule would cost, and whether it is ordered at all.

Nothing is copied. Every lane has a clock in seconds and a vector clock over all lanes. An access to
a buffer that no event orders after an earlier one that it conflicts with is an error, also when the
clocks would have let it pass: on a GPU it is right or wrong by luck. Allocating device memory is a
write on the compute lane, and so is freeing any, since whoever gets that memory next gets it in
compute's order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fuseops.errors import FuseOpsError

LANES = ("host", "compute", "d2h", "h2d")
_INDEX = {lane: k for k, lane in enumerate(LANES)}

Clock = tuple[int, ...]  # how many of each lane's steps are known to be over


class OrderError(FuseOpsError):
    """Two accesses to one buffer, at least one a write, that no event orders."""


class Stamp(NamedTuple):
    """One access: the step of a lane that made it."""

    lane: str
    step: int
    what: str


@dataclass(eq=False)
class SimulatedBuf:
    """A buffer of the simulation: its size, where it is, and who touched it last."""

    nbytes: int
    device: str
    name: str
    freed: bool = False
    written: Stamp | None = None
    read: dict[str, Stamp] = field(default_factory=dict)  # the last read of each lane


class SimulatedEvent(NamedTuple):
    """A point of a lane: when it is passed, and what is over then."""

    lane: str
    seconds: float
    clock: Clock


class Wait(NamedTuple):
    """One `wait`: which lane stood still for which, and from when to when.

    implied  the lane knew all this already, by other events: the edge adds no order
    """

    lane: str
    on: str
    start: float
    end: float
    implied: bool


class Busy(NamedTuple):
    """A stretch of work on a lane."""

    lane: str
    name: str
    start: float
    end: float
    nbytes: int


class Level(NamedTuple):
    """Bytes on a device from this second on, and what changed them."""

    seconds: float
    nbytes: int
    name: str


class SimulatedLanes:
    """Runs a schedule on simulated clocks.

    cost     seconds for (lane, cost as the schedule gave it, bytes it reads and writes); by default
             the cost is seconds already
    resident bytes on the device before the schedule begins
    """

    def __init__(
        self,
        cost: Callable[[str, float, int], float] = lambda lane, cost, nbytes: cost,
        resident: int = 0,
    ) -> None:
        self._cost = cost
        self.now = dict.fromkeys(LANES, 0.0)
        self._clocks = {lane: [0] * len(LANES) for lane in LANES}
        self.waits: list[Wait] = []
        self.busy: list[Busy] = []
        self.levels = [Level(0.0, resident, "at the start")]
        self.host_bytes = self.host_peak = 0

    # --- the protocol

    def alloc(self, nbytes: int, device: str, name: str) -> SimulatedBuf:
        buf = SimulatedBuf(nbytes, device, name)
        self._access("host" if device == "host" else "compute", (), (buf,), f"alloc {name}")
        self._count(buf, nbytes)
        return buf

    def free(self, buf: SimulatedBuf) -> None:
        self._access("compute", (), (buf,), f"free {buf.name}")
        buf.freed = True
        self._count(buf, -buf.nbytes)

    def op(
        self,
        lane: str,
        reads: Sequence[SimulatedBuf],
        writes: Sequence[SimulatedBuf],
        cost: float,
        fn: Callable[[], Any] | None = None,
        name: str = "",
    ) -> None:
        name = name or ", ".join(buf.name for buf in (*writes, *reads))
        self._access(lane, reads, writes, name)
        nbytes = sum(buf.nbytes for buf in reads) + sum(buf.nbytes for buf in writes)
        start = max(self.now[lane], self.now["host"])  # it cannot start before it was issued
        self.now[lane] = start + self._cost(lane, cost, nbytes)
        self.busy.append(Busy(lane, name, start, self.now[lane], nbytes))

    def record(self, lane: str) -> SimulatedEvent:
        self._issued(lane)
        return SimulatedEvent(lane, self.now[lane], tuple(self._clocks[lane]))

    def wait(self, lane: str, event: SimulatedEvent) -> None:
        clock, before = self._clocks[lane], self.now[lane]
        implied = all(known >= new for known, new in zip(clock, event.clock, strict=True))
        self._clocks[lane] = [max(pair) for pair in zip(clock, event.clock, strict=True)]
        self.now[lane] = max(before, event.seconds)
        self.waits.append(Wait(lane, event.lane, before, self.now[lane], implied))

    # --- what came of it

    @property
    def seconds(self) -> float:
        """When the last lane is done."""
        return max(self.now.values())

    @property
    def peak(self) -> Level:
        """The most bytes on the device, and when."""
        return max(self.levels, key=lambda level: level.nbytes)

    def stalls(self, lane: str = "compute") -> list[Wait]:
        """When `lane` stood still."""
        return [wait for wait in self.waits if wait.lane == lane and wait.end > wait.start]

    # --- inside

    def _issued(self, lane: str) -> None:
        """Whatever the host did before it gives a lane something to do is over by then."""
        host, clock = self._clocks["host"], self._clocks[lane]
        self._clocks[lane] = [max(pair) for pair in zip(clock, host, strict=True)]

    def _access(
        self,
        lane: str,
        reads: Sequence[SimulatedBuf],
        writes: Sequence[SimulatedBuf],
        what: str,
    ) -> None:
        if lane not in _INDEX:
            raise FuseOpsError(f"no lane {lane!r}; there are {', '.join(LANES)}.")
        self._issued(lane)
        clock = self._clocks[lane]
        clock[_INDEX[lane]] += 1
        stamp = Stamp(lane, clock[_INDEX[lane]], what)
        for buf in reads:
            self._after(stamp, buf, [buf.written])
            buf.read[lane] = stamp
        for buf in writes:
            self._after(stamp, buf, [buf.written, *buf.read.values()])
            buf.written, buf.read = stamp, {}

    def _after(self, stamp: Stamp, buf: SimulatedBuf, earlier: Sequence[Stamp | None]) -> None:
        if buf.freed:
            raise OrderError(f"{stamp.what!r} on {stamp.lane} uses {buf.name} after its free.")
        clock = self._clocks[stamp.lane]
        for other in earlier:
            if other is not None and clock[_INDEX[other.lane]] < other.step:
                raise OrderError(
                    f"{stamp.what!r} on {stamp.lane} and {other.what!r} on {other.lane} both use "
                    f"{buf.name} ({buf.nbytes} bytes, {buf.device}), and no event orders them: "
                    f"{stamp.lane} has to wait for an event of {other.lane} first."
                )

    def _count(self, buf: SimulatedBuf, change: int) -> None:
        if buf.device == "host":
            self.host_bytes += change
            self.host_peak = max(self.host_peak, self.host_bytes)
        else:
            total = self.levels[-1].nbytes + change
            self.levels.append(Level(self.now["compute"], total, buf.name))
