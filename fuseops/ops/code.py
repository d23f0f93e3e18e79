"""The values that an op's method refers to are read off its code: generators that it may draw from, mutable state."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fuseops.attributes import OWN, package_of

FOLLOWED: Any = FunctionType | property | staticmethod | classmethod


def referenced_values(method: Any, kind: type) -> Iterator[tuple[str, Any]]:
    """Yield ("function.name", value) of all that a method of the class `kind`, and functions that it calls, refer to.

    Those are globals, closure cells, defaults, imports, and attributes of modules and of `kind`. Functions of torch and
    fuseops are not followed.
    """
    pending, seen = [method], set()
    while pending:
        value = pending.pop()
        function = getattr(value, "fget", getattr(value, "__func__", value))
        if function in seen or package_of(function) in OWN:
            continue
        seen.add(function)
        for name, found in _values(function, kind) if isinstance(function, FunctionType) else ():
            if isinstance(found, FOLLOWED):
                pending.append(found)
            yield f"{function.__name__}.{name}", found


def _values(function: FunctionType, kind: type) -> Iterator[tuple[str, Any]]:
    codes = [*_codes(function.__code__)]
    names = [*dict.fromkeys(name for code in codes for name in code.co_names)]
    yield from ((n, inspect.getattr_static(kind, n)) for n in names if hasattr(kind, n))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty one
            yield name, cell.cell_contents
    yield from (("default", value) for value in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    steps = (step for code in codes for step in dis.get_instructions(code))
    imported = (step.argval for step in steps if step.opname == "IMPORT_NAME")
    found = [(name, sys.modules[name]) for name in imported if name in sys.modules]
    found += [(n, function.__globals__[n]) for n in names if n in function.__globals__]
    seen: set[ModuleType] = set()
    while found:
        name, value = found.pop()
        yield name, value
        if isinstance(value, ModuleType) and value not in seen:
            seen.add(value)
            found += [(n, vars(value)[n]) for n in names if n in vars(value)]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
