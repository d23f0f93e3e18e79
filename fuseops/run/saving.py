"""Packing: the kept fields of every Saved of a node become one flat tuple of plain tensors, and back.

A tensor takes one slot, however many fields hold it, so that hooks and offload see each storage once with all its
names. A quantized tensor takes one slot for each component. Other values (a shape) stay with the node.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops.ops.names import SavedName
from fuseops.ops.router import RouterForm
from fuseops.plain import PLAIN, PLAIN_OR_NONE
from fuseops.plan.segment import Const, Segment, SlotMap
from fuseops.recipes import Quantized

NONE = id(None)
# types of fields of fuseops' own ops, for which equal constants (1 and True) are interchangeable
OWN_OP_TYPES = PLAIN_OR_NONE | {torch.Size, tuple, float, int, bool, str, RouterForm}
Entry = Any  # the number of a tensor, None, Const or QuantizedSlots


class QuantizedSlots(NamedTuple):
    """A `QuantizedSlots` is a quantized tensor without its tensors, and the slot of every component."""

    form: Quantized
    slots: tuple[tuple[str, int], ...]


def pack(
    seg: Segment, values: Sequence[Any], traced: bool = False
) -> tuple[Sequence[Tensor], list[Entry]]:
    """Flatten the kept values, in the order of `seg.kept`.   -> distinct tensors, and where each value is"""
    # by id; a trace must not take one (dynamo would guard on the object), and removes duplicates itself
    slots: dict[int, int] | None = None if traced else {}
    if slots is not None:  # the common case: plain tensors and constants, as in the last call
        last = seg.last_slot_map
        if last is not None and [*map(type, values)] == last.kinds:
            distinct = last.tensors_of(values)
            if (
                len({*map(id, distinct)}) == len(distinct)
                and last.fixed_of(values) == last.fixed
                and (not last.duplicates or all(values[k] is values[j] for k, j in last.duplicates))
            ):
                return distinct, last
        if {*map(type, values)} <= (OWN_OP_TYPES if seg.builtin else PLAIN_OR_NONE):
            plain = [v if type(v) in PLAIN else None for v in values]
            flat: dict[int, Any] = dict(zip(map(id, plain), plain, strict=True))
            flat.pop(NONE, None)
            number = dict(zip(flat, itertools.count(), strict=False))
            try:
                return [*flat.values()], seg.slot_map((*map(number.get, map(id, plain)),), values)
            except TypeError:  # a constant has no hash
                pass
    tensors: list[Tensor] = []
    return tensors, [None if v is None else _place(v, tensors, slots) for v in values]


def _place(value: Any, flat: list[Tensor], slots: dict[int, int] | None) -> Any:
    if isinstance(value, Tensor):
        place = len(flat) if slots is None else slots.setdefault(id(value), len(flat))
        if place == len(flat):
            flat.append(value)
        return place
    if isinstance(value, Quantized):
        parts = tuple([(name, _place(c, flat, slots)) for name, c in value.components().items()])
        return QuantizedSlots(value.without_tensors, parts)
    return Const(value)


def unpack(rows: Sequence[Entry], tensors: Sequence[Tensor]) -> list[Any]:
    """The kept values, over the tensors that autograd returns: the inverse of `pack`."""
    if type(rows) is SlotMap:
        return [*rows.values_of((*tensors, *rows.constants))]
    return [tensors[e] if type(e) is int else e and _restore(e, tensors) for e in rows]


def _restore(entry: Const | QuantizedSlots, tensors: Sequence[Tensor]) -> Any:
    if isinstance(entry, Const):
        return entry.value
    return entry.form.of({name: tensors[slot] for name, slot in entry.slots})


def saved_names(
    seg: Segment,
    rows: Sequence[Entry],
    flat: Sequence[Tensor],
    prefix: str,
    params: Sequence[Any],
) -> Sequence[SavedName]:
    """The names of every flat tensor, in save order. A parameter is recognised by identity.

    Calls with the same layout of saved values share the list.
    """
    own = {*map(id, params)}
    is_param = (*map(own.__contains__, map(id, flat)),)
    # constants may change from call to call, and be unhashable
    where = tuple([None if type(entry) is Const else entry for entry in rows])
    key = prefix, is_param, id(rows) if type(rows) is SlotMap else where
    found = seg.saved_names.get(key)
    if found is None:
        found = seg.saved_names[key] = _saved_names(seg, rows, is_param, prefix)
    return found


def _saved_names(
    seg: Segment, rows: Sequence[Entry], is_param: Sequence[bool], prefix: str
) -> list[SavedName]:
    found: list[list[str]] = [[] for _ in is_param]
    ops = [""] * len(is_param)
    fields = [(slot.names[k], slot.op) for slot in seg.slots for k in slot.kept]
    for (name, op), entry in zip(fields, rows, strict=True):
        for component, place in _places(entry):
            found[place].append(f"{prefix}{name}.{component}" if component else prefix + name)
            ops[place] = op
    return [SavedName(tuple(n), own, op) for n, own, op in zip(found, is_param, ops, strict=True)]


def _places(entry: Any) -> tuple[tuple[str, int], ...]:
    if isinstance(entry, QuantizedSlots):
        return entry.slots
    return (("", entry),) if type(entry) is int else ()
