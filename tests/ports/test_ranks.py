"""Cells of the matrix that need two ranks, over gloo. See `ranks.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from features import PORTS, Cell, cells, refusal, title
from ranks import Ranks

SPREAD = [cell for cell in cells() if any(feature.ranks > 1 for feature in cell)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    both = Ranks()
    yield both
    both.stop()


@pytest.mark.parametrize("cell", SPREAD, ids=title)
@pytest.mark.parametrize("name", PORTS)
def test_cell(ranks: Ranks, name: str, cell: Cell) -> None:
    refused = refusal(name, cell)
    for rank, outcome in enumerate(ranks.run(name, tuple(f.name for f in cell))):
        if refused is not None:
            assert refused.error.__name__ in outcome.kinds, outcome.trace
            assert re.search(refused.match, outcome.error or ""), outcome.trace
            continue
        if "it came with 2.12" in (outcome.error or ""):
            pytest.skip("fully_shard of torch 2.11 knows one mesh, and experts have their own")
        assert outcome.error is None, f"rank {rank}: {outcome.trace}"
        assert not outcome.differences, f"rank {rank}"
