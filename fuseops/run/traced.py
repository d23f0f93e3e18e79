"""What dynamo sees of a call under torch.compile.

The planner is opaque to dynamo and reached through ints: a key of constants computed in traced code, a constant id, a
look-up in `TABLE`. Conditions are evaluated in traced code, so that their outcome becomes a guard and dim 0 stays free.
Modules go into the planner by address: `id()` makes dynamo guard on their identity, and a constant must be a constant.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fuseops.torch_private import assume_constant_result


class Table:
    """Objects by int, until their owner drops them.

    One attribute an object, since dynamo reads attributes one by one, but would snapshot a whole dict.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)

    def add(self, item: Any) -> int:
        number = next(self._ids)
        setattr(self, f"item{number}", item)
        return number

    def drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            delattr(self, f"item{number}")

    def __getitem__(self, number: int) -> Any:
        return getattr(self, f"item{number}")


TABLE = Table()


def alive(address: int) -> Any:
    """The object at an address that `id()` gave. The traced call holds it, so it is alive."""
    return ctypes.cast(address, ctypes.py_object).value


def distinct(x: Any, inputs: Sequence[Any]) -> list[Any]:
    """Dynamo takes no tensor twice: a repeated one (a residual, a tied weight) is passed as a view of itself."""
    seen = [x]
    for t in inputs:
        seen.append(t.view_as(t) if t is not None and any(t is u for u in seen) else t)
    return seen[1:]


@assume_constant_result
def entry_number(run: int, key: tuple[Any, ...]) -> int:
    """The number of the entry of a key."""
    number: int = alive(run).numbered(alive(run).entry(key))
    return number


@assume_constant_result
def plan_number(run: int, entry: int, reasons: tuple[str | None, ...]) -> int:
    """The number of the plan of an entry, given the outcome of its conditions."""
    plan = alive(run).plan_of(TABLE[entry], reasons)
    for segment in plan.segments:
        segment.number = alive(run).numbered(segment)
    number: int = alive(run).numbered(plan)
    return number


def plan(run: Any, key: tuple[Any, ...], reasons: Callable[[Any], tuple[str | None, ...]]) -> Any:
    """The plan of a call, found in traced code."""
    entry = entry_number(id(run), key)
    return TABLE[plan_number(id(run), entry, reasons(TABLE[entry]))]
