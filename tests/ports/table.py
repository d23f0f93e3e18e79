"""Writes docs/compatibility.md from the declared features and refusals, each cell of which the matrix proves.

Run it: python tests/ports/table.py            (--check: fail when the committed file is stale)
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "distributed"))

import rows
from features import FEATURES, NOTES, PORTS, REFUSED, refusal

FILE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
HEAD = """# Compatibility

Two models built of fuseops ops train as the stock ones do: the same outputs, losses and gradients, under every feature
of a table and every pair of two. `tests/ports` runs them on the CPU: in CI every cell, elsewhere a third of the pairs,
and inductor on one port a cell. It writes this file from the same data (`python tests/ports/table.py`), and CI fails
when the file is stale.

- **equal**: equal to the stock implementation, in float64 within rounding. Autocast and FP8 round, so they are compared
  with the ported model with fusion off, under the same numerics.
- **refused**: an error says so and names both sides. The number is that of the reason, below.
- The diagonal is the feature alone.
"""


def text() -> str:
    """The whole file."""
    parts = [HEAD, *(_port(name) for name in PORTS), rows.text(), _refusals(), _notes()]
    return "\n".join(part for part in parts if part)


def _port(name: str) -> str:
    head = "| | | " + " | ".join(str(i) for i, _ in enumerate(FEATURES, 1)) + " |"
    rows = [head, "|---|---|" + "---|" * len(FEATURES)]
    for i, row in enumerate(FEATURES):
        found = [_cell(name, i, j) for j in range(len(FEATURES))]
        rows.append(f"| {i + 1} | {row.name} | " + " | ".join(found) + " |")
    return f"## {name}\n\n" + "\n".join(rows) + "\n"


def _cell(port: str, i: int, j: int) -> str:
    if j > i:
        return ""
    cell = (FEATURES[i],) if i == j else (FEATURES[j], FEATURES[i])
    refused = refusal(port, cell)
    return "equal" if refused is None else f"refused ({REFUSED.index(refused) + 1})"


def _refusals() -> str:
    if not REFUSED:
        return "## Refused\n\nNothing.\n"
    lines = [
        f"{k}. {' + '.join(entry.features)} ({', '.join(entry.ports)}): `{entry.error.__name__}`. {entry.because}"
        for k, entry in enumerate(REFUSED, 1)
    ]
    return "## Refused, and why\n\n" + "\n".join(lines) + "\n"


def _notes() -> str:
    return "## Notes\n\n" + "\n".join(f"- {note}" for note in NOTES) + "\n"


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(0 if FILE.read_text(encoding="utf-8") == text() else f"{FILE} is stale")
    FILE.write_text(text(), encoding="utf-8")
