"""The fused expert MLPs: what they save to the byte, what they run for every subset of needs, and what they equal."""

import copy
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fuseops as fo
from fuseops import kernels as K
from fuseops import offload
from fuseops.explain import FusionPlan
from fuseops.kernels import configs
from fuseops.kernels.registry import as_if_on
from fuseops.rules.builtin_rules import SCALED, UNSCALED
from fuseops.rules.fused import routed_mlp
from fuseops.rules.rule import types_of
from fuseops.testing import assert_fused_matches_unfused
from fuseops.testing.strategies import GROUPS, Split, group_splits

D, F, TOKENS, TOP_K = 6, 8, 15, 2
ROWS = TOKENS * TOP_K
ACTIVATIONS = (*types_of(SCALED), *types_of(UNSCALED))
FORMS = [(act, bias) for act in ACTIVATIONS for bias in (None, "plain", "scaled")]


def linear(groups: int, wide: int, out: int, bias: str | None) -> fo.ops.GroupedLinear:
    return fo.ops.GroupedLinear(
        groups, wide, out, bias=bias is not None, scale_bias=bias == "scaled"
    )


def experts(act: Any, bias: str | None = None, bias1: str | None = None) -> dict[str, Any]:
    made = act()
    wide = F * (1 + (made.kind in K.GATES))
    bias1 = bias if bias1 is None else bias1
    return {
        "fc1": linear(GROUPS, D, wide, bias1),
        "act": made,
        "fc2": linear(GROUPS, F, D, bias),
    }


def grouped(act: Any = fo.ops.ScaledSwiGLU, bias: str | None = None) -> fo.Sequential:
    return fo.Sequential(experts(act, bias))


def routed(
    act: Any = fo.ops.ScaledSwiGLU, bias: str | None = None, combine: bool = True
) -> fo.Sequential:
    end = {"combine": fo.ops.Combine(TOP_K)} if combine else {}
    return fo.Sequential({"permute": fo.ops.Permute(TOP_K), **experts(act, bias), **end})


def rows_of(
    split: Split, model: fo.Sequential, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Any]]:
    x = torch.randn(split.rows, D, dtype=dtype)
    side = {"offs": split.offs, "probs": torch.rand(split.rows)}
    return x, {name: side[name] for name in model.reads}


def tokens(
    model: fo.Sequential, dtype: torch.dtype, kind: str = "uniform", count: int = TOKENS
) -> tuple[Tensor, dict[str, Any]]:
    """Tokens and their routing: even, by Zipf's law, all to one expert, or with dropped copies."""
    weights = torch.ones(count, GROUPS)
    if kind == "zipf":
        weights = weights / torch.arange(1, GROUPS + 1) ** 2
    chosen = (
        torch.multinomial(weights, TOP_K) if count else torch.zeros(0, TOP_K, dtype=torch.int64)
    )
    if kind == "one":
        chosen = torch.full_like(chosen, 2)
    elif kind == "dropped":
        chosen = torch.where(torch.rand(chosen.shape) < 0.3, -1, chosen)
    routing = fo.Routing.from_topk(chosen, torch.rand(count, TOP_K), num_experts=GROUPS)
    side = routing._asdict()
    return torch.randn(count, D, dtype=dtype), {name: side[name] for name in model.reads}


# --- fused equals unfused


@pytest.mark.parametrize(
    ("act", "bias"), FORMS, ids=lambda value: getattr(value, "__name__", value)
)
@settings(max_examples=settings.default.max_examples // 4)
@given(split=group_splits(), seed=st.integers(0, 99))
def test_grouped_equals_unfused_in_every_form(
    act: Any, bias: str | None, split: Split, seed: int
) -> None:
    torch.manual_seed(seed)
    model = grouped(act, bias).double()
    x, side = rows_of(split, model, torch.float64)
    assert assert_fused_matches_unfused(model, x, **side) == ("grouped_mlp",)


@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("kind", ["uniform", "zipf", "one", "dropped"])
@given(form=st.sampled_from(FORMS), count=st.sampled_from([0, 1, 15, 63]), seed=st.integers(0, 99))
def test_routed_equals_unfused_in_every_form(
    kind: str, combine: bool, form: Any, count: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model = routed(*form, combine).double()
    x, side = tokens(model, torch.float64, kind, count)
    assert assert_fused_matches_unfused(model, x, **side) == ("routed_mlp",)


COPIES = (routed_mlp.FC1, routed_mlp.FC2_BWD)


@pytest.mark.parametrize("copied", list(itertools.product((0, 1), repeat=2)), ids=str)
@pytest.mark.parametrize("kind", ["zipf", "dropped"])
def test_rows_that_are_copied_equal_unfused(kind: str, copied: tuple[int, ...]) -> None:
    model = routed().double()
    x, side = tokens(model, torch.float64, kind)
    with ExitStack() as scopes:
        for space, copies in zip(COPIES, copied, strict=True):
            scopes.enter_context(configs.forced(space, {"COPY": copies}))
        assert assert_fused_matches_unfused(model, x, **side) == ("routed_mlp",)
        model = model.bfloat16()
        x, side = tokens(model, torch.bfloat16, kind)
        plan = model.plan(x.requires_grad_(), **side)
    assert plan.saved_bytes <= 2 * TOKENS * D + 4 * ROWS * F + 16 * ROWS + 4 * GROUPS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("make", [grouped, routed])
@pytest.mark.parametrize("act", [fo.ops.ScaledSwiGLU, fo.ops.ScaledSReLU, fo.ops.GEGLU])
def test_halves_equal_unfused(make: Any, act: Any, dtype: torch.dtype) -> None:
    model = make(act, "plain").to(dtype)
    x, side = (
        tokens(model, dtype) if make is routed else rows_of(Split((5, 0, 17, 2), 3), model, dtype)
    )
    assert assert_fused_matches_unfused(model, x, **side)


@pytest.mark.parametrize("bias1", [None, "plain", "scaled"])
def test_biases_of_two_kinds_equal_unfused(bias1: str | None) -> None:
    for bias in ("plain", "scaled"):
        model = fo.Sequential(experts(fo.ops.ScaledSwiGLU, bias, bias1)).double()
        x, side = rows_of(Split((5, 0, 17, 2), 3), model, torch.float64)
        assert assert_fused_matches_unfused(model, x, **side) == ("grouped_mlp",)


# --- what is saved


def bytes_by_name(plan: FusionPlan) -> dict[str, int]:
    return {t.name: t.nbytes for t in plan.saved if t.nbytes}


def test_the_grouped_mlp_saves_x_h_probs_and_offs_to_the_byte() -> None:
    model = grouped().bfloat16()
    x, side = rows_of(Split((5, 0, 17, 2), 3), model, torch.bfloat16)
    rows = len(x)
    plan = model.plan(x, **{**side, "probs": side["probs"].requires_grad_()})
    assert plan.saved_bytes == 2 * rows * D + 4 * rows * F + 4 * rows + 4 * GROUPS
    assert bytes_by_name(plan) == {
        "fc1.x": 2 * rows * D,
        "act.x": 4 * rows * F,
        "act.probs": 4 * rows,
        "fc1.offs": 4 * GROUPS,
    }


def test_without_h_it_saves_x_probs_and_offs() -> None:
    model = grouped(bias="plain").bfloat16()
    x, side = rows_of(Split((5, 0, 17, 2), 3), model, torch.bfloat16)
    with offload.recompute():
        assert assert_fused_matches_unfused(model, x, **side) == ("grouped_mlp",)
        plan = model.plan(x, **side)
    assert set(bytes_by_name(plan)) == {"fc1.x", "act.probs", "fc1.offs"}


def test_a_routed_layer_saves_tokens_h_and_indices_to_the_byte() -> None:
    model = routed().bfloat16()
    x, side = tokens(model, torch.bfloat16)
    plan = model.plan(x, **{**side, "probs": side["probs"].requires_grad_()})
    assert bytes_by_name(plan) == {
        "fc1.x": 2 * TOKENS * D,
        "act.x": 4 * ROWS * F,
        "act.probs": 4 * ROWS,
        "fc1.offs": 4 * GROUPS,
        "permute.index": 8 * ROWS,
        "permute.pos": 4 * ROWS,
    }


def test_a_moe_layer_saves_no_routed_copy() -> None:
    moe = fo.MoE(D, F, GROUPS, TOP_K, dtype=torch.bfloat16)
    plan = moe.plan(torch.randn(TOKENS, D, dtype=torch.bfloat16))
    router = 4 * TOKENS * GROUPS + 4 * ROWS  # logits, experts
    routing = 8 * ROWS + 4 * ROWS + 4 * GROUPS + 4 * ROWS  # index, pos, offs, probs
    assert plan.saved_bytes <= 2 * TOKENS * D + 4 * ROWS * F + router + routing


# --- the peak


T, WIDE, HIDDEN = 256, 128, 64


WEIGHT = 2 * GROUPS * WIDE * HIDDEN  # bytes of fc2's, half of fc1's


def as_it_is(function: Any) -> Any:
    return function


@pytest.mark.parametrize("frames", [as_it_is, torch._dynamo.run], ids=["python", "dynamo"])
@pytest.mark.parametrize("hidden", [HIDDEN, 1024])
def test_a_layer_needs_h_or_dh_and_the_rows_of_dx_before_the_last_gradient(
    hidden: int, frames: Any
) -> None:
    """dh takes the place of h, and the rows of dx go when they are summed: before the gradient of fc1's weight.
    Where dynamo evaluates frames, callers hold the arguments until a call returns.
    """
    moe = fo.MoE(WIDE, hidden, GROUPS, TOP_K, dtype=torch.bfloat16)
    x = torch.randn(T, WIDE, dtype=torch.bfloat16, requires_grad=True)
    tokens, rows, a = 2 * T * WIDE, 2 * T * TOP_K * WIDE, 2 * T * TOP_K * hidden
    weight = 2 * GROUPS * WIDE * hidden
    forward = 3 * a + rows - tokens  # h, a and the rows of y, which is not there
    making = 3 * a + weight + (rows if hidden >= 1024 else 0)  # of dy, where they are copied
    summing = 2 * a + weight + rows + tokens
    last = 2 * a + 3 * weight + tokens
    with as_if_on(90):
        plan = frames(moe.plan)(x)
    least = 2 * tokens + max(forward, making, summing, last)  # x and y live throughout
    assert plan.rehearsed and least <= plan.peak_bytes <= least + 64 * T * (GROUPS + TOP_K)


@pytest.mark.parametrize("frames", [as_it_is, torch._dynamo.run], ids=["python", "dynamo"])
@pytest.mark.parametrize("main_grad", [False, True])
def test_grouped_experts_need_h_or_dh(main_grad: bool, frames: Any) -> None:
    fc1 = fo.ops.GroupedLinear(GROUPS, WIDE, 2 * HIDDEN, False, accumulate_into_main_grad=main_grad)
    fc2 = fo.ops.GroupedLinear(GROUPS, HIDDEN, WIDE, False, accumulate_into_main_grad=main_grad)
    model = fo.Sequential(fc1, fo.ops.ScaledSwiGLU(), fc2).bfloat16()
    for op in (fc1, fc2) if main_grad else ():
        op.weight.main_grad = torch.zeros(op.weight.shape)
    split = Split((200, 0, 100, 212), 0)
    x = torch.randn(split.rows, WIDE, dtype=torch.bfloat16, requires_grad=True)
    with as_if_on(90):
        probs = torch.rand(split.rows).requires_grad_()
        plan = frames(model.plan)(x, offs=split.offs, probs=probs)
    rows, a = 2 * split.rows * WIDE, 2 * split.rows * HIDDEN
    weight = 0 if main_grad else WEIGHT
    least = 2 * rows + max(3 * a + weight, 2 * a + rows + 3 * weight)  # x and y live throughout
    assert plan.rehearsed and least <= plan.peak_bytes <= least + 32 * split.rows


@given(
    sizes=st.tuples(*[st.sampled_from([64, 80, 192, 512, 1024, 4096])] * 2),
    counts=st.tuples(st.sampled_from([64, 512]), st.integers(1, 6), st.integers(1, 4)),
    options=st.sampled_from([{}, {"bias": True}, {"activation": "geglu"}, {"shared_experts": 1}]),
)
@settings(max_examples=settings.default.max_examples // 2, deadline=None)
def test_what_prefers_memory_plans_no_higher_peak(
    sizes: tuple[int, int], counts: tuple[int, int, int], options: dict[str, Any]
) -> None:
    (wide, hidden), (tokens, more, top_k) = sizes, counts
    with FakeTensorMode():
        moe = fo.MoE(wide, hidden, top_k + more, top_k, dtype=torch.bfloat16, **options)
        x = torch.empty(tokens, wide, dtype=torch.bfloat16, requires_grad=True)
    peaks = []
    for prefer in ("speed", "memory"):
        fo.configure(moe, prefer=prefer)
        with as_if_on(90):
            plan = moe.plan(x)
        assert plan.rehearsed
        peaks.append(plan.peak_bytes)
    assert peaks[1] <= peaks[0]


def test_rows_of_dy_are_not_copied_where_memory_is_preferred() -> None:
    """They are what the step holds beside h, the activation and fc2's gradient."""
    with FakeTensorMode():
        moe = fo.MoE(1024, 768, 8, 4, dtype=torch.bfloat16)
        x = torch.empty(8192, 1024, dtype=torch.bfloat16, requires_grad=True)
    with as_if_on(90):
        speed = moe.plan(x)
        fo.configure(moe, prefer="memory")
        memory = moe.plan(x)
    assert speed.peak_bytes > memory.peak_bytes and speed.saved_bytes == memory.saved_bytes


# --- every subset of needs runs and saves what it asks for


class Ran(NamedTuple):
    kernels: dict[str, int]
    saved: set[str]


COUNTED = (
    "grouped_mm",
    "grouped_wgrad",
    "grouped_wgrad_into",
    "grouped_bias_bwd",
    "scaled_act_fwd",
    "scaled_act_bwd",
    "act_dprobs",
    "combine_fwd",
    "scatter_rows",
    "gather_rows",
)


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often each launcher is called inside."""
    calls: Counter[str] = Counter()

    def counted(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in COUNTED:
            patch.setattr(K, name, counted(name, getattr(K, name)))
        yield calls


def leaves(model: fo.Sequential, x: Tensor, side: dict[str, Any]) -> dict[str, Tensor]:
    return {"x": x, "probs": side["probs"], **dict(model.named_parameters())}


def expected(needs: set[str], routes: bool) -> Ran:
    """What a MLP with plain biases has to run in its backward, and to save."""
    below = bool(needs & {"x", "fc1.weight", "fc1.bias"})
    through = below or "probs" in needs
    kernels = {
        "grouped_mm": through + ("x" in needs),
        "grouped_wgrad": len(needs & {"fc1.weight", "fc2.weight"}),
        "grouped_bias_bwd": len(needs & {"fc1.bias", "fc2.bias"}),
        "scaled_act_bwd": int(below),
        "act_dprobs": int("probs" in needs and not below),
        "scaled_act_fwd": int("fc2.weight" in needs and not below),
        "combine_fwd": int(routes and "x" in needs),
        "scatter_rows": int(routes and "fc2.bias" in needs),
    }
    saved = {"fc1.offs"} if needs else set()
    saved |= {"fc1.x"} if "fc1.weight" in needs else set()
    saved |= {"act.x"} if through or "fc2.weight" in needs else set()
    saved |= {"act.probs"} if below or "fc2.weight" in needs else set()
    if routes and needs:
        saved |= {"permute.index", "permute.pos"}
    return Ran({name: n for name, n in kernels.items() if n}, saved)


@pytest.mark.parametrize("make", [grouped, routed])
def test_every_subset_of_needs_runs_and_saves_no_more(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(bias="plain").bfloat16()
    routes = make is routed
    x, side = (
        tokens(model, torch.bfloat16)
        if routes
        else rows_of(Split((5, 0, 17, 2), 3), model, torch.bfloat16)
    )
    all_leaves = leaves(model, x, side)
    for wanted in itertools.product((False, True), repeat=len(all_leaves)):
        for leaf, want in zip(all_leaves.values(), wanted, strict=True):
            leaf.requires_grad_(want)
            leaf.grad = None
        needs = {name for name, want in zip(all_leaves, wanted, strict=True) if want}
        plan = model.plan(x, **side)
        saved = {t.name for t in plan.saved if not t.is_param}
        y = model(x, **side)
        with counting(monkeypatch) as calls:
            if needs:
                y.backward(torch.ones_like(y))
        assert Ran(dict(calls), saved) == expected(needs, routes), needs
        assert {n for n, t in all_leaves.items() if t.grad is not None} == needs


@pytest.mark.parametrize("make", [grouped, routed])
def test_main_grads_take_the_sums_themselves(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    x, side = (
        tokens(model, torch.float32)
        if make is routed
        else rows_of(Split((5, 0, 17, 2), 3), model, torch.float32)
    )
    model(x, **side).sum().backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model = copy.deepcopy(model)  # the option holds from the first call on
    for op in (model["fc1"], model["fc2"]):
        op.accumulate_into_main_grad = True
        op.weight.main_grad = torch.ones_like(op.weight)
        op.weight.grad = None
    assert model.plan(x, **side).fused
    with counting(monkeypatch) as calls:
        model(x, **side).sum().backward()
    assert calls["grouped_wgrad_into"] == 2 and not calls["grouped_wgrad"]
    for name, p in model.named_parameters():
        assert p.grad is None
        torch.testing.assert_close(p.main_grad, plain[name] + 1)


class Adapted(nn.Module):
    """A frozen base of experts, and low-rank terms beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = grouped().requires_grad_(False)
        self.down = fo.ops.GroupedLinear(GROUPS, D, 2, bias=False)
        self.up = fo.ops.GroupedLinear(GROUPS, 2, D, bias=False)

    def forward(self, x: Tensor, offs: Tensor, probs: Tensor) -> Tensor:
        return self.base(x, offs=offs, probs=probs) + self.up(self.down(x, offs=offs), offs=offs)


@pytest.mark.parametrize("asks", [False, True])
def test_low_rank_terms_beside_a_frozen_base(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Adapted().double()
    x, side = rows_of(Split((5, 0, 17, 2), 3), model.base, torch.float64)
    x.requires_grad_(asks)
    y = model(x, **side)
    with counting(monkeypatch) as calls:
        y.sum().backward()
    # the base: nothing, or its two input gradients; the terms: down and up's own
    assert calls["grouped_mm"] == (4 if asks else 1) and calls["grouped_wgrad"] == 2
    assert bool(model.base.plan(x, **side).saved) is asks
    x.grad = None
    assert assert_fused_matches_unfused(model, x, **side)


# --- widths that fit nothing


@pytest.mark.parametrize("make", [grouped, routed])
def test_misfits_are_misses_or_the_errors_of_the_ops(make: Any) -> None:
    model = make()
    model.act = fo.ops.ScaledSReLU()  # fc1 is twice as wide
    x, side = (
        tokens(model, torch.float32)
        if make is routed
        else rows_of(Split((5, 0, 17, 2), 3), model, torch.float32)
    )
    with pytest.raises((fo.FuseOpsError, RuntimeError)) as fused:
        model(x, **side)
    with fo.fusion(False), pytest.raises((fo.FuseOpsError, RuntimeError)) as unfused:
        model(x, **side)
    assert type(fused.value) is type(unfused.value)
