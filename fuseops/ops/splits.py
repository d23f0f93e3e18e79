"""`check_splits` checks the row ends of groups, `offs`: always where that does not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError, ShapeError
from fuseops.kernels.registry import opaque_call
from fuseops.plain import PLAIN

from . import scopes


def check_splits(offs: Tensor, rows: int, device: torch.device) -> None:
    """Raise ShapeError for `offs` that are not int32 (int64 may be counts) or not on the device of the rows.

    On the CPU also for bad values: an end before the previous one, or beyond the rows (padding included). On a CUDA
    device, and in traced code, values are checked under `fo.debug()` only.  Raises FuseOpsError under a `vmap` over
    them.
    """
    if offs.dtype is not torch.int32 or offs.dim() != 1:
        raise ShapeError(
            f"offs must be int32 (E,), the cumulative row end of every group, got {offs.dtype} of shape "
            f"{tuple(offs.shape)}. Counts become offs by Routing.from_counts(tokens_per_expert)."
        )
    if offs.device != device:
        raise ShapeError(f"offs is on {offs.device}, the rows are on {device}: move it there.")
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
            opaque_call(_check_values, offs, rows)
    elif scopes.current().debug is not None:
        scopes.current().debug.splits(offs, rows)


def group_starts(offs: Tensor) -> Tensor:
    """The row at which each group begins.   (E,) ends -> (E,)"""
    return torch.cat([offs.new_zeros(1), offs[:-1]])


def bad_ends(offs: Tensor, rows: int) -> Tensor:
    """A mask of groups that end before they begin, or beyond the last row.   (E,) ends -> (E,) bool"""
    return (offs < group_starts(offs)) | (offs > rows)


def _check_values(offs: Tensor, rows: int) -> None:
    start = 0
    for group, end in enumerate(offs.tolist()):
        if not start <= end <= rows:
            raise ShapeError(bad_end_message(group, start, end, rows))
        start = end


def bad_end_message(group: int, start: int, end: int, rows: int) -> str:
    """The message of an error about the end of one group."""
    if end < start:
        why = f"before it begins ({start})" if group else "which is negative"
    else:
        why = f"but x has {rows} rows"
    return (
        f"offs are cumulative row ends; group {group} ends at row {end}, {why}. "
        "Routing.from_counts(tokens_per_expert) builds them."
    )
