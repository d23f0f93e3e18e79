"""What the ranks of a pipeline do under torch's schedules, beside one process that runs the same stages: to the bit."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload
from fuseops.distributed import dw_builder
from fuseops.offload.planning.plan import plan_profile

D, ROWS, MICROBATCHES, WORLD = 8, 4, 6, 2
KINDS: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
    "dualpipev": ScheduleDualPipeV,
}
SPLIT = ("zero bubble", "zbv", "dualpipev")
V = ("zbv", "dualpipev")


LAYERS = (
    ("marked", "dense"), ("", "experts"), ("kept", "dense"), ("marked", "experts"),
    ("disabled", "experts"), ("", "dense"), ("kept", "experts"), ("disabled", "dense"),
)  # fmt: skip
"""The scope and the second half of every layer: each rank has several of both, as stages are placed here."""


class Layer(nn.Module):
    """A block whose second half runs in a scope of its own, or with a mark on what it gets."""

    def __init__(self, scope: str, kind: str) -> None:
        super().__init__()
        self.scope = scope
        self.first = fo.Residual(
            fo.ops.RMSNorm(D), fo.ops.Linear(D, 2 * D), fo.ops.SwiGLU(), fo.ops.Linear(D, D)
        )
        self.second: nn.Module
        if kind == "experts":
            self.second = fo.Residual(fo.MoE(D, D, 4, 2, aux="inject", balance_loss=0.1))
        else:
            self.second = fo.Residual(fo.ops.Linear(D, D), fo.ops.GELU(), fo.ops.Linear(D, D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.scope == "kept":
            with offload.keep():
                return self.second(x)
        if self.scope == "disabled":
            with offload.disabled():
                return self.second(x)
        if self.scope == "marked":
            offload.mark_not_offload(x)
        return self.second(x)


def layers() -> list[nn.Module]:
    """All of the model."""
    torch.manual_seed(1)
    return [Layer(*each).double() for each in LAYERS]


def placed(kind: str, rank: int) -> tuple[int, list[int]]:
    """How many stages there are, and the ones of a rank."""
    if kind == "1f1b":
        return WORLD, [rank]
    if kind in V:
        return 2 * WORLD, [rank, 2 * WORLD - 1 - rank]
    return 2 * WORLD, [rank, rank + WORLD]


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def batch(step: int, dtype: torch.dtype = torch.float64, replica: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 + step + 10 * replica)
    x, target = torch.randn(2, MICROBATCHES * ROWS, D, dtype=dtype).unbind()
    return x, target


def alone(steps: int) -> list[list[Tensor]]:
    """Gradients of one process that runs one micro-batch after the other."""
    model, found = nn.Sequential(*layers()), []
    for step in range(steps):
        for x, target in zip(*(t.chunk(MICROBATCHES) for t in batch(step)), strict=True):
            loss(model(x), target).backward()
        found.append([p.grad / MICROBATCHES for p in model.parameters()])
        model.zero_grad()
    return found


def stages(kind: str, rank: int) -> tuple[nn.ModuleDict, int]:
    """This rank's stages by number, and how many there are of all ranks."""
    count, mine = placed(kind, rank)
    every = layers()
    each = len(every) // count
    return (
        nn.ModuleDict({str(s): nn.Sequential(*every[s * each : (s + 1) * each]) for s in mine}),
        count,
    )


def schedule(kind: str, model: nn.ModuleDict, count: int, delayed: bool, group: Any = None) -> Any:
    made = [
        PipelineStage(
            module,
            int(number),
            count,
            torch.device("cpu"),
            group=group,
            dw_builder=dw_builder(module) if delayed else None,
        )
        for number, module in model.items()
    ]
    return KINDS[kind](made[0] if kind == "1f1b" else made, MICROBATCHES, loss_fn=loss)


def train(
    run: Any, model: nn.ModuleDict, steps: int, first: bool, last: bool, replica: int = 0
) -> list[list[Tensor]]:
    found = []
    for step in range(steps):
        x, target = batch(step, next(model.parameters()).dtype, replica)
        run.step(*((x,) if first else ()), **({"target": target} if last else {}))
        found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    return found


def _law(kind: str, delayed: bool) -> None:
    """Plain, and under a Scheduler whose layers are the blocks: the gradients of one process, bit for bit."""
    rank = dist.get_rank()
    expected = alone(3)
    names = [n for n, _ in nn.Sequential(*layers()).named_parameters()]
    model, count = stages(kind, rank)
    each = len(layers()) // count
    mine = [
        f"{int(stage) * each + int(k)}.{rest}"
        for stage, k, rest in (n.split(".", 2) for n, _ in model.named_parameters())
    ]
    last = str(count - 1) in model
    run = schedule(kind, model, count, delayed)
    for scheduled in (False, True):
        if not scheduled:
            found = train(run, model, 3, rank == 0, last)
        else:
            policy = offload.Policy(min_bytes=1)
            with offload.Scheduler(model, "*.*", policy=policy, lag=1) as scheduler:
                found = train(run, model, 3, rank == 0, last)
            check_report(scheduler.report(), model, kind in SPLIT and not delayed)
        for step, grads in enumerate(found):
            for name, grad in zip(mine, grads, strict=True):
                want = expected[step][names.index(name)]
                assert torch.equal(grad, want), (kind, delayed, scheduled, step, name)
    assert not any(op.__dict__.get("_delayed_gradients") for op in model.modules())


def check_report(report: Any, model: nn.ModuleDict, reads_twice: bool) -> None:
    """What marks and inner scopes keep has stayed; what has left came back before it was read, but in the first step,
    where the order is not known, and where torch reads twice.
    """
    facts = dict(report.schedule)
    assert facts["out_bytes"] > 0
    assert reads_twice or facts["misses"] <= len(model) * MICROBATCHES, facts
    moved = {entry.name for entry in report.entries if entry.decision == "moved"}
    for path, layer in model.named_modules():
        if isinstance(layer, Layer):
            assert any(name.startswith(f"{path}.first") for name in moved), path
            second = {name for name in moved if name.startswith(f"{path}.second")}
            assert bool(second) == (layer.scope not in ("kept", "disabled")), (path, second)
            if layer.scope == "marked":
                assert not second & {f"{path}.second.0.x", f"{path}.second.0.router.x"}


class Again(nn.Module):
    """A layer in a checkpoint."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        contexts = fo.checkpoint_contexts
        y: Tensor = checkpoint(self.layer, x, use_reentrant=False, context_fn=contexts)
        return y


def law_checkpoints_in_stages() -> None:
    """Every second layer is computed again, under every schedule, weight gradients delayed where they can be."""
    expected = alone(1)
    names = [n for n, _ in nn.Sequential(*layers()).named_parameters()]
    for kind in KINDS:
        for delayed in (False, True) if kind in SPLIT else (False,):
            model, count = stages(kind, dist.get_rank())
            each = len(layers()) // count
            for stage in model.values():
                for k in range(0, each, 2):
                    stage[k] = Again(stage[k])  # type: ignore[index]
            run = schedule(kind, model, count, delayed)
            (grads,) = train(run, model, 1, dist.get_rank() == 0, str(count - 1) in model)
            for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
                number, k, rest = name.replace(".layer.", ".").split(".", 2)
                want = expected[0][names.index(f"{int(number) * each + int(k)}.{rest}")]
                assert torch.equal(grad, want), (kind, delayed, name)


def law_autocast_and_recipes_in_stages() -> None:
    """As in one process, to the bit: what is rounded is rounded alike."""
    half = torch.autocast("cpu", torch.bfloat16)
    for recipe, scope in ((fo.recipes.Float8BlockScaling(), nullcontext()), (None, half)):
        whole = nn.Sequential(*layers()).float()
        fo.configure(whole, recipe=recipe)
        for x, target in zip(
            *(t.chunk(MICROBATCHES) for t in batch(0, torch.float32)), strict=True
        ):
            with scope:
                total = loss(whole(x), target)
            total.backward()
        for kind in KINDS:
            model, count = stages(kind, dist.get_rank())
            each = len(layers()) // count
            fo.configure(model.float(), recipe=recipe)
            run = schedule(kind, model, count, kind in SPLIT)
            with scope:
                (grads,) = train(run, model, 1, dist.get_rank() == 0, str(count - 1) in model)
            for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
                number, k, rest = name.split(".", 2)
                want = whole.get_parameter(f"{int(number) * each + int(k)}.{rest}").grad
                assert torch.equal(grad, want / MICROBATCHES), (kind, recipe, name)  # type: ignore[operator]


law_1f1b = partial(_law, "1f1b", False)
law_interleaved = partial(_law, "interleaved", False)
law_zero_bubble = partial(_law, "zero bubble", False)
law_zero_bubble_with_a_dw_builder = partial(_law, "zero bubble", True)
law_zbv = partial(_law, "zbv", False)
law_zbv_with_a_dw_builder = partial(_law, "zbv", True)
law_dualpipev = partial(_law, "dualpipev", False)
law_dualpipev_with_a_dw_builder = partial(_law, "dualpipev", True)


def law_a_plan_follows_the_order_of_torchs_schedule() -> None:
    """Every turn of torch's order is one of the plan's, and the weight half of a backward is apart."""
    for kind in V:
        model, count = stages(kind, dist.get_rank())
        pipeline = offload.Pipeline.of(schedule(kind, model, count, True))
        assert (pipeline.ranks, pipeline.micro_batches, pipeline.chunks) == (WORLD, MICROBATCHES, 2)
        ways = [turn.way for mine in pipeline.order for turn in mine]
        assert ways.count("forward") == count * MICROBATCHES
        assert ways.count("input") == ways.count("weight") > 0
        assert ways.count("input") + ways.count("backward") == count * MICROBATCHES
    single, count = stages("1f1b", dist.get_rank())
    try:
        offload.Pipeline.of(schedule("1f1b", single, count, False))
    except fo.FuseOpsError as error:
        assert "Pipeline(ranks, micro_batches)" in str(error)


def law_stages_under_fsdp2_are_reduced_by_the_schedule() -> None:
    """Two replicas of a whole pipeline on one rank each: their mean. Weight gradients are delayed where they can be."""
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    expected = nn.Sequential(*layers())
    data = [batch(step) for step in range(2)]
    for x, target in data:
        for rows, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            loss(expected(rows), wanted).backward()
    for kind in KINDS:
        if kind == "1f1b":
            continue  # one stage a rank: no pipeline
        every = layers()
        model = nn.ModuleDict({str(s): nn.Sequential(*every[4 * s : 4 * s + 4]) for s in range(2)})
        for stage in model.values():
            for layer in stage:
                fully_shard(layer, mesh=both["dp"])
            fully_shard(stage, mesh=both["dp"])
        run = schedule(kind, model, 2, kind in SPLIT, both["pp"].get_group())
        x, target = data[dist.get_rank()]
        for _ in range(2):
            model.zero_grad()
            run.step(x, target=target)
        for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
            whole = p.grad.full_tensor()  # type: ignore[union-attr]
            torch.testing.assert_close(whole, q.grad / (2 * MICROBATCHES), msg=f"{kind} {name}")  # type: ignore[operator]


def law_the_ranks_of_a_machine_share_one_host_budget() -> None:
    """By what their plans need: together no more than there is, and one that needs little leaves the rest to others."""
    gib, rows = 1 << 30, (1 << 16) >> 2 * dist.get_rank()
    with torch.device("meta"):
        make = lambda: fo.Residual(fo.ops.RMSNorm(1024), fo.ops.Linear(1024, 1024), fo.ops.SiLU())  # noqa: E731
        model = nn.Sequential(*(make() for _ in range(24)))
        x = torch.zeros(rows, 1024, requires_grad=True)
    whole = offload.plan(model, x, layers="*", hardware=offload.Hardware.h200(), host=64 * gib)
    need = whole.after.host
    needs: list[Any] = [None] * WORLD
    dist.all_gather_object(needs, need)
    assert needs[0] > 3 * needs[1] > 0
    tight = sum(needs) * 3 // 4
    for budget in (64 * gib, tight):
        limits = replace(whole.limits, host=budget)
        plan = plan_profile(whole.profile, whole.hardware, limits, whole.settings)
        mine = offload.share_host(plan, dist.group.WORLD)
        told: list[Any] = [None] * WORLD
        dist.all_gather_object(told, (mine.limits.host, mine.after.host, plan.after.host))
        assert sum(share for share, _, _ in told) <= budget
        assert all(used <= share for share, used, _ in told)
        assert told[1][1] == told[1][2]  # what the small one wanted is less than its half
        if budget == 64 * gib:
            assert mine.decisions == whole.decisions
        else:
            assert told[0][0] > budget // 2
    try:
        offload.share_host(
            replace(whole, limits=replace(whole.limits, host=None)), dist.group.WORLD
        )
    except fo.FuseOpsError as error:
        assert "Plan with host=" in str(error)
    else:
        raise AssertionError("a plan without a budget was shared")


def law_schedulers_of_a_machine_share_one_host_budget() -> None:
    """Each has its part, and beyond it tensors stay, whatever the plan."""
    model, x = nn.Sequential(*layers()), batch(0)[0]
    for options in ({}, {"peak": 1 << 16, "policy": offload.Policy(min_bytes=1)}):
        with offload.Scheduler(
            model, "*", host=WORLD * 20_000, group=dist.group.WORLD, **options
        ) as scheduler:
            for _ in range(3):
                model(x).sum().backward()
        told: list[Any] = [None] * WORLD
        dist.all_gather_object(told, dict(scheduler.report().schedule)["host_reserved"])
        assert sum(told) <= WORLD * 20_000, told
