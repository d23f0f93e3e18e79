"""(d) All-to-all over NVSHMEM with counts that stay on the device: no host sync, across hosts too, and no empty slots.

torch's `all_to_all_vdev` reads from the symmetric memory of every other rank as many rows as that rank says. It waits
for all ranks before it reads, but not after. So two lanes alternate, the narrow one first in every step of one:
once it is through, all ranks have read the wide lane's rows of the step before, and vice versa. (Alternating halves of
one buffer would need an index, which a captured graph would bake in.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.errors import FuseOpsError
from fuseops.torch_private import symmetric_memory

from .bounded import Bounded
from .dispatcher import ReceivedTokens

BLOCKS = (64, 16)
"""Thread blocks of torch's kernel within a host and between hosts, for `LEAST` bytes and more. The blocks that read
from one rank take equal parts of its bytes.
"""

LEAST = 64 * 2**16
"""The least size of a lane in bytes: for fewer torch's kernel takes other numbers of blocks, which rows must divide."""


@dataclass
class Lane:
    """A `Lane` holds the symmetric memory of one all-to-all at a time.

    send_buffer, recv_buffer (bytes,) uint8.  in_splits (W,) int64, the rows for each rank.  out_splits_offsets (2, W)
    int64, the rows from each rank, and where they begin.
    """

    group: str
    send_buffer: Tensor
    recv_buffer: Tensor
    in_splits: Tensor
    out_splits_offsets: Tensor

    def all_to_all(self, x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Send the first rows of x (R, N), counts (W,) of them to each rank.   -> (R, N), (W,): rows from each rank

        The received rows are in the order of ranks, with zeros behind them.
        """
        rows, row = len(x), x.shape[1] * x.element_size()
        send_buffer, recv_buffer = self._rows(row)
        send_buffer[:rows, :row].view(x.dtype).copy_(x)
        self.in_splits.copy_(counts)
        self._all_to_all(send_buffer, recv_buffer)
        received = self.out_splits_offsets[0].clone()
        every = torch.arange(rows, dtype=torch.int32, device=x.device)
        ends = received.sum(0, keepdim=True, dtype=torch.int32)
        return K.gather_rows(recv_buffer[:, :row].view(x.dtype), every, ends), received

    def barrier(self) -> None:
        """Wait for all ranks by an empty all-to-all, in a step that needs only the wide lane."""
        self.in_splits.zero_()
        self._all_to_all(*self._rows(1))

    def _rows(self, row: int) -> list[Tensor]:
        """Both buffers, viewed as rows of at least `row` bytes, a pitch apart."""
        between = row_pitch(row, len(self.in_splits))
        return [
            t[: len(t) // between * between].view(-1, between)
            for t in (self.send_buffer, self.recv_buffer)
        ]

    def _all_to_all(self, send_buffer: Tensor, recv_buffer: Tensor) -> None:
        torch.ops.symm_mem.all_to_all_vdev(
            send_buffer, recv_buffer, self.in_splits, self.out_splits_offsets, self.group
        )


def row_pitch(row: int, world: int) -> int:
    """Bytes from one row of `row` bytes to the next, which `BLOCKS` for one rank divide."""
    step = math.lcm(16, *(max(blocks // world, 1) for blocks in BLOCKS))
    return -(-row // step) * step


Lanes = tuple[Lane, Lane]

_lanes: dict[Any, Lanes] = {}
"""Process group -> the narrow and the wide lane, which all its layers share."""

_replaced: list[Lanes] = []
"""Lanes that were too small for a later layer: kept, since all ranks must free symmetric memory at once."""


def get_lanes(group: Any, narrow: int, wide: int, device: torch.device) -> Lanes:
    """The lanes of a group, of at least so many bytes. A collective if they have to be allocated."""
    found = _lanes.get(group)
    if found is None or len(found[0].recv_buffer) < narrow or len(found[1].recv_buffer) < wide:
        if found is not None:
            _replaced.append(found)
            narrow, wide = (
                max(narrow, len(found[0].recv_buffer)),
                max(wide, len(found[1].recv_buffer)),
            )
        with torch.inference_mode(False):  # later forwards may be of training
            found = _lanes[group] = _allocate(group, narrow, device), _allocate(group, wide, device)
    return found


def _allocate(group: Any, nbytes: int, device: torch.device) -> Lane:
    _check_nvshmem(device)
    world = group.size()

    def shared(*shape: int, dtype: torch.dtype) -> Tensor:
        memory = symmetric_memory().empty(*shape, dtype=dtype, device=device)
        symmetric_memory().rendezvous(memory, group)
        return memory

    send_buffer, recv_buffer = (shared(nbytes, dtype=torch.uint8) for _ in range(2))
    in_splits, received = (shared(*n, dtype=torch.int64) for n in ((world,), (2, world)))
    return Lane(group.group_name, send_buffer, recv_buffer, in_splits, received)


def _check_nvshmem(device: torch.device) -> None:
    """Set NVSHMEM as the backend of symmetric memory.  Raises FuseOpsError if that is not possible."""
    instead = "'host_counts' and 'fixed_capacity' run over any backend."
    if device.type != "cuda" or not symmetric_memory().is_nvshmem_available():
        raise FuseOpsError(
            f"ExpertParallel(dispatcher='device_counts') sends between GPUs by NVSHMEM, which torch has not found for "
            f"{device.type}: {instead}"
        )
    if symmetric_memory().get_backend(device) != "NVSHMEM":
        try:
            symmetric_memory().set_backend("NVSHMEM")
        except RuntimeError as error:
            raise FuseOpsError(
                "ExpertParallel(dispatcher='device_counts') needs symmetric memory by NVSHMEM, and this process has "
                f"some of {symmetric_memory().get_backend(device)} already, as 'peer_memory' takes: one of the two a "
                "process."
            ) from error


class DeviceCounts(Bounded):
    """A `DeviceCounts` dispatcher sends tokens by all-to-all, with counts that the device reads.

    slots: index of a token among all that this rank sends, rank after rank.  arrivals: (2, W) int64, the numbers of
    tokens sent to each rank and received from it.
    """

    name = "all_to_all_vdev over NVSHMEM by counts on the device (no host sync)"
    not_copied = Bounded.not_copied | {"lanes"}
    lanes: Lanes | None = None

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> ReceivedTokens:
        self.begin_forward(x)
        narrow, wide = self._ensure_lanes(x)
        slots, counts = self._outgoing_slots(experts)
        words = weights.flatten().view(torch.int32)  # without tokens strides are arbitrary
        words = words.view(len(x), self.top_k * weights.itemsize // words.itemsize)
        head_row = torch.cat([experts.int(), words], 1)
        head, received = narrow.all_to_all(self._rows(head_row.view(torch.float32), slots), counts)
        ids, weights = self._unpack_head(head, received, weights.dtype)
        x, _ = wide.all_to_all(self._rows(x, slots), counts)
        return ReceivedTokens(x, ids, weights, self.rows, slots, torch.stack([counts, received]))

    def _outgoing_slots(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """`slots` (T, W), and the number of tokens sent to each rank (W,)."""
        slots, counts = self.assign_slots(experts)
        counts = counts.long()
        begin = (counts.cumsum(0) - counts).int()
        return torch.where(slots >= 0, slots + begin, -1), counts

    def _unpack_head(
        self, head: Tensor, received: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Local expert ids (C, K), -1 for other experts and in empty rows, and weights (C, K)."""
        words, owner = head.view(torch.int32), torch.full_like(received[:1], self.rank)
        filled = torch.arange(len(head), device=head.device) < received.sum()
        ids = self.local_ids(words[:, : self.top_k], owner)
        weights = words[:, self.top_k :].contiguous().view(dtype)
        return torch.where(filled[:, None], ids, -1), weights

    def _rows(self, x: Tensor, slots: Tensor) -> Tensor:
        """The rows of x (T, N) in the order in which they are sent.   -> (W pair_capacity, N)"""
        most = self.world * self.pair_capacity
        return K.scatter_rows(x, slots, K.one_group(most, x)[0], most)

    def collect(self, y: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        summed, _ = self._return_sums(y, None, slots, arrivals)
        self.end_forward()
        return summed

    def dispatch_bwd(
        self, dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, arrivals: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        dx, copies = self._return_sums(dx, dweights, slots, arrivals)
        self.end_backward()
        return dx, None if copies is None else self.weights_of_copies(copies, experts, slots)

    def collect_bwd(self, dy: Tensor, slots: Tensor, arrivals: Tensor, tokens: int) -> Tensor:
        narrow, wide = self._ensure_lanes(dy)
        narrow.barrier()
        return wide.all_to_all(self._rows(dy, slots), arrivals[0])[0]

    def _return_sums(
        self, y: Tensor, dweights: Tensor | None, slots: Tensor, arrivals: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Send y (C, D) and dweights (C, K) back.   -> sums of y (T, D), NaN after an overflow; dweights by slot"""
        narrow, wide = self._ensure_lanes(y)
        copies = None
        if dweights is None:
            narrow.barrier()
        else:
            copies, _ = narrow.all_to_all(dweights, arrivals[1])
        rows, _ = wide.all_to_all(y, arrivals[1])
        return self.sum_returned(rows, slots), copies

    def no_arrivals(self, x: Tensor) -> Tensor:
        return x.new_empty(2, self.world, dtype=torch.int64)

    def buffer_bytes(self, x: Tensor, pair_capacity: int) -> int:
        return 2 * sum(self._sizes(x, self.world * pair_capacity))

    def allocated_bytes(self) -> int:
        return sum(2 * len(lane.recv_buffer) for lane in self.lanes or ())

    def _sizes(self, x: Tensor, rows: int) -> tuple[int, int]:
        """Bytes of the narrow and of the wide lane for so many rows like those of x."""
        wide = max(x.element_size(), 0 if self.sums is None else self.sums.itemsize)
        head_row = self.top_k * (4 + max(x.element_size(), 4))
        least, most = (row_pitch(row, self.world) for row in (head_row, x.shape[1] * wide))
        return max(rows * least, LEAST + least), max(rows * most, LEAST + most)

    def _ensure_lanes(self, x: Tensor) -> Lanes:
        """The lanes, large enough for rows like those of x. All ranks compute the same sizes."""
        sizes = self._sizes(x, self.world * self.pair_capacity)
        lanes = self.lanes
        if lanes is None or any(
            len(lane.recv_buffer) < size for lane, size in zip(lanes, sizes, strict=True)
        ):
            lanes = self.lanes = get_lanes(self.group, *sizes, x.device)
        return lanes
