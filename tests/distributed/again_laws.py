"""Laws of tokens that are dispatched again in the backward: to the bit what saved copies of them give."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from expert_laws import TOP, D, E, layer, mesh, raises, tokens, whole
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

import fuseops as fo
from fuseops import offload
from fuseops.distributed import ExpertParallel
from fuseops.offload.planning.plan import plan_with_dropped
from fuseops.offload.planning.together import regenerated_by_sending

DISPATCHERS = ("host_counts", "fixed_capacity", "device_counts", "peer_memory")
Scope = Callable[[], AbstractContextManager[Any]]


def spread(kind: str, sums: torch.dtype | None = None, **options: Any) -> Any:
    moe = layer(**options)
    style = ExpertParallel(dispatcher=kind, average=False, capacity=8.0, sums=sums)
    return parallelize_module(moe, mesh(), style)


def mine(width: int = D) -> Tensor:
    torch.manual_seed(1)
    every = [torch.randn(t, width, dtype=torch.float64) for t in tokens(9, 4)]
    return every[dist.get_rank()]


def results(moe: Any, x: Tensor, inside: Scope, times: int = 1) -> list[Tensor]:
    """y, and the gradients of x and of all parameters, of a step whose forward runs in a scope."""
    x = x.clone().requires_grad_()
    with inside():
        y = moe(x)
    loss = y.float().square().sum() if y.dtype is torch.bfloat16 else y.square().sum()
    for last in range(times)[::-1]:
        moe.zero_grad()
        x.grad = None
        loss.backward(retain_graph=bool(last))
    return [y.detach(), x.grad, *(whole(p.grad).clone() for p in moe.parameters())]  # type: ignore[list-item]


def equal(moe: Any, x: Tensor, again: Scope = offload.dispatch_again, **options: Any) -> None:
    want, got = results(moe, x, nullcontext), results(moe, x, again, **options)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def kept(moe: Any, x: Tensor) -> dict[str, fo.SavedTensor]:
    return {s.name: s for s in moe.plan(x.clone().requires_grad_()).saved}


# --- the laws


def law_what_is_sent_again_is_what_arrived() -> None:
    """By every dispatcher: in float64, with shared experts between, float32 sums and capacity; where h is recomputed
    too; in a backward that runs twice; and in bfloat16 under autocast and as codes of a recipe.
    """
    x = mine()

    class Both:
        def __enter__(self) -> None:
            self.scopes = offload.recompute(), offload.dispatch_again()
            for scope in self.scopes:
                scope.__enter__()

        def __exit__(self, *error: Any) -> None:
            for scope in self.scopes[::-1]:
                scope.__exit__(*error)

    for kind in DISPATCHERS:
        moe = spread(kind)
        equal(moe, x)
        equal(moe, x, times=2)
        equal(moe, x, again=Both)
        equal(moe, x[:0] if dist.get_rank() else x)
        equal(spread(kind, shared_experts=1, bias=True), x)
        equal(spread(kind, capacity_factor=0.8), x)
        equal(spread(kind, dtype=torch.float32, sums=torch.float32), x.float())
    wide = mine(160).bfloat16()
    for kind in DISPATCHERS:
        torch.manual_seed(0)
        moe = fo.MoE(160, 64, E, TOP, dtype=torch.bfloat16)
        parallelize_module(
            moe, mesh(), ExpertParallel(dispatcher=kind, average=False, capacity=8.0)
        )
        with fo.recipe(fo.recipes.Float8BlockScaling()):
            equal(moe, wide)
        with fo.recipe(fo.recipes.Float8CurrentScaling()):
            equal(moe, wide)
        full = moe.float()
        with torch.autocast("cpu", torch.bfloat16):
            equal(full, wide.float())


def law_what_arrived_is_not_saved_then() -> None:
    """Fewer bytes by all that arrived: what stands in for it is saved anyway, for the router."""
    x = mine()
    for kind in DISPATCHERS:
        moe = spread(kind)
        moe(x)  # sizes are agreed on
        before = kept(moe, x)
        with offload.dispatch_again():
            after = kept(moe, x)
            said = moe.explain(x.clone().requires_grad_())
        gone = before.keys() - after.keys()
        assert gone == {"fc1.x"}, (kind, gone, after.keys() - before.keys())
        extra = [s for n, s in after.items() if n not in before and s.shared_with is None]
        assert not extra, extra
        if kind != "host_counts":
            arrived, _ = moe["dispatch"].dispatcher.expected_sizes(x)
            assert before["fc1.x"].shape == (arrived, D), (kind, before["fc1.x"])
        assert "again in the backward" in said, said


def law_where_nothing_stands_in_for_it_it_is_saved() -> None:
    """Another op between the dispatch and the experts, ops that no rule fuses, and layers of one process."""
    x = mine()
    chosen = torch.stack([torch.randperm(E)[:TOP] for _ in x]).to(torch.int32)
    side = {"experts": chosen, "weights": torch.rand(len(x), TOP, dtype=torch.float64)}
    moe = spread("host_counts")
    ops = {n: moe[n] for n in ("dispatch", "permute", "fc1", "act", "fc2", "combine", "collect")}
    normed = {}
    for name, op in ops.items():
        normed[name] = op
        if name == "dispatch":
            normed["norm"] = fo.ops.RMSNorm(D, dtype=torch.float64)
    experts = fo.Sequential(normed)
    found = []
    for scope in (nullcontext, offload.dispatch_again):
        given = x.clone().requires_grad_()
        with scope():  # type: ignore[operator]
            y = experts(given, **side)
        y.square().sum().backward()
        found.append([y.detach(), given.grad, *(whole(p.grad) for p in experts.parameters())])
        experts.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]
    with fo.fusion(False):
        equal(moe, x)
    equal(layer(), x)


def law_a_plan_sends_again_where_ranks_agree() -> None:
    """A Scheduler does what a plan says of what arrived; what ranks differ in is shared first, or refused."""
    x, rank = mine(), dist.get_rank()
    model = nn.Sequential(*(spread("host_counts", dtype=torch.float64) for _ in range(2)))
    want = results(model, x, nullcontext)
    seen = []
    sent = type(model[0]["dispatch"].dispatcher).begin_resend
    type(model[0]["dispatch"].dispatcher).begin_resend = lambda *a: seen.append(1) or sent(*a)  # type: ignore[func-returns-value]
    try:
        plan: Any = {"1.fc1.x": "dispatch"}
        with offload.Scheduler(model, layers="*", plan=plan) as scheduler:
            got = results(model, x, nullcontext)
        scheduler.assert_matched(plan)
        assert len(seen) == 1
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        odd: Any = {f"{rank}.fc1.x": "dispatch"}
        raises("makes '0.fc1.x' again", offload.Scheduler(model, layers="*", plan=odd).attach)
        whole_layer: Any = {f"{rank}": "recompute"}
        raises("makes '0' again", offload.Scheduler(model, layers="*", plan=whole_layer).attach)
        planned = partial(offload.plan, model, x.clone().requires_grad_(), layers="*", min_bytes=1)
        alone, recorded = planned(), planned(record=True)
        for one in (alone, recorded):
            kinds = {(g.kind, g.name) for g in one.profile.recompute}
            assert kinds >= {("dispatch", "0"), ("dispatch", "1"), ("module", "0")}, kinds
        odd = plan_with_dropped(recorded, {("module", "0")} if rank else {("dispatch", "1")})
        shared = offload.share_decisions(odd, mesh().get_group())
        assert regenerated_by_sending(shared) == {("module", "0"), ("dispatch", "1")}
        each = plan_with_dropped(alone, {("dispatch", str(rank))})
        shared = offload.share_decisions(each, mesh().get_group())
        assert regenerated_by_sending(shared) == {("dispatch", "0"), ("dispatch", "1")}
        one = plan_with_dropped(alone, {("module" if rank else "dispatch", "0")})
        shared = offload.share_decisions(one, mesh().get_group())
        assert regenerated_by_sending(shared) == {("module", "0")}
        seen.clear()
        shared = offload.share_decisions(each, mesh().get_group())
        with offload.Scheduler(model, layers="*", plan=replace(shared)) as scheduler:
            got = results(model, x, nullcontext)
        scheduler.assert_matched()
        assert len(seen) == 2
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    finally:
        type(model[0]["dispatch"].dispatcher).begin_resend = sent
