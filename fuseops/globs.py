"""Globs over dotted paths: `*` is one segment, or a part of one, `**` any number of them."""

import functools
import re
from collections.abc import Iterable

from fuseops.arguments import several
from fuseops.errors import FuseOpsError


@functools.cache
def _compiled(glob: str) -> re.Pattern[str]:
    pattern = ""
    for part in re.split(r"(\*\*\.?|\.\*\*$|\*|\?)", glob):
        if part == "**.":
            pattern += r"(?:.*\.)?"
        elif part == ".**":
            pattern += r"(?:\..*)?"
        elif part == "**":
            pattern += ".*"
        elif part == "*":
            pattern += r"[^.]*"
        elif part == "?":
            pattern += r"[^.]"
        else:
            pattern += re.escape(part)
    return re.compile(pattern)


def matches(glob: str, path: str) -> bool:
    """Whether the whole path matches."""
    return _compiled(glob).fullmatch(path) is not None


def as_globs(value: str | Iterable[str], what: str) -> tuple[str, ...]:
    """One glob or several.  Raises FuseOpsError for anything else."""
    expected = "globs over dotted names, such as 'blocks.*'"
    globs: tuple[str, ...] = several(
        (value,) if isinstance(value, str) else value, str, what, expected
    )
    if "" in globs:
        raise FuseOpsError(f"{what} expects {expected}, got ''.")
    return globs
