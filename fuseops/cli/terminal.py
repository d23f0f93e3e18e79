"""What commands take and print: values of options, tables as plain text, JSON for programs, how far they are; and the
threads that they run on.
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fuseops.errors import FuseOpsError
from fuseops.offload.arguments import parse_bytes
from fuseops.words import aligned

SCHEMA_VERSION = 1
Told = Callable[[str, int, int], None]  # what is done now, how many are done, of how many


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, got {text!r}")
    return int(text)


def number_option(parser: Any, option: str, text: str, default: int | None = None) -> None:
    """Add an option that takes a whole number from 1 on."""
    said = "" if default is None else f" (default {default})"
    parser.add_argument(option, type=positive, default=default, metavar="N", help=f"{text}{said}")


def file_option(parser: Any, option: str, text: str) -> None:
    """Add an option that takes a path."""
    parser.add_argument(option, type=Path, metavar="FILE", help=text)


def amount(text: str) -> int:
    """Bytes: a number, or text such as 11GiB."""
    try:
        return parse_bytes(text, "")
    except FuseOpsError:
        raise argparse.ArgumentTypeError(
            f"expected bytes such as 11GiB, 500MB or 1073741824, got {text!r}"
        ) from None


def as_json(command: str, **fields: Any) -> None:
    """Print what a command found as one JSON object."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, "command": command, **fields}, indent=2))


def table(rows: Sequence[Sequence[str]]) -> None:
    """Titles, then rows; columns of numbers are aligned right. Nothing is cut off: a line that the terminal is too
    narrow for goes on in the next.
    """
    numbers = [
        k for k, (_, *cells) in enumerate(zip(*rows, strict=True)) if all(map(_is_number, cells))
    ]
    for line in aligned(rows, numbers):
        print(line)


def _is_number(cell: str) -> bool:
    return not cell or cell.replace(".", "", 1).isdigit()


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """CPU ops run on so many threads inside; None: on as many as before."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count or before)
        yield
    finally:
        torch.set_num_threads(before)


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
