"""What modules hold besides parameters, buffers, submodules and hooks, and how a trial run restores it.

A forward may count its calls, collect losses in a list, keep its last output, or make a table once. After a trial run
all of that is as before: the same containers with the same elements. What was made once is made again by the first real
step, as it would have been without the trial. A module that the trial has built, which has other parameters or
submodules now (`torch.nn.LazyLinear`), keeps all it made, since those stay.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fuseops.attributes import WELL_KNOWN, package_of
from fuseops.ops.op import Op
from fuseops.ops.paths import walk
from fuseops.ops.scopes import OF_THIS_PROCESS
from fuseops.run.generators import generators_of, is_generator

# names of a module's own tables and settings, and of what fuseops keeps in it for the next step
OWNED = frozenset(vars(nn.Module())) | OF_THIS_PROCESS
# exactly these: a subclass, such as a registry of transformers, may do something else when it is read or written
CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)
Container = dict[Any, Any] | list[Any] | set[Any] | deque[Any]


def values_held(module: nn.Module) -> Iterator[Any]:
    """Yields the attributes of a module, what lies in containers among them, and the `__dict__` of plain objects with
    what it holds. Objects in objects are not looked into.
    """
    own = ((value, True) for name, value in vars(module).items() if name not in OWNED)
    pending, seen = [*own], set[int]()
    while pending:
        value, objects = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if type(value) in (*CONTAINERS, tuple):
            inner = value.values() if isinstance(value, dict) else value
            pending += [(v, objects) for v in inner]
        elif objects and _is_plain(value):
            pending.append((vars(value), False))


def _is_plain(value: Any) -> bool:
    """Whether a value is an object of attributes, such as a SimpleNamespace, but none of torch or fuseops."""
    if isinstance(value, type | nn.Module | Tensor):
        return False
    return (
        package_of(type(value)) not in WELL_KNOWN and type(getattr(value, "__dict__", None)) is dict
    )


def held_tensors(model: nn.Module) -> list[Tensor]:
    """Tensors that modules hold, neither parameters nor buffers, such as a router's token counts."""
    found = (v for _, m in walk(model) for v in values_held(m) if isinstance(v, Tensor))
    return [*{id(t): t for t in found if not isinstance(t, nn.Parameter)}.values()]


def lists_held(model: nn.Module) -> list[Container]:
    """The lists and queues that modules hold, in which steps collect."""
    held = (value for _, module in walk(model) for value in values_held(module))
    return [value for value in held if type(value) in (list, deque)]


@contextmanager
def contents_restored(containers: Iterable[Container]) -> Iterator[None]:
    """Restores the elements of containers, and their order. One that did not change is not written."""
    before = [(container, _contents(container)) for container in containers]
    try:
        yield
    finally:
        for container, known in before:
            _refill(container, known)


def _contents(container: Container) -> dict[Any, Any] | list[Any]:
    return dict(container) if isinstance(container, dict) else [*container]


def _refill(container: Any, known: dict[Any, Any] | list[Any]) -> None:
    now = _flat(container)
    before = _flat(known)
    if len(now) == len(before) and all(map(is_, now, before)):
        return
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(known)


def _flat(container: Any) -> list[Any]:
    """The elements, or keys and values."""
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


@contextmanager
def held_restored(model: nn.Module) -> Iterator[None]:
    """Restores what modules hold, and which tensors are their buffers, except in modules that were built inside."""
    before = [
        (module, _registered(module), [(c, _contents(c)) for c in _containers(module)])
        for _, module in walk(model)
    ]
    try:
        yield
    finally:
        for module, registered, held in before:
            if _registered(module) == registered:
                for container, known in held:
                    if container is vars(module) and isinstance(known, dict):
                        known = {n: v for n, v in known.items() if n not in OF_THIS_PROCESS}
                        known |= {n: v for n, v in container.items() if n in OF_THIS_PROCESS}
                    _refill(container, known)


def _containers(module: nn.Module) -> Iterator[Container]:
    own = vars(module)
    yield own
    yield own["_buffers"]
    yield from (value for value in values_held(module) if type(value) in CONTAINERS)


def _registered(module: nn.Module) -> tuple[Any, ...]:
    """The class of a module, and the names of its parameters and submodules that are there already."""
    tables: Iterator[Any] = chain(module._parameters.items(), module._modules.items())
    return type(module), [
        name for name, value in tables if value is not None and not is_lazy(value)
    ]


# --- random states


@contextmanager
def rng_restored(model: nn.Module) -> Iterator[None]:
    """Restores the random states of torch, `random` and `numpy.random`, and of the generators that modules hold or that
    the code of ops refers to.
    """
    ready = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    generators: list[Any] = [random, *filter(None, [sys.modules.get("numpy.random")])]
    for _, module in walk(model):
        generators += filter(is_generator, values_held(module))
        if isinstance(module, Op):
            generators += generators_of(module, {}, torch.device("cpu"))
    with torch.random.fork_rng(range(torch.cuda.device_count() if ready else 0)):
        restore = [_restores(g) for g in {id(g): g for g in generators}.values()]
        try:
            yield
        finally:
            for call in restore:
                call()


def _restores(generator: Any) -> Callable[[], Any]:
    """A function that puts back the present state of a generator, or of the module `random` or `numpy.random`."""
    for get, put in (("getstate", "setstate"), ("get_state", "set_state")):
        if hasattr(generator, get):
            return partial(getattr(generator, put), getattr(generator, get)())
    bits = generator.bit_generator  # numpy.random.Generator
    return partial(setattr, bits, "state", bits.state)
