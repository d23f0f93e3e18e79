"""The values that an op's method refers to are read off its code: generators that it may draw from, mutable state."""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from fuseops.attributes import OWN, WELL_KNOWN, package_of

FOLLOWED: Any = FunctionType | property | staticmethod | classmethod
CONSTANT_PACKAGES = WELL_KNOWN | {"math", "operator", "_operator"}
"""Packages whose built-in functions give the same for the same arguments, but for the following."""
ASK_ELSEWHERE = frozenset({
    "__import__", "compile", "delattr", "eval", "exec", "get_default_dtype", "getattr", "globals", "hasattr", "hash",
    "id", "input", "iter", "locals", "next", "open", "setattr", "vars",
})  # fmt: skip


def referenced_values(method: Any, kind: type) -> Iterator[tuple[str, Any]]:
    """Yield ("function.name", value) of all that a method of the class `kind`, and functions that it calls, refer to.

    Those are globals, builtins, closure cells, defaults, imports, and attributes of modules, of `kind` and its bases.
    Functions of torch and fuseops are not followed.
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
    yield from ((n, vars(base)[n]) for base in kind.__mro__ for n in names if n in vars(base))
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # an empty one
            yield name, cell.cell_contents
    yield from (("default", value) for value in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    steps = [step for code in codes for step in dis.get_instructions(code)]
    loaded = {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}
    shipped = (name for name in loaded if name not in function.__globals__)
    yield from ((name, vars(builtins)[name]) for name in shipped if name in vars(builtins))
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


def is_fixed(value: Any, kind: type) -> bool:
    """Whether a callable to which code of the class `kind` refers depends on its arguments alone, as far as it is not
    followed. Functions and modules are followed; a class, or an object to call, may hold what changes.
    """
    if isinstance(value, FOLLOWED | ModuleType):
        return True
    if isinstance(value, type):
        return issubclass(kind, value) or package_of(value) in CONSTANT_PACKAGES
    if isinstance(value, BuiltinFunctionType):
        package = package_of(value) or package_of(value.__self__)
        return package in CONSTANT_PACKAGES and value.__name__ not in ASK_ELSEWHERE
    return callable(value) and package_of(type(value)) in OWN and not isinstance(value, nn.Module)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of the functions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
