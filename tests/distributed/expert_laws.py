"""Laws of experts over ranks, as every rank runs them: what all ranks compute together is what one process computes."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import host_memory
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload
from fuseops.distributed import (
    ExpertParallel,
    check_overflow,
    expert_placement,
    quantized_gather,
    tp_plan,
)
from fuseops.distributed.dispatch import (
    ExpertDispatch,
    FixedCapacity,
    HostCounts,
    device_counts,
    overflow,
    symmetric,
)
from fuseops.distributed.dispatch.choose import choose
from fuseops.integrations import hf
from fuseops.observe.memory import outside_bytes
from fuseops.recipes import gain
from fuseops.rules.fused import gemm_bwd
from fuseops.rules.fused.routed_mlp import RoutedMLP
from fuseops.run import gate
from fuseops.run.config import set_root
from fuseops.words import size

D, F, E, TOP = 6, 5, 8, 3


KIND: list[str | None] = [None]  # what the laws run by


def parallel(**options: Any) -> ExpertParallel:
    return ExpertParallel(dispatcher=KIND[0], **options)


BOUNDED = ("fixed_capacity", "device_counts", "peer_memory")


@cache
def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))


def layer(seed: int = 0, low_rank: int | None = None, **options: Any) -> fo.MoE:
    torch.manual_seed(seed)
    options = {"dtype": torch.float64, "top_k": TOP, **options}
    moe = fo.MoE(D, F, E, **options)
    for name, op in moe.named_children() if low_rank else ():
        if isinstance(op, fo.ops.GroupedLinear):
            sizes = op.num_groups, op.in_features, op.out_features, op.bias is not None
            made = fo.ops.GroupedLinear(*sizes, low_rank=low_rank, dtype=torch.float64)
            torch.nn.init.uniform_(made.up)
            moe.add_module(name, made)
    return moe


def batch(tokens: list[int], spread: float = 1.0) -> list[Tensor]:
    """What every rank gets, one after another."""
    torch.manual_seed(1)
    return [spread * torch.randn(t, D, dtype=torch.float64) for t in tokens]


def whole(t: Any) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def trained(moe: nn.Module, x: Tensor, c: Tensor, share: float, run: Any) -> tuple[Any, ...]:
    """(y, router_loss, gradient of x, gradients by name) of the loss sum(c * y) + share * router_loss."""
    x = x.clone().requires_grad_()
    y, loss = run(moe, x)
    total = (c * y).sum() + (0.0 if loss is None else share * loss)
    total.backward()
    moe.backward_dw()
    return y.detach(), loss, x.grad, {n: p.grad for n, p in moe.named_parameters()}


def plainly(moe: fo.MoE, x: Tensor) -> Any:
    if "router_loss" not in moe["router"].writes:
        return moe(x), None
    return moe(x, returns=("router_loss",))


def equal_to_one_process(
    tokens: list[int], run: Any = plainly, style: Any = None, spread: float = 1.0, **options: Any
) -> fo.MoE:
    """The layer spread over ranks gives what it gives alone for the tokens of all ranks in their order."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = batch(tokens, spread)
    c = batch(tokens)[::-1]
    c = [torch.randn_like(p) for p in parts]
    alone = layer(**options)
    want = trained(alone, torch.cat(parts), torch.cat(c), 1.0, plainly)
    moe = layer(**options)
    parallelize_module(moe, mesh(), style or parallel(average=False, capacity=8.0))
    got = trained(moe, parts[rank], c[rank], 1 / world, run)
    start = sum(tokens[:rank])
    close(got[0], want[0][start : start + tokens[rank]], "y")
    close(got[2], want[2][start : start + tokens[rank]], "dx")
    if want[1] is not None:
        mean = got[1].detach().clone()
        dist.all_reduce(mean)
        close(mean / world, want[1].detach(), "router_loss")
    for name, grad in want[3].items():
        mine = got[3][name]
        if isinstance(mine, DTensor):
            assert mine.placements == (Shard(0),)
            mine = mine.full_tensor()
        elif name.startswith("router") or name.startswith("shared"):
            mine = torch.zeros_like(grad) if mine is None else mine.clone()
            dist.all_reduce(mine)
        close(mine, grad, name)
    return moe


def close(a: Tensor, b: Tensor, name: str) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11, msg=lambda m: f"{name}: {m}")


def tokens(*of_first: int) -> list[int]:
    """Uneven counts, the first ones given."""
    world = dist.get_world_size()
    return [*of_first, *(5 + 2 * r for r in range(world))][:world]


# --- the laws


def law_every_option_equals_one_process() -> None:
    equal_to_one_process(tokens(9, 4))
    equal_to_one_process(tokens(6, 6), bias=True, shared_experts=1)
    equal_to_one_process(tokens(6, 3), balance_loss=0.1, z_loss=0.1)
    equal_to_one_process(tokens(3, 8), z_loss=0.1, score="sigmoid", expert_bias=True, scale=1.5)
    equal_to_one_process(tokens(2, 9), activation="geglu", router_bias=True)
    equal_to_one_process(tokens(5, 4), low_rank=2)


def law_what_layers_share_they_share_over_ranks() -> None:
    """Ops, as a layer and the one with given experts do, and parameters."""
    moe, other = layer(), layer(seed=1)
    other.fc1.weight = moe.fc1.weight  # type: ignore[union-attr]
    model = torch.nn.ModuleList([moe, moe.with_given_experts(), other])
    whole_ones = copy.deepcopy(model)
    parallelize_module(model, mesh(), parallel(average=False, capacity=8.0))
    x = batch(tokens(5, 4))[dist.get_rank()]
    for first, given, tied in (whole_ones, model):
        y, chosen = first(x, returns=("experts",))
        close(given(x, chosen=chosen), y, "y")
        assert tied.fc1.weight is given.fc1.weight is first.fc1.weight
    close(model[2](x), whole_ones[2](x), "y")


def law_a_rank_may_have_no_token() -> None:
    equal_to_one_process(tokens(0, 7), balance_loss=0.1)
    equal_to_one_process(tokens(0, 7), top_k=1)
    equal_to_one_process(tokens(7, 0), shared_experts=1)
    equal_to_one_process([0] * dist.get_world_size())


def law_a_rank_may_get_no_token() -> None:
    """All go to the experts of the first rank."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"score": "sigmoid", "expert_bias": True}
    bias = torch.zeros(E)
    bias[:TOP] = 10.0
    before = fo.ops.Router.reset_parameters
    fo.ops.Router.reset_parameters = lambda self: (before(self), self.expert_bias.copy_(bias))[0]
    try:
        moe = equal_to_one_process(tokens(5, 4), **options)
    finally:
        fo.ops.Router.reset_parameters = before
    assert dist.get_rank() == 0 or moe.fc1.weight.grad.to_local().abs().sum() == 0


def law_capacity_is_of_all_tokens() -> None:
    """What is dropped is what one process drops, for factors that drop much, some and nothing."""
    for factor in (0.3, 0.8, 1.3):
        equal_to_one_process(tokens(9, 4), capacity_factor=factor)


def law_gradients_of_experts_are_averaged() -> None:
    x = batch(tokens(4, 4))[dist.get_rank()]
    grads = []
    for average in (False, True):
        moe = layer()
        parallelize_module(moe, mesh(), ExpertParallel(average=average))
        moe(x).sum().backward()
        grads.append(moe.fc1.weight.grad.to_local())
    close(grads[1] * dist.get_world_size(), grads[0], "fc1.weight")


def law_rules_fuse_what_arrived() -> None:
    moe = layer(shared_experts=1, ep=mesh())
    x = batch(tokens(4, 6))[dist.get_rank()]
    plan = moe.plan(x.requires_grad_())
    assert [span.rule for span in plan.forward].count("routed_mlp") == 1, str(plan)
    assert {s.name for s in plan.saved if s.is_param} >= {"fc1.weight", "fc2.weight"}, str(plan)
    said = moe.explain(x)
    assert f"{E // dist.get_world_size()} here" in said and "all_to_all_single" in said, said


def law_a_layer_may_begin_on_meta() -> None:
    moe = fo.MoE(D, F, E, TOP, device="meta", dtype=torch.float64, ep=mesh())
    local = E // dist.get_world_size()
    assert moe.fc1.weight.shape[0] == E and moe.fc1.weight.to_local().shape[0] == local
    moe.to_empty(device="cpu")
    full = layer()
    with torch.no_grad():
        for name, p in moe.named_parameters():
            source = full.get_parameter(name)
            mine = source[dist.get_rank() * local :][:local] if isinstance(p, DTensor) else source
            (p.to_local() if isinstance(p, DTensor) else p).copy_(mine)
    spread = layer(ep=mesh())
    x = batch(tokens(4, 6))[dist.get_rank()]
    close(moe(x), spread(x), "y")


def law_checkpointed_delayed_and_reference_are_equal() -> None:
    def again(moe: fo.MoE, x: Tensor) -> Any:
        return checkpoint(moe, x, use_reentrant=False, context_fn=fo.checkpoint_contexts), None

    def reference(moe: fo.MoE, x: Tensor) -> Any:
        with fo.reference():
            return plainly(moe, x)

    equal_to_one_process(tokens(5, 4), run=again, shared_experts=1)
    equal_to_one_process(tokens(5, 4), run=reference, balance_loss=0.1)
    equal_to_one_process(tokens(5, 4), delay_wgrad=True)


def law_tokens_are_waited_for_where_an_op_is_called_by_itself() -> None:
    """As one with a hook is: the dispatch, or what waits for its tokens behind shared experts."""
    for name in ("dispatch", "arrive"):

        def hooked(moe: fo.MoE, x: Tensor, name: str = name) -> Any:
            moe.get_submodule(name).register_forward_hook(lambda *_: None)
            dispatcher: Any = moe["dispatch"].dispatcher
            sent = dispatcher.dispatch

            def late(*args: Any) -> Any:
                got = sent(*args).wait()
                arrived = got.x.clone()
                got.x.fill_(math.nan)
                return got._replace(ready=lambda: got.x.copy_(arrived))

            dispatcher.dispatch = late
            return plainly(moe, x)

        equal_to_one_process(tokens(5, 4), run=hooked, shared_experts=1)


def law_tokens_travel_beside_other_kernels() -> None:
    """While shared experts are computed, and on their way home while both weight gradients are, or fc1's alone where
    memory is preferred: to the bit what the layer gives where each transfer is waited for at once, by every dispatcher;
    one that runs in line makes fc2's weight gradient first, whatever is preferred.
    """
    x = batch(tokens(5, 4))[dist.get_rank()]
    weights = gemm_bwd.add_weight_grads
    both, one = ["leave", "leave", "weight", "weight"], ["weight", "leave", "leave", "weight"]
    for kind, prefer, home in (
        ("host_counts", "speed", both),
        ("host_counts", "memory", one),
        ("fixed_capacity", "speed", both),
        ("fixed_capacity", "memory", one),
        ("device_counts", "speed", ["weight", "weight"]),
        ("peer_memory", "speed", ["weight", "weight"]),
    ):
        results: list[list[Tensor]] = []
        for waits in (False, True):
            moe: Any = layer(shared_experts=1)
            parallelize_module(moe, mesh(), ExpertParallel(dispatcher=kind, capacity=8.0))
            fo.configure(moe, prefer=prefer)
            said: list[str] = []
            dispatcher = moe["dispatch"].dispatcher
            if dispatcher.overlaps_compute:
                dispatcher._start = partial(travels, dispatcher._start, waits, said)
            moe["shared"].register_forward_hook(lambda *_, said=said: said.append("shared"))
            gemm_bwd.add_weight_grads = lambda *a, said=said: said.append("weight") or weights(*a)  # type: ignore[func-returns-value]
            given = x.clone().requires_grad_()
            try:
                y = moe(given)
                y.square().sum().backward()
            finally:
                gemm_bwd.add_weight_grads = weights
            if not waits and dispatcher.overlaps_compute:
                there = ["leave", "shared", "arrive"]
                assert apart(said) == [*there, *home, "arrive", "arrive"], (kind, said)
            elif not waits:
                assert said == ["shared", *home], (kind, said)
            grads = [whole(p.grad) for p in moe.parameters()]
            results.append([y.detach(), given.grad, *grads])  # type: ignore[list-item]
        assert all(map(torch.equal, *results)), kind
        said_of_it = "beside other kernels" if dispatcher.overlaps_compute else "in line"
        assert said_of_it in moe.explain(x)


def law_what_waits_for_dx_is_said_in_bytes() -> None:
    """Which gradients are made under dx's way home, and what fc2's operands take until then, but of one in line."""
    x = batch(tokens(5, 4))[dist.get_rank()]
    before = RoutedMLP.fwd
    found: list[tuple[int, str]] = []

    def fwd(self: Any, x: Any, t: Any, calls: Any, keep: Any) -> Any:
        rows = len(t[0]["index"])
        copies = self._copies_dy(x, self.saved_inputs(x, t), t[0]["index"], calls)
        found.append((rows * (F + D * copies) * 8, self.choices(x, t, calls)))
        return before(self, x, t, calls, keep)

    for kind, prefer, words in (
        ("host_counts", "speed", "while both weight gradients are made"),
        ("fixed_capacity", "memory", "while fc1's weight gradient is made"),
        ("peer_memory", "speed", ""),
    ):
        moe = layer()
        parallelize_module(moe, mesh(), ExpertParallel(dispatcher=kind, capacity=8.0))
        fo.configure(moe, prefer=prefer)
        RoutedMLP.fwd = fwd  # type: ignore[method-assign]
        try:
            moe(x.clone().requires_grad_())
        finally:
            RoutedMLP.fwd = before  # type: ignore[method-assign]
        held, said = found.pop()
        assert (words in said and size(held) in said) if words else "goes home" not in said, said


def apart(said: list[str]) -> list[str]:
    """Without transfers that are waited for at once."""
    found: list[str] = []
    for word in said:
        if word == "arrive" and found[-1] == "leave":
            found.pop()
        else:
            found.append(word)
    return found


def travels(begun: Any, waits: bool, said: list[str], *args: Any) -> Any:
    """A transfer that is noted, or waited for at once."""
    rows, ready = begun(*args)
    if waits:
        return rows, (ready(), lambda: None)[1]
    said.append("leave")
    return rows, lambda: (ready(), said.append("arrive"))


def law_probabilities_that_are_asked_for_have_gradients() -> None:
    """They arrive after dX has gone home."""
    rank, parts = dist.get_rank(), batch(tokens(5, 4))
    found = []
    for moe, x in ((layer(), torch.cat(parts)), (layer(), parts[rank])):
        if x is parts[rank]:
            parallelize_module(moe, mesh(), parallel(average=False, capacity=8.0))
        x = x.clone().requires_grad_()
        y, probs = moe(x, returns=("probs",))
        (y.square().sum() + probs.square().sum()).backward()
        found.append((x.grad, moe))
    (want, alone), (got, moe) = found
    start = sum(map(len, parts[:rank]))
    close(got, want[start : start + len(got)], "dx")
    close(whole(moe.fc1.weight.grad), alone.fc1.weight.grad, "fc1")
    dist.all_reduce(moe["router"].weight.grad)
    close(moe["router"].weight.grad, alone["router"].weight.grad, "router")


def law_copies_and_compiled_layers_are_equal() -> None:
    moe = layer(shared_experts=1, ep=mesh())
    x = batch(tokens(5, 4))[dist.get_rank()]

    def grads(moe: Any) -> list[Tensor]:
        given = x.clone().requires_grad_()
        y = moe(given)
        y.square().sum().backward()
        inner = getattr(moe, "_orig_mod", moe)
        found = [y.detach(), given.grad, *(whole(p.grad) for p in inner.parameters())]
        inner.zero_grad()
        return found

    want = grads(moe)
    kept = pickle.loads(pickle.dumps(moe))
    for other in (
        copy.deepcopy(moe),
        kept,
        torch.compile(moe, fullgraph=True, backend="aot_eager"),
    ):
        for mine, theirs in zip(grads(other), want, strict=True):
            close(mine, theirs, type(other).__name__)


def law_expert_bias_moves_with_the_load_of_all_ranks() -> None:
    options: dict[str, Any] = {"score": "sigmoid", "expert_bias": True}
    parts = batch(tokens(9, 4))
    alone, moe = layer(**options), layer(**options, ep=mesh())
    alone(torch.cat(parts).requires_grad_())
    moe(parts[dist.get_rank()].requires_grad_())
    for m in (alone, moe):
        m["router"].update_expert_bias(0.1)
    close(moe["router"].expert_bias, alone["router"].expert_bias, "expert_bias")


def by(kind: str, law: Any) -> None:
    KIND[0] = kind
    try:
        law()
        check_overflow()
    finally:
        KIND[0] = None


def law_ways_of_a_fixed_size_equal_one_process() -> None:
    for kind in BOUNDED:
        dispatchers_equal_one_process(kind)


def dispatchers_equal_one_process(kind: str) -> None:
    for law in (
        law_every_option_equals_one_process,
        law_a_rank_may_have_no_token,
        law_a_rank_may_get_no_token,
        law_capacity_is_of_all_tokens,
        law_checkpointed_delayed_and_reference_are_equal,
        law_probabilities_that_are_asked_for_have_gradients,
    ):
        by(kind, law)


def law_a_gradient_is_differentiated_over_ranks() -> None:
    """By `fo.reference()`: second derivatives of all tokens, of x and of every parameter, by every dispatcher."""

    def penalty(moe: fo.MoE, x: Tensor, c: Tensor) -> dict[str, Any]:
        x = x.clone().requires_grad_()
        with fo.reference():
            (dx,) = torch.autograd.grad((c * moe(x)).sum(), x, create_graph=True)
        dx.square().sum().backward()
        return {"x": x.grad, **{name: p.grad for name, p in moe.named_parameters()}}

    rank, counts = dist.get_rank(), tokens(5, 4)
    xs, start = batch(counts), sum(counts[:rank])
    cs = [x.cos() for x in xs]
    options: dict[str, Any] = {"shared_experts": 1, "bias": True, "capacity_factor": 1.1}
    want = penalty(layer(**options), torch.cat(xs), torch.cat(cs))
    want["x"] = want["x"][start : start + counts[rank]]
    world = dist.get_world_size()
    for kind, average in ((None, True), *((kind, False) for kind in BOUNDED)):
        moe = layer(**options)
        style = ExpertParallel(dispatcher=kind, capacity=8.0, average=average)
        parallelize_module(moe, mesh(), style)
        got = penalty(moe, xs[rank], cs[rank])
        for name, mine in got.items():
            if want[name] is None:  # a bias that is added at the end
                assert mine is None, name
                continue
            if isinstance(mine, DTensor):
                mine = mine.full_tensor() * (world if average else 1)
            elif name != "x":
                dist.all_reduce(mine)
            close(mine, want[name], f"{kind}: {name}")
        check_overflow()


def law_a_layer_that_was_evaluated_in_inference_mode_first_trains_like_another() -> None:
    """What the first forward makes for all later ones, flags and buffers, is not of inference mode."""

    def evaluated(moe: fo.MoE, x: Tensor) -> Any:
        with torch.inference_mode():
            moe(x)
        return plainly(moe, x)

    for kind in ("host_counts", *BOUNDED):
        symmetric._peer_buffers.clear()  # which other laws have made
        device_counts._lanes.clear()
        by(kind, partial(equal_to_one_process, tokens(5, 4), run=evaluated))


@contextmanager
def as_on_hopper(rows_of_experts: int) -> Iterator[None]:
    """FP8 is said to pay from 30 rows on, for experts from so many, and never for weights that are kept."""

    def min_rows(layer: gain.LinearRun) -> int | None:
        if layer.roles.weights == "step":
            return None
        return rows_of_experts if layer.gemms[0].groups > 1 else 30

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "multiplies_codes", lambda device: True)
        for module in (gate, gain):
            patch.setattr(module, "min_rows_to_gain", min_rows)
        yield


def law_tokens_travel_as_codes_under_a_recipe() -> None:
    """By every dispatcher, with the numbers of high precision that is quantized where it arrives; of a Quantized too.

    As on Hopper, where FP8 is said to pay from 30 rows on: for experts of any number, which other ranks do not know,
    and not for shared experts beside them, whose rows are this rank's.
    """
    block = fo.recipes.Float8BlockScaling
    width, rank = 160, dist.get_rank()
    torch.manual_seed(3)
    every = [torch.randn(t, width).to(torch.bfloat16) for t in tokens(17, 0)]
    for kind, recipe, codes in (
        ("host_counts", block(), True),
        ("fixed_capacity", block(), True),
        ("device_counts", block(), True),
        ("host_counts", block(weights="step"), False),
        ("peer_memory", block(), True),
        ("host_counts", block(wgrad="block"), False),
        ("host_counts", fo.recipes.MXFP8BlockScaling(), False),
        ("host_counts", fo.recipes.Float8CurrentScaling(), False),
        ("device_counts", fo.recipes.Float8CurrentScaling(), False),
    ):
        results = []
        for sends in (True, False):
            torch.manual_seed(0)
            shared = int(kind == "fixed_capacity")
            moe = fo.MoE(width, 64, E, TOP, dtype=torch.bfloat16, shared_experts=shared)
            parallelize_module(
                moe, mesh(), ExpertParallel(dispatcher=kind, average=False, capacity=8.0)
            )
            dispatch = moe["dispatch"]
            told = ExpertDispatch.across_ranks
            assert dispatch.across_ranks.sends
            ExpertDispatch.across_ranks = property(  # type: ignore[assignment]
                lambda op, told=told, sends=sends: told.fget(op)._replace(sends=sends)
            )
            seen = []
            sent = dispatch.dispatcher.dispatch
            dispatch.dispatcher.dispatch = lambda x, *a, seen=seen, sent=sent: (
                seen.append((x.dtype, x.shape[1])) or sent(x, *a)
            )
            try:
                x = every[rank].clone().requires_grad_()
                with as_on_hopper(30 if sends else 0), fo.recipe(recipe):
                    y = moe(x)
                    y.float().square().sum().backward()
                    said = str(moe.plan(x)) if kind == "fixed_capacity" else ""
            finally:
                ExpertDispatch.across_ranks = told  # type: ignore[method-assign]
            words = (torch.float32, (width + 2 * 4) // 4)
            assert {*seen} == {words if sends and codes else (torch.bfloat16, width)}, seen
            assert ("ranks send their rows in one format" in said) == (sends and said != ""), said
            results.append([y.detach(), x.grad, *(p.grad for p in moe.parameters())])
        for mine, theirs in zip(*results, strict=True):
            assert torch.equal(whole(mine), whole(theirs))
    names = ("dispatch", "permute", "fc1", "act", "fc2", "combine", "collect")
    experts = fo.Sequential({name: moe[name] for name in names})
    chosen = torch.stack([torch.randperm(E)[:TOP] for _ in every[rank]] or [torch.zeros(TOP)])
    side = {"experts": chosen[: len(every[rank])].to(torch.int32)}
    side["weights"] = torch.rand(len(every[rank]), TOP)
    found = []
    for arrives in (True, False):
        x = every[rank].clone().requires_grad_()
        with fo.recipe(block()):
            y = experts(fo.quantize(x, block().roles().input) if arrives else x, **side)
            y.float().sum().backward()
        found.append((y, x.grad))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


def law_weights_that_gather_as_codes_are_those_that_are_quantized_where_they_arrive() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    recipe = fo.recipes.Float8BlockScaling()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def dense(out: int = 256) -> fo.Sequential:
        torch.manual_seed(0)
        return fo.Sequential(
            fo.ops.Linear(256, 512), fo.ops.SwiGLU(), fo.ops.Linear(256, out, bias=False)
        )

    def sharded(model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=mesh(), mp_policy=policy, reshard_after_forward=True)

    def experts() -> fo.MoE:
        torch.manual_seed(0)
        return fo.MoE(256, 64, 4, 2)

    for make in (dense, experts):
        results = []
        for codes in (True, False):
            model: Any = make()
            names = quantized_gather(model, recipe) if codes else []
            assert len(names) == (2 if codes else 0)
            sharded(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            torch.manual_seed(7 + dist.get_rank())
            seen: list[Tensor] = []
            for _ in range(3):
                x = torch.randn(40, 256).to(torch.bfloat16).requires_grad_()
                with fo.recipe(recipe):
                    y = model(x)
                    y.float().square().mean().backward()
                seen += [y.detach(), x.grad]  # type: ignore[list-item]
                seen += [whole(p.grad).clone() for p in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
            seen += [whole(t) for t in model.state_dict().values()]
            results.append(seen)
        for mine, theirs in zip(*results, strict=True):
            assert torch.equal(mine.as_subclass(Tensor), theirs)
    x = torch.randn(4, 256).to(torch.bfloat16)
    uneven = dense(192)
    quantized_gather(uneven, recipe)
    sharded(uneven)
    with pytest.raises(fo.FuseOpsError, match="no multiple of 128 rows"), fo.recipe(recipe):
        uneven(x)
    with pytest.raises(fo.FuseOpsError, match="in squares"):
        quantized_gather(dense(), fo.recipes.Float8CurrentScaling())
    high = dense()
    quantized_gather(high, recipe)
    sharded(high)
    with pytest.raises(fo.FuseOpsError, match=r"\(quantized_gather\), and .* as high precision"):
        high(x)


def law_what_arrives_is_what_was_sent() -> None:
    """Copies of it, by every dispatcher, and no token where nothing came."""
    here = tokens(9, 4)[dist.get_rank()]
    torch.manual_seed(7 + dist.get_rank())
    x = 1 + torch.rand(here, D, dtype=torch.float64)
    experts = torch.rand(here, E).topk(TOP).indices.int()
    experts[:1, 0] = -1  # dropped
    weights = 1 + torch.rand(here, TOP, dtype=torch.float64)
    for kind in ("host_counts", *BOUNDED):
        moe = layer()
        parallelize_module(moe, mesh(), ExpertParallel(dispatcher=kind, capacity=8.0))
        dispatcher: Any = moe["dispatch"].dispatcher
        got = dispatcher.dispatch(x, experts, weights).wait()
        came = got.experts >= 0
        for mine, theirs in (
            (torch.ones_like(weights), torch.ones_like(got.weights)),
            (weights, got.weights),
        ):
            both = torch.stack([mine[experts >= 0].sum(), theirs[came].sum()])
            dist.all_reduce(both)
            close(both[1], both[0], kind)
        assert (got.experts < dispatcher.local_experts).all(), kind
        assert (got.x[came.any(1)] >= 1).all(), kind
        if kind in ("device_counts", "peer_memory"):
            assert not got.x[~came.any(1)].any(), kind


def law_an_overflow_is_said() -> None:
    """By every rank, if any has one: at once, or where flags are read later by themselves or by the check; once."""
    for kind in BOUNDED:
        by(kind, an_overflow_is_said)


def an_overflow_is_said() -> None:
    device_counts._lanes.clear()
    x = batch([64] * dist.get_world_size())[dist.get_rank()].requires_grad_()
    moe: Any = fo.Sequential({"moe": layer()})
    parallelize_module(moe, mesh(), parallel(capacity=0.3))
    set_root(moe)
    said = "on rank 0, 1 more tokens or copies came than there is room for: moe.dispatch has room for 32 tokens"
    raises(said, lambda: moe(x))
    few, arrived = x[:8], [False]
    assert not moe(few).isnan().any()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overflow, "reads_at_once", lambda flag: False)
        patch.setattr(overflow, "start_copy", lambda flags: (flags, lambda: arrived[0]))
        for read in (lambda: moe(x), check_overflow):
            moe(x).sum().backward()
            assert moe(few).isnan().any()
            arrived[0] = True
            raises(said, read)
            check_overflow()
            arrived[0] = False
        for _ in range(2):  # without a backward a round ends where the layer runs again
            moe(x)
        arrived[0] = True
        raises(said, lambda: moe(few))
        y = moe(few)
        moe["moe"]["dispatch"].dispatcher.flag.fill_(
            dist.get_rank()
        )  # the experts of the second alone have no room
        raises("on rank 1 more tokens", y.sum().backward)
        moe(few).sum().backward()
        moe["moe"]["dispatch"].dispatcher.flag.fill_(dist.get_rank())
        raises("on rank 1 more tokens", check_overflow)
        check_overflow()
    raises("agreed on", lambda: moe(torch.cat([x, x])))


def law_rows_of_two_sizes_are_refused() -> None:
    """By all ranks, before any is read."""
    x = torch.randn(5, D, dtype=torch.float32 if dist.get_rank() else torch.float64)
    experts = torch.arange(5 * TOP, dtype=torch.int32).view(5, TOP) % E
    for kind in ("host_counts", *BOUNDED):
        dispatcher: Any = choose(kind, mesh(), E, TOP)
        raises(
            "rows of 24 and 48 bytes", lambda e=dispatcher: e.dispatch(x, experts, experts.float())
        )


def raises(said: str, make: Any) -> None:
    try:
        make()
    except fo.FuseOpsError as error:
        assert said in str(error), error
    else:
        raise AssertionError(f"nothing raised where {said!r} was expected")


def law_a_rank_whose_x_alone_wants_a_gradient_is_told_so() -> None:
    """Its backward sends gradients back, for which no other rank comes: an error there, and no wait."""
    moe = parallelize_module(layer(), mesh(), ExpertParallel(dispatcher="host_counts"))
    moe["router"].requires_grad_(False)
    rank = dist.get_rank()
    x = batch([4] * dist.get_world_size())[rank].requires_grad_(rank == 0)
    y = moe(x).sum()
    if rank:
        y.backward()
    else:
        raises("weights on this rank, and nothing on rank 1", y.backward)
    dist.barrier()


def law_a_rank_that_has_raised_is_named() -> None:
    """In the error of those that wait for it, while its process lives; not once it goes on, nor in an error of all."""
    ranks, rank = [*range(dist.get_world_size())], dist.get_rank()
    sent = HostCounts.dispatch

    def dispatch(self: Any, *args: Any) -> Any:
        if wrong:
            raise ValueError("no room")
        return sent(self, *args)

    def notes(error: Exception) -> list[str]:
        with contextlib.redirect_stderr(io.StringIO()):
            sys.excepthook(type(error), error, None)
        return [note for note in getattr(error, "__notes__", ()) if "has raised ValueError" in note]

    with patch.object(HostCounts, "dispatch", dispatch):
        group: Any = dist.new_group(ranks, timeout=timedelta(seconds=1))
        over = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))
        moe = parallelize_module(layer(), over, ExpertParallel(dispatcher="host_counts"))
        x = batch([4] * len(ranks))[rank]
        wrong = False
        moe(x)
        wrong = True
        with pytest.raises(ValueError, match="no room") as raised:
            moe(x)
        dist.barrier()
        assert notes(raised.value) == [], notes(raised.value)
        dist.barrier()
        wrong = False
        moe(x)
        assert notes(ValueError("of another matter")) == []
        dist.barrier()
        moe(x)  # which takes that back
        dist.barrier()
        wrong = rank == 1
        with pytest.raises((ValueError, RuntimeError)) as raised:
            moe(x)
        named = ["rank 1 has raised ValueError: no room, before this rank did."]
        assert rank == 1 or notes(raised.value) == named, notes(raised.value)
        dist.barrier()


def of_transformers() -> Any:
    """A model of theirs, of float64."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=8, intermediate_size=8, moe_intermediate_size=4, num_hidden_layers=2, vocab_size=17,
        num_attention_heads=2, num_key_value_heads=1, head_dim=4, num_experts=4, num_experts_per_tok=2,
        dtype=torch.float64, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).double()


def law_models_of_transformers_spread_too() -> None:
    """What `hf.apply` runs, applied before or after: logits and every gradient."""
    alone = of_transformers()
    torch.manual_seed(2)
    world, rank = dist.get_world_size(), dist.get_rank()
    tokens = torch.randint(1, 17, (world, 6))
    hf.apply(alone)
    want = alone(tokens).logits
    want.square().sum().backward()
    for before in (True, False):
        spread = of_transformers()
        if before:
            hf.apply(spread)
        parallelize_module(spread, mesh(), ExpertParallel(average=False))
        if not before:
            hf.apply(spread)
        got = spread(tokens[rank : rank + 1]).logits
        close(got[0].detach(), want[rank].detach(), "logits")
        got.square().sum().backward()
        for (name, p), q in zip(spread.named_parameters(), alone.parameters(), strict=True):
            if isinstance(p, DTensor):
                close(p.grad.full_tensor(), q.grad, name)
            else:
                dist.all_reduce(p.grad)
                close(p.grad, q.grad, name)
        assert any(isinstance(p, DTensor) for p in spread.parameters())
        odd: Any = {f"model.layers.{rank}": "recompute"}
        attach = offload.Scheduler(spread, layers="model.layers.*", plan=odd).attach
        raises("makes 'model.layers.0' again, the other does not", attach)


def law_adapters_of_experts_over_ranks_are_refused() -> None:
    """Adapters of other modules are not, nor those that are switched off."""
    peft, x = pytest.importorskip("peft"), torch.randint(1, 17, (1, 6))
    both = peft.LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj"]
    )
    alone, model = of_transformers(), peft.get_peft_model(of_transformers(), both)
    hf.apply(alone)
    hf.apply(model)
    parallelize_module(model, mesh(), parallel())
    raises("has adapters of 'gate_up_proj', whose factors are of all", lambda: model(x))
    with model.disable_adapter():
        close(model(x).logits, alone(x).logits, "logits")


def law_wrong_use_says_so() -> None:
    raises("must divide", lambda: fo.MoE(D, F, 7, 2, ep=mesh()))
    raises("no experts to spread", lambda: ExpertParallel()._apply(nn.Linear(2, 2), mesh()))
    raises("host_counts", lambda: ExpertParallel(dispatcher="pigeon")._apply(layer(), mesh()))
    both = fo.MoE(D, 4, E, TOP)
    parallelize_module(both, mesh(), tp_plan(both))
    raises("over a mesh already", lambda: ExpertParallel()._apply(both, mesh()))
    recipe = fo.recipes.Float8BlockScaling()
    with fo.quantized_init(recipe):
        codes = layer()
    raises("has no values to spread", lambda: parallel()._apply(codes, mesh()))
    quantized_gather(gathered := layer(), recipe)
    raises("FSDP2 gathers of whole weights", lambda: parallel()._apply(gathered, mesh()))
    raises("main_grad", lambda: layer(accumulate_into_main_grad=True, ep=mesh()))
    raises("spread over ranks already", lambda: parallel()._apply(layer(ep=mesh()), mesh()))
    raises(
        "dispatcher gave None",
        lambda: ExpertParallel(dispatcher=lambda *_: None)._apply(layer(), mesh()),
    )  # type: ignore[arg-type,return-value]
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("sums is torch.int32", {"sums": torch.int32}),
        ("sums is 'float32'", {"sums": "float32"}),
        ("tokens is -1", {"tokens": -1}),
        *((f"capacity is {value!r}", {"capacity": value}) for value in (0, -1.0, math.nan, "2")),
    ]
    for said, options in wrong:
        raises(said, partial(ExpertParallel, **options))
    raises("capacity is 0", partial(FixedCapacity, mesh(), E, TOP, capacity=0))
    of_gpus = (
        (host_memory.ON_GPUS, "got tokens on cpu"),
        (host_memory.OVER_NVSHMEM, "by NVSHMEM, which"),
    )
    for made, said in of_gpus:
        raises(said, partial(made, mesh().get_group(), 64, torch.device("cpu")))
    two = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "ep"))
    for model in (layer(), of_transformers()):
        raises("one dimension, got 2", partial(parallel()._apply, model, two))
    raises("one dimension", partial(expert_placement, two))
    check_overflow(mesh())
    for model in (layer(), of_transformers()):
        fully_shard(model, mesh=mesh())
        raises("before fully_shard", partial(parallel()._apply, model, mesh()))


def law_buffers_outside_of_the_allocator_count_in_peaks() -> None:
    """Before and after they are there; once for all layers; in plans of fusion and of offload."""
    symmetric._peer_buffers.clear()  # of other laws, whose rows may be wider
    moe, other = fo.MoE(D, F, E, TOP), fo.MoE(D, F, E, TOP)
    x = torch.randn(40, D).requires_grad_()
    peaks, residents = [], []
    for kind in ("fixed_capacity", "peer_memory"):
        both = nn.Sequential(copy.deepcopy(moe), copy.deepcopy(other))
        style = ExpertParallel(dispatcher=kind, capacity=2.0, tokens=48)
        parallelize_module(both, mesh(), style)
        fo.configure(both, prefer="memory")  # the same order of gradients by both
        for _ in range(2):
            first: Any = both[0]
            peaks.append(first.plan(x).peak_bytes)
            residents.append(offload.plan(both, x, layers="*").profile.peak)
            both(x).sum().backward()
    nbytes = outside_bytes(both)
    room = symmetric.layout(dist.get_world_size(), 48, TOP, 4 * D, 4)[-1]
    assert nbytes == 2 * room, (nbytes, room)
    less = 4 * dist.get_world_size() * (48 - 1)  # its `arrivals` are counts, not slots
    assert peaks[2:] == [peaks[0] + nbytes - less] * 2, (peaks, nbytes)
    assert residents[2] - residents[0] == residents[3] - residents[1] == nbytes - 2 * less, (
        residents
    )


def law_sums_in_float32_are_rounded_once() -> None:
    """Forward and backward, by every dispatcher: bfloat16 is what one process has, but where float32 sums differ."""
    torch.manual_seed(4)
    width, rank = 64, dist.get_rank()
    parts = [torch.randn(t, width).to(torch.bfloat16) for t in tokens(40, 25)]
    start = sum(map(len, parts[:rank]))

    def results(style: ExpertParallel | None, run: Any) -> list[Tensor]:
        torch.manual_seed(0)
        moe = fo.MoE(width, 32, E, TOP, dtype=torch.bfloat16, shared_experts=1)
        if style is not None:
            parallelize_module(moe, mesh(), style)
        x = (torch.cat(parts) if style is None else parts[rank]).clone().requires_grad_()
        y = run(moe, x)
        torch.manual_seed(5)
        c = torch.randn(sum(map(len, parts)), width).to(torch.bfloat16)
        y.backward(c if style is None else c[start : start + len(x)])
        assert y.dtype is torch.bfloat16 and x.grad is not None
        return [t if style else t[start : start + len(parts[rank])] for t in (y.detach(), x.grad)]

    def plain(moe: Any, x: Tensor) -> Tensor:
        return moe(x)

    def compiled(moe: Any, x: Tensor) -> Tensor:
        return torch.compile(moe, fullgraph=True, backend="aot_eager")(x)

    def reference(moe: Any, x: Tensor) -> Tensor:
        with fo.reference():
            return moe(x)

    def unfused(moe: Any, x: Tensor) -> Tensor:
        with fo.fusion(False):
            return moe(x)

    want = results(None, plain)
    for kind in ("host_counts", *BOUNDED):
        for run in (plain, unfused, compiled, reference) if kind == "host_counts" else (plain,):
            shares = []
            for sums in (None, torch.float32):
                style = ExpertParallel(dispatcher=kind, sums=sums, average=False, capacity=8.0)
                got = results(style, run)
                shares.append(
                    [float((a != b).float().mean()) for a, b in zip(got, want, strict=True)]
                )
            rounded, once = shares
            assert rounded[0] > 0.05, (kind, run, shares)
            assert once[0] < 0.01, (kind, run, shares)
            if run is plain:  # elsewhere dx is rounded to the dtype of x before it travels
                assert rounded[1] > 0.05 and once[1] < 0.01, (kind, run, shares)
