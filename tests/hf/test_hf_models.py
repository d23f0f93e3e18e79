"""Every family under every feature of the table: what the stock model gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from families import FAMILIES
from hf_features import FEATURES, Feature

CELLS = [(feature, name) for feature in FEATURES for name in feature.families]
# torch's and transformers' own
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.*(rank|alpha)_pattern keys:RuntimeWarning"),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("feature, name", CELLS, ids=lambda v: getattr(v, "name", v))
def test_cell(feature: Feature, name: str) -> None:
    feature.run(name)


def test_every_family_has_cells() -> None:
    assert {name for _, name in CELLS} == set(FAMILIES)
