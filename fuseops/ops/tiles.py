"""The tile table of a routing is computed once a Sequential call, for all its grouped GEMMs, backward included."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fuseops import kernels as K
from fuseops.kernels.registry import opaque_call
from fuseops.torch_private import storage_id, version

from .op import Call

TILES = "tiles"
"""In `call.scratch`: the `TileTables` of the call."""


class TileTables(dict[Any, tuple[Tensor, Tensor]]):
    """`TileTables` cache (offs, table) by the memory of `offs`, which the cache keeps alive.

    last  offs, rows, version of `offs`, and table of the last lookup
    """

    last: tuple[Tensor, int, int, Tensor] | None = None


def tiles_of(call: Call, offs: Tensor, rows: int) -> Tensor | None:
    """`K.group_tiles(offs, rows)`, for `tiles=` of the grouped GEMMs; None where the twin runs, which reads none.

    offs (E,) int32, rows: of x, padding included. For ops with `live_call`, forward and backward: the table is cached
    in `call.scratch` by the memory of `offs`, so a copy of `offs` (recomputed, reloaded) needs one more. Traced code
    has no
    scratch: there each op computes the table, and the compiler merges them (from torch 2.15 on into one that the
    backward reads, and one that it does not).
    """
    if call.scratch is not None:
        return opaque_call(_cached_tiles, call.scratch, offs, rows)
    return K.group_tiles(offs, rows) if K.group_tiles.launches((offs, rows), {}) else None


def _cached_tiles(scratch: dict[str, Any], offs: Tensor, rows: int) -> Tensor | None:
    tables: TileTables | None = scratch.get(TILES)
    if tables is not None:
        last = tables.last
        if last is not None and last[0] is offs and last[1:3] == (rows, version(offs)):
            return last[3]
    if K.group_tiles.obstacle((offs, rows), {}) is not None:  # each step asks
        return None
    if tables is None:
        tables = scratch[TILES] = TileTables()
    key = storage_id(offs), offs.storage_offset(), offs.stride(), len(offs), version(offs), rows
    if key not in tables:
        tables[key] = offs, K.group_tiles(offs, rows)
    found = tables[key][1]
    tables.last = offs, rows, version(offs), found
    return found


def tiles_of_columns(call: Call, offs: Tensor, columns: int) -> Tensor | None:
    """A table for products over columns, which read only the order of the groups: a cached one for any rows serves."""
    tables: TileTables | None = None if call.scratch is None else call.scratch.get(TILES)
    last = None if tables is None else tables.last
    if last is not None and last[0] is offs and last[2] == version(offs):
        return last[3]
    return tiles_of(call, offs, columns)


def shares_only_tables(scratch: dict[Any, dict[str, Any]]) -> bool:
    """Whether ops of a call share nothing but tables: level-1 ops also keep state in the scratch, under other keys."""
    shared = (own for path, own in scratch.items() if isinstance(path, str))
    return {TILES}.union(*shared) == {TILES}
