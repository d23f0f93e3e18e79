"""The flag on the device by which bounded exchanges report an overflow, and the check that reads it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError

_flags: dict[Any, Tensor] = {}
"""Process group -> (1,) int32 on the device, nonzero after an overflow."""


def overflow_flag(group: Any, device: torch.device) -> Tensor:
    """The overflow flag of a group, which all its layers share."""
    if group not in _flags:
        _flags[group] = torch.zeros(1, dtype=torch.int32, device=device)
    return _flags[group]


def check_overflow(group: Any = None) -> None:
    """Raise FuseOpsError on every rank if tokens of any rank did not fit since the last call.

    It is a collective that waits for the device: call it on all ranks at the end of a step, where the loss is read.
    Sums are NaN from the first overflow on.   group: the ranks, a ProcessGroup or a DeviceMesh of one dimension, by
    default all.
    """
    mine = any(map(bool, _flags.values()))
    for flag in _flags.values():
        flag.zero_()
    ranks = _overflowed_ranks(mine, group) if dist.is_initialized() else [0] * mine
    if ranks:
        raise FuseOpsError(
            f"experts: on rank {', '.join(map(str, ranks))} more tokens or copies came than there is room for. Raise "
            "`capacity` of ExpertParallel, or take way='host_counts', which has no bound."
        )


def _overflowed_ranks(mine: bool, group: Any) -> list[int]:
    """The global ranks whose flag is set."""
    group = group.get_group() if hasattr(group, "get_group") else group or dist.group.WORLD
    on_host = "cpu" in dist.get_backend_config(group)
    device = "cpu" if on_host else torch.cuda.current_device()
    flags = torch_private.all_gather(torch.tensor([mine], device=device).int(), 0, group)
    return [dist.get_global_rank(group, rank) for rank, yes in enumerate(flags.tolist()) if yes]
