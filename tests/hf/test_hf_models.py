"""Every family under every feature of the table: what the stock model gives."""

from __future__ import annotations

from pathlib import Path

import hf_table
import pytest
import transformers
from families import FAMILIES
from hf_features import FEATURES, Feature

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
CELLS = [(feature, name) for feature in FEATURES for name in feature.families]
# torch's and transformers' own
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.*(rank|alpha)_pattern keys:RuntimeWarning"),
]


@pytest.mark.parametrize("feature, name", CELLS, ids=[f"{f.name}-{name}" for f, name in CELLS])
def test_cell(feature: Feature, name: str) -> None:
    feature.run(name)


def test_every_family_has_cells() -> None:
    assert {name for _, name in CELLS} == set(FAMILIES)


def test_the_tables_are_up_to_date() -> None:
    """`python tests/hf/hf_table.py` writes them, with the transformers of constraints.txt."""
    if f"transformers=={transformers.__version__}" not in CONSTRAINTS.read_text("utf-8").split():
        pytest.skip("another transformers, whose classes may have other names")
    assert hf_table.FILE.read_text(encoding="utf-8") == hf_table.text()
