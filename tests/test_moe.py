"""fo.MoE equals a plain loop over tokens and experts, in its output and in every gradient, and lives with the rest."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_moe import (
    ACTS,
    D,
    E,
    F,
    built,
    judged,
    losing,
    objective,
    options,
    step,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload

TOLERANCE = dict(rtol=1e-9, atol=1e-12)  # float64, sums of tens of terms
some = settings(max_examples=settings.default.max_examples // 2)


@st.composite
def layers(draw: Any) -> tuple[fo.MoE, Tensor, str]:
    torch.manual_seed(draw(st.integers(0, 999)))
    kind = draw(st.sampled_from(["even", "zipf", "one expert"]))
    kwargs = options(lambda *values: draw(st.sampled_from(values)))
    top_k = draw(st.sampled_from([2, 1, 3]))
    x = torch.randn(draw(st.sampled_from([7, 1, 0, 33])), D, dtype=torch.float64)
    return built(kind, top_k, **kwargs), x, kwargs["activation"]


def assert_same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, **TOLERANCE)


@given(layers())
def test_a_layer_is_the_loop_over_tokens_and_experts(case: tuple[fo.MoE, Tensor, str]) -> None:
    assert_same(step(*case[:2]), judged(*case))


@some
@given(layers())
def test_the_reference_differentiates_to_the_same(case: tuple[fo.MoE, Tensor, str]) -> None:
    moe, x, _ = case
    expected = step(moe, x)
    with fo.reference():
        assert_same(step(moe, x), expected)


@some
@given(layers(), st.sampled_from([2.0, 0.0, torch.tensor(2.0)]))
def test_an_injected_loss_is_one_that_is_added(
    case: tuple[fo.MoE, Tensor, str], scale: float | Tensor
) -> None:
    moe, x, activation = case
    if not losing(moe):
        return
    expected = judged(moe, x, activation)
    injecting = fo.MoE._like(
        moe, {**dict(moe.named_children()), "inject": fo.ops.InjectLoss()}.items()
    )
    names = [*moe._modules]
    names.insert(names.index("router") + 1, "inject")
    injecting._modules = {name: injecting._modules[name] for name in names}
    injecting.loss_scale = scale
    y, _, grads = step(injecting, x, returned=False)
    assert_same(y, expected[0])
    if scale == 2:
        assert_same(grads, expected[2])
    with fo.reference():
        assert_same(step(injecting, x, returned=False), (y, x.new_zeros(()), grads))


@some
@given(layers())
def test_fused_is_unfused(case: tuple[fo.MoE, Tensor, str]) -> None:
    moe, x, _ = case
    asked = ("router_loss",) * losing(moe)
    assert "routed_mlp" in fo.testing.assert_fused_matches_unfused(moe, x, returns=asked)
    with fo.fusion(False):
        unfused = step(moe, x)
    assert_same(step(moe, x), unfused)


def test_aux_says_how_the_loss_leaves() -> None:
    assert "inject" in fo.MoE(D, F, E, 2, aux="inject", z_loss=0.1)._modules
    assert "inject" not in fo.MoE(D, F, E, 2, aux="inject")._modules  # there is no loss
    assert "inject" not in fo.MoE(D, F, E, 2, z_loss=0.1)._modules


@pytest.mark.parametrize("way", ["as it is", "checkpoint", "to_host", "recompute"])
def test_every_micro_batch_has_the_scale_of_its_forward(way: str) -> None:
    """As in a pipeline, whose next forward runs before the backward."""
    layer = fo.MoE(D, F, E, 2, balance_loss=1.0, aux="inject").double()
    x = torch.randn(9, D, dtype=torch.float64)

    def moe(x: Tensor) -> Tensor:
        if way == "checkpoint":
            return checkpoint(layer, x, use_reentrant=False)
        scopes = {"to_host": offload.to_host(min_bytes=1), "recompute": offload.recompute()}
        with scopes.get(way, contextlib.nullcontext()):
            return layer(x)

    def gradient(scale: float) -> Tensor:
        layer.loss_scale = scale
        return torch.autograd.grad((moe(x) * 0).sum(), layer["router"].weight)[0]

    layer.loss_scale = 1.0
    first = (moe(x) * 0).sum()
    layer.loss_scale = three = torch.tensor(3.0, dtype=torch.float64)
    second = (moe(x) * 0).sum()
    layer.loss_scale = 7.0
    apart = [torch.autograd.grad(loss, layer["router"].weight)[0] for loss in (first, second)]
    assert_same(apart, [gradient(1.0), gradient(3.0)])
    assert apart[0].abs().max() > 0
    layer.loss_scale = three
    written = (moe(x) * 0).sum()
    three.add_(1)
    with pytest.raises(RuntimeError, match=r"in ?place"):
        written.backward()


def plain_blocks(aux: str) -> list[nn.Module]:
    """MoE layers between plain blocks, which know of no loss."""
    torch.manual_seed(0)
    layer = lambda: fo.MoE(D, F, E, 2, balance_loss=0.5, z_loss=0.25, aux=aux)  # noqa: E731
    between = nn.Sequential(nn.LayerNorm(D), nn.Tanh())
    return [m.double() for m in (nn.Linear(D, D), layer(), between, layer(), nn.Linear(D, 3))]


@pytest.mark.parametrize("cut", [None, 1, 2, 3])
def test_an_injected_loss_crosses_plain_blocks_and_pipeline_stages(cut: int | None) -> None:
    """cut: where one stage ends and hands over its output, and gets back nothing but the gradient of it."""
    scale, x = 3.0, torch.randn(9, D, dtype=torch.float64)
    returning, injecting = (plain_blocks(aux) for aux in ("return", "inject"))

    h, losses = x, x.new_zeros(())
    for block in returning:
        if isinstance(block, fo.MoE):
            h, loss = block(h, returns="router_loss")
            losses = losses + loss
        else:
            h = block(h)
    (objective(h, losses) + (scale - 2) * losses).backward()  # objective counts losses twice

    for block in injecting:
        if isinstance(block, fo.MoE):
            block.loss_scale = scale
    if cut is None:
        objective(nn.Sequential(*injecting)(x), x.new_zeros(())).backward()
    else:
        sent = nn.Sequential(*injecting[:cut])(x)
        received = sent.detach().requires_grad_()
        objective(nn.Sequential(*injecting[cut:])(received), x.new_zeros(())).backward()
        sent.backward(received.grad)
    gradients = [
        {n: p.grad for n, p in nn.ModuleList(blocks).named_parameters()}
        for blocks in (injecting, returning)
    ]
    assert_same(*gradients)


@some
@given(layers())
def test_given_experts_give_the_same_layer(case: tuple[fo.MoE, Tensor, str]) -> None:
    moe, x, _ = case
    expected = step(moe, x)
    with torch.no_grad():
        experts = moe(x, returns="experts")[1]
    again = moe.with_given_experts()
    assert {n: id(p) for n, p in again.named_parameters()} == {
        n: id(p) for n, p in moe.named_parameters()
    }
    x = x.detach().requires_grad_()
    moe.zero_grad()
    out = again(x, chosen=experts, returns=("router_loss",) * losing(moe))
    y, loss = out if losing(moe) else (out, x.new_zeros(()))
    objective(y, loss).backward()
    grads = {n: p.grad for n, p in again.named_parameters() if p.grad is not None}
    assert_same((y.detach(), loss.detach(), {"x": x.grad, **grads}), expected)
    assert moe["router"].reads == ()


def test_given_experts_may_be_others() -> None:
    moe, x = fo.MoE(D, F, E, 2).double(), torch.randn(5, D, dtype=torch.float64)
    experts = torch.tensor([[1, 6]] * 5, dtype=torch.int32)
    y, offs = moe.with_given_experts()(x, chosen=experts, returns="offs")
    assert offs.tolist() == [0, 5, 5, 5, 5, 5, 10, 10]
    scores = (x @ moe["router"].weight.t())[:, [1, 6]].softmax(-1)
    one = [moe["fc2"].weight[e] @ act(moe["fc1"].weight[e] @ x[0]) for e in (1, 6)]
    assert_same(y[0], scores[0, 0] * one[0] + scores[0, 1] * one[1])


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        (torch.tensor([[2.9, 0.0]] * 5), "int dtype, numbers of experts, got torch.float32"),
        (torch.tensor([[True, False]] * 5), "int dtype, numbers of experts, got torch.bool"),
        (torch.full((5, 2), E), f"from 0 to {E - 1}.*got {E} to {E}"),
        (torch.full((5, 2), -1), "got -1 to -1"),
        (torch.full((5, 2), 2**32), f"got {2**32} to"),
    ],
)
def test_given_experts_are_numbers_of_experts(chosen: Tensor, told: str) -> None:
    again = fo.MoE(D, F, E, 2).with_given_experts()
    with pytest.raises(fo.FuseOpsError, match=f"Router expects chosen.*{told}"):
        again(torch.randn(5, D), chosen=chosen)


def act(h: Tensor) -> Tensor:
    return ACTS["swiglu"](*h.chunk(2))


@given(st.integers(0, 99), st.sampled_from([0.3, 1.0, 1.5]))
@some
def test_capacity_drops_the_last_copies(seed: int, factor: float) -> None:
    torch.manual_seed(seed)
    moe = built("zipf", 2, capacity_factor=factor)
    x = torch.randn(33, D, dtype=torch.float64)
    _, experts, pos, offs = moe(x, returns=("experts", "pos", "offs"))
    room = math.ceil(factor * 66 / E)
    counts = offs.diff(prepend=offs.new_zeros(1))
    assert counts.max() <= room
    seen = [0] * E
    for chosen, rows in zip(experts.tolist(), pos.tolist(), strict=True):
        for e, row in zip(chosen, rows, strict=True):
            assert (row >= 0) == (seen[e] < room)
            seen[e] += 1
    assert counts.tolist() == [min(n, room) for n in seen]


# --- the correction of the choice


def test_the_expert_bias_evens_out_the_load() -> None:
    moe = fo.MoE(D, F, E, 2, score="sigmoid", expert_bias=True)
    router = moe["router"]
    with torch.no_grad():
        router.weight.mul_(4)
    x = torch.randn(256, D) + 1  # some experts are liked by all

    def spread() -> float:
        experts = moe(x, returns="experts")[1]
        return experts.flatten().bincount(minlength=E).double().std().item()

    before = spread()
    router.tokens_per_expert.zero_()
    for _ in range(200):
        moe(x)
        assert router.tokens_per_expert.sum() == 512
        router.update_expert_bias(rate=0.01)
        assert not router.tokens_per_expert.any()
    assert spread() < before / 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_copies_are_counted_once_and_in_training_only(reentrant: bool) -> None:
    moe = fo.MoE(D, F, E, 2, expert_bias=True)
    x, counted = torch.randn(2, 5, D, requires_grad=True), moe["router"].tokens_per_expert
    checkpoint(moe, x, use_reentrant=reentrant).sum().backward()
    assert counted.sum() == 20
    with torch.no_grad():
        moe(x)
    fo.explain(moe, x)
    moe.plan(x)
    fo.testing.assert_fused_matches_unfused(moe, x)
    moe.eval()(x)
    assert counted.sum() == 20 and moe["router"].tokens_per_expert is counted
    assert set(moe.state_dict()) == {
        "router.weight", "router.expert_bias", "fc1.weight", "fc2.weight"
    }  # fmt: skip


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("around", [None, "to_host", "keep", "scheduler"])
@pytest.mark.parametrize(
    "inside", [None, "to_host", "keep", "recompute", "disabled", "save_on_cpu"]
)
def test_copies_are_counted_once_wherever_scopes_are_open(
    inside: str | None, around: str | None, reentrant: bool
) -> None:
    block = torch.nn.Sequential(
        torch.nn.Tanh(), fo.MoE(D, F, E, 2, expert_bias=True), torch.nn.Tanh()
    )
    model = torch.nn.ModuleList([block])
    scopes = {
        None: contextlib.nullcontext,
        "to_host": lambda: offload.to_host(min_bytes=0),
        "keep": offload.keep,
        "recompute": offload.recompute,
        "disabled": offload.disabled,
        "save_on_cpu": torch.autograd.graph.save_on_cpu,
        "scheduler": lambda: offload.Scheduler(model, "*", policy=offload.Policy(min_bytes=0)),
    }

    def run(x: Tensor) -> Tensor:
        with scopes[inside]():
            y = block(x)
        return y.exp()  # what this saves is the checkpoint's, so that it runs again

    x, plain = torch.randn(10, D), copy.deepcopy(block)
    plain(x).exp().sum().backward()
    with scopes[around]():
        checkpoint(run, x.requires_grad_(), use_reentrant=reentrant).sum().backward()
    assert torch.equal(block[1]["router"].tokens_per_expert, plain[1]["router"].tokens_per_expert)
    for p, q in zip(block.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_copies_are_counted_once_where_a_plan_recomputes_the_layer() -> None:
    block = torch.nn.Sequential(torch.nn.Tanh(), fo.MoE(D, F, E, 2, expert_bias=True))
    model = torch.nn.Sequential(block)
    with offload.Scheduler(model, "*", plan={"0": "recompute"}):
        model(torch.randn(10, D, requires_grad=True)).sum().backward()
    assert block[1]["router"].tokens_per_expert.sum() == 20


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("scope", [contextlib.nullcontext, torch.autograd.graph.save_on_cpu])
def test_a_compiled_layer_inside_a_checkpoint_counts_once(scope: Any, reentrant: bool) -> None:
    """Its graph is the same for the forward and for the recomputation."""
    torch._dynamo.reset()
    moe = fo.MoE(D, F, E, 2, expert_bias=True)
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")

    def run(x: Tensor) -> Tensor:
        with scope():
            y = compiled(x)
        return y.exp()  # what this saves is the checkpoint's, so that it runs again

    x = torch.randn(7, D, requires_grad=True)
    for steps in (1, 2):
        checkpoint(run, x, use_reentrant=reentrant).sum().backward()
        assert moe["router"].tokens_per_expert.sum() == 14 * steps


def test_a_compiled_layer_counts_once_where_a_plan_recomputes_it() -> None:
    torch._dynamo.reset()
    block = torch.nn.Sequential(fo.MoE(D, F, E, 2, expert_bias=True), torch.nn.Tanh())
    block[0].compile(fullgraph=True, backend="aot_eager")
    model = torch.nn.Sequential(block)
    with offload.Scheduler(model, "*", plan={"0": "recompute"}):
        model(torch.randn(10, D, requires_grad=True)).sum().backward()
    assert block[0]["router"].tokens_per_expert.sum() == 20


@pytest.mark.parametrize(
    "backend",
    ["aot_eager", pytest.param("inductor", marks=[pytest.mark.cxx])],
)
def test_a_compiled_checkpoint_counts_once(backend: str) -> None:
    torch._dynamo.reset()
    moe = fo.MoE(D, F, E, 2, expert_bias=True)
    run = torch.compile(
        lambda x: checkpoint(moe, x, use_reentrant=False).exp(), fullgraph=True, backend=backend
    )
    run(torch.randn(7, D, requires_grad=True)).sum().backward()
    assert moe["router"].tokens_per_expert.sum() == 14


def test_the_expert_bias_stays_in_float32() -> None:
    moe = fo.MoE(D, F, E, 2, expert_bias=True)
    moe["router"].expert_bias.fill_(1.001)  # which bfloat16 does not know
    bias = moe.bfloat16()["router"].expert_bias
    assert bias.dtype is torch.float32 and bias[0] == torch.tensor(1.001)
    assert moe.double()["router"].expert_bias.dtype is torch.float64
    assert moe.to("meta")["router"].expert_bias.device.type == "meta"


def test_what_no_state_dict_fills_is_there_after_to_empty_and_after_a_reset() -> None:
    options: dict[str, Any] = {"expert_bias": True, "z_loss": 0.1, "aux": "inject"}
    moe = fo.MoE(D, F, E, 2, **options, device="meta").to_empty(device="cpu")
    moe.load_state_dict(fo.MoE(D, F, E, 2, **options).state_dict())
    assert moe.loss_scale == 1 and not moe["router"].tokens_per_expert.any()
    moe(torch.randn(5, D))
    assert moe["router"].tokens_per_expert.any()
    moe["router"].expert_bias.fill_(1.0)
    moe["router"].reset_parameters()
    assert not moe["router"].tokens_per_expert.any() and not moe["router"].expert_bias.any()


# --- with the rest of the package


def test_leading_axes_are_tokens() -> None:
    moe, x = fo.MoE(D, F, E, 2, shared_experts=1), torch.randn(2, 3, D)
    y, experts = moe(x, returns="experts")
    assert y.shape == x.shape and experts.shape == (6, 2)
    assert torch.equal(y.flatten(0, 1), moe(x.flatten(0, 1)))
    assert torch.equal(moe(x[0, 0]), y[0, 0]) or torch.allclose(moe(x[0, 0]), y[0, 0])


FROZEN = ["router", "fc1", "fc2", "shared", "router fc1", "fc1 fc2 shared"]


@pytest.mark.parametrize("frozen", FROZEN)
def test_frozen_parts_get_no_gradient_and_change_none(frozen: str) -> None:
    moe = built("zipf", 2, balance_loss=0.5, shared_experts=1, bias=True)
    x = torch.randn(9, D, dtype=torch.float64)
    y, loss, grads = step(moe, x)
    for name in frozen.split():
        moe[name].requires_grad_(False)
        moe[name].zero_grad()
    got = step(moe, x)
    kept = {n: g for n, g in grads.items() if n.split(".")[0] not in frozen.split()}
    assert_same(got, (y, loss, kept))


def test_without_a_gradient_of_x() -> None:
    moe = built("zipf", 2, balance_loss=0.5)
    x = torch.randn(9, D, dtype=torch.float64)
    expected = step(moe, x)[2]
    moe.zero_grad()
    objective(*moe(x, returns="router_loss")).backward()
    assert_same(
        {n: p.grad for n, p in moe.named_parameters()},
        {n: expected[n] for n in dict(moe.named_parameters())},
    )


@pytest.mark.parametrize("aux", ["return", "inject"])
def test_checkpoint_deepcopy_and_state_dict(aux: str) -> None:
    moe = built("zipf", 2, balance_loss=0.5, shared_experts=1, aux=aux)
    x = torch.randn(9, D, dtype=torch.float64)
    returned = aux == "return"
    expected = step(moe, x, returned)
    other = built("even", 2, balance_loss=0.5, shared_experts=1, aux=aux)
    other.load_state_dict(moe.state_dict())
    for same in (copy.deepcopy(moe), other):
        assert_same(step(same, x, returned), expected)
    call = functools.partial(moe, returns=("router_loss",) * returned)
    for reentrant in (False, True):
        leaf = x.detach().requires_grad_()
        moe.zero_grad()
        out = checkpoint(call, leaf, use_reentrant=reentrant)
        y, loss = out if returned else (out, x.new_zeros(()))
        objective(y, loss).backward()
        grads = {n: p.grad for n, p in moe.named_parameters()}
        assert_same((y.detach(), loss.detach(), {"x": leaf.grad, **grads}), expected)


@pytest.mark.parametrize("loss", ["balance_loss", "z_loss"])
def test_a_loss_that_nobody_reads_is_refused_where_a_gradient_would_be_lost(loss: str) -> None:
    """In the layer, inside of a block, by a router in a Sequential of one's own, compiled and checkpointed."""
    moe, x = fo.MoE(D, F, E, 2, **{loss: 0.1}), torch.randn(3, D)
    own = fo.Sequential(norm=fo.ops.RMSNorm(D), router=moe["router"])
    compiled = torch.compile(own, fullgraph=True, backend="eager")
    again = functools.partial(checkpoint, moe, use_reentrant=False)
    for call in (moe, fo.Residual(fo.ops.RMSNorm(D), moe), own, compiled, again):
        moe.train()
        with pytest.raises(Exception, match=r"router' .*'router_loss' in training.*aux='inject'"):
            call(x)
        with torch.no_grad():
            call(x)
        moe.eval()
        call(x)
    moe.train().requires_grad_(False)
    moe(x)  # there is no gradient
    with pytest.raises(fo.SideInputError, match="nobody reads it"):
        moe(x.requires_grad_())
    for published in ("router_loss", ("experts", "router_loss")):
        moe(x, returns=published)
    fo.Residual(fo.ops.RMSNorm(D), fo.MoE(D, F, E, 2, aux="inject", **{loss: 0.1}))(x)


def test_autocast_routes_in_float32() -> None:
    moe = fo.MoE(D, F, E, 2, balance_loss=0.5, shared_experts=1)
    x = torch.randn(9, D, requires_grad=True)
    y, loss, experts, weights = moe(x, returns=("router_loss", "experts", "weights"))
    with torch.autocast("cpu", torch.bfloat16):
        z, low, chosen, probs = moe(x, returns=("router_loss", "experts", "weights"))
    assert z.dtype is torch.bfloat16
    assert torch.equal(experts, chosen) and torch.equal(weights, probs) and torch.equal(loss, low)
    z.float().sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in moe.parameters())
    torch.testing.assert_close(z.float(), y, rtol=0.05, atol=0.05)


def test_halves_are_routed_by_their_exact_products() -> None:
    moe = fo.MoE(D, F, E, 2, z_loss=0.1, dtype=torch.bfloat16)
    x = torch.randn(65, D, dtype=torch.bfloat16)
    y, weights, loss = moe(x, returns=("weights", "router_loss"))
    exact = (x.double() @ moe["router"].weight.double().t()).softmax(-1).topk(2).values
    assert y.dtype is torch.bfloat16 and weights.dtype is loss.dtype is torch.float32
    torch.testing.assert_close(weights, (exact / exact.sum(-1, keepdim=True)).float())
    router = fo.ops.Router(D, E, 2, bias=True, dtype=torch.bfloat16)
    _, experts, weights = router(x)
    wide = copy.deepcopy(router).double().with_given_experts()
    _, _, exact = wide(x.double(), chosen=experts)
    slope = torch.randn(65, 2)
    (mine,) = torch.autograd.grad((weights * slope).sum(), router.bias)
    (true,) = torch.autograd.grad((exact * slope).sum(), wide.bias)
    # one rounding of the sum over tokens
    torch.testing.assert_close(mine.double(), true, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("kwargs", [
    {}, {"balance_loss": 0.1, "z_loss": 0.1, "aux": "inject"},
    {"score": "sigmoid", "expert_bias": True, "groups": 4, "top_groups": 2, "shared_experts": 1},
    {"capacity_factor": 1.0, "bias": True, "activation": "clamped_swiglu"},
])  # fmt: skip
def test_compiled_equals_eager_without_a_recompile(kwargs: dict[str, Any]) -> None:
    moe = fo.MoE(D, F, E, 2, **kwargs)
    eager = copy.deepcopy(moe)
    torch._dynamo.reset()
    frames = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moe, fullgraph=True, backend=frames)
    for rows in (6, 8, 12, 33):
        x = torch.randn(rows, D)
        results = []
        for model, params in ((compiled, moe), (eager, eager)):
            params.zero_grad()
            leaf = x.clone().requires_grad_()
            y = model(leaf)
            y.square().sum().backward()
            results.append([y.detach(), leaf.grad, *(p.grad for p in params.parameters())])
        torch.testing.assert_close(results[0], results[1])
    assert frames.frame_count <= 2


@pytest.mark.parametrize("change", ["appended", "hook"])
def test_an_output_that_others_hold_is_not_written_unseen(change: str) -> None:
    moe, x = fo.MoE(D, F, E, 2), torch.randn(2, 3, D, requires_grad=True)
    kept = []
    if change == "appended":
        moe.append(torch.nn.Tanh())  # saves its output
    else:
        moe["combine"].register_forward_hook(lambda op, args, y: kept.append(y.square()))
    y = moe(x)
    y += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (kept or [y])[0].sum().backward()


def test_a_layer_inside_a_sequential() -> None:
    model = fo.Sequential(
        fo.ops.Linear(D, D), fo.Residual({"norm": fo.ops.RMSNorm(D), "moe": fo.MoE(D, F, E, 2)})
    )
    text = str(fo.explain(model, torch.randn(2, 3, D, requires_grad=True)))
    assert "1.moe.router.logits" in text and "permute" in text
    assert {k.rsplit(".", 2)[1] for k in model.state_dict() if "moe" in k} == {
        "router", "fc1", "fc2"
    }  # fmt: skip


class Reversed(fo.Op):
    """A dispatcher that passes tokens on in another order, as one that sends them elsewhere does."""

    reads = ("experts", "weights")
    writes = ("offs", "probs", "index", "pos")
    integers = frozenset({"offs", "index", "pos"})
    num_experts = E

    def fwd(self, x: Tensor, *, experts: Tensor, weights: Tensor) -> fo.Out:
        rows = fo.Routing.from_topk(experts.flip(0), weights.flip(0), num_experts=E)
        return fo.Out(x.flip(0), side=rows._asdict())


class Back(fo.Op):
    def fwd(self, x: Tensor) -> Tensor:
        return x.flip(0)


def test_a_dispatcher_of_your_own() -> None:
    moe = built("zipf", 2, balance_loss=0.5)
    other = built("zipf", 2, balance_loss=0.5, dispatch=Reversed(), collect=Back())
    other.load_state_dict(moe.state_dict())
    x = torch.randn(9, D, dtype=torch.float64)
    assert_same(step(other, x), step(moe, x))


class OwnSReLU(fo.Op[Any]):
    """A level-1 activation of a user: that of the name "srelu"."""

    reads = ("probs",)

    def fwd(self, x: Tensor, *, probs: Tensor) -> Tensor:
        return x.relu().square() * probs[:, None]


class OwnSwiGLU(fo.Op[Any]):
    """A gated one: that of the name "swiglu"."""

    reads = ("probs",)

    def out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // 2)

    def fwd(self, x: Tensor, *, probs: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up * probs[:, None]


@pytest.mark.parametrize(("own", "name"), [(OwnSReLU, "srelu"), (OwnSwiGLU, "swiglu")])
def test_an_activation_of_a_user_that_reads_the_probabilities_is_taken(
    own: type, name: str
) -> None:
    x = torch.randn(9, D, dtype=torch.float64)
    layer, named = (
        fo.MoE(D, F, E, 2, activation=act, dtype=torch.float64) for act in (own(), name)
    )
    layer.load_state_dict(named.state_dict())
    assert_same(step(layer, x), step(named, x))


def test_an_activation_of_another_width_is_refused_where_it_is_given() -> None:
    class Third(OwnSwiGLU):
        def out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
            return (*shape[:-1], shape[-1] // 3)

    with pytest.raises(
        fo.FuseOpsError, match=rf"activation is Third.*neither {F} features nor {2 * F}"
    ):
        fo.MoE(D, F, E, 2, activation=Third())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"activation": "tanh"}, "activation is 'tanh'.*swiglu"),
        ({"activation": fo.ops.SwiGLU()}, r"SwiGLU\(\).*reads `probs`.*ops\.ScaledSwiGLU\(\)"),
        ({"aux": "add"}, "aux is 'add'"),
        ({"score": "tanh"}, "score is 'tanh'"),
        ({"groups": 3}, "groups is 3.*divide the 8 experts"),
        ({"groups": 0}, "groups is 0.*divide the 8 experts"),
        ({"dim": 0}, "dim is 0, expected an integer from 1 on"),
        ({"shared_experts": -1}, "shared_experts is -1, expected an integer from 0 on"),
        ({"groups": 8, "top_groups": 1}, "hold 1 experts, fewer than top_k = 2"),
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0, expected a finite number above 0"),
        ({"capacity_factor": 1.0, "dispatch": fo.ops.Dispatch(E)}, "its own capacity_factor"),
        ({"activation": fo.ops.ScaledSReLU(), "shared_experts": 1}, "shared_experts as a module"),
    ],
)
def test_options_that_cannot_be(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(fo.FuseOpsError, match=message):
        fo.MoE(**{"dim": D, "ffn": F, "num_experts": E, "top_k": 2, **kwargs})


def test_what_is_not_there_is_said() -> None:
    moe = fo.MoE(D, F, E, 2)
    with pytest.raises(fo.FuseOpsError, match="aux='inject'"):
        moe.loss_scale = 1.0
    assert not hasattr(moe, "loss_scale") and dict(inspect.getmembers(moe))["training"]
    with pytest.raises(fo.FuseOpsError, match="no expert_bias"):
        moe["router"].update_expert_bias()
    with pytest.raises(fo.SideInputError, match="router_loss"):
        moe(torch.randn(3, D), returns="router_loss")
    with pytest.raises(fo.FuseOpsError, match="Router expects x with 6 features"):
        moe(torch.randn(3, D + 1))
    with pytest.raises(fo.FuseOpsError, match=r"Router expects x with 6 features.*\(\)"):
        moe(torch.tensor(1.0))
    moe = fo.MoE(D, F, E, 2, aux="inject", z_loss=0.1)
    with pytest.raises(fo.FuseOpsError, match=r"scale of shape \(\), got \(3,\)"):
        moe.loss_scale = torch.ones(3)


def test_the_documented_layer_runs() -> None:
    text = (Path(__file__).parents[1] / "docs" / "moe.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(snippet, "docs/moe.md", "exec"), {})
    assert "routed_mlp" in out.getvalue()


def test_a_layer_built_on_meta_trains_with_the_tensors_that_it_is_given() -> None:
    """No state_dict holds the scale of an injected loss, nor the counts of the expert bias."""
    options: dict[str, Any] = {"balance_loss": 0.1, "aux": "inject", "expert_bias": True}
    moe = fo.MoE(8, 6, 4, 2, score="sigmoid", **options)
    given = fo.MoE(8, 6, 4, 2, score="sigmoid", device="meta", **options)
    before = copy.deepcopy(given)
    given.load_state_dict(copy.deepcopy(moe.state_dict()), assign=True)
    x = torch.randn(7, 8)
    for layer in (moe, given):
        layer.loss_scale = 0.5
        layer(x).square().sum().backward()
        layer["router"].update_expert_bias(0.1)
    assert torch.equal(given["router"].weight.grad, moe["router"].weight.grad)
    assert torch.equal(given["router"].expert_bias, moe["router"].expert_bias)
    assert before["router"].expert_bias.is_meta  # a copy is another layer
