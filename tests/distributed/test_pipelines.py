"""Pipelines on two ranks equal one process, to the bit. The laws stand in `pipeline_ranks.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pipeline_ranks
import pytest
from spawned import Ranks

import fuseops as fo
from fuseops.distributed import dw_builder

LAWS = [name for name in vars(pipeline_ranks) if name.startswith("law_")]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    both = Ranks(2)
    yield both
    both.stop()


@pytest.mark.parametrize("law", LAWS)
def test_law(ranks: Ranks, law: str) -> None:
    ranks.run("pipeline_ranks", law)


def test_a_stage_that_could_delay_nothing_is_told_so() -> None:
    with pytest.raises(fo.FuseOpsError, match="no Linear or GroupedLinear"):
        dw_builder(fo.Sequential(fo.ops.SiLU()))
