"""A stand-in for transfers between ranks in dry runs, which send nothing: an op by which a watcher of the step sees
where it waits for other ranks, and for how many bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError

TRAVEL = "fuseops.travel.default"


@torch.library.custom_op("fuseops::travel", mutates_args=())
def travel(sent: Tensor, rows: int, nbytes: int) -> Tensor:
    """sent (T, ...) -> received (rows, ...).   nbytes: the bytes that this rank sends to others

    Raises FuseOpsError for tensors with values, which collectives send.
    """
    raise FuseOpsError(
        f"fuseops::travel stands for a transfer in dry runs, of fake or meta tensors; got one on {sent.device}."
    )


@travel.register_fake
def _(sent: Tensor, rows: int, nbytes: int) -> Tensor:
    return sent.new_empty(rows, *sent.shape[1:])
