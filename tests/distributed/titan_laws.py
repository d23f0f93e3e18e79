"""torchtitan's routed experts by fuseops over ranks, on stand-ins: what all ranks compute together is what one does."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist
import torchtitan_stand_ins
from expert_laws import mesh
from torch import Tensor
from torchtitan_stand_ins import AllToAllTokenDispatcher, LocalTokenDispatcher

WIDTH, HIDDEN, EXPERTS, TOP = 16, 12, 4, 2
INTEGRATION = "fuseops.integrations.torchtitan"


def law_routed_experts_of_torchtitan_travel_by_every_dispatcher() -> None:
    sys.modules.update(torchtitan_stand_ins.modules({"ep": mesh()}))  # type: ignore[arg-type]
    titan = importlib.import_module(INTEGRATION)
    rank, world = dist.get_rank(), dist.get_world_size()
    here = EXPERTS // world
    mine = slice(rank * here, (rank + 1) * here)
    torch.manual_seed(0)
    alone = experts(titan, EXPERTS, LocalTokenDispatcher(EXPERTS, TOP))
    parts = [7 + 3 * r for r in range(world)]
    x, c = torch.randn(sum(parts), WIDTH), torch.randn(sum(parts), WIDTH)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in x])
    scores = torch.rand(len(x), TOP)
    want = stepped(alone, x, scores, ids, c)
    rows = slice(sum(parts[:rank]), sum(parts[: rank + 1]))
    for kind in (None, "fixed_capacity", "peer_memory"):
        spread = experts(titan, here, AllToAllTokenDispatcher(EXPERTS, TOP), kind)
        spread.load_state_dict({n: t[mine] for n, t in alone.state_dict().items()})
        got = stepped(spread, x[rows], scores[rows], ids[rows], c[rows])
        for name, right in want.items():
            right = right[rows if name in ("y", "x", "scores") else mine]
            torch.testing.assert_close(
                got[name], right, rtol=3e-2, atol=3e-2 * float(right.abs().max())
            )
        assert "collect" in spread.__dict__[titan._CACHE][1]._modules


def experts(titan: Any, here: int, stock: Any, kind: str | None = None) -> Any:
    config = titan.RoutedExperts.Config(
        w13=(here, WIDTH, HIDDEN, 2), w2=(here, HIDDEN, WIDTH), token_dispatcher=stock
    )
    return titan.FusedRoutedExperts(titan.routed_experts(config, dispatcher=kind, capacity=4.0))


def stepped(layer: Any, x: Tensor, scores: Tensor, ids: Tensor, c: Tensor) -> dict[str, Any]:
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    y = layer(x, scores, ids, torch.bincount(ids.view(-1), minlength=EXPERTS))
    (y * c).sum().backward()
    grads = {name: p.grad for name, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "scores": scores.grad, **grads}
