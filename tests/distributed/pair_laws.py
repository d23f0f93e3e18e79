"""Pairs of a forward and a backward in turns, under torch's DualPipeV with experts over ranks: the gradients of one
process that runs one after the other, to the bit.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import schedule_laws as pipes
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload
from fuseops.distributed import ExpertParallel, expert_placement, overlap_pairs, pairs
from fuseops.distributed.pairs import BACKWARD, FORWARD
from fuseops.rules.fused import gemm_bwd

DISPATCHERS = ("host_counts", "fixed_capacity")
CASES = (("host_counts", False, True), ("fixed_capacity", True, False), ("host_counts", True, True))
"""A dispatcher, whether weight gradients are delayed, whether there is a Scheduler."""


def meshes(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp", "ep"))


def stages(mesh: DeviceMesh, kind: str) -> tuple[nn.ModuleDict, int]:
    """This rank's two stages of the model in a V, experts spread over "ep"."""
    ranks, rank = mesh["pp"].size(), mesh["pp"].get_local_rank()
    count, every = 2 * ranks, pipes.layers()
    each = len(every) // count
    model = nn.ModuleDict(
        {str(s): nn.Sequential(*every[s * each : (s + 1) * each]) for s in (rank, count - 1 - rank)}
    )
    parallelize_module(model, mesh["ep"], ExpertParallel(dispatcher=kind, capacity=8.0))
    return model, count


def local(t: Any) -> Tensor:
    part: Tensor = t.to_local() if hasattr(t, "to_local") else t
    return part


def run_of(mesh: DeviceMesh, model: nn.ModuleDict, count: int, delayed: bool, paired: bool) -> Any:
    run = pipes.schedule("dualpipev", model, count, delayed, mesh["pp"].get_group())
    if paired:
        overlap_pairs(run)
    return run


def trained(
    mesh: DeviceMesh, kind: str, delayed: bool = False, paired: bool = True, scheduled: bool = False
) -> dict[str, list[Tensor]]:
    """Gradients of three steps by name, of what is here."""
    model, count = stages(mesh, kind)
    each = len(pipes.LAYERS) // count
    rank = mesh["pp"].get_local_rank()
    run = run_of(mesh, model, count, delayed, paired)
    args = (run, model, 3, rank == 0, str(count - 1) in model, mesh["ep"].get_local_rank())
    if scheduled:
        policy = offload.Policy(min_bytes=1)
        with offload.Scheduler(model, "*.*", policy=policy, lag=1) as scheduler:
            steps = pipes.train(*args)
        pipes.check_report(scheduler.report(), model, not delayed)
    else:
        steps = pipes.train(*args)
    names = [
        f"{int(stage) * each + int(k)}.{rest}"
        for stage, k, rest in (n.split(".", 2) for n, _ in model.named_parameters())
    ]
    return {name: [local(grads[i]) for grads in steps] for i, name in enumerate(names)}


def law_pairs_equal_one_process() -> None:
    """Two ranks with two stages each, plain and under a Scheduler, weight gradients delayed or not."""
    mesh = meshes(2, 1, 1)
    expected = pipes.alone(3)
    names = [n for n, _ in nn.Sequential(*pipes.layers()).named_parameters()]
    for kind, delayed, scheduled in CASES:
        for name, steps in trained(mesh, kind, delayed, True, scheduled).items():
            for step, grad in enumerate(steps):
                want = expected[step][names.index(name)]
                assert torch.equal(grad, want), (kind, delayed, scheduled, step, name)


def law_pairs_over_ranks_equal_those_one_after_the_other() -> None:
    """Experts over two ranks, each with tokens of its own, by both dispatchers."""
    mesh = meshes(1, 1, 2)
    apart = {kind: trained(mesh, kind, paired=False) for kind in DISPATCHERS}
    for kind, delayed, scheduled in CASES[:2]:
        for name, steps in trained(mesh, kind, delayed, True, scheduled).items():
            assert all(map(torch.equal, steps, apart[kind][name])), (kind, delayed, scheduled, name)


def law_the_all_to_all_of_one_lies_under_the_products_of_the_other() -> None:
    """Between the start of a transfer and the wait for it, the other of the pair computes: both ways round."""
    mesh = meshes(1, 1, 2)
    model, count = stages(mesh, "host_counts")
    run = run_of(mesh, model, count, False, True)
    said: list[tuple[str, str]] = []
    for op in model.modules():
        if hasattr(op, "dispatcher"):
            op.dispatcher._start = partial(
                noted, op.dispatcher._start, lambda w: said.append((side(), w))
            )
        if isinstance(op, fo.Sequential):
            op.register_forward_pre_hook(lambda *_: said.append((side(), "computes")))
    weights = gemm_bwd.add_weight_grads
    gemm_bwd.add_weight_grads = lambda *a: said.append((side(), "computes")) or weights(*a)  # type: ignore[func-returns-value]
    try:
        pipes.train(run, model, 1, True, True, dist.get_rank())
    finally:
        gemm_bwd.add_weight_grads = weights
    covered = {FORWARD: 0, BACKWARD: 0}
    for i, (mine, what) in enumerate(said):
        if what == "leave":
            rest = said[i + 1 :]
            end = next(j for j, word in enumerate(rest) if word == (mine, "arrive"))
            covered[mine] += any(word == "computes" for other, word in rest[:end] if other != mine)
    pairs = 2 * pipes.MICROBATCHES - 4  # of one rank: all but the first and the last turns
    assert covered[FORWARD] > pairs and covered[BACKWARD] > pairs, covered


def side() -> str:
    """Of a pair, which runs."""
    return FORWARD if threading.current_thread() is threading.main_thread() else BACKWARD


def noted(begun: Any, say: Any, *args: Any) -> Any:
    rows, ready = begun(*args)
    say("leave")
    return rows, lambda: (ready(), say("arrive"))


def law_pairs_of_sharded_stages_are_reduced_by_the_schedule() -> None:
    """FSDP2 over two ranks that hold the same experts: what the stages give one after the other."""
    mesh = meshes(1, 2, 1)
    results = []
    for paired in (False, True):
        model, count = stages(mesh, "host_counts")
        place = expert_placement(mesh["ep"])
        for stage in model.values():
            for layer in stage:
                fully_shard(layer, mesh=mesh["dp"], shard_placement_fn=place)
            fully_shard(stage, mesh=mesh["dp"], shard_placement_fn=place)
        run = run_of(mesh, model, count, True, paired)
        results.append(pipes.train(run, model, 2, True, True, dist.get_rank()))
    for mine, theirs in zip(*results, strict=True):
        assert all(torch.equal(local(a), local(b)) for a, b in zip(mine, theirs, strict=True))


def law_recomputation_keeps_its_random_numbers() -> None:
    """Layers that drop at random and are computed again in the backward, while a forward draws numbers of its own."""
    mesh = meshes(1, 1, 2)
    results = []
    for paired in (False, True):
        model, count = stages(mesh, "fixed_capacity")
        for stage in model.values():
            for k, layer in enumerate(stage):
                stage[k] = Dropped(layer)
        torch.manual_seed(dist.get_rank())
        run = run_of(mesh, model, count, True, paired)
        results.append(pipes.train(run, model, 2, True, True, dist.get_rank()))
    for mine, theirs in zip(*results, strict=True):
        assert all(torch.equal(local(a), local(b)) for a, b in zip(mine, theirs, strict=True))


class Dropped(nn.Module):
    """A layer and a dropout in one checkpoint."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.both = nn.Sequential(layer, nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        contexts = fo.checkpoint_contexts
        y: Tensor = checkpoint(self.both, x, use_reentrant=False, context_fn=contexts)
        return y


def law_an_error_of_one_ends_the_other() -> None:
    """It comes up, of whichever side, and no thread is left."""
    mesh, weights, threads = meshes(1, 1, 2), gemm_bwd.add_weight_grads, threading.active_count()

    def fails(wanted: str, *_: Any) -> None:
        if pairs._active_pair is not None and side() == wanted:
            raise ValueError(f"in the {wanted}")

    for wanted in (FORWARD, BACKWARD):
        model, count = stages(mesh, "host_counts")
        run = run_of(mesh, model, count, False, True)
        if wanted == FORWARD:
            next(iter(model.values()))[3].register_forward_pre_hook(partial(fails, FORWARD))
        else:
            gemm_bwd.add_weight_grads = lambda *a: fails(BACKWARD) or weights(*a)  # type: ignore[func-returns-value]
        try:
            pipes.train(run, model, 1, True, True, dist.get_rank())
        except (ValueError, RuntimeError) as error:
            assert f"in the {wanted}" in f"{error} {error.__cause__}", error
        else:
            raise AssertionError("nothing was raised")
        finally:
            gemm_bwd.add_weight_grads = weights
        assert pairs._active_pair is None and threading.active_count() == threads


def law_what_pairs_nothing_is_refused() -> None:
    mesh = meshes(1, 1, 2)
    model, count = stages(mesh, "peer_memory")
    refused("nothing that travels beside", run_of(mesh, model, count, False, False))
    zbv = pipes.schedule(
        "zbv", stages(mesh, "host_counts")[0], count, False, mesh["pp"].get_group()
    )
    refused("pairs no forward", zbv)
    dense = nn.ModuleDict({str(s): fo.Sequential(fo.ops.Linear(2, 2)) for s in range(2)})
    refused("no experts over ranks", run_of(mesh, dense, 2, False, False))


def refused(said: str, schedule: Any) -> None:
    try:
        overlap_pairs(schedule)
    except fo.FuseOpsError as error:
        assert said in str(error), error
    else:
        raise AssertionError(f"nothing was raised where {said!r} was expected")
