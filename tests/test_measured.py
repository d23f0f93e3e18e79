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


def test_a_cell_that_failed_stands_in_the_table() -> None:
    cell = {"case": "relu", "rows": 4, "columns": 8, "wrong": "worst element 3"}
    assert tables().bandwidth([cell])[1] == ["relu", "4 x 8", "", "", ""]


def test_a_summary_of_facts_counts_what_it_lists() -> None:
    facts = tables().summary({"cells": 3, "below_bar": {"relu": 0.8}, "wrong": {}})
    assert facts[1:] == [["cells", "3"], ["below_bar", "1"], ["wrong", "0"]]
    rows = tables().summary({"fwd": {"geomean": 1.25, "least": ["relu", 1.1]}})
    assert rows == [["summary", "geomean", "least"], ["fwd", "1.25", "relu 1.1"]]


def test_ways_to_train_show_what_was_predicted() -> None:
    way = {"ms": 3.0, "ratio": 1.02, "quartiles": [1.0, 1.04], "peak_gib": 2.5, "time_error": -0.01}
    rows = tables().ways("rounds", {"plan": way, "save_on_cpu": {"ms": 90.0}})
    assert rows[0][3:] == ["peak GiB", "time over predicted, less 1"]
    assert rows[1:] == [
        ["plan", "3", "1.020 (1.000-1.040)", "2.5", "-0.01"],
        ["save_on_cpu", "90", "", "", ""],
    ]
