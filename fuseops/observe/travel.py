"""What travels between ranks, in dry runs: nothing is sent there, and an op stands for it, so that whoever watches the
step sees where it waits for others, and for how many bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError

TRAVEL = "fuseops.travel.default"


@torch.library.custom_op("fuseops::travel", mutates_args=())
def travel(sent: Tensor, rows: int, nbytes: int) -> Tensor:
    """sent (T, ...) -> (rows, ...), what comes for it.   nbytes: that this rank sends to others

    Raises FuseOpsError for tensors that have values: those are sent by collectives.
    """
    raise FuseOpsError(
        f"fuseops::travel stands for an exchange in dry runs, of fake or meta tensors; got one on {sent.device}."
    )


@travel.register_fake
def _(sent: Tensor, rows: int, nbytes: int) -> Tensor:
    return sent.new_empty(rows, *sent.shape[1:])
