"""The tile table of a routing is made once a Sequential call, and read by all its grouped GEMMs, backward included."""

from __future__ import annotations

from torch import Tensor

from fuseops import kernels as K
from fuseops.torch_private import storage_id, version

from .op import Call


def tiles_of(call: Call, offs: Tensor, rows: int) -> Tensor | None:
    """`K.group_tiles(offs, rows)`, for `tiles=` of the grouped GEMMs; None where the reference runs, which reads none.

    offs (E,) int32, rows: those of x, padding included. For ops with `live_call`, forward and backward: the table lies
    in `call.scratch`, under the memory that it was made from, so a copy of `offs` (recomputed, reloaded) makes one
    more. Traced code has no scratch: there each op makes the table, and the compiler keeps one of them (from torch 2.15
    on one that the backward reads, and one that it does not).
    """
    last = None if call.scratch is None else call.scratch.get("last_tiles")
    if last is not None and last[0] is offs and last[1:3] == (rows, version(offs)):
        latest: Tensor = last[3]
        return latest
    if not K.group_tiles.launches((offs, rows), {}):
        return None
    if call.scratch is None:
        return K.group_tiles(offs, rows)
    tables = call.scratch.setdefault("tiles", {})
    key = storage_id(offs), offs.storage_offset(), offs.stride(), len(offs), version(offs), rows
    if key not in tables:
        # with `offs`, so that nothing else lies there
        tables[key] = offs, K.group_tiles(offs, rows)
    found: Tensor = tables[key][1]
    call.scratch["last_tiles"] = offs, rows, version(offs), found
    return found


def tiles_of_columns(call: Call, offs: Tensor, columns: int) -> Tensor | None:
    """A table for products over columns, which read the order of the groups alone: that of any rows does, if there is
    one.
    """
    last = None if call.scratch is None else call.scratch.get("last_tiles")
    if last is not None and last[0] is offs and last[2] == version(offs):
        latest: Tensor = last[3]
        return latest
    return tiles_of(call, offs, columns)
