"""What the attributes of an op hold, and whether that may change while the op has the same attributes."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from enum import Enum
from itertools import islice
from operator import is_
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseops.attributes import OWN, package_of
from fuseops.torch_private import version

from .op import NON_CONFIG_ATTRS

IRRELEVANT = NON_CONFIG_ATTRS | {"_path", "_prefix", "renames", "across_ranks", "delays"}
"""Attributes of an op that its results do not depend on."""
CONSTANTS = (int, float, str, bool, type(None), torch.dtype, torch.device)
OPAQUE = (type, ModuleType, nn.Module, Enum)  # not looked into
MAX_VALUES = 1000  # that one attribute holds and that are watched; those nearest to it


def may_change(value: Any) -> bool:
    """Whether an attribute of this value may become another without an assignment to it."""
    items = value if isinstance(value, tuple) else (value,)
    return not all(isinstance(item, CONSTANTS) for item in items)


class Contents(NamedTuple):
    """A `Contents` is all that a value holds: its items and attributes, theirs, and so on, down to constants, tensors
    and objects that show no attributes.
    """

    objects: list[Any]  # kept alive, so that no other takes their addresses
    values: list[Any]  # constants, versions of tensors, and how much an object holds

    @classmethod
    def of(cls, value: Any) -> Contents:
        objects: list[Any] = []
        values: list[Any] = []
        pending, seen = [value], set[int]()
        for each in pending:
            if isinstance(each, CONSTANTS):
                values.append((type(each), each))
                continue
            objects.append(each)
            if isinstance(each, Tensor):
                values.append(version(each))
            elif id(each) not in seen:
                seen.add(id(each))
                inside = items_of(each)
                values.append(len(inside))
                pending += islice(inside, MAX_VALUES - len(pending))
        return cls(objects, values)

    def equals(self, other: Contents) -> bool:
        """Whether these are the same objects, constants and versions."""
        return (
            len(self.objects) == len(other.objects)
            and all(map(is_, self.objects, other.objects))
            and self.values == other.values
        )


def items_of(value: Any) -> list[Any]:
    """The items and attributes of a container or an object, and what a function closes over."""
    if isinstance(value, OPAQUE):
        return []
    found: list[Any] = []
    if isinstance(value, dict):
        found += [*value, *value.values()]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        found += value
    elif isinstance(value, FunctionType):
        found += value.__closure__ or ()
    elif isinstance(value, CellType):
        with suppress(ValueError):  # an empty one
            found.append(value.cell_contents)
    if package_of(type(value)) not in OWN:
        own = getattr(value, "__dict__", {})
        found += [*own, *own.values()]
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            found += [getattr(value, name, None) for name in names if name != "__weakref__"]
    return found
