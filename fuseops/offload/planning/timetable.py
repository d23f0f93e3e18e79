"""A `Timetable` says where the schedule sends, releases and fetches every saved tensor of a step, if all leave: the
schedule itself, run on lanes that take no time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from fuseops.offload.lanes.protocol import Lanes
from fuseops.offload.order import Boundary, Order, OrderKey
from fuseops.offload.schedule import Item, LinkSettings, MoveStep, Schedule

from .profile import Profile
from .simulate import ReplayedItem, ReplayedStep

SEND, RELEASE, FETCH, READ, LAST, AGAIN, HOST_COPY = range(7)
"""LAST: the last read. HOST_COPY: an op copies from the host, after all reloads that were started."""


class Hole(NamedTuple):
    """A hole is the part of a step, in positions of its ops, where an item's bytes are not on the device."""

    start: int
    end: int
    nbytes: int


class UnbundledSchedule(Schedule):
    """An `UnbundledSchedule` sends the small storages of a call when it ends, as ever, but each by itself: which of
    them share a transfer is what a plan chooses, and one that is read soon would hold back the others.
    """

    def _send_late(self, items: list[Item]) -> None:
        for item in items:
            super()._send_late([item])


class Timetable(ReplayedStep):
    """A `Timetable` says at which op the schedule sends, releases and fetches every saved tensor.

    events   kind, saved and position, in the order in which the host program reaches them
    movable  saved storages that can be away for a while; immovable: saved -> why not, of others that may leave
    """

    def __init__(
        self, profile: Profile, settings: LinkSettings, coded: Collection[str] = ()
    ) -> None:
        self.lanes, self.small = Lanes(), settings.small
        alone = settings._replace(bundle=1 << 62)  # small storages are sent when their call ends
        super().__init__(profile, UnbundledSchedule(self.lanes, alone))
        boundaries = (
            (boundary.what, profile.calls[boundary.which]) for boundary in profile.boundaries
        )
        self.schedule.order = Order(  # as known from the step before
            Boundary(way, OrderKey(call.layer, call.ordinal)) for way, call in boundaries
        )
        # bytes of codes, and bytes on the link
        self.codes = {
            k: s.codes for k, s in enumerate(profile.saved) if s.name in coded and s.codes
        }
        self.nbytes = [self.codes.get(k, s.nbytes) for k, s in enumerate(profile.saved)]
        self.events: list[tuple[int, int, int]] = []
        self._at: dict[tuple[int, int], int] = {}  # kind, saved -> position
        for step_event in profile.events:
            self._position = step_event.position
            self.replay(step_event)
        self.holes: dict[int, list[Hole]] = {}
        self.movable: list[int] = []
        self.immovable: dict[int, str] = {}
        for k in sorted(self.items):
            self._find_holes(k)
        self.events = [event for event in self.events if event[1] in self.holes]

    def on_move(self, k: int, what: MoveStep) -> None:
        self._note({"copy": SEND, "release": RELEASE, "reload": FETCH}[what], k)

    def _note(self, kind: int, k: int) -> None:
        """Record what happens to a saved storage at the current position."""
        self.events.append((kind, k, self._position))
        self._at[kind, k] = self._position

    def is_small(self, k: int) -> bool:
        return self.nbytes[k] < self.small

    def _save(self, k: int, _: int) -> None:
        if self._may_leave(k):
            saved = self.profile.saved[k]
            source = self.lanes.alloc(self.nbytes[k], "device", saved.name)
            self.items[k] = ReplayedItem(self, k, source)
            sent = self.schedule.save(self.calls[saved.call], self.items[k])
            if sent and not self.is_small(k):
                self._note(SEND, k)

    def _reread(self, k: int, call: int) -> None:
        if k in self.items and self.items[k].kept_reason is None:
            self.schedule.fetch(self.items[k])
            self.schedule.mark_read(self.items[k])
            self.schedule.drop(self.calls[call], self.items[k])
            self._note(LAST if self._position == max(self.profile.saved[k].reads) else READ, k)

    def _may_leave(self, k: int) -> bool:
        saved, calls = self.profile.saved[k], self.profile.calls
        mine = (saved.call, *(again.call for again in saved.again))
        return (
            saved.why is None
            and saved.nbytes > 0
            and saved.call >= 0
            and all(calls[call].backward >= 0 for call in mine)
        )

    def _find_holes(self, k: int) -> None:
        """Find where the bytes of a storage are off the device, or why it cannot be moved."""
        released, fetched = self._at.get((RELEASE, k)), self._at.get((FETCH, k))
        if released is None or fetched is None:
            self.immovable[k] = "read again too soon"
            return
        holes = self._holes(k, self._at[SEND, k], released, fetched)
        if any(h.nbytes > 0 for h in holes):
            self.holes[k] = holes
            self.movable.append(k)
        else:
            self.immovable[k] = "held by another reference until it is read"

    def _holes(self, k: int, sent: int, released: int, fetched: int) -> list[Hole]:
        saved = self.profile.saved[k]
        holes = []
        back = fetched  # where its bytes are on the device again
        if k in self.codes:
            # The storage is freed at once, and the codes at the release; both are there during the reads.
            back = min(saved.reads)
            holes.append(Hole(saved.held, back, saved.nbytes))
            holes.append(Hole(saved.at, max(sent, released), -self.codes[k]))
            holes.append(Hole(fetched, max(saved.reads), -self.codes[k]))
        else:
            holes.append(Hole(max(released, saved.held), fetched, saved.nbytes))
        # While something else holds the original, the reloaded bytes are a second copy.
        holes.append(Hole(back, min(saved.held, saved.freed), -saved.nbytes))
        return [h for h in holes if h.start < h.end]
