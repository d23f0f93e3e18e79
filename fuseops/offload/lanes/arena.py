"""Host memory for copies: regions of exact size that are asked for once and divided among buffers.

Pinning costs 0.4 ms a MiB and torch's own host allocator rounds up to powers of two, so nothing is
given back before the arena closes: what one step used, the next divides anew, best fit first. A slab
that is given back is parked for the next request of its size, of which the first in memory is
taken; what is parked becomes one with its neighbours only when a request fits none of it. The same
requests in the same order get the same places, so that after the first steps nothing is allocated
and addresses stay, as captured CUDA graphs need it: a step that made slabs one and ends with all
given back leaves the arena as before any step, and one that did not finds its slabs parked.
Pure: `make` brings the memory.
"""

import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from .protocol import Event, NoRoomError

ALIGN = 512
REGION = 64 << 20  # small buffers share regions of this size


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to what every dtype and every copy engine likes."""
    return -(-nbytes // ALIGN) * ALIGN


class Slab:
    """A part of a region.

    after  the last copy that may still read it
    view   what its users keep of the memory, for the next user of the same slab
    """

    __slots__ = ("after", "nbytes", "offset", "region", "view")

    def __init__(self, region: int, offset: int, nbytes: int, after: Event | None) -> None:
        self.region, self.offset, self.nbytes, self.after = region, offset, nbytes, after
        self.view: Any = None


class Arena:
    """Best fit over a few regions.

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
        self._free: list[tuple[int, int, int]] = []  # (bytes, region, offset), the smallest first
        self._starts: dict[tuple[int, int], Slab] = {}  # free slabs by region and offset
        self._ends: dict[tuple[int, int], Slab] = {}
        self._returned: deque[tuple[Slab, Event | None]] = deque()
        # by size: those given back as they were, (region, offset, slab), the first in memory on top
        self._parked: dict[int, list[tuple[int, int, Slab]]] = {}
        self._merged = False  # parked ones were made one with others since all was given back
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> Slab:
        """A slab of at least so many bytes.  Raises NoRoomError beyond the budget."""
        wanted = aligned(nbytes)
        with self._lock:
            if self._returned:
                self._collect()
            parked = self._parked.get(wanted)
            slab = heappop(parked)[2] if parked else self._divide(wanted)
            self._used += wanted
            self.peak = max(self.peak, self._used)
            return slab

    def give(self, slab: Slab, after: Event | None) -> None:
        """Take a slab back; `after` is the last copy that reads it. Takes no lock: a finalizer may
        call it, anywhere.
        """
        self._returned.append((slab, after))

    @property
    def used(self) -> int:
        """Bytes handed out now."""
        with self._lock:
            self._collect()
            return self._used

    def _collect(self) -> None:
        while self._returned:
            slab, after = self._returned.popleft()
            slab.after = after
            self._used -= slab.nbytes
            parked = self._parked.setdefault(slab.nbytes, [])
            heappush(parked, (slab.region, slab.offset, slab))
        if self._merged and not self._used:
            self._merge()
            self._merged = False

    def _merge(self) -> None:
        """Have all that is parked among the free ones, one with their neighbours."""
        while self._parked:
            for _, _, slab in self._parked.popitem()[1]:
                self._give(slab)
                self._merged = True

    def _divide(self, wanted: int) -> Slab:
        """A new slab out of the smallest free one that has room, or out of a new region."""
        self._merge()
        at = bisect_left(self._free, (wanted,))
        if at < len(self._free):
            best = self._starts[self._free[at][1:]]
            self._remove(best)
        else:
            best = self._grow(wanted)
        if best.nbytes > wanted:
            self._add(Slab(best.region, best.offset + wanted, best.nbytes - wanted, best.after))
        return Slab(best.region, best.offset, wanted, best.after)

    def _give(self, slab: Slab) -> None:
        region, offset, nbytes, after = slab.region, slab.offset, slab.nbytes, slab.after
        before = self._ends.get((region, offset))
        behind = self._starts.get((region, offset + nbytes))
        for other in (before, behind):
            if other is not None:
                self._remove(other)
                offset, nbytes = min(offset, other.offset), nbytes + other.nbytes
                after = _later(after, other.after)
        self._add(Slab(region, offset, nbytes, after))

    def _add(self, slab: Slab) -> None:
        """Have it among the free ones."""
        insort(self._free, (slab.nbytes, slab.region, slab.offset))
        self._starts[slab.region, slab.offset] = slab
        self._ends[slab.region, slab.offset + slab.nbytes] = slab

    def _remove(self, slab: Slab) -> None:
        """Takes a slab out of the free ones."""
        del self._free[bisect_left(self._free, (slab.nbytes, slab.region, slab.offset))]
        del self._starts[slab.region, slab.offset]
        del self._ends[slab.region, slab.offset + slab.nbytes]

    def _grow(self, wanted: int) -> Slab:
        room = None if self.budget is None else self.budget - self.reserved
        nbytes = max(wanted, REGION)
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
