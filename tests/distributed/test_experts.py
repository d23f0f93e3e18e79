"""Experts over two ranks, over gloo: see `expert_laws.py`."""

from __future__ import annotations

import importlib
import math
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import again_laws
import expert_laws
import fsdp_laws
import host_memory
import pytest
import torch
import torch.distributed as dist
from spawned import Ranks

from fuseops import machine
from fuseops.distributed import clip_grad_norm_
from fuseops.distributed.dispatch import choose, device_counts, lost, symmetric

LAWS = [name for name in vars(expert_laws) if name.startswith("law_")]


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    four = Ranks(4)
    yield four
    four.stop()


@pytest.mark.parametrize("law", LAWS)
def test_law(ranks: Ranks, law: str) -> None:
    ranks.run("expert_laws", law)


@pytest.mark.parametrize("laws", ["expert_laws", "fsdp_laws", "peer_laws"])
def test_laws_that_are_imported_share_no_memory_of_the_host(laws: str) -> None:
    """Laws of GPUs import laws of CPUs, and meet what is real."""
    importlib.import_module(laws)
    assert symmetric._allocate is host_memory.ON_GPUS and device_counts.LEAST > 0
    assert device_counts._allocate is host_memory.OVER_NVSHMEM


def test_a_buffer_of_another_library_fits(ranks: Ranks) -> None:
    ranks.run("buffer_laws", "law_a_buffer_of_another_library_fits")


@pytest.mark.parametrize("law", [n for n in vars(fsdp_laws) if n.startswith("law_")])
def test_beside_fsdp(four: Ranks, law: str) -> None:
    four.run("fsdp_laws", law)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_two_ranks_is_read_by_others(
    ranks: Ranks, four: Ranks, tmp_path: Path
) -> None:
    ranks.run("fsdp_laws", "saves", str(tmp_path))
    four.run("fsdp_laws", "reads", str(tmp_path), 2)
    alone, one, _ = fsdp_laws.trained_alone(2)
    fsdp_laws.finds(str(tmp_path), fsdp_laws.net(), alone, one)


def test_a_rank_that_was_killed_is_named_and_training_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    both = Ranks(2)
    with pytest.raises(AssertionError) as raised:
        both.run("fsdp_laws", "the_second_is_killed_inside_a_dispatch", str(tmp_path))
    both.stop()
    assert str(raised.value) == "rank 1: died"
    ranks.run("fsdp_laws", "goes_on", str(tmp_path))


def test_nobody_waits_in_a_group_that_was_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setitem(lost._pids, dist.group.WORLD, {0: gone.pid})
    try:
        assert [*lost.lost_ranks()] == [
            f"rank 0 has ended (process {gone.pid}), and this one waited for it."
        ]
    finally:
        dist.destroy_process_group()
    assert not [*lost.lost_ranks()]


def voted(
    patch: pytest.MonkeyPatch, gpus: Sequence[int], visible: int = 3, arch: int = 90
) -> list[choose.Ballot]:
    """The ballots of ranks on these GPUs of one machine, of which 1 and 2 do not reach each other."""
    patch.setattr(choose, "HAS_TRITON", True)
    patch.setattr(choose, "arch_of", lambda device: arch)
    patch.setattr(torch.cuda, "device_count", lambda: visible)
    patch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {1, 2})
    patch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=f"GPU-{i}"))
    found = []
    for gpu in gpus:
        patch.setattr(torch.cuda, "current_device", lambda gpu=gpu: gpu)
        found.append(choose.ballot())
    return found


def test_ranks_write_to_peers_only_where_every_gpu_reaches_every_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    yes = voted(monkeypatch, [0, 1])
    assert choose.all_reach_all(yes)
    assert yes[0].machine == machine.machine_id() and all(yes[0].machine)
    other_boot = yes[1]._replace(machine=(yes[1].machine[0], "another boot"))
    assert not choose.all_reach_all([yes[0], other_boot])  # two machines of one name
    for gpus, options in (
        ([0, 1, 2], {}),
        ([1, 2], {}),
        ([0, 0], {}),  # two ranks on one GPU
        ([0, 1], {"arch": 75}),
        ([0, 1], {"visible": 1}),
    ):
        assert not choose.all_reach_all(voted(monkeypatch, gpus, **options)), (gpus, options)


@pytest.mark.parametrize("law", [n for n in vars(again_laws) if n.startswith("law_")])
def test_dispatched_again(ranks: Ranks, law: str) -> None:
    ranks.run("again_laws", law)


def test_experts_of_torchtitan(ranks: Ranks) -> None:
    ranks.run("titan_laws", "law_routed_experts_of_torchtitan_travel_by_every_dispatcher")


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("given", [iter, list, lambda tensors: tensors[0]])
def test_gradients_of_one_process_are_clipped_as_torch_does(given: Any, norm_type: float) -> None:
    found = []
    for clip in (clip_grad_norm_, torch.nn.utils.clip_grad_norm_):
        tensors = [torch.ones(3, 2), torch.ones(4)]
        for t in tensors:
            t.grad = torch.full_like(t, 5.0)
        norm = clip(given(tensors), 2.0, norm_type)
        found.append([norm, *(t.grad for t in tensors)])
    torch.testing.assert_close(*found)
