"""Checks of arguments that users pass: numbers and flags, values of a type, several of them, amounts of memory.

They raise FuseOpsError where the argument is given, and import nothing else, so that any part of fuseops can use them.
"""

import math
import operator
import re
from collections.abc import Iterable
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex

from fuseops.errors import FuseOpsError

UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(value: int | str, what: str) -> int:
    """A number of bytes from itself, or from text such as "11GiB" or "1.5 GB".

    Raises FuseOpsError for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if isinstance(value, str)
        else None
    )
    if found is None or found[2].upper() not in UNITS:
        raise FuseOpsError(
            f"{what} expects bytes, as a number or as text such as '11GiB', got {shown(value)}."
        )
    return int(float(found[1]) * UNITS[found[2].upper()])


def shown(value: object) -> str:
    """A value in a message, in one line: a tensor, or another array, by its dtype and shape."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape is not None and not isinstance(value, type):
        return f"{type(value).__name__}, {dtype} of shape {tuple(shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def instance_of(value: Any, kinds: Any, what: str, expected: str) -> Any:
    """`value`, if it is of one of `kinds`, a type or several.  Raises FuseOpsError, with `expected`, for others."""
    if not isinstance(value, kinds):
        raise FuseOpsError(f"{what} expects {expected}, got {shown(value)}.")
    return value


def several(given: Any, kinds: Any, what: str, expected: str) -> tuple[Any, ...]:
    """The items of an iterable, all of `kinds`.  Raises FuseOpsError, with `expected`, for others: text is no iterable.

    A Tensor is one value too, whatever its axes.
    """
    alone = isinstance(given, str | bytes) or hasattr(given, "ndim")
    is_several = isinstance(given, Iterable) and not alone
    items = tuple(given) if is_several else (given,)
    for item in items:
        if not (is_several and isinstance(item, kinds)):
            raise FuseOpsError(f"{what} expects {expected}, got {shown(item)}.")
    return items


def as_path(path: Any, what: str) -> Path:
    """The path of a file.  Raises FuseOpsError for what is no path, and for an empty one, which is a folder."""
    if not isinstance(path, str | PathLike) or path == "":
        raise FuseOpsError(f"{what} expects the path of a file, got {shown(path)}.")
    return Path(path)


def is_one_of(value: Any, choices: Iterable[Any]) -> bool:
    """Whether a value is one of the choices. An array is none: to compare it gives an array."""
    return not hasattr(value, "ndim") and value in choices


def is_number(value: object) -> bool:
    """Whether an option is a finite real number."""
    return isinstance(value, Real) and math.isfinite(value)


def _is_one(value: object) -> bool:
    """Whether a value may be one number: neither a class, whose instances may be, nor an array of several axes."""
    return not isinstance(value, type) and getattr(value, "ndim", 0) == 0


def _is_whole(value: Any) -> bool:
    """Whether a value is one integer. An array of floats is none, although it has an `__index__`."""
    if isinstance(value, bool) or not (isinstance(value, SupportsIndex) and _is_one(value)):
        return False
    try:
        return not hasattr(value, "ndim") or operator.index(value) == value
    except TypeError:
        return False


def check_numbers(op: str, least: float = -math.inf, **options: Any) -> None:
    """Raise FuseOpsError for an option of `op` that is no finite number from `least` on. A number may be a tensor."""
    for name, value in options.items():
        number = float(value) if isinstance(value, SupportsFloat) and _is_one(value) else math.nan
        if not (math.isfinite(number) and number >= least):
            wanted = "a finite number" + (f" from {least:g} on" if least > -math.inf else "")
            raise FuseOpsError(f"{op}: {name} is {shown(value)}, expected {wanted}.")


def check_positive(op: str, **options: Any) -> None:
    """Raise FuseOpsError for an option of `op` that is no finite number above 0."""
    for name, value in options.items():
        if not (is_number(value) and value > 0):
            raise FuseOpsError(f"{op}: {name} is {shown(value)}, expected a finite number above 0.")


def check_flags(op: str, **options: Any) -> None:
    """Raise FuseOpsError for an option of `op` that is neither true nor false: a bool, or 0 or 1."""
    for name, value in options.items():
        if not isinstance(value, int) or value not in (0, 1):
            raise FuseOpsError(f"{op}: {name} is {shown(value)}, expected True or False.")


def check_integers(op: str, least: int | None = None, **options: Any) -> None:
    """Raise FuseOpsError for an option of `op` that is no integer from `least` on: a bool is none."""
    for name, value in options.items():
        whole = type(value) is int or _is_whole(value)
        if not whole or (least is not None and value < least):
            wanted = "an integer" + ("" if least is None else f" from {least} on")
            raise FuseOpsError(f"{op}: {name} is {shown(value)}, expected {wanted}.")
