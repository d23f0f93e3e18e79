"""The choice of the fastest dispatcher that every rank of a mesh supports; all ranks take the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from fuseops.arguments import shown
from fuseops.errors import FuseOpsError
from fuseops.kernels.launch import HAS_TRITON, arch_of
from fuseops.machine import machine_id

from .bounded import Bounded
from .device_counts import DeviceCounts
from .dispatcher import Dispatcher
from .fixed import FixedCapacity
from .host_counts import HostCounts
from .symmetric import PeerMemory

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DISPATCHERS: dict[str, type[Dispatcher]] = {
    "host_counts": HostCounts,
    "fixed_capacity": FixedCapacity,
    "device_counts": DeviceCounts,
    "peer_memory": PeerMemory,
}

_votes: dict[Any, str] = {}
"""Process group -> the name of the dispatcher that its ranks have agreed on."""

DispatcherChoice = str | Callable[["DeviceMesh", int, int], Dispatcher]
"""The name of a dispatcher, or what makes one."""


def choose(
    choice: DispatcherChoice | None,
    mesh: DeviceMesh,
    num_experts: int,
    top_k: int,
    **limits: Any,
) -> Dispatcher:
    """The dispatcher of a layer.  limits: see `Bounded`.  Raises FuseOpsError for an unknown name, and for a function
    that does not return a Dispatcher.
    """
    check_choice(choice)
    if callable(choice):
        made = choice(mesh, num_experts, top_k)
        if not isinstance(made, Dispatcher):
            raise FuseOpsError(
                f"ExpertParallel: dispatcher gave {made!r}, expected a dispatch.Dispatcher."
            )
        return made
    kind = DISPATCHERS[choice or vote(mesh)]
    return kind(mesh, num_experts, top_k, **(limits if issubclass(kind, Bounded) else {}))


def check_choice(choice: DispatcherChoice | None) -> None:
    """Raise FuseOpsError for a `dispatcher` that is neither a known name nor a function."""
    named = isinstance(choice, str) and choice in DISPATCHERS
    if not (choice is None or callable(choice) or named):
        raise FuseOpsError(
            f"ExpertParallel: dispatcher is {shown(choice)}, expected one of {sorted(DISPATCHERS)}."
        )


def vote(mesh: DeviceMesh) -> str:
    """The name of the dispatcher that all ranks of a mesh support. A collective, once per group."""
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
