"""(c) Kernels that write into the memory of the other GPUs of a host, over torch's symmetric memory.

A token takes one of the `pair_capacity` slots between two ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.errors import FuseOpsError
from fuseops.kernels.peers import PeerUse, layout
from fuseops.torch_private import symmetric_memory

from .bounded import Bounded
from .dispatcher import ReceivedTokens

TIMEOUT_MS = 600_000
"""How long a rank waits in a barrier before its kernel traps."""


@dataclass
class PeerBuffers:
    """A `PeerBuffers` holds the buffers of all ranks of a group; every rank can write to all of them.

    table (W,) int64: their addresses.  uses (1,) int64: how often they were used.
    handle: of the symmetric memory; None if ranks need no barrier on the device.
    """

    table: Tensor
    uses: Tensor
    nbytes: int
    handle: Any = None
    memory: Any = None

    def barrier(self) -> None:
        """Wait until all ranks have written."""
        if self.handle is not None:
            self.handle.barrier(channel=0, timeout_ms=TIMEOUT_MS)


_peer_buffers: dict[Any, PeerBuffers] = {}
"""Process group -> the allocation that all its layers share; a layer that needs more replaces it."""


def get_peer_buffers(group: Any, nbytes: int, device: torch.device) -> PeerBuffers:
    """The buffers of a group, of at least `nbytes`. A collective if they have to be allocated."""
    found = _peer_buffers.get(group)
    if found is None or found.nbytes < nbytes:
        with torch.inference_mode(False):  # later forwards may be of training
            found = _peer_buffers[group] = _allocate(group, nbytes, device)
    return found


def _allocate(group: Any, nbytes: int, device: torch.device) -> PeerBuffers:
    if device.type != "cuda":
        raise FuseOpsError(
            f"ExpertParallel(dispatcher='peer_memory') writes into the memory of other GPUs of a host, got tokens on "
            f"{device.type}: 'host_counts' and 'fixed_capacity' run over any backend."
        )
    memory = symmetric_memory().empty(nbytes, dtype=torch.uint8, device=device)
    handle = symmetric_memory().rendezvous(memory, group)
    # a pool of allocations has one handle
    inside = memory.data_ptr() - handle.buffer_ptrs[handle.rank]
    table = torch.tensor([p + inside for p in handle.buffer_ptrs], device=device)
    uses = torch.zeros(1, dtype=torch.int64, device=device)
    return PeerBuffers(table, uses, nbytes, handle, memory)


class PeerMemory(Bounded):
    """A `PeerMemory` dispatcher writes tokens into the memory of the other ranks.

    arrivals: (W,) int32, the number of tokens received from each rank.
    """

    name = "written into the memory of peers (no host sync)"
    not_copied = Bounded.not_copied | {"peers"}
    peers: PeerBuffers | None = None

    def dispatch(self, x: Tensor, experts: Tensor, weights: Tensor) -> ReceivedTokens:
        if x.is_cuda and x.element_size() > 4:
            raise FuseOpsError(
                f"ExpertDispatch: x is {x.dtype}, which the kernels that write to peers do not take: "
                "ExpertParallel(dispatcher='host_counts') does."
            )
        self.begin_forward(x)
        peers, use = self._ensure_buffers(x, weights.dtype)
        slots, counts = K.token_slots(experts, self.num_experts, self.world)
        K.send_tokens(x, slots, use, counts, experts, weights)
        peers.barrier()
        x, ids, weights, arrivals = K.take_tokens(x, use, None, weights)
        peers.uses += 1
        return ReceivedTokens(x, ids, weights, self.rows, slots, arrivals)

    def buffer_bytes(self, x: Tensor, pair_capacity: int) -> int:
        """As of `Bounded`: the buffers are two halves, used in alternation."""
        wide = max(x.element_size(), 0 if self.sums is None else self.sums.itemsize)
        row, weight = x.shape[1] * wide, max(x.element_size(), 4)
        return 2 * layout(self.world, pair_capacity, self.top_k, row, weight)[-1]

    def allocated_bytes(self) -> int:
        return 0 if self.peers is None else self.peers.nbytes

    def no_arrivals(self, x: Tensor) -> Tensor:
        return x.new_empty(self.world, dtype=torch.int32)

    def collect(self, y: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        summed, _ = self._return_sums(y, None, None, slots, arrivals)
        self.end_forward()
        return summed

    def dispatch_bwd(
        self, dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, arrivals: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        dx, copies = self._return_sums(dx, dweights, experts, slots, arrivals)
        self.end_backward()
        return dx, None if dweights is None else copies

    def collect_bwd(self, dy: Tensor, slots: Tensor, arrivals: Tensor, tokens: int) -> Tensor:
        peers, use = self._ensure_buffers(dy, torch.float32)
        K.send_tokens(dy, slots, use)
        peers.barrier()
        got = K.take_tokens(dy, use, arrivals)[0]
        peers.uses += 1
        return got

    def _return_sums(
        self, y: Tensor, dweights: Any, experts: Any, slots: Tensor, arrivals: Tensor
    ) -> tuple[Tensor, Tensor]:
        peers, use = self._ensure_buffers(y, torch.float32 if dweights is None else dweights.dtype)
        K.return_sums(y, use, arrivals, dweights)
        peers.barrier()
        summed = K.add_sums(y, slots, use, None if dweights is None else experts, dweights)
        peers.uses += 1
        return summed

    def _ensure_buffers(self, x: Tensor, weight: torch.dtype) -> tuple[PeerBuffers, PeerUse]:
        """The buffers, large enough for this use, and what its kernels are told."""
        peers = self.peers
        if peers is None:
            self.agree_on_tokens(x)
            peers = get_peer_buffers(self.group, self.buffer_bytes(x, self.pair_capacity), x.device)
        row = x.shape[1] * x.element_size()
        *at, most = layout(self.world, self.pair_capacity, self.top_k, row, weight.itemsize)
        if 2 * most > peers.nbytes:
            peers = get_peer_buffers(self.group, 2 * most, x.device)
        self.peers = peers
        # fixed halves, whatever their use takes: the other may still hold the use before
        half = peers.nbytes // 2
        sizes = self.rank, self.pair_capacity, self.num_experts, self.top_k, half
        return peers, PeerUse(peers.table, peers.uses, self.flag, *sizes, *at)
