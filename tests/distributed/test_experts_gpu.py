"""Experts over two GPUs of one host, over NCCL and over both kinds of symmetric memory: see `peer_laws.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import peer_laws
import pytest
import torch
from spawned import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs of one host"),
]


GPUS = [
    ("False", peer_laws.DISPATCHERS),
    ("True", peer_laws.DISPATCHERS),
    ("False", peer_laws.OVER_NVSHMEM),
]


@pytest.fixture(scope="module", params=GPUS, ids=["fixed", "expandable", "nvshmem"])
def gpus(request: pytest.FixtureRequest) -> Iterator[tuple[Ranks, peer_laws.Kinds]]:
    """Without and with segments of memory that grow, and with symmetric memory by NVSHMEM."""
    segments, kinds = request.param
    both = Ranks(2, allocator=f"expandable_segments:{segments}")
    yield both, kinds
    both.stop()


@pytest.mark.parametrize("law", peer_laws.LAWS)
def test_law(gpus: tuple[Ranks, peer_laws.Kinds], law: str) -> None:
    both, kinds = gpus
    both.run("peer_laws", law, kinds)


def test_a_rank_that_was_killed_inside_a_dispatch_is_named(tmp_path: Path) -> None:
    both, said = Ranks(2, allocator="expandable_segments:False"), tmp_path / "said"
    with pytest.raises(AssertionError, match="rank 1: died"):
        both.run("peer_laws", "the_second_is_killed_inside_a_dispatch", str(said))
    both.stop()
    assert "rank 1 has ended (process " in said.read_text()
