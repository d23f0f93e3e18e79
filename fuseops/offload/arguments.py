"""Checks of arguments that users pass: amounts of memory, whole numbers, values of a type."""

import re
from typing import Any

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
            f"{what} expects bytes, as a number or as text such as '11GiB', got {value!r}."
        )
    return int(float(found[1]) * UNITS[found[2].upper()])


def whole_number(value: Any, what: str, least: int = 0) -> int:
    """`value`, if it is an int of at least `least`.  Raises FuseOpsError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise FuseOpsError(f"{what} expects a whole number, {least} or more, got {value!r}.")
    return value


def instance_of(value: Any, kinds: Any, what: str, expected: str) -> Any:
    """`value`, if it is of one of `kinds`, a type or several.  Raises FuseOpsError, with `expected`, for others."""
    if not isinstance(value, kinds):
        raise FuseOpsError(f"{what} expects {expected}, got {value!r:.80}.")
    return value
