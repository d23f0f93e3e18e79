"""Common parts of commands: options and their types, output as a table or JSON, a progress bar, CPU threads."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fuseops.arguments import parse_bytes
from fuseops.errors import FuseOpsError
from fuseops.words import aligned

SCHEMA_VERSION = 1
ProgressCallback = Callable[[str, int, int], None]  # (current part, number done, total)


def positive(text: str) -> int:
    """Parse a whole number, 1 or more."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, got {text!r}")
    return int(text)


def number_option(parser: Any, option: str, text: str, default: int | None = None) -> None:
    """Add an option that takes a whole number, 1 or more."""
    suffix = "" if default is None else f" (default {default})"
    parser.add_argument(option, type=positive, default=default, metavar="N", help=f"{text}{suffix}")


def file_option(parser: Any, option: str, text: str) -> None:
    """Add an option that takes a path."""
    parser.add_argument(option, type=Path, metavar="FILE", help=text)


def byte_count(text: str) -> int:
    """Parse a number of bytes, with or without a unit: 11GiB."""
    try:
        return parse_bytes(text, "")
    except FuseOpsError:
        raise argparse.ArgumentTypeError(
            f"expected bytes such as 11GiB, 500MB or 1073741824, got {text!r}"
        ) from None


def print_json(command: str, **fields: Any) -> None:
    """Print the result of a command as one JSON object."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, "command": command, **fields}, indent=2))


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print a table, the first row being its titles. Columns of numbers are right-aligned; long lines are not cut."""
    numbers = [
        k for k, (_, *cells) in enumerate(zip(*rows, strict=True)) if all(map(_is_number, cells))
    ]
    for line in aligned(rows, numbers):
        print(line)


def _is_number(cell: str) -> bool:
    return not cell or cell.replace(".", "", 1).isdigit()


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run CPU ops on `count` threads inside; None leaves their number."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(count or before)
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def progress(title: str, quiet: bool, lines: bool = True) -> Iterator[ProgressCallback]:
    """Show a progress bar on stderr until the end, and give the function that updates it.

    lines: print `title` as a line where there is no bar.  quiet: show nothing.
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
