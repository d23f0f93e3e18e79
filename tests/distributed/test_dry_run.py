"""Dry runs of experts over ranks that need not exist: what travels takes time, and compute waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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

RANKS, D, TOKENS, TOP_K, LAYERS = 4, 32, 64, 2, 3


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    dist.destroy_process_group()


def planned(mesh: DeviceMesh, network: float) -> Any:
    with torch.device("meta"):
        layers = (fo.Residual(fo.MoE(D, D, 8, TOP_K)) for _ in range(LAYERS))
        model = nn.Sequential(*layers).to(torch.bfloat16)
        x = torch.zeros(TOKENS, D, dtype=torch.bfloat16, requires_grad=True)
    parallelize_module(model, mesh, ExpertParallel(way="host_counts", tokens=TOKENS))
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
