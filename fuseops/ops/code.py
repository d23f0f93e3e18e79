"""The values that an op's method refers to are read off its code: generators that it may draw from, mutable state."""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from fuseops.attributes import OWN, WELL_KNOWN, package_of

from .contents import may_change

FOLLOWED: Any = FunctionType | property | staticmethod | classmethod
CONSTANT_PACKAGES = WELL_KNOWN | {"math", "operator", "_operator"}
"""Packages whose built-in functions give the same for the same arguments, but for the following."""
ASK_ELSEWHERE = frozenset({
    "__import__", "compile", "delattr", "eval", "exec", "get_default_dtype", "getattr", "globals", "hasattr", "hash",
    "id", "input", "iter", "locals", "next", "open", "setattr", "vars",
})  # fmt: skip

WRITES = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR", "DELETE_GLOBAL"})
READS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


class Place(NamedTuple):
    """A `Place` is where code finds a value: "function.name", and a function that reads it now."""

    name: str
    read: Callable[[], Any]


def referenced_values(method: Any, kind: type) -> Iterator[tuple[str, Any]]:
    """Yield ("function.name", value) of all that a method of the class `kind`, and functions that it calls, refer to.

    Those are globals, builtins, closure cells, defaults, imports, and attributes of `kind` and its bases, and of the
    modules, classes and objects among these. Functions of torch and fuseops are not followed.
    """
    for function, _ in _followed(method, kind):
        yield from ((place.name, place.read()) for place in _places(function, kind))


def constants_outside(method: Any, kind: type) -> list[Place]:
    """The places of constants that a method refers to, as `referenced_values`, and writes to nowhere."""
    functions = [function for function, _ in _followed(method, kind)]
    places = [place for function in functions for place in _places(function, kind)]
    written = {step.argval for f in functions for step in _steps(f) if step.opname in WRITES}
    return [
        place
        for place in places
        if place.name.rpartition(".")[2] not in written and not may_change(place.read())
    ]


def own_attributes(method: Any, kind: type) -> set[str]:
    """The names of attributes of its first argument, `self`, that a method of the class `kind`, or one that it calls,
    reads and writes to nowhere.
    """
    read, written = set[str](), set[str]()
    methods = [m for base in kind.__mro__ for m in vars(base).values()]
    for function, value in _followed(method, kind):
        is_method = any(value is m or function is m for m in methods)
        first = function.__code__.co_varnames[0] if function.__code__.co_argcount else None
        before: Any = None
        for step in _steps(function):
            if step.opname in WRITES:
                written.add(step.argval)
            loaded = before.argval if before is not None and "LOAD_FAST" in before.opname else None
            loaded = loaded[-1] if isinstance(loaded, tuple) else loaded
            if is_method and step.opname in READS and first is not None and loaded == first:
                read.add(step.argval)
            before = step
    return read - written


def _followed(method: Any, kind: type) -> Iterator[tuple[FunctionType, Any]]:
    """Yield a method and the functions that it calls, each with the property or static method that it was found as."""
    pending, seen = [method], set[Any]()
    while pending:
        value = pending.pop()
        function = getattr(value, "fget", getattr(value, "__func__", value))
        if function in seen or package_of(function) in OWN:
            continue
        seen.add(function)
        if isinstance(function, FunctionType):
            yield function, value
            pending += [v for p in _places(function, kind) if isinstance(v := p.read(), FOLLOWED)]


def _places(function: FunctionType, kind: type) -> Iterator[Place]:
    """Yield the places to which a function refers."""
    names, loaded, imported = _names(function.__code__)
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    found: list[tuple[str, Callable[[], Any]]] = []
    found += [(n, partial(_content, cell)) for n, cell in pairs]
    fixed = [("default", value) for value in function.__defaults__ or ()]
    fixed += (function.__kwdefaults__ or {}).items()
    fixed += [(name, sys.modules[name]) for name in imported if name in sys.modules]
    found += [(name, partial(_same, value)) for name, value in fixed]
    bases = [vars(base) for base in kind.__mro__]
    # what an instance reads, which a subclass may override later, and what `super()` does
    found += [(n, partial(_first, kind, n)) for n in names if any(n in base for base in bases)]
    found += [(n, partial(base.get, n)) for base in bases for n in names if n in base]
    found += [(n, partial(function.__globals__.get, n)) for n in names if n in function.__globals__]
    shipped = [n for n in loaded if n in vars(builtins) and n not in function.__globals__]
    found += [(n, partial(vars(builtins).get, n)) for n in shipped]
    seen = set[int]()
    while found:
        name, read = found.pop()
        yield Place(f"{function.__name__}.{name}", read)
        value = read()
        if id(value) not in seen:
            seen.add(id(value))
            holders = _holders(value)
            found += [(n, partial(_held, read, n)) for n in names if any(n in d for d in holders)]


def _held(read: Callable[[], Any], name: str) -> Any:
    """The attribute `name` of the module, class or object that `read` gives now."""
    return next((d[name] for d in _holders(read()) if name in d), None)


def _first(kind: type, name: str) -> Any:
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _holders(value: Any) -> list[Mapping[str, Any]]:
    """The dicts in which a module, or a class or an object of a user, has attributes."""
    if isinstance(value, ModuleType):
        return [vars(value)]
    kind = value if isinstance(value, type) else type(value)
    if package_of(kind) in WELL_KNOWN or isinstance(value, FOLLOWED | BuiltinFunctionType):
        return []
    own = [] if kind is value else [getattr(value, "__dict__", {})]
    return own + [vars(base) for base in kind.__mro__ if package_of(base) not in WELL_KNOWN]


def _same(value: Any) -> Any:
    return value


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty one
        return None


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """The names in a function's code; those that it loads as globals or builtins, and the modules that it imports."""
    names = dict.fromkeys(name for each in _codes(code) for name in each.co_names)
    steps = [step for each in _codes(code) for step in dis.get_instructions(each)]
    loaded, imported = (
        tuple(dict.fromkeys(step.argval for step in steps if step.opname == name))
        for name in ("LOAD_GLOBAL", "IMPORT_NAME")
    )
    return tuple(names), loaded, imported


def _steps(function: FunctionType) -> Iterator[dis.Instruction]:
    """Yield the instructions of a function and of those nested in it."""
    return (step for code in _codes(function.__code__) for step in dis.get_instructions(code))


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
