"""Generators of random numbers that a level-1 op may draw from, and their states, compared around its `fwd`.

Watched are torch's own of the CPU and of the device, those that the op holds, and those that the code of its `fwd`,
and of what it calls, names: functions of the modules `random` and `numpy.random`, generators in globals and closures.
"""

from __future__ import annotations

import dis
import pickle
import random
import sys
from collections.abc import Iterator, Mapping
from types import BuiltinMethodType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fuseops import torch_private

SHIPPED = frozenset({"builtins", "collections", "fuseops", "torch"})
_drawn_by_nobody: set[type] = set()  # classes of attributes, by which most ops have no generator
# of a class: its `fwd`, and the generators that this names
_named: WeakKeyDictionary[type, tuple[Any, list[Any]]] = WeakKeyDictionary()


def generators_of(op: Any, attributes: Mapping[str, Any], device: torch.device) -> list[Any]:
    """All that a call of `op.fwd` on a device may draw from."""
    found: list[Any] = [torch.default_generator]
    if device.type == "cuda" and not torch_private.is_capturing():
        found.append(torch.cuda.default_generators[torch_private.current_device()])
    unknown = {*map(type, attributes.values())} - _drawn_by_nobody
    if unknown:
        found += [value for value in attributes.values() if _is_generator(value)]
        shipped = (t for t in unknown if t.__module__.partition(".")[0] in SHIPPED)
        _drawn_by_nobody.update(t for t in shipped if not _is_generator_class(t))
    kind, fwd = type(op), getattr(op.fwd, "__func__", op.fwd)
    known = _named.get(kind)
    if known is None or known[0] is not fwd:
        known = _named[kind] = fwd, [*_reachable(fwd, kind)]
    return found + known[1]


def states(generators: list[Any]) -> list[Any]:
    return [_state(generator) for generator in generators]


def same(before: list[Any], after: list[Any]) -> bool:
    """Whether no generator was drawn from between two of their states."""
    return all(map(_equal, before, after))


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        if generator.device.type == "cuda":
            return generator.initial_seed(), generator.get_offset()
        return generator.get_state()
    return pickle.dumps(generator)


def _is_generator(value: Any) -> bool:
    return _is_generator_class(type(value))


def _is_generator_class(kind: type) -> bool:
    if issubclass(kind, torch.Generator | random.Random):
        return True
    numpy = sys.modules.get("numpy.random")
    return numpy is not None and issubclass(kind, numpy.Generator | numpy.RandomState)


def _reachable(fwd: Any, kind: type) -> Iterator[Any]:
    """Generators that the code of a method of `kind` names, in itself or in what it calls outside of torch."""
    pending, seen = [fwd] if isinstance(fwd, FunctionType) else [], set()
    while pending:
        function = pending.pop()
        if function in seen or (function.__module__ or "").partition(".")[0] == "torch":
            continue
        seen.add(function)
        for value in _values(function, kind):
            if isinstance(value, FunctionType):
                pending.append(value)
            yield from _drawn_from(value)


def _values(function: FunctionType, kind: type) -> Iterator[Any]:
    """What the code of a function names: globals, what is closed over, modules that it imports itself, attributes of
    modules, methods of `kind`.
    """
    codes = [*_codes(function.__code__)]
    names = [name for code in codes for name in code.co_names]
    inner = [getattr(kind, name, None) for name in names]
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    steps = (step for code in codes for step in dis.get_instructions(code))
    imported = (step.argval for step in steps if step.opname == "IMPORT_NAME")
    found += [sys.modules[name] for name in imported if name in sys.modules]
    found += [cell.cell_contents for cell in function.__closure__ or () if _filled(cell)]
    found += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    yield from (value for value in inner if isinstance(value, FunctionType))
    modules: set[ModuleType] = set()
    while found:
        value = found.pop()
        yield value
        if isinstance(value, ModuleType) and value not in modules:
            modules.add(value)
            found += [vars(value)[name] for name in names if name in vars(value)]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of those that stand in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _drawn_from(value: Any) -> Iterator[Any]:
    """The generator that a value is, or draws from."""
    if _is_generator(value):
        yield value
    elif isinstance(value, BuiltinMethodType | MethodType) and _is_generator(value.__self__):
        yield value.__self__
