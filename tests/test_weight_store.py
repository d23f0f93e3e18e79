"""Quantized weights that are kept: never stale, never saved, never carried along."""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops.ops.scopes import STORE

D, F, E, K, T = 32, 32, 2, 2, 20
BLOCK, CURRENT = fo.recipes.Float8BlockScaling, fo.recipes.Float8CurrentScaling
DELAYED = partial(fo.recipes.DelayedScaling, amax_history_len=2)


def dense() -> fo.Sequential:
    return fo.Sequential(fo.ops.Linear(D, 2 * F, bias=False), fo.ops.SwiGLU(), fo.ops.Linear(F, D))


def experts() -> fo.Sequential:
    return fo.MoE(D, F, E, K)


def kept(model: nn.Module) -> int:
    found = (m.__dict__.get(STORE) for m in model.modules())
    return sum(s.nbytes for s in found if s is not None)


# --- what may happen to the weights of a model between two calls


def steps(model: nn.Module, make: Callable[..., Any]) -> None:
    make(model.parameters(), lr=0.1).step()


def writes(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)


def writes_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(1.5)
    fo.weights_changed(model)


def points_elsewhere(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = p.data * 1.5


def loads(model: nn.Module, assign: bool) -> None:
    state = {name: t * 1.5 for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)


def freezes(model: nn.Module) -> None:
    for m in model.modules():
        if isinstance(m, fo.ops.Linear | fo.ops.GroupedLinear):
            m.weight.requires_grad_(not m.weight.requires_grad)


def casts_and_returns(model: nn.Module) -> None:
    model.double().float()
    writes(model)


def swaps(model: nn.Module) -> None:
    for m in model.modules():
        if isinstance(m, fo.ops.Linear | fo.ops.GroupedLinear):
            m.weight = nn.Parameter(m.weight.detach() * 1.5)


EVENTS: dict[str, Callable[[nn.Module], None]] = {
    "sgd": partial(steps, make=partial(torch.optim.SGD, foreach=False)),
    "adam": partial(steps, make=partial(torch.optim.AdamW, foreach=True)),
    "fused": partial(steps, make=partial(torch.optim.AdamW, fused=True)),
    "in place": writes,
    "data": writes_data,
    "data = t": points_elsewhere,
    "load": partial(loads, assign=False),
    "assign": partial(loads, assign=True),
    "freeze": freezes,
    "cast": casts_and_returns,
    "swap": swaps,
    "nothing": lambda model: None,
}

# --- how a model is called


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False, context_fn=fo.checkpoint_contexts)


def functional(model: nn.Module, x: Tensor) -> Tensor:
    others = {name: p * 0.5 for name, p in model.named_parameters()}
    return torch.func.functional_call(model, others, (x,))


def after_evaluation(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    return model(x)


def twice(model: nn.Module, x: Tensor) -> Tensor:
    return model(x) + model(x * 0.5)


CALLS = [plain, checkpointed, functional, after_evaluation, twice]


def gradients(model: nn.Module, x: Tensor, call: Any, recipe: Any) -> list[Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    with fo.recipe(recipe):
        y = call(model, x)
        y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


@settings(max_examples=25)
@given(
    make=st.sampled_from([dense, experts]),
    recipe=st.sampled_from([BLOCK, partial(BLOCK, wgrad="block"), CURRENT, DELAYED]),
    program=st.lists(
        st.tuples(
            st.sampled_from(sorted(EVENTS)),
            st.sampled_from(CALLS),
            st.sampled_from(["step", "unshard"]),
        ),
        min_size=2,
        max_size=5,
    ),
)
@example(  # the scale of a frozen weight follows it at the next step
    dense, DELAYED, [(event, plain, "step") for event in ("sgd", "in place", "freeze", "sgd")]
)
def test_whatever_happens_to_the_weights_what_is_kept_is_what_would_be_made(
    make: Any, recipe: Any, program: Any
) -> None:
    torch.manual_seed(0)
    mine, x = make(), torch.randn(T, D)
    other = copy.deepcopy(mine)
    gradients(mine, x, plain, recipe(weights="step"))
    gradients(other, x, plain, recipe())
    for event, call, policy in program:
        for model in (mine, other):
            EVENTS[event](model)
        found = gradients(mine, x, call, recipe(weights=policy))
        expected = gradients(other, x, call, recipe())
        for a, b in zip(found, expected, strict=True):
            # a program may drive the weights to infinity and NaN
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=f"{event}, {call}")
    assert not kept(other)


def turned(op: fo.ops.Linear) -> None:
    op.weight.data = op.weight.data.t()


def written_by_another(op: fo.ops.Linear) -> None:
    """Which has a version of its own."""
    before, op.weight = op.weight, nn.Parameter(op.weight.data)
    with torch.no_grad():
        op.weight.mul_(1)
        assert op.weight._version == before._version
        before.mul_(1.5)


@pytest.mark.parametrize("change", [turned, written_by_another, lambda op: None])
@pytest.mark.parametrize("recipe", [BLOCK, CURRENT, partial(BLOCK, fwd=torch.float8_e5m2)])
def test_the_same_memory_read_otherwise_is_another_weight(recipe: Any, change: Any) -> None:
    model, x = fo.Sequential(fo.ops.Linear(D, D)), torch.randn(T, D)
    gradients(model, x, plain, BLOCK(weights="step"))
    change(model[0])
    found, expected = (gradients(model, x, plain, recipe(weights=w)) for w in ("step", "none"))
    assert all(map(torch.equal, found, expected))


DELAYED = fo.recipes.DelayedScaling


@pytest.mark.parametrize("before", [DELAYED, CURRENT])
@pytest.mark.parametrize("after", [CURRENT, DELAYED, partial(DELAYED, margin=3)])
@pytest.mark.parametrize("make", [dense, experts])
def test_what_is_kept_is_of_one_recipe(make: Any, before: Any, after: Any) -> None:
    """A scale of the steps before is not that of the weight, though both are of one format."""
    torch.manual_seed(0)
    model, x = make(), torch.randn(T, D)
    gradients(model, x, plain, DELAYED())
    fo.weights_changed(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8)  # beyond the amax of the step before
    gradients(model, x, plain, before(weights="step"))
    found, expected = (gradients(model, x, plain, after(weights=w)) for w in ("step", "none"))
    assert all(map(torch.equal, found, expected))


def test_nothing_is_kept_of_weights_that_have_no_versions() -> None:
    with torch.inference_mode(), fo.recipe(BLOCK(weights="step")):
        model, x = fo.Sequential(fo.ops.Linear(D, D)), torch.randn(T, D)
        before = model(x)
        model[0].weight.mul_(2), model[0].bias.mul_(2)
        assert torch.equal(model(x), 2 * before) and not kept(model)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layouts of weights that stores make, from now on."""
    found: list[str] = []
    original = fo.recipes.weight_operand

    def counted(weight: Any, scaling: Any, *, row: bool, col: bool, **options: Any) -> Any:
        found.append("row " * row + "col" * col)
        return original(weight, scaling, row=row, col=col, **options)

    monkeypatch.setattr("fuseops.recipes.store.weight_operand", counted)
    return found


@pytest.mark.parametrize("recipe", [BLOCK, CURRENT])
def test_a_weight_is_quantized_once_a_step_in_one_pass(recipe: Any, made: list[str]) -> None:
    model, x = experts(), torch.randn(T, D)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        made.clear()
        for _ in range(3):  # micro-batches
            gradients(model, x, plain, recipe(weights="step"))
            gradients(model, x, checkpointed, recipe(weights="step"))
        assert made == ["row col"] * 2
        opt.step()


def test_an_evaluation_makes_the_rows_alone_and_a_frozen_weight_outlives_the_steps_of_others(
    made: list[str],
) -> None:
    model, x = dense(), torch.randn(T, D)
    model[0].weight.requires_grad_(False)
    with fo.recipe(BLOCK(weights="step")), torch.no_grad():
        model(x)
    assert made == ["row ", "row "]
    torch.optim.SGD(model[2].parameters(), lr=0.1).step()
    made.clear()
    with fo.recipe(BLOCK(weights="step")), torch.no_grad():
        model(x)
    assert made == ["row "]


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_a_frozen_weight_that_an_optimizer_still_steps_is_quantized_anew(
    options: dict[str, bool],
) -> None:
    """By the gradient that it had when it was frozen; a fused step moves no version."""
    model, x = dense(), torch.randn(T, D)
    gradients(model, x, plain, BLOCK(weights="step"))
    model.requires_grad_(False)
    with fo.recipe(BLOCK(weights="step")):
        model(x)
        torch.optim.AdamW(model.parameters(), lr=0.1, **options).step()
        found = model(x)
    with fo.recipe(BLOCK()):
        assert torch.equal(found, model(x))


def test_stores_do_not_travel_with_the_model() -> None:
    model, x = experts(), torch.randn(T, D)
    cold = set(model.state_dict())
    gradients(model, x, plain, BLOCK(weights="step"))
    assert kept(model)
    assert set(model.state_dict()) == cold
    assert not kept(copy.deepcopy(model)) and not kept(pickle.loads(pickle.dumps(model)))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert not kept(torch.load(file, weights_only=False))


@pytest.fixture
def swapping() -> Iterator[None]:
    """Modules that are cast, moved or loaded swap their parameters, and torch swaps none that is weakly held."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize(
    "change",
    [nn.Module.bfloat16, lambda m: m.to("meta"), partial(loads, assign=False)],
    ids=["cast", "move", "load"],
)
@pytest.mark.parametrize("swaps", [False, True])
def test_a_model_that_is_another_keeps_nothing_of_what_it_was(
    change: Any, swaps: bool, request: pytest.FixtureRequest
) -> None:
    if swaps:
        request.getfixturevalue("swapping")
    model, x = experts(), torch.randn(T, D)
    gradients(model, x, plain, BLOCK(weights="step"))
    assert kept(model)
    model.zero_grad()
    change(model)
    assert not kept(model)


def test_a_checkpoint_saves_the_same_tensors_from_a_warm_and_a_cold_store() -> None:
    model, x = dense(), torch.randn(T, D)

    def saved() -> list[Any]:
        found: list[Any] = []

        def pack(t: Tensor) -> Tensor:
            found.append((t.shape, t.dtype))
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            gradients(model, x, plain, BLOCK(weights="step"))
        return found

    cold = saved()
    assert cold == saved()
    fo.weights_changed(model)
    assert cold == saved()


@pytest.mark.parametrize(
    "recipe",
    [
        BLOCK,
        CURRENT,
        DELAYED,
        fo.recipes.MXFP8BlockScaling,
        partial(fo.recipes.MXFP8BlockScaling, square_weights=True),
        partial(fo.recipes.NVFP4BlockScaling, square_weights=False),
        fo.recipes.NVFP4BlockScaling,
    ],
)
def test_explain_has_a_line_of_what_is_kept(recipe: Any) -> None:
    model, x = dense(), torch.randn(T, D, requires_grad=True)
    with fo.recipe(recipe(weights="step")):
        plan = model.plan(x)
        with fo.recipe(recipe()):
            bare = model.plan(x)
    assert [w.name for w in plan.weights] == ["0.weight", "2.weight"]
    assert plan.kept_bytes == kept(model) == fo.weights_changed(model)
    assert f"quantized weights: {plan.kept_bytes / 1024:.1f} KiB kept" in str(plan)
    assert not bare.weights and bare.saved_bytes == plan.saved_bytes
    assert plan.to_json()["weights"][0]["policy"] == "step"
    assert "Quantized weights" in plan._repr_html_()


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_region_keeps_nothing_and_explain_says_so(whole: bool) -> None:
    model, x = nn.Sequential(dense(), dense()), torch.randn(T, D, requires_grad=True)
    fo.configure(model, recipe=BLOCK(weights="step"))
    if whole:
        run: Any = torch.compile(model, backend="eager")
    else:
        run = model
        model[0].compile(backend="eager")
    said = str(fo.explain(run, x))
    assert said.count("compiled code quantizes the weights in each call: none are kept") == 1
    assert ("quantized weights" in said) is not whole
    fo.weights_changed(model)
    run(x)
    assert bool(kept(model[0])) is False and bool(kept(model[1])) is not whole


def test_weights_changed_wants_a_module() -> None:
    with pytest.raises(fo.FuseOpsError, match=r"expects an nn\.Module, got Parameter"):
        fo.weights_changed(nn.Parameter(torch.zeros(2)))  # type: ignore[arg-type]


# --- FSDP2


@pytest.fixture
def mesh(tmp_path: Any) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "stay"])
@pytest.mark.parametrize("policy", ["step", "unshard"])
def test_sharded_weights_are_kept_as_the_policy_says(
    mesh: Any, policy: str, reshard: bool, made: list[str]
) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    mine, x = nn.Sequential(dense(), dense()), torch.randn(T, D)
    other = copy.deepcopy(mine)
    for model in (mine, other):
        for block in model:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    opts = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (mine, other)]
    for turn in range(4):
        found = gradients(mine, x, plain, BLOCK(weights=policy))
        count = len(made)
        expected = gradients(other, x, plain, BLOCK())
        for a, b in zip(found, expected, strict=True):
            a, b = (getattr(t, "_local_tensor", t) for t in (a, b))
            assert torch.equal(a, b)
        assert bool(kept(mine)) is (policy == "step")
        if turn == 2:  # nothing was written since the last one
            assert count == (0 if policy == "step" else 4 * (1 + reshard))
        made.clear()
        if turn == 0:  # by no optimizer, and no version of what was gathered
            for model in (mine, other):
                with torch.no_grad():
                    for p in model.parameters():
                        p.mul_(1.5)
        elif turn == 2:
            for opt in opts:
                opt.step()
