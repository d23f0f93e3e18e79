"""Scales of the steps before: the formula, what a step is, and state that travels."""

import copy
import io
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload
from fuseops.recipes import scales
from fuseops.testing import assert_fused_matches_unfused
from fuseops.testing.strategies import filled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DELAYED = partial(fo.recipes.DelayedScaling, amax_history_len=3)
LARGEST = np.array([448.0, 448.0, 57344.0], np.float32)
D = 16


def dense() -> fo.Sequential:
    torch.manual_seed(0)
    return fo.Sequential(fo.ops.Linear(D, D, bias=False))


def experts() -> fo.Sequential:
    torch.manual_seed(0)
    return fo.Sequential(fo.ops.GroupedLinear(2, D, D, bias=False))


def mlp() -> fo.Sequential:
    torch.manual_seed(0)
    return fo.Sequential(
        fo.ops.Linear(D, 2 * D, bias=False), fo.ops.SwiGLU(), fo.ops.Linear(D, D, bias=False)
    )


def moe() -> fo.MoE:
    torch.manual_seed(0)
    return fo.MoE(D, D, 2, 2)


def plain(model: Any, x: Tensor, **side: Tensor) -> Tensor:
    return model(x, **side)


def recomputed(model: Any, x: Tensor, **side: Tensor) -> Tensor:
    kept = {"use_reentrant": False, "context_fn": fo.checkpoint_contexts}
    return checkpoint(model, x, **kept, **side)


def call(
    model: Any, x: Tensor, dy: Tensor, recipe: Any, how: Any = plain, **side: Tensor
) -> list[Tensor]:
    """Output and gradients."""
    x = x.detach().requires_grad_()
    with fo.recipe(recipe):
        y = how(model, x, **side)
        return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {k: t.clone() for k, t in model.state_dict().items() if "fp8_" in k}


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


ALGORITHMS: dict[str, Callable[[Any], Any]] = {
    "max": lambda history: np.max(history, 0),
    "most_recent": lambda history: history[0],
}


@settings(max_examples=15)
@given(
    sizes=st.lists(
        st.lists(
            st.sampled_from([0.0, 1e-30, 0.3, 5.0, 448.0, 3e38, np.inf, np.nan]),
            min_size=1,
            max_size=2,
        ),
        min_size=1,
        max_size=6,
    ),
    algorithm=st.sampled_from(["max", "most_recent", "mean"]),
    margin=st.sampled_from([0, 2]),
)
@example(sizes=[[1e-37]], algorithm="max", margin=0)  # whose scale float32 does not have
def test_scales_follow_the_formula(sizes: list[list[float]], algorithm: str, margin: int) -> None:
    """Steps of micro-batches whose inputs have these amaxes, against the same in numpy."""
    algo: Any = (lambda h: h.mean(0)) if algorithm == "mean" else algorithm
    recipe = DELAYED(amax_compute_algo=algo, margin=margin)
    model, history, scale = dense(), np.zeros((3, 3), np.float32), np.zeros(3, np.float32)
    weight = np.float32(model[0].weight.abs().max().item())
    for micro in sizes:
        for size in micro:
            x, dy = torch.zeros(4, D), torch.zeros(4, D)
            x[1, 2], dy[2, 1] = -size, size / 4
            call(model, x, dy, recipe)
        fo.weights_changed(model)
        largest = max([size for size in micro if size == size], default=0.0)
        seen = np.array([largest, weight, largest / 4], np.float32)
        for k in range(3):
            if seen[k] == 0 or np.isinf(seen[k]):
                continue
            history[:, k] = [seen[k], *history[:-1, k]]
            with np.errstate(over="ignore"):
                made = ALGORITHMS.get(algorithm, partial(np.mean, axis=0))(history[:, k])
                if not np.isfinite(made):
                    continue
                scale[k] = min(LARGEST[k] / made / 2.0**margin, np.finfo(np.float32).max)
        found = state(model)
        assert np.array_equal(found["0.fp8_amax_history"][:, :, 0].numpy(), history)
        np.testing.assert_allclose(found["0.fp8_scale"][:, 0].numpy(), scale, rtol=1e-6)
        assert not found["0.fp8_amax"].any()


@pytest.mark.parametrize("first", [False, True])  # which has those of the tensors themselves
@pytest.mark.parametrize("make", [dense, experts])
def test_operands_are_rounded_with_the_scales_of_the_step_before(make: Any, first: bool) -> None:
    model, recipe = make(), DELAYED()
    side = {} if make is dense else {"offs": torch.tensor([20, 50], dtype=torch.int32)}
    x, dy = filled((50, D), torch.float32, "normal", 1), filled((50, D), torch.float32, "normal", 2)
    if not first:
        call(model, x, dy, recipe, **side)
        fo.weights_changed(model)
        x, dy = 3 * x, 5 * dy  # beyond the amax of the step before, so that they saturate
    y, dx, dw = call(model, x, dy, recipe, **side)
    scale = state(model)["0.fp8_scale"].double()
    if first:
        assert not scale.any()
        scale = (torch.from_numpy(LARGEST)[:, None] / state(model)["0.fp8_amax"]).double()
    ends = [0, 50] if make is dense else [0, 20, 50]
    for g, (a, b) in enumerate(itertools.pairwise(ends)):
        w = model[0].weight.detach().view(-1, D, D)[g]
        qx, qw, qdy = (
            (t.double() * scale[k, g]).clamp(-m, m).float().to(f).double() / scale[k, g]
            for k, (t, m, f) in enumerate(
                [(x[a:b], 448, E4M3), (w, 448, E4M3), (dy[a:b], 57344, E5M2)]
            )
        )
        for mine, theirs in ((y[a:b], qx @ qw.t()), (dx[a:b], qdy @ qw)):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            dw.view(-1, D, D)[g].double(), qdy.t() @ qx, rtol=1e-5, atol=1e-4
        )


@pytest.mark.parametrize("make", [mlp, moe])
@pytest.mark.parametrize("weights", ["none", "step"])
def test_a_recomputation_sees_what_its_forward_saw(make: Any, weights: str) -> None:
    recipe, found = DELAYED(weights=weights), []
    for how in (plain, recomputed):
        model = make()
        for turn in range(3):
            x, dy = (filled((20, D), torch.float32, "normal", 2 * turn + k) for k in (0, 1))
            result = call(model, x * 2.0**turn, dy, recipe, how)
            fo.weights_changed(model)
        found.append([*result, *state(model).values()])
    assert same(*found)


@pytest.mark.parametrize("make", [mlp, moe])
def test_fused_equals_unfused_from_the_same_state(make: Any) -> None:
    model, x = make(), filled((20, D), torch.float32, "normal", 1)
    call(model, x, x, DELAYED())
    fo.weights_changed(model)
    assert_fused_matches_unfused(model, 2 * x, recipe=DELAYED())


@pytest.mark.parametrize(
    "front", [fo.ops.Identity, partial(fo.ops.RMSNorm, D)], ids=["alone", "fused"]
)
@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_a_gradient_that_no_product_reads_is_not_noted(front: Any, trained: str) -> None:
    """Where a bias alone is trained, dy is summed as it is."""
    model = fo.Sequential(front(), fo.ops.Linear(D, D))
    for name, p in model.named_parameters():
        p.requires_grad_(name == f"1.{trained}")
    x = filled((20, D), torch.float32, "normal", 1)
    assert_fused_matches_unfused(model, x, recipe=DELAYED())
    with fo.recipe(DELAYED()):
        model(x).sum().backward()
    _, _, noted = state(model)["1.fp8_amax"]
    assert bool(noted) is (trained == "weight")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [dense, moe])
def test_a_model_that_is_cast_keeps_its_scales(make: Any, dtype: torch.dtype) -> None:
    model, x = make(), filled((20, D), torch.float32, "normal", 1)
    call(model, x * 1e-4, x * 1e-6, DELAYED())  # scales beyond float16
    fo.weights_changed(model)
    before = state(model)
    model.to(dtype)
    assert all(t.dtype is torch.float32 for t in state(model).values())
    assert same(state(model).values(), before.values())
    call(model, (x * 1e-4).to(dtype), (x * 1e-4).to(dtype), DELAYED())
    fo.weights_changed(model)
    other = make()
    saved = {name: t.to(torch.bfloat16) for name, t in model.state_dict().items()}
    other.load_state_dict(saved)
    assert all(t.dtype is torch.float32 for t in state(other).values())
    assert {t.device.type for t in state(model.to("meta")).values()} == {"meta"}


def advanced(model: nn.Module) -> bool:
    """Whether the state went one step on, of all ops."""
    histories = [t for k, t in state(model).items() if k.endswith("fp8_amax_history")]
    assert all(not t[1:].any() for t in histories)
    return all(bool((t[0] > 0).all()) for t in histories)


def test_a_step_is_one_however_often_it_is_announced() -> None:
    recipe, x = DELAYED(), filled((20, D), torch.float32, "normal", 1)
    model = dense()
    opt = torch.optim.SGD(model.parameters(), lr=0.0)
    call(model, x, x, recipe)
    opt.step()
    after = state(model)
    fo.weights_changed(model)
    fo.weights_changed(model)
    opt.step()
    assert same(state(model).values(), after.values()) and advanced(model)


@pytest.mark.parametrize("make", [dense, mlp, experts])
def test_a_state_follows_the_optimizer_that_holds_its_parameters(make: Any) -> None:
    recipe, x = DELAYED(), filled((20, D), torch.float32, "normal", 1)
    side = {"offs": torch.tensor([7, 20], dtype=torch.int32)} if make is experts else {}
    mine, other = make(), make()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in (mine, other)]
    for model in (mine, other):
        call(model, x, x, recipe, **side)
    optimizers[0].step()
    assert advanced(mine) and not advanced(other)
    optimizers[1].step()
    assert advanced(mine) and advanced(other)


def test_a_state_whose_op_has_an_optimizer_follows_no_other() -> None:
    """The optimizer of a critic or of an embedding, without fuseops, may step between forward and backward."""
    recipe, x = DELAYED(), filled((20, D), torch.float32, "normal", 1)
    model, critic = dense(), nn.Linear(D, 1)
    own, other = (torch.optim.SGD(m.parameters(), lr=0.0) for m in (model, critic))
    critic(x).sum().backward()
    for _ in range(2):
        call(model, x, x, recipe)
        own.step()
    after = state(model)
    call(model, 2 * x, x, recipe)
    noted = state(model)
    assert not same(noted.values(), after.values())
    other.step()
    assert same(state(model).values(), noted.values())


@pytest.mark.parametrize("make", [dense, mlp])
def test_the_step_of_a_compiled_optimizer_is_a_step(make: Any) -> None:
    found = []
    for compiles in (False, True):
        model = make()
        # foreach: what compiled code takes, with roundings of its own in torch 2.11
        opt = torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)
        step = torch.compile(opt.step, backend="eager") if compiles else opt.step
        for seed in range(3):
            x = filled((20, D), torch.float32, "normal", seed)
            with fo.recipe(DELAYED()):
                model(x).square().mean().backward()
            step()
            opt.zero_grad()
        found.append(model.state_dict())
    assert same(list(found[0].values()), list(found[1].values()))


def test_an_optimizer_of_copies_of_the_parameters_advances_every_state() -> None:
    recipe, x = DELAYED(), filled((20, D), torch.float32, "normal", 1)
    model = mlp()
    call(model, x, x, recipe)
    torch.optim.SGD([p.detach().double() for p in model.parameters()], lr=0.0).step()
    assert advanced(model)


def test_the_state_of_a_frozen_op_follows_whoever_steps() -> None:
    recipe, x = DELAYED(), filled((20, D), torch.float32, "normal", 1)
    model = mlp()
    model[0].requires_grad_(False)
    with fo.recipe(recipe):
        model(x.requires_grad_()).sum().backward()
    torch.optim.SGD(model[-1].parameters(), lr=0.0).step()
    assert advanced(model)


def test_nothing_is_noted_in_evaluation_nor_by_plans() -> None:
    model, recipe, x = dense(), DELAYED(), filled((20, D), torch.float32, "normal", 1)
    call(model, x, x, recipe)
    before = state(model)
    with fo.recipe(recipe):
        model.plan(9 * x.requires_grad_())
        fo.explain(model, 9 * x)
        model.eval()
        model(9 * x)
    assert same(state(model).values(), before.values())
    model = dense()  # whose state the first call makes
    with fo.recipe(recipe):
        fo.explain(model, 9 * x)
        offload.plan(model, x.detach(), layers="0", record=True)
    assert not [*model.buffers()]


@pytest.mark.parametrize("amax", [0.0, -1.0, torch.inf, torch.nan])
def test_an_amax_that_gives_no_scale_leaves_it_as_it_is(amax: float) -> None:
    model, x = dense(), filled((20, D), torch.float32, "normal", 1)
    for algorithm in ("max", lambda history: torch.full_like(history[0], amax)):
        call(model, x, x, DELAYED(amax_compute_algo=algorithm))
        fo.weights_changed(model)
    usual = dense()
    call(usual, x, x, DELAYED())
    fo.weights_changed(usual)
    assert torch.equal(state(model)["0.fp8_scale"], state(usual)["0.fp8_scale"])


def test_a_step_that_saw_nothing_leaves_everything_as_it_is() -> None:
    model, x = dense(), filled((20, D), torch.float32, "normal", 1)
    call(model, x, x, DELAYED())
    fo.weights_changed(model)
    before = state(model)
    with fo.recipe(DELAYED(margin=3)):
        model.eval()(x)
    fo.weights_changed(model)
    assert same(state(model).values(), before.values())


def test_training_goes_on_from_a_call_in_inference_mode() -> None:
    model, usual, x = dense(), dense(), filled((20, D), torch.float32, "normal", 1)
    with torch.inference_mode(), fo.recipe(DELAYED()):
        model.eval()(x)
    model.train()
    for _ in range(2):
        assert same(call(model, x, x, DELAYED()), call(usual, x, x, DELAYED()))
        fo.weights_changed(model), fo.weights_changed(usual)


def test_state_goes_through_checkpoints_copies_and_other_dtypes() -> None:
    recipe, x = DELAYED(), filled((20, D), torch.float32, "normal", 1)
    model = moe()
    for turn in range(2):
        call(model, x * 2.0**turn, x, recipe)
        fo.weights_changed(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded, copied = moe(), copy.deepcopy(model)
    loaded.load_state_dict(torch.load(file))
    want = call(model, x, x, recipe)
    assert same(call(loaded, x, x, recipe), want) and same(call(copied, x, x, recipe), want)
    before = state(model)
    model.load_state_dict({k: t for k, t in model.state_dict().items() if "fp8_" not in k})
    assert same(state(model).values(), before.values())
    half = copy.deepcopy(model).bfloat16()
    assert torch.isfinite(call(half, x.bfloat16(), x.bfloat16(), recipe)[0]).all()


def test_amaxes_are_the_largest_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def largest(t: Tensor, group: str, how: str) -> Tensor:
        assert how == "max"
        asked.append((group, t.numel()))
        return t * 2

    monkeypatch.setattr("fuseops.torch_private.all_reduce", largest)
    monkeypatch.setattr(scales, "_states", weakref.WeakSet())  # no later test has such a group
    model, recipe = moe(), DELAYED(group="0")
    call(model, filled((20, D), torch.float32, "normal", 1), torch.ones(20, D), recipe)
    noted = state(model)
    fo.weights_changed(model)
    assert asked == [("0", sum(t.numel() for k, t in noted.items() if k.endswith("fp8_amax")))]
    for name, amax in noted.items():
        if name.endswith("fp8_amax"):
            assert torch.equal(state(model)[f"{name}_history"][0], 2 * amax)


def test_a_history_of_another_length_goes_on_with_what_there_is() -> None:
    model, x = dense(), filled((20, D), torch.float32, "normal", 1)
    before = torch.zeros(0, 3, 1)
    for turn, length in enumerate((3, 5, 1, 4)):
        call(model, x * 2.0**turn, x, DELAYED(amax_history_len=length))
        noted = state(model)["0.fp8_amax"]
        fo.weights_changed(model)
        zeros = torch.zeros(length, 3, 1)
        before = torch.cat([noted[None], before, zeros])[:length]
        assert torch.equal(state(model)["0.fp8_amax_history"], before)
    shorter = dense()
    call(shorter, x, x, DELAYED())
    shorter.load_state_dict(model.state_dict())
    assert same(state(shorter).values(), state(model).values())
    with pytest.raises(fo.FuseOpsError, match="of 1 groups, the op has 2"):
        other = experts()
        other.load_state_dict(state(model) | {"0.weight": other[0].weight})
        call(other, x, x, DELAYED(), offs=torch.tensor([10, 20], dtype=torch.int32))


recipes_with_state = st.builds(
    DELAYED,
    fwd=st.sampled_from([E4M3, E5M2]),
    bwd=st.sampled_from([E4M3, E5M2]),
    margin=st.sampled_from([0, 6]),
    amax_compute_algo=st.sampled_from(["max", "most_recent"]),
)


@settings(max_examples=15)
@given(
    before=recipes_with_state,
    after=recipes_with_state,
    loads=st.booleans(),
    make=st.sampled_from([dense, experts]),
)
def test_another_recipe_has_scales_of_its_own_from_the_same_history(
    before: Any, after: Any, loads: bool, make: Any
) -> None:
    """A scale brings an amax to the end of one format: in another one most numbers would be beyond it."""
    side = {"offs": torch.tensor([7, 20], dtype=torch.int32)} if make is experts else {}
    x, found = filled((20, D), torch.float32, "normal", 1), []
    for first in (before, after):
        model = make()
        for turn in range(2):
            call(model, x * 2.0**-turn, x, first, **side)
            fo.weights_changed(model)
        if loads:
            model, trained = make(), model
            call(model, x, x, after, **side)  # it has scales already
            model.load_state_dict(trained.state_dict())
        found.append([*call(model, x, x, after, **side), *state(model).values()])
        fo.weights_changed(model)
        found[-1] += state(model).values()
    assert same(*found)


@given(during=recipes_with_state, length=st.integers(1, 4))
def test_an_evaluation_under_another_recipe_changes_no_training(during: Any, length: int) -> None:
    x, found = filled((20, D), torch.float32, "normal", 1), []
    for evaluates in (False, True):
        model = dense()
        for turn in range(3):
            result = call(model, x * 2.0**-turn, x, DELAYED())
            if evaluates:
                with torch.no_grad(), fo.recipe(replace(during, amax_history_len=length)):
                    model.eval()(x)
                model.train()
            fo.weights_changed(model)
        found.append([*result, *state(model).values()])
    assert same(*found)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"amax_history_len": 0}, "expected a number, 1 or above"),
        ({"amax_compute_algo": "mean"}, "amax_compute_algo='mean'"),
        ({"group": object()}, "expected the name of a process group"),
        ({"fwd": torch.bfloat16}, "fwd=torch.bfloat16"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(fo.FuseOpsError, match=error):
        fo.recipes.DelayedScaling(**options)


def test_compiled_code_refuses_it() -> None:
    model = torch.compile(dense(), backend="eager")
    with fo.recipe(DELAYED()), pytest.raises(Exception, match="compiled code cannot"):
        model(torch.ones(2, D))
    assert scales.AMAX not in dict(model.named_buffers())


def test_a_comparison_sees_the_amaxes_of_weights_that_an_earlier_run_has_kept() -> None:
    with fo.recipe(DELAYED(weights="step")):
        assert_fused_matches_unfused(dense(), torch.randn(3, D))


def test_a_state_whose_buffers_were_deleted_begins_anew() -> None:
    model, x = dense(), torch.randn(3, D)
    with fo.recipe(DELAYED()):
        model(x).sum().backward()
        for op in model:
            for name in (scales.AMAX, scales.HISTORY, scales.SCALE):
                op._buffers.pop(name, None)
        fo.weights_changed(model)
        assert scales.AMAX not in dict(model.named_buffers())
        model(x)
    assert scales.AMAX in {name.rpartition(".")[2] for name, _ in model.named_buffers()}
