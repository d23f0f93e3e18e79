"""How far a command is: a bar where somebody looks and rich is installed, a line otherwise."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Told = Callable[[str, int, int], None]  # what is done now, how many are done, of how many


@contextmanager
def progress(title: str, quiet: bool, lines: bool = True) -> Iterator[Told]:
    """What is told to the function that this gives is shown on stderr, and gone at the end.

    lines: without a bar, `title` is a line. With `quiet` nothing is shown.
    """
    if not quiet and sys.stderr.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task: Any = bar.add_task(title, total=None)
            yield lambda what, done, total: bar.update(
                task, completed=done, total=total, description=f"{title} {what}"
            )
        return
    if not quiet and lines:
        print(title, file=sys.stderr, flush=True)
    yield lambda what, done, total: None
