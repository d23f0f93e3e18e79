"""Writes the tables of docs/huggingface.md, each cell of which `test_hf_models.py` proves.

Run it: python tests/hf/hf_table.py            (--check: fail when the committed file is stale)
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from families import FAMILIES, stock
from hf_features import FEATURES

from fuseops.integrations import hf

FILE = Path(__file__).resolve().parents[2] / "docs" / "huggingface.md"
PARTS = ("experts", "router", "mlp", "norm", "rope", "loss")


def text() -> str:
    """The whole file, with both tables as they are now."""
    page = FILE.read_text(encoding="utf-8")
    for name, rows in (("replaced", _replaced()), ("features", _features())):
        block = f"<!-- {name} -->\n" + "\n".join(rows) + f"\n<!-- end of {name} -->"
        page = re.sub(f"<!-- {name} -->.*?<!-- end of {name} -->", block, page, flags=re.DOTALL)
    return page


def _replaced() -> list[str]:
    """How many modules of each kind run, and what does not."""
    rows = [
        "| family | " + " | ".join(PARTS) + " | left to stock |",
        "|---" * (len(PARTS) + 2) + "|",
    ]
    for name in FAMILIES:
        report = hf.apply(stock(name), dry_run=True)
        cells = []
        for part in PARTS:
            said = dict.fromkeys(e.by for e in report.replaced if e.part == part)
            cells.append("; ".join(map(str, said)))
        left = dict.fromkeys(f"{e.module}: {e.why}" for e in report.left)
        rows.append(f"| {name} | " + " | ".join(cells) + f" | {'; '.join(left)} |")
    return rows


def _features() -> list[str]:
    rows = ["| | " + " | ".join(FAMILIES) + " |", "|---" * (len(FAMILIES) + 1) + "|"]
    for feature in FEATURES:
        cells = ["equal" if name in feature.families else "" for name in FAMILIES]
        rows.append(f"| {feature.name} | " + " | ".join(cells) + " |")
    return rows


def main() -> None:
    now = text()
    if "--check" in sys.argv:
        sys.exit(
            0 if now == FILE.read_text(encoding="utf-8") else f"{FILE} is stale: run {__file__}"
        )
    FILE.write_text(now, encoding="utf-8")


if __name__ == "__main__":
    main()
