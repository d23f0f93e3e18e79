"""Experts over two ranks, over gloo: see `expert_laws.py`."""

from __future__ import annotations

from collections.abc import Iterator

import expert_laws
import pytest
from spawned import Ranks

LAWS = [name for name in vars(expert_laws) if name.startswith("law_")]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    both = Ranks(2)
    yield both
    both.stop()


@pytest.mark.parametrize("law", LAWS)
def test_law(ranks: Ranks, law: str) -> None:
    ranks.run("expert_laws", law)
