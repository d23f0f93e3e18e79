"""Printing: tables as plain text, JSON for programs."""

import json
from collections.abc import Sequence
from typing import Any

SCHEMA_VERSION = 1


def as_json(command: str, **fields: Any) -> None:
    """Print what a command found as one JSON object."""
    print(json.dumps({"schema_version": SCHEMA_VERSION, "command": command, **fields}, indent=2))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Numbers are aligned right. Nothing is cut off: a line that the terminal is too narrow for goes on in the next."""
    every = [header, *rows]
    widths = [max(len(row[k]) for row in every) for k in range(len(header))]
    for row in every:
        cells = [
            c.rjust(w) if _is_number(c) else c.ljust(w) for c, w in zip(row, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())


def _is_number(cell: str) -> bool:
    return cell.replace(".", "", 1).isdigit()
