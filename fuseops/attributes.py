"""How a scope of the package changes attributes for the time that it is open, and which objects have some that nobody
should look into.
"""

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


OWN = frozenset({"fuseops", "torch"})
"""Packages whose objects keep in their attributes what they have built, in agreement with what is elsewhere."""
WELL_KNOWN = OWN | {"builtins", "collections"}
"""Packages of types that are not a user's."""


def package_of(value: Any) -> str:
    """The package of a class or function, or an empty string."""
    return (getattr(value, "__module__", None) or "").partition(".")[0]
