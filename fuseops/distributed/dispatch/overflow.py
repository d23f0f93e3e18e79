"""What ways of a fixed size note on the device where tokens find no room, and who reads it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError

_flags: dict[Any, Tensor] = {}
"""By group: (1,) int32 on the device, whether something had no room."""


def flag_of(group: Any, device: torch.device) -> Tensor:
    """The flag of a group, which all its layers share."""
    if group not in _flags:
        _flags[group] = torch.zeros(1, dtype=torch.int32, device=device)
    return _flags[group]


def check_overflow(group: Any = None) -> None:
    """Raise FuseOpsError on every rank if tokens of any found no room since the last call.

    A collective that waits for the device: all ranks call it at the end of a step, where the loss is read. Sums are
    NaN from the first overflow on.   group: a ProcessGroup or a DeviceMesh of one dimension, whose ranks ask each
    other, by default all of them.
    """
    mine = any(map(bool, _flags.values()))
    for flag in _flags.values():
        flag.zero_()
    ranks = _where(mine, group) if dist.is_initialized() else [0] * mine
    if ranks:
        raise FuseOpsError(
            f"experts: on rank {', '.join(map(str, ranks))} more tokens or copies came than there is room for. Raise "
            "`capacity` of ExpertParallel, or take way='host_counts', which has no bound."
        )


def _where(mine: bool, group: Any) -> list[int]:
    """The ranks, in the numbers of all, that say so."""
    group = group.get_group() if hasattr(group, "get_group") else group or dist.group.WORLD
    on_host = "cpu" in dist.get_backend_config(group)
    device = "cpu" if on_host else torch.cuda.current_device()
    said = torch_private.all_gather(torch.tensor([mine], device=device).int(), 0, group)
    return [dist.get_global_rank(group, rank) for rank, yes in enumerate(said.tolist()) if yes]
