"""Simulates the schedule over a profile: the cost of a plan, to the byte and with every stall. The schedule is the one
that runs on CUDA; only the lanes differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from fuseops.offload.lanes.protocol import Buf, Event
from fuseops.offload.lanes.simulated import Busy, SimulatedBuf, SimulatedLanes, Wait
from fuseops.offload.schedule import DEFAULT, Item, LayerRun, LinkSettings, MoveStep, Schedule

from .hardware import Hardware
from .profile import Profile, StepEvent


class Level(NamedTuple):
    """A `Level` is the bytes on the device at the begin of an op, and when that is."""

    seconds: float
    nbytes: int


class Window(NamedTuple):
    """A window is the times of the copies of one saved storage, in seconds since the begin of the step.

    slack  how much later its copies could end without a stall, the lesser of out and back; negative: a stall
    """

    out: tuple[float, float]
    back: tuple[float, float]
    slack: float


@dataclass(frozen=True, repr=False)
class Simulation:
    """A `Simulation` is one steady step under a plan.

    stall         seconds that compute waited for copies; network: for other ranks
    coding        seconds of encoding and decoding
    kept_reasons  saved index -> why the schedule kept it, of those to be offloaded
    levels        bytes on the device at the begin of every op
    """

    seconds: float
    stall: float
    recompute: float
    peak: int
    peak_position: int
    moved: int
    host: int
    kept_reasons: dict[int, str]
    windows: dict[int, Window]
    levels: tuple[Level, ...]
    busy: tuple[Busy, ...]
    stalls: tuple[Wait, ...]
    network: float = 0.0
    coding: float = 0.0


def simulate(
    profile: Profile,
    offload: Collection[int],
    hardware: Hardware,
    settings: LinkSettings = DEFAULT,
    *,
    recompute: Collection[int] = (),
    coded: Collection[str] = (),
    lanes: SimulatedLanes | None = None,
) -> Simulation:
    """Simulate one steady step: the second of two, as in the first the schedule learns the order.

    offload    indices of saved storages to offload; recompute: indices of `profile.recompute`
    coded      names of those that are offloaded as codes
    """
    lanes = lanes or SimulatedLanes(hardware.lane_seconds)
    schedule = Schedule(lanes, settings)
    saved = profile.saved
    coding = {
        k: hardware.coding_seconds(saved[k].nbytes, saved[k].codes)
        for k in offload
        if saved[k].name in coded and saved[k].codes
    }
    _Step(profile, schedule, lanes, set(offload), set(recompute), coding).run()
    return _Step(profile, schedule, lanes, set(offload), set(recompute), coding).run()


class ReplayedItem(Item):
    """A `ReplayedItem` tells a step what the schedule does with a saved storage."""

    def __init__(self, step: ReplayedStep, k: int, source: Buf) -> None:
        super().__init__(source.name, source)
        self.step, self.k = step, k

    def on_move(self, what: MoveStep) -> None:
        self.step.on_move(self.k, what)


class ReplayedStep:
    """A `ReplayedStep` replays the events of a profile to a schedule, in the place of hooks and ops."""

    def __init__(self, profile: Profile, schedule: Schedule) -> None:
        self.profile, self.schedule = profile, schedule
        self.calls: dict[int, LayerRun] = {}
        self.items: dict[int, ReplayedItem] = {}  # by saved index

    def replay(self, event: StepEvent) -> None:
        getattr(self, f"_{event.what}")(event.which, event.call)

    def on_move(self, k: int, what: MoveStep) -> None:
        """What the schedule does with a saved storage."""
        raise NotImplementedError

    def _forward(self, k: int, _: int) -> None:
        call = self.profile.calls[k]
        self.calls[k] = self.schedule.enter(call.layer)
        if call.backward >= 0:
            self.schedule.keep(self.calls[k])  # keeps the call alive until its backward

    def _leave(self, k: int, _: int) -> None:
        self.schedule.leave(self.calls[k])

    def _backward(self, k: int, _: int) -> None:
        self.schedule.backward(self.calls[k])
        self.schedule.drop(self.calls[k])

    def _share(self, k: int, call: int) -> None:
        if k in self.items and self.items[k].kept_reason is None:  # else the caller keeps it
            self.schedule.share(self.calls[call], self.items[k])

    def _read(self, k: int, _: int) -> None:
        self._reread(k, self.profile.saved[k].call)

    def _reread(self, k: int, call: int) -> None:
        raise NotImplementedError

    def _held(self, k: int, _: int) -> None:
        """Autograd alone holds the storage."""

    def _freed(self, k: int, _: int) -> None:
        """The storage is freed."""


class _Step(ReplayedStep):
    """A `_Step` is one simulated step."""

    def __init__(
        self,
        profile: Profile,
        schedule: Schedule,
        lanes: SimulatedLanes,
        offload: set[int],
        recompute: set[int],
        coding: Mapping[int, tuple[float, float]],
    ) -> None:
        super().__init__(profile, schedule)
        self.lanes = lanes
        self.coding, self.coding_seconds = coding, 0.0
        groups = [profile.recompute[k] for k in recompute]
        self.dropped: dict[int, int] = {}  # saved -> bytes that dropping saves
        for group in groups:
            self.dropped |= group.dropped_bytes(profile.saved)
        self.offload = offload - self.dropped.keys()
        self.again: dict[int, float] = defaultdict(float)  # position -> seconds of recomputation
        for group in groups:
            for at in profile.recomputed_at(group).values():
                self.again[at] += group.seconds_per_call
        self.absent = _absent_bytes(profile, self.dropped, self.offload)
        self.by_position: dict[int, list[StepEvent]] = defaultdict(list)
        for event in profile.events:
            if event.what in ("forward", "leave", "backward") or event.which in self.offload:
                self.by_position[event.position].append(event)
        self.made: dict[int, SimulatedBuf] = {}
        self.read: dict[int, SimulatedBuf] = {}
        self.coded: set[int] = set()
        # by saved index: when it was first read, and when its reload ended; when compute would have released it; when
        # an op that copies from the host waited for it
        self.read_times: dict[int, tuple[float, float]] = {}
        self.released_at: dict[int, float] = {}
        self.needed_at: dict[int, float] = {}
        self.returning: list[int] = []  # no op has waited for these yet
        self.reads: list[int] = []  # saved storages that the next op reads
        self.drop_after_op: list[tuple[int, int]] = []  # (call, saved) of handles freed after it

    def run(self) -> Simulation:
        lanes, profile = self.lanes, self.profile
        started, waits, busy = lanes.now["compute"], len(lanes.waits), len(lanes.busy)
        bytes_out = self.schedule.stats.out_bytes
        levels, recompute, host = [], 0.0, 0
        travelling: dict[int, Event] = {}
        for position in range(len(profile.ops) + 1):
            for event in self.by_position.get(position, ()):
                self.replay(event)
            host = max(host, lanes.arena.used)
            again = self.again.get(position, 0.0)
            if again:
                lanes.op("compute", (), (), again, "recompute")
                recompute += again
            if position == len(profile.ops):
                if travelling:
                    lanes.wait("compute", lanes.record("network"))
                break
            op = profile.ops[position]
            nbytes = op.resident - self.absent[position] + lanes.nbytes
            levels.append(Level(lanes.now["compute"] - started, nbytes))
            for k in profile.joins.get(position, ()):
                lanes.wait("compute", travelling[k])
            if op.from_host:
                self._stall_behind()
            reads = [self.read[k] for k in self.reads]
            travels = op.lane == "network"
            lanes.op("compute", reads, (), 0.0 if travels else op.seconds, op.name)
            if travels:
                lanes.wait("network", lanes.record("compute"))
                lanes.op("network", (), (), op.seconds, op.name)
                travelling[position] = lanes.record("network")
            for call, k in self.drop_after_op:
                self.schedule.drop(self.calls[call], self.items[k])
            self.reads, self.drop_after_op = [], []
        top = max(range(len(levels)), key=lambda p: levels[p].nbytes, default=0)
        every = (_shifted(wait, started) for wait in lanes.waits[waits:])
        idle = [w for w in every if w.lane == "compute" and w.end > w.start]
        stalls = [w for w in idle if w.on != "network"]
        return Simulation(
            seconds=lanes.now["compute"] - started,
            stall=sum(w.end - w.start for w in stalls),
            recompute=recompute,
            peak=levels[top].nbytes if levels else 0,
            peak_position=top,
            moved=self.schedule.stats.out_bytes - bytes_out,
            host=host,
            kept_reasons={k: i.kept_reason for k, i in self.items.items() if i.kept_reason},
            windows=self._windows(started),
            levels=tuple(levels),
            busy=tuple(_shifted(work, started) for work in lanes.busy[busy:]),
            stalls=tuple(stalls),
            network=sum(w.end - w.start for w in idle if w.on == "network"),
            coding=self.coding_seconds,
        )

    def _stall_behind(self) -> None:
        """The next op copies from the host, after all reloads that were started."""
        for k in self.returning:
            self.needed_at.setdefault(k, self.lanes.now["compute"])
        self.returning.clear()
        self.lanes.stall_behind("h2d")

    # --- events

    def on_move(self, k: int, what: MoveStep) -> None:
        if what == "release":
            self.released_at[k] = self.lanes.now["compute"]
        elif what == "reload":
            self.returning.append(k)

    def _save(self, k: int, _: int) -> None:
        saved = self.profile.saved[k]
        source = self.lanes.alloc(saved.nbytes, "device", saved.name)
        self.lanes.hold(source)  # the op that made it holds it too
        self.made[k] = source
        call = self.calls[saved.call]
        if k not in self.coding or call.keeps_all:
            self.items[k] = ReplayedItem(self, k, source)
            self.schedule.save(call, self.items[k])
            return
        codes = self.lanes.alloc(saved.codes, "device", saved.name)
        self._code(self.coding[k][0], source, codes)
        self.items[k] = ReplayedItem(self, k, codes)
        self.schedule.save(call, self.items[k])
        if self.items[k].kept_reason is None:
            self.lanes.free(source)
            self.coded.add(k)
        else:
            self.lanes.free(codes)
            self.items[k].source = source

    def _code(self, seconds: float, source: Buf, target: Buf) -> None:
        """Encode or decode."""
        self.coding_seconds += seconds
        self.lanes.op("compute", (source,), (target,), seconds, "codes")

    def _held(self, k: int, _: int) -> None:
        self.lanes.free(self.made.pop(k))

    def _reread(self, k: int, call: int) -> None:
        item, before = self.items[k], self.lanes.now["compute"]
        coded = k in self.coded
        if item.kept_reason is not None and not coded:
            if item.source is not None:
                self.read[k] = item.source
            return
        reloaded: Any = self.schedule.fetch(item)[0]
        if k not in self.read:
            arrived = getattr(item.bundle and item.bundle.h2d_done, "seconds", before)
            self.read_times[k] = (before, arrived)
            if coded:  # the decoded storage lives until the backward frees it
                self.read[k] = self.lanes.alloc(self.profile.saved[k].nbytes, "device", item.name)
            else:
                self.lanes.hold(reloaded)  # by the op that reads it
                self.read[k] = reloaded
        if coded:
            self._code(self.coding[k][1], reloaded, self.read[k])
        self.schedule.mark_read(item)
        self.reads.append(k)
        self.drop_after_op.append((call, k))

    def _freed(self, k: int, _: int) -> None:
        self.lanes.free(self.read.pop(k))

    # --- results

    def _windows(self, started: float) -> dict[int, Window]:
        found = {}
        for k, item in self.items.items():
            bundle = item.bundle
            if bundle is None or not bundle.released or k not in self.read_times:
                continue
            before, arrived = self.read_times[k]
            out, back = _work_of(bundle.d2h_done), _work_of(bundle.h2d_done)
            if out is None or back is None:
                continue
            found[k] = Window(
                (out.start - started, out.end - started),
                (back.start - started, back.end - started),
                min(
                    min(before, self.needed_at.get(k, before)) - arrived,
                    self.released_at[k] - out.end,
                ),
            )
        return found


def _absent_bytes(profile: Profile, dropped: Mapping[int, int], managed: set[int]) -> list[int]:
    """Bytes at every position that the profile counts, and the simulation does not, or counts on its own."""
    change = [0] * (len(profile.ops) + 2)
    for k, saved in enumerate(profile.saved):
        if k in dropped:
            change[saved.held] += dropped[k]
            change[max(saved.held, profile.restored_at(k))] -= dropped[k]
        elif k in managed:
            change[saved.at] += saved.nbytes
            change[saved.freed] -= saved.nbytes
    return list(accumulate(change))


Interval = TypeVar("Interval", Wait, Busy)


def _shifted(interval: Interval, by: float) -> Interval:
    return interval._replace(start=interval.start - by, end=interval.end - by)


def _work_of(event: object) -> Busy | None:
    """The last work before an event."""
    work: Busy | None = getattr(event, "work", None)
    return work
