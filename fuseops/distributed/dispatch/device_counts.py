"""(d) All-to-all by counts that stay on the device, over NVSHMEM: between hosts too without a host sync, and no more
travels than there is.

torch's `all_to_all_vdev` reads from the symmetric memory of every other rank as many rows as that one says. It waits
for all ranks before it reads, and for none after. So two lanes take turns, the narrow one first in every step of an
exchange: where it has gone through, all ranks have read the wide one's rows of the step before, and the other way
round. (Halves of one buffer in turn would need an index, which a captured graph bakes in.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.errors import FuseOpsError

from .bounded import Bounded
from .exchange import Arrived

BLOCKS = (64, 16)
"""Of torch's kernel inside of a host and beyond, for `LEAST` bytes and more. Those that read from one rank take equal
parts of what it has.
"""

LEAST = 64 * 2**16
"""Bytes that a lane says it has: for fewer there are any number of blocks, which rows would have to divide by."""


@dataclass
class Lane:
    """A `Lane` holds the symmetric memory in which one all-to-all at a time has its rows.

    leaving, come (bytes,) uint8.  sent (W,) int64, the rows for each rank.  received (2, W) int64, those from each, and
    where they begin.
    """

    group: str
    leaving: Tensor
    come: Tensor
    sent: Tensor
    received: Tensor

    def travel(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """The first rows of x (R, N) to the ranks, as many as counts (W,) says.   -> (R, N), (W,): rows from each

        They come in the order of ranks, and zeros behind them.
        """
        rows, row = len(x), x.shape[1] * x.element_size()
        leaving, come = self._rows(row)
        leaving[:rows, :row].view(x.dtype).copy_(x)
        self.sent.copy_(counts)
        self._exchange(leaving, come)
        received = self.received[0].clone()
        every = torch.arange(rows, dtype=torch.int32, device=x.device)
        ends = received.sum(0, keepdim=True, dtype=torch.int32)
        return K.gather_rows(come[:, :row].view(x.dtype), every, ends), received

    def pass_empty(self) -> None:
        """Wait for all ranks, as a step does whose rows need nothing beside them."""
        self.sent.zero_()
        self._exchange(*self._rows(1))

    def _rows(self, row: int) -> list[Tensor]:
        """All of it, as rows that begin a pitch apart."""
        between = pitch(row, len(self.sent))
        return [
            t[: len(t) // between * between].view(-1, between) for t in (self.leaving, self.come)
        ]

    def _exchange(self, leaving: Tensor, come: Tensor) -> None:
        torch.ops.symm_mem.all_to_all_vdev(leaving, come, self.sent, self.received, self.group)


def pitch(row: int, world: int) -> int:
    """Bytes from one row of `row` bytes to the next, which `BLOCKS` for one rank divide."""
    step = math.lcm(16, *(max(blocks // world, 1) for blocks in BLOCKS))
    return -(-row // step) * step


Lanes = tuple[Lane, Lane]

_lanes: dict[Any, Lanes] = {}
"""By group: the narrow and the wide lane that all its layers share."""

_replaced: list[Lanes] = []
"""Lanes too small for a later layer: symmetric memory is freed by all ranks at once, which a collector would not do."""


def lanes_of(group: Any, narrow: int, wide: int, device: torch.device) -> Lanes:
    """The lanes of a group, of so many bytes at least. A collective where they are not there yet."""
    found = _lanes.get(group)
    if found is None or len(found[0].come) < narrow or len(found[1].come) < wide:
        if found is not None:
            _replaced.append(found)
            narrow, wide = max(narrow, len(found[0].come)), max(wide, len(found[1].come))
        found = _lanes[group] = _made(group, narrow, device), _made(group, wide, device)
    return found


def _made(group: Any, nbytes: int, device: torch.device) -> Lane:
    import torch.distributed._symmetric_memory as symmetric_memory

    _check_nvshmem(device)
    world = group.size()

    def shared(*shape: int, dtype: torch.dtype) -> Tensor:
        memory = symmetric_memory.empty(*shape, dtype=dtype, device=device)
        symmetric_memory.rendezvous(memory, group)
        return memory

    leaving, come = (shared(nbytes, dtype=torch.uint8) for _ in range(2))
    sent, received = (shared(*n, dtype=torch.int64) for n in ((world,), (2, world)))
    return Lane(group.group_name, leaving, come, sent, received)


def _check_nvshmem(device: torch.device) -> None:
    """Have symmetric memory by NVSHMEM.  Raises FuseOpsError where it cannot be had."""
    import torch.distributed._symmetric_memory as symmetric_memory

    instead = "'host_counts' and 'fixed_capacity' run over any backend."
    if device.type != "cuda" or not symmetric_memory.is_nvshmem_available():
        raise FuseOpsError(
            f"ExpertParallel(way='device_counts') travels between GPUs by NVSHMEM, which torch has not found for "
            f"{device.type}: {instead}"
        )
    if symmetric_memory.get_backend(device) != "NVSHMEM":
        try:
            symmetric_memory.set_backend("NVSHMEM")
        except RuntimeError as error:
            raise FuseOpsError(
                "ExpertParallel(way='device_counts') needs symmetric memory by NVSHMEM, and this process has some of "
                f"{symmetric_memory.get_backend(device)} already, as way='peer_memory' takes: one of the two a process."
            ) from error


class DeviceCounts(Bounded):
    """A `DeviceCounts` sends tokens by all-to-all, by counts that the device reads.

    slots: where a token lies among all that this rank sends, rank after rank.  arrivals: (2, W) int64, the tokens that
    go to each rank and that come from it.
    """

    name = "all_to_all_vdev over NVSHMEM by counts on the device (no host sync)"
    not_copied = Bounded.not_copied | {"lanes"}
    lanes: Lanes | None = None

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> Arrived:
        self.agree(x)
        narrow, wide = self._ready(x)
        slots, counts = self._leaving(experts)
        words = weights.flatten().view(torch.int32)  # strides of no tokens are any
        words = words.view(len(x), self.top_k * weights.itemsize // words.itemsize)
        beside = torch.cat([experts.int(), words], 1)
        head, received = narrow.travel(self._rows(beside.view(torch.float32), slots), counts)
        ids, weights = self._apart(head, received, weights.dtype)
        x, _ = wide.travel(self._rows(x, slots), counts)
        return Arrived(x, ids, weights, self.rows, slots, torch.stack([counts, received]))

    def _leaving(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Where every token lies among those that leave (T, W), and how many go to each rank (W,)."""
        slots, counts = self.within_room(experts)
        counts = counts.long()
        begin = (counts.cumsum(0) - counts).int()
        return torch.where(slots >= 0, slots + begin, -1), counts

    def _apart(self, head: Tensor, received: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """ids among the experts here (C, K), -1 of others and where nothing came, and weights (C, K)."""
        words, here = head.view(torch.int32), torch.full_like(received[:1], self.rank)
        there = torch.arange(len(head), device=head.device) < received.sum()
        ids = self.there(words[:, : self.top_k], here)
        weights = words[:, self.top_k :].contiguous().view(dtype)
        return torch.where(there[:, None], ids, -1), weights

    def _rows(self, x: Tensor, slots: Tensor) -> Tensor:
        """x (T, N) as it leaves, in the order of ranks.   -> (W room, N)"""
        most = self.world * self.room
        return K.scatter_rows(x, slots, K.one_group(most, x)[0], most)

    def collect(self, y: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        return self._back(y, None, slots, arrivals)[0]

    def dispatch_bwd(
        self, dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, arrivals: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        dx, copies = self._back(dx, dweights, slots, arrivals)
        return dx, None if copies is None else self.own_weights(copies, experts, slots)

    def collect_bwd(self, dy: Tensor, slots: Tensor, arrivals: Tensor, tokens: int) -> Tensor:
        narrow, wide = self._ready(dy)
        narrow.pass_empty()
        return wide.travel(self._rows(dy, slots), arrivals[0])[0]

    def _back(
        self, y: Tensor, dweights: Tensor | None, slots: Tensor, arrivals: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Sums of y (C, D) at home, NaN where something had no room; of every slot what came beside it."""
        narrow, wide = self._ready(y)
        copies = None
        if dweights is None:
            narrow.pass_empty()
        else:
            copies, _ = narrow.travel(dweights, arrivals[1])
        rows, _ = wide.travel(y, arrivals[1])
        return self.summed(rows, slots), copies

    def no_arrivals(self, x: Tensor) -> Tensor:
        return x.new_empty(2, self.world, dtype=torch.int64)

    def buffers(self, x: Tensor, room: int) -> int:
        return 2 * sum(self._sizes(x, self.world * room))

    def held(self) -> int:
        return sum(2 * len(lane.come) for lane in self.lanes or ())

    def _sizes(self, x: Tensor, rows: int) -> tuple[int, int]:
        """Bytes of so many rows in a narrow lane, and of those like x in a wide one."""
        wide = max(x.element_size(), 0 if self.sums is None else self.sums.itemsize)
        beside = self.top_k * (4 + max(x.element_size(), 4))
        least, most = (pitch(row, self.world) for row in (beside, x.shape[1] * wide))
        return max(rows * least, LEAST + least), max(rows * most, LEAST + most)

    def _ready(self, x: Tensor) -> Lanes:
        """The lanes, for rows like those of x. The first ones take the size that all ranks need."""
        sizes = self._sizes(x, self.world * self.room)
        held = self.lanes
        if held is None or any(
            len(lane.come) < size for lane, size in zip(held, sizes, strict=True)
        ):
            held = self.lanes = lanes_of(self.group, *sizes, x.device)
        return held
