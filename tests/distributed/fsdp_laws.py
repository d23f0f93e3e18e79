"""Laws of experts over ranks beside FSDP2, on four ranks: two hold the same experts, two have others."""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import io
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import schedule_laws
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from expert_laws import close, layer, raises, whole
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import fuseops as fo
from fuseops import offload
from fuseops.distributed import ExpertParallel, clip_grad_norm_, expert_placement, param_groups
from fuseops.distributed.dispatch import HostCounts, lost

D, TOKENS, STEPS = 6, 5, 3
BLOCKS = fo.recipes.Float8BlockScaling()
ROOT = Path(__file__).resolve().parents[2]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D, dtype=torch.float64)
        self.blocks = nn.ModuleList(layer(seed, shared_experts=1) for seed in (3, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def spread(dp: int, ep: int) -> Net:
    mesh = init_device_mesh("cpu", (dp, ep), mesh_dim_names=("dp", "ep"))
    every = mesh._flatten(f"every{dp}")
    model = net()
    parallelize_module(model, mesh["ep"], ExpertParallel())
    place = expert_placement(mesh["dp"])
    for module in (*model.blocks, model):
        fully_shard(module, mesh=every, shard_placement_fn=place)
    return model


def trained(model: Net, batches: Any, clip: Any, optimizer: Any) -> list[Tensor]:
    """The norms of the gradients of every step."""
    norms = []
    for x in batches:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        norms.append(clip(model.parameters(), 0.05))
        optimizer.step()
    return norms


def batches(world: int) -> list[Tensor]:
    """(world, TOKENS, D) of every step."""
    torch.manual_seed(6)
    return [torch.randn(world, TOKENS, D, dtype=torch.float64) for _ in range(STEPS)]


def trained_alone(world: int) -> tuple[Net, torch.optim.AdamW, list[Tensor]]:
    """One process that has the tokens of `world`, its optimizer, and the norms of its gradients."""
    alone = net()
    one = adamw(alone)
    rows = [x.flatten(0, 1) for x in batches(world)]
    return alone, one, trained(alone, rows, nn.utils.clip_grad_norm_, one)


def trained_together(dp: int, ep: int) -> tuple[Net, torch.optim.AdamW, list[Tensor]]:
    return trained_on(spread(dp, ep))


def trained_on(model: Net) -> tuple[Net, torch.optim.AdamW, list[Tensor]]:
    many = adamw(model)
    rows = [x[dist.get_rank()] for x in batches(dist.get_world_size())]
    return model, many, trained(model, rows, clip_grad_norm_, many)


def adamw(model: Net) -> torch.optim.AdamW:
    return torch.optim.AdamW(param_groups(model, weight_decay=0.1), lr=0.01, fused=True)


def law_steps_equal_one_process() -> None:
    alone, one, want = trained_alone(4)
    for dp, ep in ((2, 2), (4, 1), (1, 4)):
        model, many, got = trained_together(dp, ep)
        for mine, theirs in zip(got, want, strict=True):
            close(mine, theirs, "norm")
        same(model, many, alone, one)


def law_a_budget_is_planned_ahead_of_what_fsdp2_gathers() -> None:
    """`Scheduler(peak=)` runs whole steps before the first forward, at whose ends FSDP2 frees what it had gathered."""
    alone, one, want = trained_alone(4)
    model, limits = spread(2, 2), {"peak": 1, "policy": offload.Policy(min_bytes=1)}
    with offload.Scheduler(
        model, "blocks.*", hardware=offload.Hardware.h200(), **limits
    ) as scheduler:
        _, many, got = trained_on(model)
    for mine, theirs in zip(got, want, strict=True):
        close(mine, theirs, "norm")
    same(model, many, alone, one)
    assert isinstance(scheduler.plan, offload.OffloadPlan)


def law_experts_that_their_ranks_do_not_divide_are_sharded_too() -> None:
    """By their third axis or, unevenly, the first: gradients are those of one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    every, place = mesh._flatten("every2"), expert_placement(mesh["dp"])
    for dim, ffn in ((4, 3), (5, 4), (5, 3)):
        torch.manual_seed(0)
        alone = fo.MoE(dim, ffn, 2, 1, bias=True, dtype=torch.float64)
        model, x = copy.deepcopy(alone), torch.randn(4, TOKENS, dim, dtype=torch.float64)
        parallelize_module(model, mesh["ep"], ExpertParallel())
        fully_shard(model, mesh=every, shard_placement_fn=place)
        alone(x.flatten(0, 1)).square().mean().backward()
        model(x[dist.get_rank()]).square().mean().backward()
        for name, p in model.named_parameters():
            close(whole(p.grad), alone.get_parameter(name).grad, name)  # type: ignore[arg-type]


def law_ranks_that_fsdp_leaves_out_are_refused() -> None:
    """Experts over "ep" beside others over "dp" alone: these would never hear of the other tokens."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = net()
    parallelize_module(model, mesh["ep"], ExpertParallel())
    param_groups(model)  # nothing is sharded by FSDP2 yet
    experts = {p for p in model.parameters() if isinstance(p, DTensor)}
    fully_shard(model, mesh=mesh["dp"], ignored_params=experts)
    raises("first.weight is sharded over", lambda: param_groups(model))


def saves(folder: str) -> None:
    """A checkpoint of experts over all ranks, after some steps."""
    model, optimizer, _ = trained_together(1, dist.get_world_size())
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)


def reads(folder: str, of: int) -> None:
    """Every weight and every state of the optimizer of a checkpoint that `of` ranks have written, on several meshes."""
    alone, one, _ = trained_alone(of)
    for other in (spread(1, 4), spread(2, 2)):
        finds(folder, other, alone, one)


def finds(folder: str, model: Net, alone: Net, one: torch.optim.AdamW) -> None:
    optimizer = adamw(model)
    weights, state = get_state_dict(model, optimizer)
    dcp.load(found := {"model": weights, "optim": state}, checkpoint_id=folder)
    model_state, optim_state = found["model"], found["optim"]
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
    same(model, optimizer, alone, one)


def pretrain() -> Any:
    """examples/pretrain.py as a module."""
    path = ROOT / "examples" / "pretrain.py"
    spec: Any = importlib.util.spec_from_file_location("pretrain", path)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def losses(*options: str) -> list[float]:
    """Of the steps of examples/pretrain.py."""
    example = pretrain()
    given = ["--dim", "16", "--layers", "1", "--context", "16", "--batch", "2", *options]
    return example.train(example.parsed(given), torch.device("cpu"))


TRAINED = ("--ep", "2", "--every", "2")


def the_second_is_killed_inside_a_dispatch(folder: str) -> None:
    """Of the fourth step of a training that saves every second one; the error of the first says so wherever it ends."""
    lost.GRACE_SECONDS = 0.1
    lost._start_polling()  # as over NCCL
    sent, calls = HostCounts.dispatch, []

    def dispatch(self: HostCounts, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 4 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return sent(self, *args)

    HostCounts.dispatch = dispatch  # type: ignore[method-assign]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            losses(*TRAINED, "--steps", "6", "--out", folder)
            raise AssertionError("the step had an end")
        except RuntimeError as error:
            late = time.monotonic() + 20
            while not (told := said.getvalue()) and time.monotonic() < late:
                time.sleep(0.01)  # as where nothing in Python would say it
            sys.excepthook(type(error), error, None)
    assert told.startswith("fuseops: rank 1 has ended (process "), told
    assert "rank 1 has ended (process " in said.getvalue()[len(told) :], said.getvalue()


def goes_on(folder: str) -> None:
    """From the last checkpoint, which is whole: the third step is that of a training that nobody has stopped."""
    whole = losses(*TRAINED, "--steps", "3")
    assert losses(*TRAINED, "--steps", "3", "--out", folder) == whole[2:]


def law_pretraining_resumes_bit_for_bit() -> None:
    """From a checkpoint in the middle, on the same mesh; on another mesh, within rounding."""
    with SharedFolder() as folder:
        out = ["--out", str(folder)]
        whole = losses("--ep", "2", "--steps", "4")
        assert losses("--ep", "2", "--steps", "2", *out) == whole[:2]
        dist.barrier()
        with contextlib.redirect_stdout(io.StringIO()) as said:
            assert losses("--ep", "2", "--steps", "3", "--memory", "0.001", *out) == whole[2:3]
        told = "2 of 3 steps are done", "OffloadPlan(", "step 3 loss"
        assert dist.get_rank() or all(words in said.getvalue() for words in told), said.getvalue()
        other = losses("--ep", "4", "--steps", "4", *out)
        assert len(other) == 1 and abs(other[0] - whole[3]) < 1e-5
    with SharedFolder() as folder:
        out = ["--out", str(folder), "--stock"]
        whole = losses("--stock", "--steps", "3")
        assert losses("--steps", "2", *out) == whole[:2]
        dist.barrier()
        assert losses("--steps", "3", *out) == whole[2:]
    quick = "--steps", "3", "--lr", "0.01"
    both = zip(losses("--stock", *quick), losses("--ep", "1", *quick), strict=True)
    assert max(abs(stock - ours) for stock, ours in both) < 1e-5, "not the same model"
    with SharedFolder() as folder:
        out = ["--out", str(folder), "--pp", "2", "--layers", "4", "--dense-every", "2"]
        out += ["--batch", "4", "--micro-batches", "4"]
        whole = losses("--chunks", "2", "--steps", "5", "--every", "2", *out)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "step-00000005")
            shutil.rmtree(folder / "step-00000004")
        dist.barrier()
        assert losses("--chunks", "2", "--steps", "3", "--memory", "0.001", *out) == whole[2:3]
        dist.barrier()
        other = losses("--ep", "1", "--steps", "5", *out)  # one stage a rank, experts by FSDP2
        assert len(other) == 2
        assert max(abs(a - b) for a, b in zip(other, whole[3:], strict=True)) < 1e-5


def law_the_reference_layout_moves_what_its_plans_say() -> None:
    """`distributed_layout.py --layout reference` on half the ranks: gradients to the bit, all that was planned."""
    layout_moves_what_its_plans_say("reference", (2, 1, 2))


def law_fsdp2_moves_what_its_plans_say() -> None:
    """`--layout fsdp`. The plan knows where FSDP2 copies sizes and addresses, behind what comes back."""
    plan = layout_moves_what_its_plans_say("fsdp", (1, 4, 1))
    behind = [op.name.split(".")[1] for op in plan.profile.ops if op.from_host]
    gathered = len({call.layer for call in plan.profile.calls}) + 1  # the rest of the model, too
    assert behind.count("chunk_cat") == gathered <= behind.count("split_with_sizes_copy"), behind


def layout_moves_what_its_plans_say(layout: str, mesh: tuple[int, ...]) -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import distributed_layout

    options = argparse.Namespace(layout=layout, small=True, steps=1, seconds=0)
    rank = distributed_layout.Rank(None, options, torch.device("cpu"))
    assert rank.run.mesh.shape == mesh
    found = rank.found()
    assert found["not_as_planned"] == [], found["not_as_planned"]
    # tokens that come here are as many as come
    assert 0.95 < found["moves_over_planned"] < 1.05, found
    assert found["repeats_bit_equal"] and found["gradients_bit_equal"], found
    assert all(found["leave"].values()), found["leave"]
    return rank.plan


def law_marks_and_scopes_hold_in_stages_with_experts_over_ranks() -> None:
    """Interleaved stages of dense and MoE layers, experts over two ranks with tokens of their own, in float32 and as
    codes and scales: gradients with offload are those without to the bit, what marks and inner scopes keep stays,
    several modules of a layer leave, codes apart from their scales, and ranks decide alike.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))
    stage, replica = mesh.get_coordinate() or (0, 0)
    for recipe, parts in ((None, {"fc1.x"}), (BLOCKS, {"fc1.x.row", "fc1.x.row_scale"})):
        model, count = schedule_laws.stages("interleaved", stage)
        model.float()
        parallelize_module(model, mesh["ep"], ExpertParallel())
        fo.configure(model, recipe=recipe)
        run = schedule_laws.schedule("interleaved", model, count, False, mesh["pp"].get_group())
        args = run, model, 2, stage == 0, str(count - 1) in model, replica
        plain = schedule_laws.train(*args)
        policy = offload.Policy(min_bytes=1)
        with offload.Scheduler(model, "*.*", policy=policy, lag=1) as scheduler:
            moved = schedule_laws.train(*args)
        for mine, want in zip(moved, plain, strict=True):
            assert all(torch.equal(whole(a), whole(b)) for a, b in zip(mine, want, strict=True))
        report = scheduler.report()
        schedule_laws.check_report(report, model, False)
        decided = sorted({(e.name, e.decision) for e in report.entries if e.nbytes})
        told: list[Any] = [None, None]
        dist.all_gather_object(told, decided, mesh["ep"].get_group())
        assert told[0] == told[1]
        left = {name.partition(".second.0.")[2] for name, what in decided if what == "moved"}
        assert left >= {*parts, "act.x", "router.logits"}, left


def same(model: Net, optimizer: Any, alone: Net, one: Any) -> None:
    """Weights and states of the optimizer."""
    for name, p in model.named_parameters():
        q = alone.get_parameter(name)
        close(whole(p).detach(), q.detach(), name)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            mine, theirs = whole(optimizer.state[p][key]), one.state[q][key]
            close(mine.float(), theirs.float(), f"{name} {key}")


def law_pretraining_runs_pairs_in_turns() -> None:
    """Stages in a V, experts over two ranks: the losses of one stage a rank; resumed, with offload too."""
    with SharedFolder() as folder:
        same = ["--pp", "2", "--layers", "4", "--batch", "4", "--micro-batches", "4", "--ep", "2"]
        out = [*same, "--dispatcher", "host_counts", "--pairs", "--out", str(folder)]
        whole = losses(*out, "--steps", "2")
        dist.barrier()
        whole += losses(*out, "--steps", "3", "--memory", "0.001")
        plain = losses(*same, "--steps", "3")
        assert max(abs(a - b) for a, b in zip(whole, plain, strict=True)) < 1e-5


class SharedFolder:
    """A folder of all ranks."""

    def __enter__(self) -> Path:
        self.mine = tempfile.TemporaryDirectory()
        path = [self.mine.name]
        dist.broadcast_object_list(path, src=0)
        return Path(path[0])

    def __exit__(self, *raised: object) -> None:
        dist.barrier()
        self.mine.cleanup()
