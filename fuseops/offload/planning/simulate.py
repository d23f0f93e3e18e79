"""Runs the schedule over a profile on simulated lanes: what a plan will cost, to the byte and with
every stall. The schedule is the one that runs on CUDA; only the lanes differ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fuseops.offload.lanes.protocol import Buf, Event
from fuseops.offload.lanes.simulated import (
    Busy,
    Level,
    SimulatedBuf,
    SimulatedLanes,
    Wait,
    simulated,
)
from fuseops.offload.schedule import BUNDLE, SMALL, Item, LayerRun, Schedule

from .hardware import Hardware
from .profile import Happening, Profile


class LinkSettings(NamedTuple):
    """`LinkSettings` are the constants of the schedule that a plan is made for."""

    lag: int = 2
    ahead: int = 1
    small: int = SMALL
    bundle: int = BUNDLE


DEFAULT = LinkSettings()


class Window(NamedTuple):
    """A window says when one saved storage was copied out and back. Seconds since the step began.

    slack  how much later its copies could have been done without stalling compute, the scarcer of
           out and back; negative: it stalled
    """

    out: tuple[float, float]
    back: tuple[float, float]
    slack: float


@dataclass(frozen=True, repr=False)
class Simulation:
    """A `Simulation` is one steady step under a plan.

    stall     that compute stood still for copies; network: for other ranks
    coding    that codes took to make, and to read
    stayed    saved index -> why the schedule kept it, of what was to leave
    levels    bytes on the device at the begin of every op
    """

    seconds: float
    stall: float
    recompute: float
    peak: int
    peak_position: int
    moved: int
    host: int
    stayed: dict[int, str]
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
    """One steady step: the second of two, since in the first the schedule learns the order.

    offload    indices of saved storages that leave; recompute: indices of `profile.recompute`
    coded      names of those that leave as codes
    """
    lanes = lanes or SimulatedLanes(hardware.lane_seconds)
    schedule = Schedule(lanes, **settings._asdict())
    saved = profile.saved
    coding = {
        k: hardware.coding_seconds(saved[k].nbytes, saved[k].codes)
        for k in offload
        if saved[k].name in coded and saved[k].codes
    }
    _Step(profile, schedule, lanes, set(offload), set(recompute), coding).run()
    return _Step(profile, schedule, lanes, set(offload), set(recompute), coding).run()


class _Timed(Item):
    """A `_Timed` is an item that knows when compute would have let go of it, and when it was first in compute's way."""

    __slots__ = ("at_release", "lanes", "returning", "wanted")

    def __init__(
        self, name: str, source: Buf, lanes: SimulatedLanes, returning: list[_Timed]
    ) -> None:
        super().__init__(name, source)
        self.lanes, self.at_release = lanes, 0.0
        self.returning, self.wanted = returning, math.inf

    def on_offload(self, point: Literal["copy", "release"]) -> None:
        if point == "release":
            self.at_release = self.lanes.now["compute"]

    def on_reload(self) -> None:
        self.returning.append(self)


class PlayedStep:
    """A `PlayedStep` plays the program's part in one step: it tells a schedule what hooks and ops would."""

    def __init__(self, profile: Profile, schedule: Schedule) -> None:
        self.profile, self.schedule = profile, schedule
        self.calls: dict[int, LayerRun] = {}
        self.items: dict[int, Any] = {}  # by saved index

    def tell(self, happening: Happening) -> None:
        getattr(self, f"_{happening.what}")(happening.which, happening.call)

    def _enter(self, k: int, _: int) -> None:
        call = self.profile.calls[k]
        self.calls[k] = self.schedule.enter(call.layer)
        if call.backward >= 0:
            self.schedule.keep(self.calls[k])  # its call lives until its backward

    def _leave(self, k: int, _: int) -> None:
        self.schedule.leave(self.calls[k])

    def _backward(self, k: int, _: int) -> None:
        self.schedule.backward(self.calls[k])
        self.schedule.drop(self.calls[k])

    def _save(self, k: int, _: int) -> None:
        raise NotImplementedError

    def _share(self, k: int, call: int) -> None:
        if k in self.items and self.items[k].kept_reason is None:  # else it is not the schedule's
            self.schedule.share(self.calls[call], self.items[k])

    def _read(self, k: int, _: int) -> None:
        self._reread(k, self.profile.saved[k].call)

    def _reread(self, k: int, call: int) -> None:
        raise NotImplementedError

    def _held(self, k: int, _: int) -> None:
        """Autograd alone holds it."""

    def _freed(self, k: int, _: int) -> None:
        """It is gone."""


class _Step(PlayedStep):
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
        self.dropped: dict[int, int] = {}  # saved -> bytes that are not there
        for group in groups:
            self.dropped |= group.gone(profile.saved)
        self.offload = offload - self.dropped.keys()
        self.again: dict[int, float] = defaultdict(float)  # position -> seconds of recomputation
        for group in groups:
            for at in profile.made_again(group).values():
                self.again[at] += group.each
        self.absent = _absent(profile, self.dropped, self.offload)
        self.by_position: dict[int, list[Happening]] = defaultdict(list)
        for happening in profile.happenings:
            if happening.what in ("enter", "leave", "backward") or happening.which in self.offload:
                self.by_position[happening.position].append(happening)
        self.made: dict[int, SimulatedBuf] = {}
        self.read: dict[int, SimulatedBuf] = {}
        self.as_codes: set[int] = set()
        self.ready: dict[int, tuple[float, float]] = {}  # when it was wanted, and when it came
        self.returning: list[_Timed] = []  # that no op has stood behind
        self.wanted: list[int] = []  # saved storages that the next op reads
        self.done: list[tuple[int, int]] = []  # saved tensors that go after it

    def run(self) -> Simulation:
        lanes, profile = self.lanes, self.profile
        started, waits, busy = lanes.now["compute"], len(lanes.waits), len(lanes.busy)
        bytes_out = self.schedule.stats.out_bytes
        levels, recompute, host = [], 0.0, 0
        travelling: dict[int, Event] = {}
        for position in range(len(profile.ops) + 1):
            for happening in self.by_position.get(position, ()):
                self.tell(happening)
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
            nbytes = op.resident - self.absent[position] + lanes.levels[-1].nbytes
            levels.append(Level(lanes.now["compute"] - started, nbytes, op.name))
            for k in profile.joins.get(position, ()):
                lanes.wait("compute", travelling[k])
            if op.from_host:
                self._stall_behind()
            reads = [self.read[k] for k in self.wanted]
            travels = op.lane == "network"
            lanes.op("compute", reads, (), 0.0 if travels else op.seconds, op.name)
            if travels:
                lanes.wait("network", lanes.record("compute"))
                lanes.op("network", (), (), op.seconds, op.name)
                travelling[position] = lanes.record("network")
            for call, k in self.done:
                self.schedule.drop(self.calls[call], self.items[k])
            self.wanted, self.done = [], []
        top = max(range(len(levels)), key=lambda p: levels[p].nbytes, default=0)
        still = [_shifted(w, started) for w in lanes.waits[waits:] if _is_stall(w)]
        stalls = [w for w in still if w.on != "network"]
        return Simulation(
            seconds=lanes.now["compute"] - started,
            stall=sum(w.end - w.start for w in stalls),
            recompute=recompute,
            peak=levels[top].nbytes if levels else 0,
            peak_position=top,
            moved=self.schedule.stats.out_bytes - bytes_out,
            host=host,
            stayed={k: i.kept_reason for k, i in self.items.items() if i.kept_reason is not None},
            windows=self._windows(started),
            levels=tuple(levels),
            busy=tuple(
                b._replace(start=b.start - started, end=b.end - started) for b in lanes.busy[busy:]
            ),
            stalls=tuple(stalls),
            network=sum(w.end - w.start for w in still if w.on == "network"),
            coding=self.coding_seconds,
        )

    def _stall_behind(self) -> None:
        """The next op copies from the host, after all that has been asked back."""
        for item in self.returning:
            item.wanted = min(item.wanted, self.lanes.now["compute"])
        self.returning.clear()
        self.lanes.stall_behind("h2d")

    # --- happenings

    def _save(self, k: int, _: int) -> None:
        saved = self.profile.saved[k]
        source = self.lanes.alloc(saved.nbytes, "device", saved.name)
        self.lanes.hold(source)  # by whoever made it
        self.made[k] = source
        call = self.calls[saved.call]
        if k not in self.coding or call.keeps_all:
            self.items[k] = _Timed(saved.name, source, self.lanes, self.returning)
            self.schedule.save(call, self.items[k])
            return
        codes = self.lanes.alloc(saved.codes, "device", saved.name)
        self._code(self.coding[k][0], source, codes)
        self.items[k] = _Timed(saved.name, codes, self.lanes, self.returning)
        self.schedule.save(call, self.items[k])
        if self.items[k].kept_reason is None:
            self.lanes.free(source)
            self.as_codes.add(k)
        else:
            self.lanes.free(codes)
            self.items[k].source = source

    def _code(self, seconds: float, source: Buf, target: Buf) -> None:
        """Codes are made, or read."""
        self.coding_seconds += seconds
        self.lanes.op("compute", (source,), (target,), seconds, "codes")

    def _held(self, k: int, _: int) -> None:
        self.lanes.free(self.made.pop(k))

    def _reread(self, k: int, call: int) -> None:
        item, before = self.items[k], self.lanes.now["compute"]
        coded = k in self.as_codes
        if item.kept_reason is not None and not coded:
            if item.source is not None:
                self.read[k] = simulated(item.source)
            return
        came = simulated(self.schedule.fetch(item)[0])
        if k not in self.read:
            arrived = getattr(item.bundle and item.bundle.h2d_done, "seconds", before)
            self.ready[k] = (before, arrived)
            if coded:  # what they stand for is there until the backward lets go of it
                self.read[k] = self.lanes.alloc(self.profile.saved[k].nbytes, "device", item.name)
            else:
                self.lanes.hold(came)  # by the op that reads it
                self.read[k] = came
        if coded:
            self._code(self.coding[k][1], came, self.read[k])
        self.schedule.mark_read(item)
        self.wanted.append(k)
        self.done.append((call, k))

    def _freed(self, k: int, _: int) -> None:
        self.lanes.free(self.read.pop(k))

    # --- what came of it

    def _windows(self, started: float) -> dict[int, Window]:
        found = {}
        for k, item in self.items.items():
            bundle = item.bundle
            if bundle is None or not bundle.released or k not in self.ready:
                continue
            before, arrived = self.ready[k]
            out, back = _work_of(bundle.d2h_done), _work_of(bundle.h2d_done)
            if out is None or back is None:
                continue
            found[k] = Window(
                (out.start - started, out.end - started),
                (back.start - started, back.end - started),
                min(min(before, item.wanted) - arrived, item.at_release - out.end),
            )
        return found


def _absent(profile: Profile, dropped: Mapping[int, int], managed: set[int]) -> list[int]:
    """Bytes at every position that the profile counts and the simulation does not, or counts
    itself.
    """
    change = [0] * (len(profile.ops) + 2)
    for k, saved in enumerate(profile.saved):
        if k in dropped:
            change[saved.held] += dropped[k]
            change[max(saved.held, profile.again_at(k))] -= dropped[k]
        elif k in managed:
            change[saved.at] += saved.nbytes
            change[saved.freed] -= saved.nbytes
    total = 0
    for position, difference in enumerate(change):
        total += difference
        change[position] = total
    return change


def _is_stall(wait: Wait) -> bool:
    return wait.lane == "compute" and wait.end > wait.start


def _shifted(wait: Wait, by: float) -> Wait:
    return wait._replace(start=wait.start - by, end=wait.end - by)


def _work_of(event: object) -> Busy | None:
    """The last piece of work before an event."""
    work: Busy | None = getattr(event, "work", None)
    return work
