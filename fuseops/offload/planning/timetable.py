"""A `Timetable` foretells where the schedule would send, release and fetch every saved tensor of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from .profile import Profile, Saved
from .simulate import LinkSettings

SEND, RELEASE, FETCH, READ, LAST, AGAIN = range(6)  # LAST: the last read


class Hole(NamedTuple):
    """A hole is the part of a step, in positions of its ops, where an item's bytes are not on the device."""

    start: int
    end: int
    nbytes: int


class Timetable:
    """A `Timetable` foretells at which op the schedule would send, release and fetch every saved tensor: it follows
    schedule.py.
    """

    def __init__(
        self, profile: Profile, settings: LinkSettings, coded: Collection[str] = ()
    ) -> None:
        self.profile, self.settings = profile, settings
        # bytes on the link, and of them those of codes
        self.codes = {
            k: s.codes for k, s in enumerate(profile.saved) if s.name in coded and s.codes
        }
        self.nbytes = [self.codes.get(k, s.nbytes) for k, s in enumerate(profile.saved)]
        self.events: list[tuple[int, int, int]] = []  # kind, saved, position
        self.holes: dict[int, list[Hole]] = {}
        self.movable: list[int] = []
        self.stays: dict[int, str] = {}
        boundaries = profile.boundaries
        number = {(b.what, b.which): n + 1 for n, b in enumerate(boundaries)}
        sends: dict[int, tuple[int, int]] = {}  # saved -> position, boundaries passed by then
        mine: dict[int, list[int]] = defaultdict(list)  # call -> saved, in the order of saving
        now = 0
        for position, what, k, by in profile.happenings:
            if what in ("enter", "backward"):
                now += 1
            elif what == "share" and k in mine[profile.saved[k].call]:
                mine[by].append(k)
            elif what == "save" and self._may_leave(k, number):
                mine[profile.saved[k].call].append(k)
                if not self.is_small(k):
                    sends[k] = (position, now)
            elif what == "leave":
                for saved in mine[k]:
                    sends.setdefault(saved, (position, now))
        at = [b.position for b in boundaries]
        for k, (position, passed) in sends.items():
            own = number["backward", profile.saved[k].call]
            others = [number["backward", call] for call in _others(profile.saved[k])]
            due, fetch = passed + settings.lag, min([own, *others]) - settings.ahead
            if due >= fetch:
                self.stays[k] = "read again too soon"
            else:
                self._add(k, position, at[due - 1], at[fetch - 1])
        self.movable.sort()
        self._order(sends, mine, number)

    def is_small(self, k: int) -> bool:
        return self.nbytes[k] < self.settings.small

    def _may_leave(self, k: int, number: dict[tuple[str, int], int]) -> bool:
        saved = self.profile.saved[k]
        return (
            saved.why is None
            and saved.nbytes > 0
            and saved.call >= 0
            and all(("backward", call) in number for call in (saved.call, *_others(saved)))
        )

    def _add(self, k: int, sent: int, released: int, fetched: int) -> None:
        saved = self.profile.saved[k]
        holes = []
        back = fetched  # where its bytes are there again
        if k in self.codes:
            # Its own bytes go at once, those of the codes at the release; they come back beside the codes.
            back = min(saved.reads)
            holes.append(Hole(saved.held, back, saved.nbytes))
            holes.append(Hole(saved.at, max(sent, released), -self.codes[k]))
            holes.append(Hole(fetched, max(saved.reads), -self.codes[k]))
        elif self.is_small(k):
            # Gathered: its own bytes go at once, those of the transfer at the release.
            gone, staged = max(sent, saved.held), max(sent, released)
            holes.append(Hole(gone, fetched, saved.nbytes))
            holes.append(Hole(sent, staged, -saved.nbytes))
        else:
            holes.append(Hole(max(released, saved.held), fetched, saved.nbytes))
        # While somebody else holds the original, what came back is a second copy.
        holes.append(Hole(back, min(saved.held, saved.freed), -saved.nbytes))
        self.holes[k] = [h for h in holes if h.start < h.end]
        if any(h.nbytes > 0 for h in self.holes[k]):
            self.movable.append(k)
        else:
            self.stays[k] = "held by another reference until it is read"

    def _order(
        self,
        sends: dict[int, tuple[int, int]],
        mine: dict[int, list[int]],
        number: dict[tuple[str, int], int],
    ) -> None:
        """Events in the order in which the host program reaches them."""
        lag, ahead = self.settings.lag, self.settings.ahead
        movable = set(self.movable)
        fetches: dict[int, list[int]] = defaultdict(list)
        releases: dict[int, list[int]] = defaultdict(list)
        fetched: set[int] = set()
        for call in sorted(mine, key=lambda call: number["backward", call]):
            due, saved = number["backward", call] - ahead, mine[call]
            saved = [k for k in saved if k not in fetched]
            fetched.update(saved)
            # Last saved, first read; the transfer of small ones comes where its last one would.
            large = [k for k in reversed(saved) if k in movable]
            small = [k for k in large if self.is_small(k)]
            first = next((n for n, k in enumerate(large) if self.is_small(k)), 0)
            rest = [k for k in large[first:] if not self.is_small(k)]
            fetches[due] += [*large[:first], *small, *rest]
        for k, (_, passed) in sends.items():
            if k in movable:
                releases[passed + lag].append(k)
        now = 0
        for position, what, k, _ in self.profile.happenings:
            if what in ("enter", "backward"):
                now += 1
                self.events += [(FETCH, saved, position) for saved in fetches[now]]
                self.events += [(RELEASE, saved, position) for saved in releases[now]]
            elif what == "save" and k in movable and not self.is_small(k):
                self.events.append((SEND, k, position))
            elif what == "leave":
                own = [s for s in mine[k] if self.profile.saved[s].call == k]
                small = [s for s in own if s in movable and self.is_small(s)]
                self.events += [(SEND, saved, position) for saved in small]
            elif what in ("read", "reread") and k in movable:
                last = position == max(self.profile.saved[k].reads)
                self.events.append((LAST if last else READ, k, position))


def _others(saved: Saved) -> list[int]:
    """The other calls that save it."""
    return [again.call for again in saved.again]
