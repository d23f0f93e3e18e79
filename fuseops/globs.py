"""Globs over dotted paths: `*` is one segment, or a part of one, `**` any number of them."""

import functools
import re
from collections.abc import Iterable

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
    globs = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    wrong = [g for g in globs if not isinstance(g, str) or not g]
    if wrong:
        raise FuseOpsError(
            f"{what} expects globs over dotted names, such as 'blocks.*', got {wrong[0]!r:.80}."
        )
    return globs
