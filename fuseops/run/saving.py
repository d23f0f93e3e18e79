"""How a node saves: every Saved becomes a row of slots into one flat tuple of plain tensors, and back.

One slot a tensor, however many fields hold it, so that hooks and offload see each storage once with all its names. A
quantized tensor takes one slot a component. What is not a tensor (a shape) stays in the row.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops.kernels.registry import PLAIN
from fuseops.ops.names import SavedName
from fuseops.ops.router import Form
from fuseops.plan.segment import Const, Rows, Segment
from fuseops.recipes import Quantized

NONE = id(None)
PLAIN_OR_NONE = PLAIN | {type(None)}
# of fuseops' own ops, to whom constants are the same that compare equal, as 1 and True
OWN = PLAIN_OR_NONE | {torch.Size, tuple, float, int, bool, str, Form}
Row = tuple[Any, ...]  # int slots, None, Const or Parts


class Parts(NamedTuple):
    """A quantized tensor: its format, without tensors, and the slot of every component."""

    form: Quantized
    slots: tuple[tuple[str, int], ...]


def pack(
    seg: Segment, saved: Sequence[Any], traced: bool = False
) -> tuple[Sequence[Tensor], list[Row | None]]:
    """Flatten what is kept; a Saved field outside `keep` is dropped here.   -> tensors, row by op"""
    # by identity; a trace must not ask for it (it would guard on the object), and removes duplicates itself
    slots: dict[int, int] | None = None if traced else {}
    if slots is not None:  # the common case: plain tensors and constants, in calls that save alike
        values = [(own := saved[owner]) and own[k] for owner, k in seg.kept]
        last = seg.last_rows
        if last is not None and [*map(type, values)] == last.kinds:
            distinct = last.tensors_of(values)
            if (
                len({*map(id, distinct)}) == len(distinct)
                and last.fixed_of(values) == last.fixed
                and (not last.again or all(values[k] is values[j] for k, j in last.again))
            ):
                return distinct, last
        if {*map(type, values)} <= (OWN if seg.own else PLAIN_OR_NONE):
            plain = [v if type(v) in PLAIN else None for v in values]
            flat: dict[int, Any] = dict(zip(map(id, plain), plain, strict=True))
            flat.pop(NONE, None)
            number = dict(zip(flat, itertools.count(), strict=False))
            try:
                return [*flat.values()], seg.rows((*map(number.get, map(id, plain)),), values)
            except TypeError:  # a constant has no hash
                pass
    tensors: list[Tensor] = []
    rows: list[Row | None] = [None] * len(seg.ops)
    for slot in seg.slots:
        values = saved[slot.owner]
        if values is None:
            continue
        row: list[Any] = [None] * len(slot.names)
        for k in slot.kept:
            value = values[k]
            if value is None:
                continue
            row[k] = _place(value, tensors, slots)
        rows[slot.owner] = tuple(row)
    return tensors, rows


def _place(value: Any, flat: list[Tensor], slots: dict[int, int] | None) -> Any:
    if isinstance(value, Tensor):
        place = len(flat) if slots is None else slots.setdefault(id(value), len(flat))
        if place == len(flat):
            flat.append(value)
        return place
    if isinstance(value, Quantized):
        parts = tuple([(name, _place(c, flat, slots)) for name, c in value.components().items()])
        return Parts(value.form, parts)
    return Const(value)


def unpack(seg: Segment, rows: Sequence[Row | None], tensors: Sequence[Tensor]) -> list[Any]:
    """The Saved of every op, over the tensors that autograd gives back.  None where nothing was saved."""
    saved: list[Any] = [None] * len(seg.ops)
    if type(rows) is Rows:
        found = (*tensors, *rows.constants)
        for owner, cls, getter in rows.take:
            saved[owner] = tuple.__new__(cls, getter(found))
        return saved
    for slot in seg.slots:
        row = rows[slot.owner]
        if row is not None:
            values = [tensors[e] if type(e) is int else e and _restore(e, tensors) for e in row]
            saved[slot.owner] = tuple.__new__(slot.cls, values)  # `_make`, which counts them again
    return saved


def _restore(entry: Const | Parts, tensors: Sequence[Tensor]) -> Any:
    if isinstance(entry, Const):
        return entry.value
    return entry.form.of({name: tensors[slot] for name, slot in entry.slots})


def saved_names(
    seg: Segment,
    rows: Sequence[Row | None],
    flat: Sequence[Tensor],
    prefix: str,
    params: Sequence[Any],
) -> Sequence[SavedName]:
    """Every name of every flat tensor, in save order; a parameter is recognised by identity.

    Calls that save alike get the same list.
    """
    own = {id(p) for p in params}
    is_param = tuple([id(t) in own for t in flat])
    where = id(rows) if type(rows) is Rows else tuple([row and _where(row) for row in rows])
    found = seg.saved_names.get((prefix, is_param, where))
    if found is None:
        found = _saved_names(seg, rows, is_param, prefix)
        seg.saved_names[prefix, is_param, where] = found
    return found


def _saved_names(
    seg: Segment, rows: Sequence[Row | None], is_param: Sequence[bool], prefix: str
) -> list[SavedName]:
    found: list[list[str]] = [[] for _ in is_param]
    ops = [""] * len(is_param)
    for slot in seg.slots:
        for name, entry in zip(slot.names, rows[slot.owner] or (), strict=False):
            for component, place in _places(entry):
                found[place].append(f"{prefix}{name}.{component}" if component else prefix + name)
                ops[place] = slot.op
    return [SavedName(tuple(n), own, op) for n, own, op in zip(found, is_param, ops, strict=True)]


def _where(row: Row) -> Row:
    """Where a row has tensors; what else is in it may change from call to call, and be unhashable."""
    return tuple([None if type(entry) is Const else entry for entry in row])


def _places(entry: Any) -> tuple[tuple[str, int], ...]:
    if isinstance(entry, Parts):
        return entry.slots
    return (("", entry),) if type(entry) is int else ()
