"""Plans of steps that an H200 recorded (`recorded/`: the stacks of benchmarks/offload.py), and dry runs
beside them.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from profiles_drawn import carried
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fuseops as fo
from fuseops import offload
from fuseops.errors import FuseOpsError
from fuseops.observe.memory import StorageMeter, tensors_in
from fuseops.offload.planning.cost_model import CostModel
from fuseops.offload.planning.hardware import Hardware
from fuseops.offload.planning.plan import OffloadPlan, plan_profile
from fuseops.offload.planning.planner import Limits
from fuseops.offload.planning.profile import (
    LayerCall,
    Profile,
    ProfiledOp,
    Recompute,
    Saved,
)
from fuseops.offload.planning.record import ProfiledStep
from fuseops.offload.planning.roofline import DRY_ERROR
from fuseops.offload.planning.simulate import simulate
from fuseops.offload.planning.step import dry_run, layers_of

RECORDED = Path(__file__).parent / "recorded"
LINK = Hardware.h200().with_link(55.0)


@cache
def recorded(name: str) -> Profile:
    """A profile from a file, in which tuples are lists, and named ones but ops are objects."""
    with gzip.open(RECORDED / f"{name}.json.gz", "rt") as file:
        data = json.load(file)
    for said in ("schema_version", "hardware", "facts"):
        del data[said]
    data["ops"] = tuple(ProfiledOp(*op) for op in data["ops"])
    kinds: dict[str, Any] = {"calls": LayerCall, "saved": Saved, "recompute": Recompute}
    for field, kind in kinds.items():
        data[field] = tuple(kind(**tuples(each)) for each in data[field])
    return Profile(**tuples(data))


def tuples(data: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in data.items()}


@cache
def free_plan(name: str) -> OffloadPlan:
    """The plan of a recorded step without a budget."""
    return plan_profile(recorded(name), LINK)


@pytest.mark.parametrize("name", ["dense_h200", "moe_h200_a", "moe_h200_b"])
def test_a_plan_moves_all_that_55_gb_a_second_carry_for_free(name: str) -> None:
    profile, plan = recorded(name), free_plan(name)
    assert plan.after.stall <= 1e-6 and not plan.bytes_of("recompute")
    assert plan.bytes_of("offload") == plan.free == plan.before.peak - plan.after.peak
    assert plan.free >= 0.99 * carried(CostModel(profile, LINK, plan.settings))


@pytest.mark.parametrize("name, other", ["ab", "ba"])
def test_two_recordings_of_a_step_have_plans_that_serve_both(name: str, other: str) -> None:
    """Their times differ op by op: what is free in one of them costs next to nothing in the other."""
    mine, others = recorded(f"moe_h200_{name}"), recorded(f"moe_h200_{other}")
    assert [s.name for s in mine.saved] == [s.name for s in others.saved]
    plan = free_plan(f"moe_h200_{name}")
    leave = [k for k, t in enumerate(plan.tensors) if t.decision == "offload"]
    there = simulate(others, leave, LINK, plan.settings)
    assert there.moved == plan.free and there.stall <= 0.005 * others.seconds
    assert plan.free == pytest.approx(free_plan(f"moe_h200_{other}").free, rel=0.02)


@pytest.mark.parametrize("name", ["dense_h200", "moe_h200_a", "moe_h200_b"])
def test_many_moves_bring_few_bytes_and_a_larger_least_size_leaves_them_out(name: str) -> None:
    """The host orders every move, and a plan does not charge it: `min_bytes` is for that."""
    profile = recorded(name)
    large = [s if s.nbytes >= 4 << 20 or s.why else s._replace(why="small") for s in profile.saved]
    fewer = replace(profile, saved=tuple(large))
    half = Limits(profile.peak - free_plan(name).free // 2)
    plans = [
        [free_plan(name), plan_profile(fewer, LINK)],
        [plan_profile(p, LINK, half) for p in (profile, fewer)],
    ]
    moves = [[sum(t.decision == "offload" for t in p.tensors) for p in both] for both in plans]
    assert moves[0][1] <= 0.9 * moves[0][0] and moves[1][1] <= moves[1][0]
    assert plans[0][1].free >= 0.99 * plans[0][0].free
    assert all(
        p.fits and p.after.stall <= 1e-6 and not p.recomputed for both in plans for p in both
    )


def test_a_peak_that_a_link_keeps_for_free_needs_no_recomputation_on_another_day() -> None:
    peak = free_plan("moe_h200_a").after.peak
    plan = plan_profile(recorded("moe_h200_b"), Hardware.h200(), Limits(peak))
    assert plan.fits and not plan.bytes_of("recompute")
    assert plan.after.seconds <= 1.005 * plan.before.seconds


LATER = (
    *("mlp", "norm_mlp", "norm_linear", "act_linear"),
    *("linear_add", "linear_scale", "scale_linear", "tap_linear"),
)
"""Rules that the recorded steps did not have."""


def stacks() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "common" / "offload_stacks.py"
    spec = importlib.util.spec_from_file_location("offload_stacks", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind, name", [("dense", "dense_h200"), ("moe", "moe_h200_b")])
def test_a_dry_run_is_as_near_to_the_recorded_step_as_it_says(kind: str, name: str) -> None:
    """Of an H200, on whatever machine: seconds a block, and what saved tensors take."""
    blocks, made, real = 4, stacks(), recorded(name)
    shape = made.SHAPES[kind]._replace(blocks=blocks)
    with torch.device("meta"):
        rows = torch.randn(shape.tokens, shape.d, dtype=torch.bfloat16, requires_grad=True)
        model = made.Stack(shape).to(torch.bfloat16)
    policy = offload.Policy(min_bytes=1 << 20)
    layers = layers_of(model, ("blocks.*",))
    with fo.fusion(disable=LATER):
        dry = dry_run(ProfiledStep(model, (rows,), {}, layers, None, policy), Hardware.h200())
    share = len(real.calls) / blocks
    assert dry.seconds * share == pytest.approx(real.seconds, rel=DRY_ERROR)
    assert any(f"{DRY_ERROR:.0%}" in text for text in dry.assumed)
    movable = [sum(s.nbytes for s in p.saved if s.why is None) for p in (dry, real)]
    assert movable[0] * share == pytest.approx(movable[1], rel=0.005)


# --- the bytes of a recorded step are those of the step


class Output(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class Head(nn.Module):
    """What models of language give: a loss, and beside it logits of many bytes that no backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up = fo.Sequential(fo.ops.RMSNorm(8), fo.ops.Linear(8, 16), fo.ops.SiLU())
        self.head = nn.Linear(16, 512, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> Output:
        logits = self.head(self.up(x).bfloat16())
        return Output(logits.float().logsumexp(-1).mean(), logits)


class Live(TorchDispatchMode):
    """The most bytes that live after an op."""

    def __init__(self, there: list[torch.Tensor]) -> None:
        super().__init__()
        self.meter, self.peak = StorageMeter(there), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, self.meter.after(list(tensors_in(out))))
        return out


@pytest.mark.parametrize("record", [False, True], ids=["dry", "recorded"])
def test_the_peak_of_a_profile_is_that_of_the_step(record: bool) -> None:
    model, x = Head(), torch.randn(64, 8)

    def step() -> None:
        model(x).loss.backward()

    step()
    model.zero_grad()
    live = Live([*model.parameters(), x])
    with live:
        step()
    model.zero_grad()
    on_cpu = replace(Hardware.h200(), arch=0)
    plan = offload.plan(model, x, layers="up", min_bytes=1 << 30, record=record, hardware=on_cpu)
    assert plan.before.peak == live.peak


@pytest.mark.parametrize("record", [False, True], ids=["dry", "recorded"])
def test_the_backward_begins_at_what_loss_returns_and_nowhere_else(record: bool) -> None:
    model, x = Head(), torch.randn(64, 8)

    def peak(loss: Any) -> int:
        plan = offload.plan(model, x, layers="up", record=record, loss=loss)
        return plan.before.peak

    assert peak(lambda out: (out.loss,)) == peak(lambda out: out.loss) < peak(sum_of_both)
    with pytest.raises(FuseOpsError, match="loss= whose result needs one"):
        peak(lambda out: None)


def sum_of_both(out: Output) -> torch.Tensor:
    return out.loss + out.logits.float().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", [((6, 8), (2, 8, 16)), ((2, 4, 8), (2, 8, 16))], ids=str)
def test_a_dry_run_knows_grouped_products_of_every_dtype(
    shapes: Any, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """torch's own shape function takes bfloat16 alone, and logs some forty lines for another."""

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(shapes[1], dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            offs = torch.tensor([2, 6], dtype=torch.int32) if x.dim() == 2 else None
            return torch.nn.functional.grouped_mm(x, self.weight, offs=offs)

    model, x = Grouped(), torch.randn(shapes[0], dtype=dtype)
    with caplog.at_level("ERROR"):
        dry = offload.plan(model, x, min_bytes=1 << 30)
    assert not caplog.records and dry.before.peak > 0
