"""What ways of a fixed size note on the device where tokens find no room, and who reads it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError

_flags: dict[Any, Tensor] = {}
"""By group: (1,) int32 on the device, whether something had no room."""


def flag_of(group: Any, device: torch.device) -> Tensor:
    """The flag of a group, which all its layers share."""
    if group not in _flags:
        _flags[group] = torch.zeros(1, dtype=torch.int32, device=device)
    return _flags[group]


def check_overflow() -> None:
    """Raise FuseOpsError if tokens found no room since the last call, on this rank. Waits for the device.

    Call it where the loss is read; sums are NaN from the first overflow on.
    """
    for group, flag in _flags.items():
        if int(flag):
            flag.zero_()
            raise FuseOpsError(
                f"experts of the group {group.group_name}: more tokens or copies came than there is room for. Raise "
                "`capacity` of ExpertParallel, or take way='host_counts', which has no bound."
            )
