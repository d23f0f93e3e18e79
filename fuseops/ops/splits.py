"""`check_splits` checks the row ends of groups, `offs`: always where that does not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.kernels.groups import bad_ends, check_ends, check_offs
from fuseops.kernels.registry import opaque_call
from fuseops.plain import PLAIN

from . import scopes


def check_splits(offs: Tensor, rows: int, device: torch.device) -> None:
    """Raise ShapeError for `offs` that are not int32 (int64 may be counts) or not on the device of the rows.

    On the CPU also for bad values: an end before the previous one, or beyond the rows (padding included). On a CUDA
    device, and in traced code, values are checked under `fo.debug()` only.  Raises FuseOpsError under a `vmap` over
    them.
    """
    check_offs(offs, device)
    if torch.compiler.is_compiling():
        if scopes.current().debug is not None:
            torch_private.assert_async(
                ~bad_ends(offs, rows).any(), "offs must not fall, nor end beyond the rows of x"
            )
    elif torch_private.inside_functorch():
        if torch_private.is_batched(offs):
            raise FuseOpsError(
                "torch.func.vmap over grouped rows: every example would have an `offs` of its own, and a grouped GEMM "
                "takes one. Make the examples one batch of rows, or loop over them."
            )
    elif offs.device.type == "cpu":
        if type(offs) in PLAIN:
            opaque_call(check_ends, offs, rows)
    elif scopes.current().debug is not None:
        scopes.current().debug.splits(offs, rows)
