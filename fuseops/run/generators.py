"""The random number generators that a level-1 op may draw from. Their states are compared before and after its `fwd`.

These are torch's default generators of the CPU and the device, those among the attributes of the op, and those that the
code of its `fwd`, or of a function that it calls, refers to: globals, closures, functions of `random` and
`numpy.random`.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator, Mapping
from types import BuiltinMethodType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fuseops import torch_private
from fuseops.attributes import WELL_KNOWN, package_of
from fuseops.ops.code import referenced_values

_types_without_generators: set[type] = set()  # types of attributes that were looked at
# by class: its `fwd`, and the generators that its code refers to
_generators_of_class: WeakKeyDictionary[type, tuple[Any, list[Any]]] = WeakKeyDictionary()


def generators_of(op: Any, attributes: Mapping[str, Any], device: torch.device) -> list[Any]:
    """The generators that a call of `op.fwd` on a device may draw from."""
    found: list[Any] = [torch.default_generator]
    if device.type == "cuda" and not torch_private.is_capturing():
        found.append(torch.cuda.default_generators[torch_private.current_device()])
    unknown = {*map(type, attributes.values())} - _types_without_generators
    if unknown:
        found += [value for value in attributes.values() if is_generator(value)]
        shipped = (t for t in unknown if package_of(t) in WELL_KNOWN)
        _types_without_generators.update(t for t in shipped if not _is_generator_class(t))
    kind, fwd = type(op), getattr(op.fwd, "__func__", op.fwd)
    known = _generators_of_class.get(kind)
    if known is None or known[0] is not fwd:
        known = _generators_of_class[kind] = (
            fwd,
            [g for _, value in referenced_values(fwd, kind) for g in _generators_in(value)],
        )
    return found + known[1]


def rng_states(generators: list[Any]) -> list[Any]:
    return [_state(generator) for generator in generators]


def states_equal(before: list[Any], after: list[Any]) -> bool:
    """Whether the states are equal: no generator was drawn from in between."""
    return all(map(_equal, before, after))


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        if generator.device.type == "cuda":
            return generator.initial_seed(), generator.get_offset()
        return generator.get_state()
    return pickle.dumps(generator)


def is_generator(value: Any) -> bool:
    return _is_generator_class(type(value))


def _is_generator_class(kind: type) -> bool:
    if issubclass(kind, torch.Generator | random.Random):
        return True
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and issubclass(kind, numpy.Generator | numpy.RandomState)


def _generators_in(value: Any) -> Iterator[Any]:
    """The generator that a value is, or is a method of."""
    if is_generator(value):
        yield value
    elif isinstance(value, BuiltinMethodType | MethodType) and is_generator(value.__self__):
        yield value.__self__
