"""`attributes_set` is how a scope of the package changes a setting: for the time that it is open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def attributes_set(values: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Sets attributes inside, and restores them.   values: object, name and value of each"""
    inside = [*values]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in inside]
    try:
        for owner, name, value in inside:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
