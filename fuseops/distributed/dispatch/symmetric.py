"""(c) Straight into the memory of the other GPUs of a host, by kernels over torch's symmetric memory.

A token takes one slot of `room` that every pair of ranks has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.errors import FuseOpsError
from fuseops.kernels.peers import layout

from .bounded import Bounded
from .exchange import Arrived
from .overflow import flag_of

TIMEOUT_MS = 600_000
"""How long a rank waits in a barrier for one that does not come, before the kernel that waits traps."""


@dataclass
class Fabric:
    """A `Fabric` holds the buffers of all ranks of a group, each of which the others can write to.

    table (W,) int64: their addresses.  uses (1,) int64: how often they were used.  flag (1,) int32: whether something
    had no room.  handle: of the symmetric memory; None where ranks pass no barrier of a device.
    """

    table: Tensor
    uses: Tensor
    flag: Tensor
    nbytes: int
    handle: Any = None
    memory: Any = None

    def barrier(self) -> None:
        """All ranks have written before any goes on."""
        if self.handle is not None:
            self.handle.barrier(channel=0, timeout_ms=TIMEOUT_MS)


_fabrics: dict[Any, Fabric] = {}
"""By group: the one allocation that all its layers share, and who needs more replaces."""


def fabric_of(group: Any, nbytes: int, device: torch.device) -> Fabric:
    """The buffers of a group, of `nbytes` at least. A collective where they are not there yet."""
    found = _fabrics.get(group)
    if found is None or found.nbytes < nbytes:
        found = _fabrics[group] = _made(group, nbytes, device)
    return found


def _made(group: Any, nbytes: int, device: torch.device) -> Fabric:
    import torch.distributed._symmetric_memory as symmetric_memory

    if device.type != "cuda":
        raise FuseOpsError(
            f"ExpertParallel(way='peer_memory') writes into the memory of other GPUs of a host, got tokens on "
            f"{device.type}: 'host_counts' and 'fixed_capacity' run over any backend."
        )
    memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(memory, group)
    # a pool of allocations has one handle
    inside = memory.data_ptr() - handle.buffer_ptrs[handle.rank]
    table = torch.tensor([p + inside for p in handle.buffer_ptrs], device=device)
    uses = torch.zeros(1, dtype=torch.int64, device=device)
    return Fabric(table, uses, flag_of(group, device), nbytes, handle, memory)


class PeerMemory(Bounded):
    """A `PeerMemory` writes tokens into the memory of the other ranks.

    arrivals: (W,) int32, how many tokens came from each rank.
    """

    name = "written into the memory of peers (no host sync)"
    not_copied = Bounded.not_copied | {"fabric"}
    fabric: Fabric | None = None

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> Arrived:
        if x.is_cuda and x.element_size() > 4:
            raise FuseOpsError(
                f"ExpertDispatch: x is {x.dtype}, which the kernels that write to peers do not take: "
                "ExpertParallel(way='host_counts') does."
            )
        fabric, place = self._ready(x, weights.dtype)
        self.agree(x)
        slots, counts = K.token_slots(experts, self.num_experts, self.world)
        args = (fabric.table, fabric.uses)
        K.send_tokens(x, slots, *args, fabric.flag, place, counts, experts, weights)
        fabric.barrier()
        x, ids, weights, arrivals = K.take_tokens(x, *args, place, None, weights)
        fabric.uses += 1
        return Arrived(x, ids, weights, self.rows, slots, arrivals)

    def buffers(self, x: Tensor, room: int) -> int:
        """Those of the two halves."""
        wide = max(x.element_size(), 0 if self.sums is None else self.sums.itemsize)
        row, weight = x.shape[1] * wide, max(x.element_size(), 4)
        return 2 * layout(self.world, room, self.top_k, row, weight)[-1]

    def held(self) -> int:
        return 0 if self.fabric is None else self.fabric.nbytes

    def no_arrivals(self, x: Tensor) -> Tensor:
        return x.new_empty(self.world, dtype=torch.int32)

    def collect(self, y: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        return self._back(y, None, None, slots, arrivals)[0]

    def dispatch_bwd(
        self, dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, arrivals: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        dx, copies = self._back(dx, dweights, experts, slots, arrivals)
        return dx, None if dweights is None else copies

    def collect_bwd(self, dy: Tensor, slots: Tensor, arrivals: Tensor, tokens: int) -> Tensor:
        fabric, place = self._ready(dy, torch.float32)
        args = (fabric.table, fabric.uses)
        K.send_tokens(dy, slots, *args, fabric.flag, place)
        fabric.barrier()
        got = K.take_tokens(dy, *args, place, arrivals)[0]
        fabric.uses += 1
        return got

    def _back(
        self, y: Tensor, dweights: Any, experts: Any, slots: Tensor, arrivals: Tensor
    ) -> tuple[Tensor, Tensor]:
        fabric, place = self._ready(y, torch.float32 if dweights is None else dweights.dtype)
        args = (fabric.table, fabric.uses)
        K.return_sums(y, *args, fabric.flag, place, arrivals, dweights)
        fabric.barrier()
        chosen = None if dweights is None else experts
        summed = K.add_sums(y, slots, *args, fabric.flag, place, chosen, dweights)
        fabric.uses += 1
        return summed

    def _ready(self, x: Tensor, weight: torch.dtype) -> tuple[Fabric, list[int]]:
        """The buffers, and how this use lies in them. The first one takes the size that all ranks need."""
        fabric = self.fabric
        if fabric is None:
            self.agree(x)
            fabric = fabric_of(self.group, self.buffers(x, self.room), x.device)
        row = x.shape[1] * x.element_size()
        *at, most = layout(self.world, self.room, self.top_k, row, weight.itemsize)
        if 2 * most > fabric.nbytes:
            fabric = fabric_of(self.group, 2 * most, x.device)
        self.fabric = fabric
        # whatever this use takes of its half: the one before may lie in the other
        half = fabric.nbytes // 2
        return fabric, [self.rank, self.room, self.num_experts, self.top_k, half, *at]
