"""Pipeline schedules of torch.distributed.pipelining, on two ranks."""

import multiprocessing
from typing import Any

import pytest
from pipeline_ranks import MICROBATCHES, WORLD, main

KINDS = ("1f1b", "interleaved", "zero bubble")


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    """What each rank says of each kind of schedule: two processes for all of them."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    store = str(tmp_path_factory.mktemp("ranks") / "store")
    ranks = [
        context.Process(target=main, args=(rank, store, KINDS, answers), daemon=True)
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    found = [answers.get(timeout=600) for _ in range(WORLD * len(KINDS))]
    for process in ranks:
        process.join(timeout=60)
    return {(kind, rank): said for kind, rank, *said in found}


@pytest.mark.parametrize("kind", KINDS)
def test_pipeline_schedules_are_exact_and_micro_batches_are_told_apart(
    kind: str, answered: dict[tuple[str, int], Any]
) -> None:
    """Also: the layer of one micro-batch is never taken for that of another."""
    for rank in range(WORLD):
        equal, facts, ordinals = answered[kind, rank]
        assert equal and facts["out_bytes"] > 0
        # Interleaved schedules first try one micro-batch, to learn shapes: an order of its own.
        assert facts["mispredicted"] <= (kind != "1f1b")
        alone = kind == "1f1b" and rank == WORLD - 1  # each backward follows its forward
        assert ordinals == ([0] if alone else list(range(MICROBATCHES)))
        # In the first step, before the order is known. The weight part of a split backward reads
        # again what its input part has read and let go: that comes back on demand.
        assert facts["misses"] <= MICROBATCHES or kind == "zero bubble"
