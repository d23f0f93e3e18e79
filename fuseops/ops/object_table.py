"""References to objects in traced code: by number or by address, which are constants to dynamo."""

import ctypes
import itertools
from collections.abc import Iterable, Sequence
from typing import Any


class ObjectTable:
    """An `ObjectTable` maps numbers to objects, until their owner drops them.

    Each object is an attribute: dynamo reads attributes one by one, but would snapshot a whole dict.
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


TABLE = ObjectTable()


def object_at(address: int) -> Any:
    """The object of an `id()`. The caller must hold a reference to it, as a traced call does."""
    return ctypes.cast(address, ctypes.py_object).value


def dedupe_inputs(x: Any, inputs: Sequence[Any]) -> list[Any]:
    """The inputs, a repeated one (a residual, a tied weight) as a view of itself: dynamo takes no tensor twice."""
    seen = [x]
    for t in inputs:
        seen.append(t.view_as(t) if t is not None and any(t is u for u in seen) else t)
    return seen[1:]
