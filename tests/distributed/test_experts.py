"""Experts over two ranks, over gloo: see `expert_laws.py`."""

from __future__ import annotations

from collections.abc import Iterator

import expert_laws
import fsdp_laws
import pytest
from spawned import Ranks

LAWS = [name for name in vars(expert_laws) if name.startswith("law_")]


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    four = Ranks(4)
    yield four
    four.stop()


@pytest.mark.parametrize("law", LAWS)
def test_law(ranks: Ranks, law: str) -> None:
    ranks.run("expert_laws", law)


@pytest.mark.parametrize("law", [n for n in vars(fsdp_laws) if n.startswith("law_")])
def test_beside_fsdp(four: Ranks, law: str) -> None:
    four.run("fsdp_laws", law)
