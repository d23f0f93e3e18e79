"""Packing: the kept fields of every Saved of a node become one flat tuple of plain tensors, and back.

A tensor takes one slot, however many fields hold it, so that hooks and offload see each storage once with all its
names. A quantized tensor takes one slot for each component. Other values (a shape) stay with the node.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuseops.ops.names import SavedName
from fuseops.ops.router import RouterForm
from fuseops.plain import PLAIN, PLAIN_OR_NONE
from fuseops.plan.segment import Const, QuantizedSlots, Segment, SlotMap
from fuseops.recipes import Quantized
from fuseops.recipes.quantized import QuantizedForm

NONE = id(None)
# types of fields of fuseops' own ops, for which equal constants (1 and True) are interchangeable
OWN_OP_TYPES = PLAIN_OR_NONE | {torch.Size, tuple, float, int, bool, str, RouterForm}
QUANTIZED = frozenset({QuantizedForm})
Entry = Any  # the number of a tensor, None, Const or QuantizedSlots


def pack(
    seg: Segment, values: Sequence[Any], traced: bool = False
) -> tuple[Sequence[Tensor], list[Entry]]:
    """Flatten the kept values, in the order of `seg.kept`.   -> distinct tensors, and where each value is"""
    # by id; a trace must not take one (dynamo would guard on the object), and removes duplicates itself
    slots: dict[int, int] | None = None if traced else {}
    if slots is not None:  # the common case: tensors and constants, as in the last call
        last, parts = seg.last_slot_map, values
        kinds = [*map(type, values)]
        if Quantized in kinds:
            parts = _with_components(values)
            kinds = [*map(type, parts)]
        if last is not None and kinds == last.kinds:
            distinct = last.tensors_of(parts)
            if (
                len({*map(id, distinct)}) == len(distinct)
                and last.fixed_of(parts) == last.fixed
                and (not last.duplicates or all(parts[k] is parts[j] for k, j in last.duplicates))
            ):
                return distinct, last
        if {*kinds} - QUANTIZED <= (OWN_OP_TYPES if seg.builtin else PLAIN_OR_NONE):
            plain = [v if type(v) in PLAIN else None for v in parts]
            flat: dict[int, Any] = dict(zip(map(id, plain), plain, strict=True))
            flat.pop(NONE, None)
            number = dict(zip(flat, itertools.count(), strict=False))
            try:
                return [*flat.values()], seg.slot_map((*map(number.get, map(id, plain)),), parts)
            except TypeError:  # a constant has no hash
                pass
    tensors: list[Tensor] = []
    return tensors, [None if v is None else _place(v, tensors, slots) for v in values]


def _with_components(values: Sequence[Any]) -> list[Any]:
    """The values with a `QuantizedForm` in place of each Quantized, and behind them the components of all."""
    components = [t for v in values if type(v) is Quantized for t in v.tensors()]
    return [v.form if type(v) is Quantized else v for v in values] + components


def _place(value: Any, flat: list[Tensor], slots: dict[int, int] | None) -> Any:
    if isinstance(value, Tensor):
        place = len(flat) if slots is None else slots.setdefault(id(value), len(flat))
        if place == len(flat):
            flat.append(value)
        return place
    if isinstance(value, Quantized):
        parts = [_place(c, flat, slots) for c in value.tensors()]
        return QuantizedSlots(value.form, (*parts,))
    return Const(value)


def unpack(rows: Sequence[Entry], tensors: Sequence[Tensor]) -> list[Any]:
    """The kept values, over the tensors that autograd returns: the inverse of `pack`."""
    if type(rows) is SlotMap:
        values = [*rows.values_of((*tensors, *rows.constants))]
        return rows.with_quantized(values) if rows.forms else values
    return [tensors[e] if type(e) is int else e and _restore(e, tensors) for e in rows]


def _restore(entry: Const | QuantizedSlots, tensors: Sequence[Tensor]) -> Any:
    if isinstance(entry, Const):
        return entry.value
    return entry.form.of([tensors[slot] for slot in entry.slots])


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


def name_of(seg: Segment, rows: Sequence[Entry], number: int, prefix: str) -> tuple[str, str]:
    """The first name of a flat tensor, and the op that saves it."""
    places = [place for entry in rows for _, place in _places(entry)]
    named = _saved_names(seg, rows, [False] * (max(places) + 1), prefix)[number]
    return named.name, named.op


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
        return (*zip(entry.form.components, entry.slots, strict=True),)
    return (("", entry),) if type(entry) is int else ()
