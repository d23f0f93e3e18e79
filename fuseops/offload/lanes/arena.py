"""Host memory for copies: regions of exact size that are asked for once and divided among buffers.

Pinning costs 0.1 to 0.3 ms a MiB and torch's own host allocator rounds up to powers of two, so nothing is
given back before the arena closes: what one step used, the next divides anew, best fit first. A slab
that is given back is parked for the next request of its size, of which the first in memory is
taken; what is parked becomes one with its neighbours only when a request fits none of it. The same
requests in the same order get the same places, so that after the first steps nothing is allocated
and addresses stay, as captured CUDA graphs need it: as long as every request finds a slab of its size
parked, or nothing is, slabs stay as they are; once one did not, whatever is parked becomes one each
time that all is given back, and what follows begins as if nothing had been before. Where sizes vary
from step to step, regions of exact size would never all fit, and each step would ask for more: there
a region has headroom, and room for a few slabs. Sizes vary if one is new after all was given back
once, so that a step that asks for the same each time has none. Pure: `make` brings the memory.
"""

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from operator import attrgetter
from typing import Any

from .protocol import Buf, Event, NoRoomError

ALIGN = 512
REGION = 64 << 20  # small buffers share regions of this size
MANY = 1024  # sizes; a step that asks for the same each time has fewer


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to what every dtype and every copy engine likes."""
    return -(-nbytes // ALIGN) * ALIGN


class Slab(Buf):
    """A `Slab` is a part of a region of host memory, and the buffer of whoever has it.

    room   bytes, `nbytes` of which were asked for
    after  the last copy that may still read it
    """

    __slots__ = ("offset", "region", "room")

    def __init__(self, region: int, offset: int, room: int, after: Event | None) -> None:
        super().__init__("", room, "host")
        self.region, self.offset, self.room, self.after = region, offset, room, after


PLACE = attrgetter("region", "offset")


class Arena:
    """An `Arena` gives out slabs of a few regions of host memory, by best fit.

    make    brings a region of so many bytes
    budget  bytes that all regions may have together; None: no limit
    """

    def __init__(self, make: Callable[[int], Any], budget: int | None = None) -> None:
        self.regions: list[Any] = []
        self.reserved = 0  # bytes of all regions
        self.peak = 0  # the most bytes that were handed out at a time
        self.budget = budget
        self._make = make
        self._used = 0  # bytes handed out, each rounded up to ALIGN
        # (bytes, region, offset, slab), the smallest first; none is next to another
        self._free: list[tuple[int, int, int, Slab]] = []
        self._returned: deque[Slab] = deque()
        # takes a slab back, to be used again after its `after`; no lock: a finalizer may call it, anywhere
        self.give: Callable[[Slab], None] = self._returned.append
        # by size: those given back as they were, (region, offset, slab), the first in memory on top
        self._parked: dict[int, list[tuple[int, int, Slab]]] = {}
        self._merged = False  # parked ones were made one with others, at some time
        # that were asked for before all was given back for the first time
        self._sizes: set[int] = set()
        self._again = False  # all was given back, at some time
        self._varies = False  # a size that is not among those was asked for since
        self._lock = threading.Lock()

    def take(self, nbytes: int, name: str = "") -> Slab:
        """A slab of at least so many bytes.  Raises NoRoomError beyond the budget."""
        room = -(-nbytes // ALIGN) * ALIGN
        with self._lock:
            if self._returned:
                self._collect()
            parked = self._parked.get(room)
            slab = heappop(parked)[2] if parked else self._divide(room)
            self._used += room
            if self._used > self.peak:
                self.peak = self._used
        slab.nbytes, slab.name = nbytes, name
        return slab

    @property
    def used(self) -> int:
        """Bytes handed out now."""
        with self._lock:
            self._collect()
            return self._used

    def _collect(self) -> None:
        while self._returned:
            slab = self._returned.popleft()
            self._used -= slab.room
            parked = self._parked.setdefault(slab.room, [])
            heappush(parked, (slab.region, slab.offset, slab))
        if not self._used:
            self._again = self.peak > 0
            if self._merged:
                self._merge()

    def _merge(self) -> None:
        """Have all that is parked among the free ones, one with their neighbours."""
        parked = [slab for alike in self._parked.values() for _, _, slab in alike]
        self._parked.clear()
        if not parked:
            return
        free: list[Slab] = []
        for slab in sorted((*parked, *(f[-1] for f in self._free)), key=PLACE):
            last = free[-1] if free else None
            if last and (last.region, last.offset + last.room) == PLACE(slab):
                after = _later(last.after, slab.after)
                free[-1] = Slab(last.region, last.offset, last.room + slab.room, after)
            else:
                free.append(slab)
        self._free = sorted((slab.room, *PLACE(slab), slab) for slab in free)
        self._merged = True

    def _divide(self, wanted: int) -> Slab:
        """A slab out of the smallest free one that has room, or out of a new region."""
        self._merge()
        if not self._varies and wanted not in self._sizes:
            self._varies = self._again or len(self._sizes) == MANY
            self._sizes.add(wanted)
        at = bisect_left(self._free, (wanted,))
        best = self._free.pop(at)[-1] if at < len(self._free) else self._grow(wanted)
        rest = best.room - wanted
        if not rest:
            return best
        left = Slab(best.region, best.offset + wanted, rest, best.after)
        insort(self._free, (rest, *PLACE(left), left))
        return Slab(best.region, best.offset, wanted, best.after)

    def _grow(self, wanted: int) -> Slab:
        room = None if self.budget is None else self.budget - self.reserved
        nbytes = max(wanted, REGION)
        if self._varies and self._used + wanted <= self.peak * 9 // 8:
            # What there is lies in the wrong pieces, and would again in the next step. With so many slabs of this size
            # that they come to an eighth of all, each an eighth larger, that ends after a few steps.
            slabs = 1 + self.reserved // max(8 * wanted, REGION)
            more = max(nbytes, aligned(slabs * wanted * 9 // 8))
            if self.budget is None or 2 * (self.reserved + more) <= self.budget:
                nbytes = more  # the other half of a budget is for what is needed exactly
        if room is not None:
            nbytes = min(nbytes, max(room, wanted))
            if wanted > room:
                raise NoRoomError(
                    f"host budget of {self.budget} bytes: {self._used} in use, {wanted} more wanted"
                )
        region = self._make(nbytes)  # may raise, then nothing has changed
        self.regions.append(region)
        self.reserved += nbytes
        return Slab(len(self.regions) - 1, 0, nbytes, None)


def _later(a: Event | None, b: Event | None) -> Event | None:
    """Copies that read host memory all run on one lane: the later one includes the earlier."""
    if a is None or b is None:
        return a or b
    return a if a.serial > b.serial else b
