"""Lanes of real bytes in host memory: for CPU tensors, and to show what is exact anywhere.

A copy runs at once; or, lazily, only when a wait forces it, so that whatever forgets a wait reads
bytes that never came. `choose` draws which copies run earlier than they must.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fuseops.torch_private import nothing, storage_users

from .host_memory import DATA, HostMemory, copy_all
from .protocol import Buf, Event, Lane, Place

CPU = torch.device("cpu")
POISON = 0xFF  # NaN in every float format, -1 in every integer

Entry = Callable[[], None] | Event  # work, or an event of another lane to wait for


class CpuLanes:
    """`CpuLanes` run the copies of a schedule on the CPU.

    budget  bytes of host memory, None for no limit
    choose  given n, a number below n: how many copies run before they must; None: all run at once
    poison  overwrite what is freed, where nobody else holds it
    """

    def __init__(
        self,
        budget: int | None = None,
        choose: Callable[[int], int] | None = None,
        poison: bool = False,
    ) -> None:
        self._host = HostMemory(self.make, budget)
        self.arena = self._host.arena
        self._choose, self._poison = choose, poison
        self._queues: dict[Lane, deque[tuple[int, Entry]]] = {"d2h": deque(), "h2d": deque()}

    @staticmethod
    def make(nbytes: int) -> Tensor:
        """A region of host memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def alloc(self, nbytes: int, device: Place, name: str) -> Buf:
        if device == "device":
            return Buf(name, nbytes, device, nothing(torch.uint8, CPU).new_empty(nbytes))
        return self._host.alloc(nbytes, name)

    def free(self, buf: Buf) -> None:
        data, after = buf.data, buf.after
        buf.data = None
        if buf.place == "host":
            if self._poison:  # after the last copy that reads it, as its next user would be
                if after is not None:
                    self.wait("d2h", after)
                self._put("d2h", lambda: data.fill_(POISON))
            self.arena.give(buf.slab, after)
        elif self._poison and storage_users(data) == 1:
            data.fill_(POISON)

    def copy(
        self,
        lane: Lane,
        sources: Sequence[Buf],
        target: Buf,
        offsets: Sequence[int] = (0,),
        after: Sequence[Event | None] = (),
    ) -> Event | None:
        data = list(map(DATA, sources))  # a lazy copy may run after they are freed
        if self._choose is None:
            copy_all(data, target.data, offsets)
            return None
        for event in after:
            if event is not None:  # what compute was given has run
                self.wait(lane, event)
        self._put(lane, partial(copy_all, data, target.data, offsets))
        return Event(lane)

    def record(self, lane: Lane) -> Event:
        return Event(lane)

    def wait(self, lane: Lane, event: Event) -> None:
        if lane in self._queues:
            self._put(lane, event)
        else:
            self._run_to(event)

    def compute(self) -> None:
        return None

    def _put(self, lane: Lane, entry: Entry) -> None:
        if lane not in self._queues or self._choose is None:
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
