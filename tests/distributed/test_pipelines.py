"""Pipelines on two ranks equal one process, to the bit. The laws stand in `schedule_laws.py`."""

from __future__ import annotations

import importlib

import pair_laws
import pytest
import rows
import schedule_laws
import torch
from spawned import Ranks

import fuseops as fo
from fuseops.distributed import dw_builder

LAWS = [name for name in vars(schedule_laws) if name.startswith("law_")]


@pytest.mark.parametrize("law", LAWS)
def test_law(ranks: Ranks, law: str) -> None:
    ranks.run("schedule_laws", law)


@pytest.mark.parametrize("law", [name for name in vars(pair_laws) if name.startswith("law_")])
def test_pairs(ranks: Ranks, law: str) -> None:
    ranks.run("pair_laws", law)


def test_a_stage_that_could_delay_nothing_is_told_so() -> None:
    with pytest.raises(fo.FuseOpsError, match="no Linear or GroupedLinear"):
        dw_builder(fo.Sequential(fo.ops.SiLU()))


def test_a_stage_whose_gradients_nobody_would_reduce_is_refused() -> None:
    wrapped = torch.nn.parallel.DistributedDataParallel.__new__(
        torch.nn.parallel.DistributedDataParallel
    )
    torch.nn.Module.__init__(wrapped)
    wrapped.parameters_to_ignore = set()  # which it has before it is given its module
    wrapped.module = fo.Sequential(fo.ops.Linear(2, 2))
    with pytest.raises(fo.FuseOpsError, match="Shard the stage by fully_shard"):
        dw_builder(wrapped)


def test_every_cell_of_the_table_has_a_law() -> None:
    cells = {cell for found in rows.ROWS.values() for cell in found.values()}
    assert all(hasattr(importlib.import_module(module), law) for module, law in cells)
    assert {column for found in rows.ROWS.values() for column in found} == {*rows.COLUMNS}
