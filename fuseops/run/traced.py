"""Code that dynamo traces knows objects by numbers, which are constants, and by addresses."""

import ctypes
import itertools
from collections.abc import Iterable, Sequence
from typing import Any


class Table:
    """A `Table` holds objects by int, until their owner drops them.

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
