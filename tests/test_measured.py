"""docs/measured.md says what the committed results say."""

import importlib.util
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parents[1] / "benchmarks" / "tables.py"


def tables() -> Any:
    spec = importlib.util.spec_from_file_location("tables", TABLES)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_not_stale() -> None:
    made = tables()
    said = made.PAGE.read_text(encoding="utf-8")
    assert said == made.page(), "stale: python benchmarks/tables.py"


def test_a_peer_that_is_faster_is_named() -> None:
    us = {"fuseops": 10.0, "copy": 9.0, "compile": 9.5, "eager": 11.0}
    cell = {"case": "relu", "rows": 4, "columns": 8, "us": us, "share_of_copy": 0.9}
    assert tables().bandwidth([cell])[1] == ["relu", "4 x 8", "10", "0.9", "compile 9.5"]
