"""Printing: tables through rich where it is installed and somebody looks, plain text otherwise;
JSON for programs.
"""

import importlib.util
import json
import sys
from collections.abc import Sequence
from typing import Any

SCHEMA_VERSION = 1


def as_json(command: str, **fields: Any) -> None:
    """One object on stdout."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, "command": command, **fields}, indent=2))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column is a name, the others are aligned right when they are numbers."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        _rich(header, rows)
        return
    every = [header, *rows]
    widths = [max(len(row[k]) for row in every) for k in range(len(header))]
    for row in every:
        cells = [
            c.rjust(w) if _is_number(c) else c.ljust(w) for c, w in zip(row, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _rich(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False)
    for k, title in enumerate(header):
        numbers = all(_is_number(row[k]) for row in rows)
        shown.add_column(title, justify="right" if numbers else "left")
    for row in rows:
        shown.add_row(*map(Text, row))  # as text: a cell may hold square brackets
    Console().print(shown)


def _is_number(cell: str) -> bool:
    return cell.replace(".", "", 1).isdigit()
