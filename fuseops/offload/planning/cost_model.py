"""A fast prediction of what the schedule does with a choice. The planner calls it thousands of times, and simulates the
schedule only once, at the end.

The positions of events do not depend on the choice; only stalls do. So events are laid out once, and a prediction is
one pass over those of the chosen tensors. There are two simplifications, which the simulation does not make: small
tensors of a call, which share a transfer, each take their part of its time; and copies take their time with the other
direction idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from fuseops.offload.lanes.arena import aligned
from fuseops.offload.schedule import LinkSettings

from .hardware import Hardware
from .profile import Profile, Recompute
from .timetable import AGAIN, FETCH, HOST_COPY, LAST, RELEASE, SEND, Hole, Timetable


class Choice(NamedTuple):
    """A choice is what to offload and what to recompute: indices into the model's `items` and `groups`."""

    leave: frozenset[int]
    drop: frozenset[int]


class Prediction(NamedTuple):
    """A prediction is the time and the peak of a step under a choice.

    late     item -> seconds that compute waited for it
    top      position of the peak
    """

    seconds: float
    stall: float
    recompute: float
    peak: int
    top: int
    host: int
    late: dict[int, float]


class CostModel:
    """A cost model predicts the cost of choices for one profile, machine and schedule.

    items   one for each decision: indices into `profile.saved` of the movable tensors of one name, which
            micro-batches share
    groups  those of the profile
    immovable  saved -> why it cannot move, of what may leave
    coded   names of what leaves as codes if it leaves
    """

    def __init__(
        self,
        profile: Profile,
        hardware: Hardware,
        settings: LinkSettings,
        coded: frozenset[str] = frozenset(),
    ) -> None:
        self.profile, self.hardware, self.settings = profile, hardware, settings
        self.coded = coded
        timetable = Timetable(profile, settings, coded)
        by_name: dict[str, list[int]] = defaultdict(list)
        for k in timetable.movable:
            by_name[profile.saved[k].name].append(k)
        self.items = [tuple(saved) for saved in by_name.values()]
        self.immovable = timetable.immovable
        self.of_saved = {k: n for n, saved in enumerate(self.items) for k in saved}
        self.nbytes = [sum(profile.saved[k].nbytes for k in saved) for saved in self.items]
        self.sent = [sum(aligned(timetable.nbytes[k]) for k in saved) for saved in self.items]
        self.coding = {
            k: hardware.coding_seconds(profile.saved[k].nbytes, codes)
            for k, codes in timetable.codes.items()
        }
        self._link_bytes = timetable.nbytes
        self.call = [profile.saved[saved[0]].call for saved in self.items]
        self.groups = profile.recompute
        self.members = [
            frozenset(self.of_saved[k] for k in group.saved if k in self.of_saved)
            for group in self.groups
        ]
        self.conflicts = self._conflicts()
        # Small tensors of one call share a transfer, and a slot: all arrive with the last.
        self.slots = {
            k: -1 - profile.saved[k].call if timetable.is_small(k) else k for k in timetable.movable
        }
        self.seconds_out, self.seconds_back = self._costs(timetable)
        self.out = [sum(self.seconds_out[k] for k in saved) for saved in self.items]
        self.events = self._events(timetable)
        self.holes = [[h for k in saved for h in timetable.holes[k]] for saved in self.items]
        self.drops = [self._drops(g) for g in self.groups]
        self._segments()
        self.evaluations = 0

    def predict(self, choice: Choice) -> Prediction:
        """Seconds, stalls, peak and host bytes under a choice."""
        self.evaluations += 1
        leave, drop = choice
        stall, recompute, host, late = self._time(leave, drop)
        peak, top = self._peak(leave, drop)
        seconds = self.profile.seconds + stall + recompute
        return Prediction(seconds, stall, recompute, peak, top, host, late)

    def covers(self, position: int) -> tuple[list[int], list[int]]:
        """Items and groups whose absence lowers the bytes at a position."""
        items = [
            k
            for k, holes in enumerate(self.holes)
            if any(h.start <= position < h.end and h.nbytes > 0 for h in holes)
        ]
        groups = [
            g
            for g, holes in enumerate(self.drops)
            if any(h.start <= position < h.end for h in holes)
        ]
        return items, groups

    def _conflicts(self) -> list[frozenset[int]]:
        """For each group, the others that drop some of the same tensors: at most one is chosen."""
        users: dict[int, list[int]] = defaultdict(list)
        for g, group in enumerate(self.groups):
            for k in group.saved:
                users[k].append(g)
        return [
            frozenset(r for k in group.saved for r in users[k]) - {g}
            for g, group in enumerate(self.groups)
        ]

    # --- time

    def _costs(self, timetable: Timetable) -> tuple[dict[int, float], dict[int, float]]:
        """Seconds of the offload and of the reload of every movable storage."""
        saved, sizes = self.profile.saved, timetable.nbytes
        out: dict[int, float] = {}
        back: dict[int, float] = {}
        together: dict[int, int] = defaultdict(int)
        for k in timetable.movable:
            if timetable.is_small(k):
                together[saved[k].call] += sizes[k]
        for k in timetable.movable:
            nbytes = transfer = sizes[k]
            if timetable.is_small(k):
                transfer = min(together[saved[k].call], self.settings.bundle)
            out[k] = self.hardware.copy_seconds("d2h", transfer) * nbytes / transfer
            back[k] = self.hardware.copy_seconds("h2d", transfer) * nbytes / transfer
        return out, back

    def _events(self, timetable: Timetable) -> list[tuple[int, int, int, float]]:
        """(kind, item or group or 0, saved, seconds without any stall), in the order of the program."""
        clock = self.profile.clock
        found: list[tuple[tuple[int, int], int, int, int]] = []
        for order, (kind, saved, position) in enumerate(timetable.events):
            found.append(((position, order), kind, self.of_saved[saved], saved))
        for g, group in enumerate(self.groups):
            for call, at in self.profile.recomputed_at(group).items():
                found.append(((at, len(timetable.events)), AGAIN, g, call))
        for at, op in enumerate(self.profile.ops):
            if op.from_host:
                found.append(((at, len(timetable.events)), HOST_COPY, 0, 0))
        # an op that copies from the host waits for its transfers between ranks first
        started = [end - op.seconds for end, op in zip(clock[1:], self.profile.ops, strict=True)]
        return [
            (kind, k, saved, started[p] if kind == HOST_COPY else clock[p])
            for (p, _), kind, k, saved in sorted(found)
        ]

    def _time(
        self, leave: frozenset[int], drop: frozenset[int]
    ) -> tuple[float, float, int, dict[int, float]]:
        stall = recompute = out_free = back_free = 0.0
        host = host_peak = last = 0
        copied: dict[int, float] = {}  # by slot
        arrived: dict[int, float] = {}
        late: dict[int, float] = {}
        out, back, coding = self.seconds_out, self.seconds_back, self.coding
        slots, sizes = self.slots, self._link_bytes
        for kind, item, k, base in self.events:
            if kind == AGAIN:
                if item in drop:
                    recompute += self.groups[item].seconds_per_call
                continue
            if kind == HOST_COPY:
                wait = back_free - base - stall - recompute
                if wait > 0.0:
                    stall += wait
                    late[last] = late.get(last, 0.0) + wait
                continue
            if item not in leave:
                continue
            if kind == SEND and k in coding:
                recompute += coding[k][0]
            now, slot = base + stall + recompute, slots[k]
            if kind == SEND:
                out_free = copied[slot] = (out_free if out_free > now else now) + out[k]
                host += aligned(sizes[k])
                host_peak = max(host, host_peak)
            elif kind == FETCH:
                start = back_free if back_free > now else now
                if copied[slot] > start:
                    start = copied[slot]
                back_free = arrived[slot] = start + back[k]
                last = item
            else:
                wait = (copied if kind == RELEASE else arrived)[slot] - now
                if wait > 0.0:
                    stall += wait
                    late[item] = late.get(item, 0.0) + wait
                if kind != RELEASE and k in coding:
                    recompute += coding[k][1]
                if kind == LAST:
                    host -= aligned(sizes[k])
        return stall, recompute, host_peak, late

    def added_stalls(self, choice: Choice) -> list[float]:
        """An estimate of the seconds that each item would add if it were offloaded too.

        An item waits for earlier copies on its lane and delays later ones, less gaps on the lane and slack before the
        next wait.
        """
        deadline: dict[int, dict[int, float]] = {SEND: {}, FETCH: {}}  # lane -> saved -> when
        queue: dict[int, list[tuple[int, int, float]]] = {SEND: [], FETCH: []}
        free = {SEND: 0.0, FETCH: 0.0}
        stall, behind = 0.0, 0
        for kind, item, k, base in self.events:
            now, leaves = base + stall, item in choice.leave
            if kind == HOST_COPY:
                for _, asked, _ in queue[FETCH][behind:]:
                    deadline[FETCH].setdefault(asked, now)
                behind = len(queue[FETCH])
            elif kind in queue:
                start = max(free[kind], now)
                queue[kind].append((item, k, start))
                if leaves:
                    took = self.seconds_out if kind == SEND else self.seconds_back
                    free[kind] = start + took[k]
            elif kind == AGAIN:
                stall += self.groups[item].seconds_per_call if item in choice.drop else 0.0
            else:
                deadline[SEND if kind == RELEASE else FETCH].setdefault(k, now)
        added = [0.0] * len(self.items)
        for lane, took in ((SEND, self.seconds_out), (FETCH, self.seconds_back)):
            spare = following = float("inf")  # slack and start of the next copy on the lane
            for item, k, start in reversed(queue[lane]):
                done = start + took[k]
                late = done - deadline[lane][k]
                if item in choice.leave:
                    spare = min(max(-late, 0.0), max(following - done, 0.0) + spare)
                    following = start
                else:
                    added[item] += max(late, done - following - spare, 0.0)
        return added

    # --- bytes

    def _drops(self, group: Recompute) -> list[Hole]:
        saved, found = self.profile.saved, []
        for k, nbytes in group.dropped_bytes(saved).items():
            end = self.profile.restored_at(k)
            if saved[k].held < end:
                found.append(Hole(saved[k].held, end, nbytes))
        return found

    def _segments(self) -> None:
        """Split the step at the ends of holes; of each segment only the op with the most bytes matters."""
        ends = {0, len(self.profile.ops)}
        for holes in (*self.holes, *self.drops):
            for hole in holes:
                ends.update((hole.start, hole.end))
        self._ends = sorted(e for e in ends if e <= len(self.profile.ops))
        resident = [op.resident for op in self.profile.ops]
        self._tops = [
            max(range(a, b), key=resident.__getitem__)
            for a, b in zip(self._ends, self._ends[1:], strict=False)
        ]
        self._levels = [resident[p] for p in self._tops]
        place = {end: n for n, end in enumerate(self._ends)}
        self._hole_places = [_placed(holes, place) for holes in self.holes]
        self._drop_places = [_placed(holes, place) for holes in self.drops]

    def _peak(self, leave: frozenset[int], drop: frozenset[int]) -> tuple[int, int]:
        change = [0] * (len(self._ends) + 1)
        away = [self._hole_places[k] for k in leave] + [self._drop_places[g] for g in drop]
        for places in away:
            for start, end, nbytes in places:
                change[start] += nbytes
                change[end] -= nbytes
        best, where, absent = 0, 0, 0
        for n, level in enumerate(self._levels):
            absent += change[n]
            if level - absent > best:
                best, where = level - absent, n
        return best, self._tops[where] if self._tops else 0


def _placed(holes: Sequence[Hole], place: dict[int, int]) -> list[tuple[int, int, int]]:
    return [(place[h.start], place[h.end], h.nbytes) for h in holes]
