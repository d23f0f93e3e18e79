"""The tile table of a routing is made once a Sequential call, and read by all its grouped GEMMs, backward included."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fuseops import kernels as K
from fuseops.kernels.registry import called_again
from fuseops.torch_private import storage_id, version

from .op import Call

TILES = "tiles"
"""In `call.scratch`: the `Tables` of the call."""


class Tables(dict[Any, tuple[Tensor, Tensor]]):
    """`Tables` are kept by the memory of the `offs` that they were made from, with it, so that nothing else lies there.

    last  offs, rows and version of `offs` of the table that was asked for last, and the table
    """

    last: tuple[Tensor, int, int, Tensor] | None = None


def tiles_of(call: Call, offs: Tensor, rows: int) -> Tensor | None:
    """`K.group_tiles(offs, rows)`, for `tiles=` of the grouped GEMMs; None where the reference runs, which reads none.

    offs (E,) int32, rows: those of x, padding included. For ops with `live_call`, forward and backward: the table lies
    in `call.scratch`, under the memory that it was made from, so a copy of `offs` (recomputed, reloaded) makes one
    more. Traced code has no scratch: there each op makes the table, and the compiler keeps one of them (from torch 2.15
    on one that the backward reads, and one that it does not).
    """
    if call.scratch is not None:
        return called_again(_kept, call.scratch, offs, rows)
    return K.group_tiles(offs, rows) if K.group_tiles.launches((offs, rows), {}) else None


def _kept(scratch: dict[str, Any], offs: Tensor, rows: int) -> Tensor | None:
    tables: Tables | None = scratch.get(TILES)
    if tables is not None:
        last = tables.last
        if last is not None and last[0] is offs and last[1:3] == (rows, version(offs)):
            return last[3]
    if not K.group_tiles.launches((offs, rows), {}):
        return None
    if tables is None:
        tables = scratch[TILES] = Tables()
    key = storage_id(offs), offs.storage_offset(), offs.stride(), len(offs), version(offs), rows
    if key not in tables:
        tables[key] = offs, K.group_tiles(offs, rows)
    found = tables[key][1]
    tables.last = offs, rows, version(offs), found
    return found


def tiles_of_columns(call: Call, offs: Tensor, columns: int) -> Tensor | None:
    """A table for products over columns, which read the order of the groups alone: that of any rows does, if there is
    one.
    """
    tables: Tables | None = None if call.scratch is None else call.scratch.get(TILES)
    last = None if tables is None else tables.last
    if last is not None and last[0] is offs and last[2] == version(offs):
        return last[3]
    return tiles_of(call, offs, columns)


def tables_alone(scratch: dict[Any, dict[str, Any]]) -> bool:
    """Whether ops share nothing but tables in a call: states of level-1 ops, which lie there too, are each its own."""
    shared = (own for path, own in scratch.items() if isinstance(path, str))
    return {TILES}.union(*shared) == {TILES}
