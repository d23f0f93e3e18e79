"""The reference layout as its one command runs it: eight processes over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "distributed_layout.py"


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("HYPOTHESIS_PROFILE") != "nightly",
    reason="eight processes are for a nightly: HYPOTHESIS_PROFILE=nightly",
)
def test_the_reference_layout_runs_on_eight_processes(tmp_path: Path) -> None:
    """Four ranks run its laws in `fsdp_laws.py`."""
    out = tmp_path / "found.json"
    command = [
        "--layout",
        "reference",
        "--backend",
        "gloo",
        "--ranks",
        "8",
        "--small",
        "--seconds",
        "0",
    ]
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), *command, "--out", str(out)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(out.read_text())
    assert found["mesh"] == {"pp": 2, "dp": 1, "ep": 4} and [*found["weak_scaling"]] == [*"1248"]
    for row in found["ways"]["host_counts"]:
        assert row["gradients_bit_equal"] and row["not_as_planned"] == []
