"""Dry runs of experts over ranks that need not exist: what travels takes time, and compute waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import fuseops as fo
from fuseops import offload
from fuseops.distributed import ExpertParallel
from fuseops.observe.travel import travel
from fuseops.offload.planning.plan import plan_with_dropped
from fuseops.offload.schedule import DISPATCH

RANKS, D, TOKENS, TOP_K, LAYERS = 4, 32, 64, 2, 3


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    dist.destroy_process_group()


def stack(mesh: DeviceMesh, kind: str) -> Any:
    """Layers of experts, and tokens of this rank, on meta."""
    with torch.device("meta"):
        layers = (fo.Residual({"moe": fo.MoE(D, D, 8, TOP_K)}) for _ in range(LAYERS))
        model = nn.Sequential(*layers).to(torch.bfloat16)
        x = torch.zeros(TOKENS, D, dtype=torch.bfloat16, requires_grad=True)
    parallelize_module(model, mesh, ExpertParallel(dispatcher=kind, tokens=TOKENS))
    return model, x


def planned(mesh: DeviceMesh, network: float) -> Any:
    model, x = stack(mesh, "host_counts")
    hardware = replace(offload.Hardware.h200(), network=network)
    return offload.plan(model, x, layers="*", hardware=hardware, min_bytes=1)


def test_what_travels_takes_the_time_of_the_network(mesh: DeviceMesh) -> None:
    rate = 0.5
    plan, free = planned(mesh, rate), planned(mesh, 0.0)
    reached = 1 - (1 - 1 / RANKS) ** TOP_K
    sent = round(TOKENS * RANKS * reached) * (RANKS - 1) // RANKS
    tokens, ids = 4 * LAYERS * sent * D * 2, LAYERS * sent * TOP_K * 4
    assert plan.profile.network == pytest.approx((tokens + ids) / rate / 1e9)
    assert free.profile.network == 0 and plan.before.seconds > free.before.seconds
    waits = plan.before.network
    assert waits == pytest.approx(plan.before.seconds - free.before.seconds, rel=1e-6)
    joins = {p: op.join for p, op in enumerate(plan.profile.ops) if op.lane == "network"}
    assert len(joins) == 5 * LAYERS and all(end > p for p, end in joins.items())
    assert "of transfers between ranks" in plan.explain()
    assert "in no time: Hardware.network is not known" in " ".join(free.explain().split())
    lanes = {busy.lane for busy in plan.after.busy}
    assert {"compute", "network", "d2h", "h2d"} <= lanes  # they share a step
    assert (
        plan.after.stall == 0 and plan.to_json()["after"]["network_seconds"] == plan.after.network
    )


def test_nothing_that_has_values_travels_so() -> None:
    with pytest.raises(fo.FuseOpsError, match="dry runs"):
        travel(torch.ones(2, 2), 3, 8)


@pytest.mark.parametrize("kind", ["host_counts", "fixed_capacity", "device_counts", "peer_memory"])
def test_a_budget_dispatches_again_and_its_peak_is_that_of_a_step_that_does(
    mesh: DeviceMesh, kind: str
) -> None:
    model, x = stack(mesh, kind)
    hardware = replace(offload.Hardware.h200(), network=330.0)
    asked = partial(offload.plan, model, x, layers="*", hardware=hardware, min_bytes=1 << 40)
    free = asked()
    groups = [g for g in free.profile.recompute if g.kind == "dispatch"]
    assert [g.name for g in groups] == [str(k) for k in range(LAYERS)]
    names = {free.profile.saved[k].name for g in groups for k in g.saved}
    assert names == {f"{k}.moe.fc1.x" for k in range(LAYERS)}
    assert all(g.seconds > 0 and not any(g.instead) for g in groups)
    with offload.dispatch_again():
        least = asked().profile.peak
    plan = asked(peak=free.before.peak - 1)
    assert plan.fits and DISPATCH in plan.decisions.values(), plan.explain()
    every = plan_with_dropped(free, {("dispatch", g.name) for g in groups})
    held = sum(free.profile.saved[k].nbytes for k in groups[0].saved)
    if kind in (
        "device_counts",
        "peer_memory",
    ):  # in line, where it is read: later than the plan has it
        assert least <= every.after.peak <= least + held
    else:
        assert every.after.peak == least
    assert every.after.peak <= free.before.peak - held
    assert "sent again to its experts" in every.explain()
    assert every.to_json()["tensors"] and every.to_html()


def test_what_stands_in_counts_where_nobody_else_saves_it(mesh: DeviceMesh) -> None:
    """A frozen router saves no tokens of this rank."""
    model, x = stack(mesh, "host_counts")
    for layer in model:
        layer["moe"]["router"].requires_grad_(False)
    profile = offload.plan(model, x, layers="*", min_bytes=1).profile
    for group in profile.recompute:
        if group.kind == "dispatch":
            (k,), (held,) = group.saved, group.instead
            assert (
                held == x.nbytes
                and group.dropped_bytes(profile.saved)[k] == profile.saved[k].nbytes - held
            )
