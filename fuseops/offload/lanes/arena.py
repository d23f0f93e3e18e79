"""A best-fit allocator of host memory for copies: regions are allocated once, and divided into slabs.

Pinning costs 0.1 to 0.3 ms a MiB and torch's own host allocator rounds up to powers of two, so regions have exact sizes
and are never freed before the arena is. A returned slab is parked for the next request of its size, which takes the one
with the lowest address. Parked slabs are merged with their neighbours only when a request finds none of its size.

The same requests in the same order get the same addresses, so that after the first steps nothing is allocated, as
captured CUDA graphs need it. While every request finds a parked slab of its size, or none is parked, slabs stay as they
are; after the first merge, all parked slabs are merged each time that all are returned, so that each step begins alike.

Where sizes vary from step to step, regions of exact size would never all fit, and each step would allocate more: there
a region has headroom for a few slabs. Sizes vary if a new one is requested after all slabs were returned once, so steps
with constant sizes have no headroom. Pure: `make` allocates the memory.
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
MAX_SIZES = 1024  # distinct sizes; a step with constant sizes has fewer


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to ALIGN, which suits every dtype and copy engine."""
    return -(-nbytes // ALIGN) * ALIGN


class Slab(Buf):
    """A `Slab` is a host buffer in a region of the arena.

    capacity  its bytes, of which `nbytes` were requested
    after     the last copy that may still read it
    """

    __slots__ = ("capacity", "offset", "region")

    def __init__(self, region: int, offset: int, capacity: int, after: Event | None) -> None:
        super().__init__("", capacity, "host")
        self.region, self.offset, self.capacity, self.after = region, offset, capacity, after


PLACE = attrgetter("region", "offset")


class Arena:
    """An `Arena` gives out slabs of a few regions of host memory, by best fit.

    make    allocates a region of so many bytes
    budget  the most bytes of all regions together; None: no limit
    """

    def __init__(self, make: Callable[[int], Any], budget: int | None = None) -> None:
        self.regions: list[Any] = []
        self.reserved = 0  # bytes of all regions
        self.peak = 0  # the most bytes in use at one time
        self.budget = budget
        self._make = make
        self._used = 0  # bytes in use, each request rounded up to ALIGN
        # (bytes, region, offset, slab), the smallest first; no two are neighbours
        self._free: list[tuple[int, int, int, Slab]] = []
        self._returned: deque[Slab] = deque()
        # returns a slab, to be reused after its `after`; no lock, since a finalizer may call it anywhere
        self.give_back: Callable[[Slab], None] = self._returned.append
        # by size: heaps of returned slabs, (region, offset, slab)
        self._parked: dict[int, list[tuple[int, int, Slab]]] = {}
        self._merged = False  # whether slabs were ever merged
        # sizes that were requested before all slabs were returned for the first time, and new ones
        self._sizes: set[int] = set()
        self._was_empty = False  # whether all slabs were returned once
        self._sizes_vary = False  # whether a new size was requested since
        self._lock = threading.Lock()

    def take(self, nbytes: int, name: str = "") -> Slab:
        """A slab of at least so many bytes.  Raises NoRoomError beyond the budget."""
        room = -(-nbytes // ALIGN) * ALIGN
        with self._lock:
            if self._returned:
                self._collect()
            parked = self._parked.get(room)
            slab = heappop(parked)[2] if parked else self._carve(room)
            self._used += room
            if self._used > self.peak:
                self.peak = self._used
        slab.nbytes, slab.name = nbytes, name
        return slab

    @property
    def used(self) -> int:
        """Bytes in use now."""
        with self._lock:
            self._collect()
            return self._used

    def _collect(self) -> None:
        while self._returned:
            slab = self._returned.popleft()
            self._used -= slab.capacity
            parked = self._parked.setdefault(slab.capacity, [])
            heappush(parked, (slab.region, slab.offset, slab))
        if not self._used:
            self._was_empty = self.peak > 0
            if self._merged:
                self._merge()

    def _merge(self) -> None:
        """Move all parked slabs to the free ones, merged with their neighbours."""
        parked = [slab for alike in self._parked.values() for _, _, slab in alike]
        self._parked.clear()
        if not parked:
            return
        free: list[Slab] = []
        for slab in sorted((*parked, *(f[-1] for f in self._free)), key=PLACE):
            last = free[-1] if free else None
            if last and (last.region, last.offset + last.capacity) == PLACE(slab):
                after = _later(last.after, slab.after)
                free[-1] = Slab(last.region, last.offset, last.capacity + slab.capacity, after)
            else:
                free.append(slab)
        self._free = sorted((slab.capacity, *PLACE(slab), slab) for slab in free)
        self._merged = True

    def _carve(self, wanted: int) -> Slab:
        """A slab from the smallest free one that is large enough, or from a new region."""
        self._merge()
        if not self._sizes_vary and wanted not in self._sizes:
            self._sizes_vary = self._was_empty or len(self._sizes) == MAX_SIZES
            self._sizes.add(wanted)
        at = bisect_left(self._free, (wanted,))
        best = self._free.pop(at)[-1] if at < len(self._free) else self._grow(wanted)
        rest = best.capacity - wanted
        if not rest:
            return best
        remainder = Slab(best.region, best.offset + wanted, rest, best.after)
        insort(self._free, (rest, *PLACE(remainder), remainder))
        return Slab(best.region, best.offset, wanted, best.after)

    def _grow(self, wanted: int) -> Slab:
        room = None if self.budget is None else self.budget - self.reserved
        nbytes = max(wanted, REGION)
        if self._sizes_vary and self._used + wanted <= self.peak * 9 // 8:
            # The regions are fragmented, and would be again in the next step. Headroom of slabs of this size, an eighth
            # of all memory, and each an eighth larger, ends that after a few steps.
            slabs = 1 + self.reserved // max(8 * wanted, REGION)
            more = max(nbytes, aligned(slabs * wanted * 9 // 8))
            if self.budget is None or 2 * (self.reserved + more) <= self.budget:
                nbytes = more  # the other half of a budget is for requests of exact size
        if room is not None:
            nbytes = min(nbytes, max(room, wanted))
            if wanted > room:
                raise NoRoomError(
                    f"host budget of {self.budget} bytes: {self._used} in use, {wanted} more wanted"
                )
        region = self._make(nbytes)  # may raise: nothing has changed yet
        self.regions.append(region)
        self.reserved += nbytes
        return Slab(len(self.regions) - 1, 0, nbytes, None)


def _later(a: Event | None, b: Event | None) -> Event | None:
    """The later of two copies that read host memory. They run on one lane, so it implies the earlier."""
    if a is None or b is None:
        return a or b
    return a if a.serial > b.serial else b
