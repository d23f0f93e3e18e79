"""Pipeline schedules of torch.distributed.pipelining, on two ranks."""

import multiprocessing
import tempfile
from pathlib import Path

import pytest
from pipeline_ranks import MICROBATCHES, WORLD, main


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zero bubble"])
def test_pipeline_schedules_are_exact_and_micro_batches_are_told_apart(
    kind: str, tmp_path: Path
) -> None:
    """Also: the layer of one micro-batch is never taken for that of another."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.NamedTemporaryFile(dir=tmp_path, delete=False) as store:
        pass
    ranks = [
        context.Process(target=main, args=(rank, store.name, kind, answers), daemon=True)
        for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    found = {answer[0]: answer[1:] for answer in (answers.get(timeout=120) for _ in ranks)}
    for process in ranks:
        process.join(timeout=30)
    for rank in range(WORLD):
        equal, facts, ordinals = found[rank]
        assert equal and facts["out_bytes"] > 0
        # Interleaved schedules first try one micro-batch, to learn shapes: an order of its own.
        assert facts["mispredicted"] <= (kind != "1f1b")
        alone = kind == "1f1b" and rank == WORLD - 1  # each backward follows its forward
        assert ordinals == ([0] if alone else list(range(MICROBATCHES)))
        # In the first step, before the order is known. The weight part of a split backward reads
        # again what its input part has read and let go: that comes back on demand.
        assert facts["misses"] <= MICROBATCHES or kind == "zero bubble"
