"""The choice of the fastest way that every rank of a mesh supports; all ranks take the same."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fuseops.errors import FuseOpsError
from fuseops.kernels.launch import HAS_TRITON, arch_of

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
        dist.all_gather_object(answers, (socket.gethostname(), _has_peer_access()), group=group)
        one_host = len({host for host, _ in answers}) == 1
        capable = one_host and all(can for _, can in answers)
        _votes[group] = "peer_memory" if capable else "host_counts"
    return _votes[group]


def _has_peer_access() -> bool:
    """Whether this rank can run the kernels that write to peers."""
    device = torch.device("cuda", torch.cuda.current_device())
    return HAS_TRITON and arch_of(device) >= 80
