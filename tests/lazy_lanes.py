"""Lanes of real bytes on the CPU that show whether offload is exact by order or by luck."""

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from torch import UntypedStorage

from fuseops.offload.lanes.arena import Slab
from fuseops.offload.lanes.cpu import CpuLanes
from fuseops.offload.lanes.protocol import Buf, Event, Lane
from fuseops.torch_private import WeakStorage

POISON = 0xFF  # NaN in every float format, -1 in every integer
Entry = Callable[[], None] | Event  # work, or an event of another lane to wait for


class LazyLanes(CpuLanes):
    """`LazyLanes` run a copy only when a wait forces it, so that whatever forgets a wait reads bytes that never came,
    and overwrite what is freed, where nobody else holds it.

    choose  given n, a number below n: how many copies run before they must
    """

    synchronous = False

    def __init__(self, choose: Callable[[int], int], budget: int | None = None) -> None:
        super().__init__(budget)
        self._choose = choose
        self._queues: dict[Lane, deque[tuple[int, Entry]]] = {"d2h": deque(), "h2d": deque()}

    def free(self, buf: Buf) -> None:
        if isinstance(buf, Slab):  # after the last copy that reads it, as its next user would be
            if buf.after is not None:
                self._put("d2h", buf.after)
            self._put("d2h", partial(poison, buf.at, buf.nbytes))
        elif isinstance(buf.data, UntypedStorage) and not WeakStorage(buf.data).holders():
            poison(buf.data.data_ptr(), buf.data.nbytes())
        super().free(buf)

    def move(
        self, lane: Lane, sources: Sequence[Buf], target: Buf, offsets: Sequence[int]
    ) -> Event | None:
        at = target.at or target.data.data_ptr()
        parts = [
            # what it is in may be freed before it runs, or get other memory
            (source.data, source.at, source.nbytes, at + offset)
            for source, offset in zip(sources, offsets, strict=True)
        ]
        self._put(lane, partial(copy, parts, target.data))
        return self.record(lane)

    def record(self, lane: Lane) -> Event:
        event = super().record(lane)
        if lane == "compute":
            event.mark_waited(self.compute())
        return event

    def wait(self, lane: Lane, event: Event) -> None:
        if lane == "compute":
            event.mark_waited(self.compute())
        if lane in self._queues:
            self._put(lane, event)
        else:
            self._run_to(event)

    def _put(self, lane: Lane, entry: Entry) -> None:
        if lane not in self._queues:
            self._do(entry)
            return
        self._queues[lane].append((Event(lane).serial, entry))
        for other, queue in self._queues.items():
            for _ in range(self._choose(len(queue) + 1)):
                if queue:  # the one before may have run it
                    self._step(other)

    def _step(self, lane: Lane) -> None:
        self._do(self._queues[lane].popleft()[1])

    def _do(self, entry: Entry) -> None:
        if isinstance(entry, Event):
            self._run_to(entry)
        else:
            entry()

    def _run_to(self, event: Event) -> None:
        queue = self._queues.get(event.lane, deque())
        while queue and queue[0][0] < event.serial:
            self._step(event.lane)


def copy(parts: Sequence[tuple[UntypedStorage | None, int, int, int]], held: object) -> None:
    for storage, at, nbytes, target in parts:
        if storage is not None:
            at, nbytes = storage.data_ptr(), min(nbytes, storage.nbytes())
        ctypes.memmove(target, at, nbytes)


def poison(at: int, nbytes: int) -> None:
    ctypes.memset(at, POISON, nbytes)
