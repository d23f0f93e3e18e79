"""The choice of the fastest way that every rank of a mesh supports; all ranks take the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fuseops.errors import FuseOpsError
from fuseops.kernels.launch import HAS_TRITON, arch_of
from fuseops.machine import machine_id

from .bounded import Bounded
from .device_counts import DeviceCounts
from .exchange import Exchange
from .fixed import FixedCapacity
from .host_counts import HostCounts
from .symmetric import PeerMemory

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

WAYS: dict[str, type[Exchange]] = {
    "host_counts": HostCounts,
    "fixed_capacity": FixedCapacity,
    "device_counts": DeviceCounts,
    "peer_memory": PeerMemory,
}

_votes: dict[Any, str] = {}
"""Process group -> the way that its ranks have agreed on."""


Way = str | Callable[["DeviceMesh", int, int], Exchange]


def choose(
    way: Way | None, mesh: DeviceMesh, num_experts: int, top_k: int, **limits: Any
) -> Exchange:
    """The exchange of a layer.  limits: see `Bounded`.  Raises FuseOpsError for an unknown way, and for a function that
    does not return an Exchange.
    """
    check_way(way)
    if callable(way):
        made = way(mesh, num_experts, top_k)
        if not isinstance(made, Exchange):
            raise FuseOpsError(f"ExpertParallel: way gave {made!r}, expected a dispatch.Exchange.")
        return made
    way = way or vote(mesh)
    return WAYS[way](mesh, num_experts, top_k, **(limits if issubclass(WAYS[way], Bounded) else {}))


def check_way(way: Way | None) -> None:
    """Raise FuseOpsError for a way that is neither a known name nor a function."""
    if not (way is None or callable(way) or (isinstance(way, str) and way in WAYS)):
        raise FuseOpsError(f"ExpertParallel: way is {way!r:.80}, expected one of {sorted(WAYS)}.")


def vote(mesh: DeviceMesh) -> str:
    """The way that all ranks of a mesh support. A collective, once per group."""
    if mesh.device_type != "cuda" or mesh.size() == 1:
        return "host_counts"
    group = mesh.get_group()
    if group not in _votes:
        answers: list[Any] = [None] * mesh.size()
        dist.all_gather_object(answers, ballot(), group=group)
        _votes[group] = "peer_memory" if all_reach_all(answers) else "host_counts"
    return _votes[group]


class Ballot(NamedTuple):
    """A `Ballot` is what a rank tells the others of its GPU.

    gpu      its UUID
    reached  UUIDs of the other GPUs that its kernels can write to; of none if they do not run on it
    """

    machine: tuple[str, str]
    gpu: str
    reached: frozenset[str]


def ballot() -> Ballot:
    """The ballot of this rank. It knows nothing of GPUs that are hidden from it (CUDA_VISIBLE_DEVICES)."""
    own = torch.cuda.current_device()
    runs = HAS_TRITON and arch_of(torch.device("cuda", own)) >= 80
    peers = [i for i in range(torch.cuda.device_count()) if i != own] if runs else []
    reached = [_uuid(i) for i in peers if torch.cuda.can_device_access_peer(own, i)]
    return Ballot(machine_id(), _uuid(own), frozenset(reached))


def all_reach_all(ballots: Sequence[Ballot]) -> bool:
    """Whether all ranks are on one machine, each on a GPU of its own that can write to those of all others."""
    pairs = permutations(ballots, 2)
    return all(mine.machine == other.machine and other.gpu in mine.reached for mine, other in pairs)


def _uuid(device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)
