"""What holds of a call holds of it under any recipe: checkpoints, offload, delayed and accumulated gradients, autocast,
adapters on frozen experts.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload
from fuseops.offload import marks
from fuseops.testing.strategies import filled, recipes

D, F, E, K, T = 32, 32, 2, 2, 70
DTYPE = torch.bfloat16


def moe(**options: Any) -> Any:
    torch.manual_seed(0)
    return fo.MoE(D, F, E, K, dtype=DTYPE, **options)


def dense(**options: Any) -> Any:
    torch.manual_seed(0)
    where: dict[str, Any] = {"bias": False, "dtype": DTYPE}
    return fo.Sequential(
        {
            "fc1": fo.ops.Linear(D, 2 * F, **where),
            "act": fo.ops.SwiGLU(),
            "fc2": fo.ops.Linear(F, D, **where),
        }
    )


def tokens() -> Tensor:
    return filled((T, D), DTYPE, "normal", 1).requires_grad_()


def after(model: Any, y: Tensor, x: Tensor) -> list[Tensor]:
    """Output and gradients of a call, x first."""
    torch.autograd.backward(y.float().square().sum())
    found: list[Any] = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
    return found


def plain(make: Any) -> list[Tensor]:
    model, x = make(), tokens()
    return after(model, model(x), x)


def recomputed(make: Any) -> list[Tensor]:
    model, x = make(), tokens()
    y = checkpoint(model, x, use_reentrant=False, context_fn=fo.checkpoint_contexts)
    return after(model, y, x)


def on_the_host(make: Any) -> list[Tensor]:
    model, x = make(), tokens()
    with offload.to_host(min_bytes=0):
        y = model(x)
    return after(model, y, x)


def without_saved_hidden(make: Any) -> list[Tensor]:
    model, x = make(), tokens()
    with offload.recompute():
        y = model(x)
    return after(model, y, x)


def packed_hooks(make: Any) -> list[Tensor]:
    model, x = make(), tokens()
    with torch.autograd.graph.saved_tensors_hooks(Tensor.clone, Tensor.clone):
        y = model(x)
    return after(model, y, x)


CALLS = [recomputed, on_the_host, without_saved_hidden, packed_hooks]


@settings(max_examples=25)
@given(
    recipe=recipes(("bf16", "float8")),
    call=st.sampled_from(CALLS),
    make=st.sampled_from([moe, dense]),
)
def test_what_is_saved_may_go_and_come_back(
    recipe: Any, call: Callable[..., Any], make: Any
) -> None:
    with fo.recipe(recipe):
        for mine, theirs in zip(call(make), plain(make), strict=True):
            assert torch.equal(mine, theirs)


@settings(max_examples=15)
@given(recipe=recipes(("bf16", "float8")), make=st.sampled_from([moe, dense]))
@example(recipe=fo.recipes.DelayedScaling(), make=dense)
def test_a_model_that_was_evaluated_in_inference_mode_trains_like_another(
    recipe: Any, make: Any
) -> None:
    """What it made then, kept weights or the state of scales, is no tensor of that mode."""
    with fo.recipe(recipe):
        expected = plain(make)
        model, x = make().eval(), tokens()
        with torch.inference_mode():
            model(x)
        model.train()
        for mine, theirs in zip(after(model, model(x), x), expected, strict=True):
            assert torch.equal(mine, theirs)
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@settings(max_examples=10)
@given(recipe=recipes(("bf16", "float8")))
def test_delayed_and_accumulated_gradients_are_those_of_the_backward(recipe: Any) -> None:
    with fo.recipe(recipe), fo.fusion(False):
        expected = plain(moe)
        model, x = moe(delay_wgrad=True), tokens()
        y = model(x)
        y.float().square().sum().backward()
        assert model["fc1"].weight.grad is None
        model.backward_dw()
        found = [y.detach(), x.grad, *(p.grad for p in model.parameters())]
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs)
    with fo.recipe(recipe):
        expected = plain(moe)
        model, x = moe(accumulate_into_main_grad=True), tokens()
        for fc in (model["fc1"], model["fc2"]):
            fc.weight.main_grad = torch.ones(fc.weight.shape)
        model(x).float().square().sum().backward()
        at = {name: k + 2 for k, (name, _) in enumerate(model.named_parameters())}
        for name in ("fc1", "fc2"):
            total = model[name].weight.main_grad - 1
            wanted = expected[at[f"{name}.weight"]].float()
            # the float32 sums, of which the other way gives the rounded ones
            torch.testing.assert_close(
                total, wanted, rtol=2**-7, atol=2e-5 * float(wanted.abs().max() + 1)
            )


@settings(max_examples=8)
@given(recipe=recipes(("bf16", "float8")), make=st.sampled_from([moe, dense]))
def test_frozen_weights_change_no_other_gradient_and_save_no_operand_of_theirs(
    recipe: Any, make: Any
) -> None:
    with fo.recipe(recipe):
        expected = plain(make)
        model, x = make(), tokens()
        for name in ("fc1", "fc2"):
            model[name].weight.requires_grad_(False)
        saved = {t.name for t in model.plan(x).saved}
        y = model(x)
        y.float().square().sum().backward()
    assert torch.equal(y, expected[0]) and torch.equal(x.grad, expected[1])  # type: ignore[arg-type]
    assert not any(name.startswith(("fc1.x", "fc2.x")) for name in saved)


@settings(max_examples=8)
@given(recipe=recipes(("bf16", "float8")))
def test_autocast_quantizes_the_same_numbers(recipe: Any) -> None:
    """Weights that bfloat16 has, in float32 under autocast: the same codes, so the same output."""
    half, full = dense(), dense().float()
    x = tokens()
    with fo.recipe(recipe):
        with torch.autocast("cpu", torch.bfloat16):
            y = full(x.detach().float())
        assert y.dtype is torch.bfloat16 and torch.equal(y, half(x))


@settings(max_examples=8)
@given(recipe=recipes(("bf16", "float8")))
def test_autocast_leaves_float64_alone(recipe: Any) -> None:
    """What a recipe computes in float32 of it, too: autocast is off inside of every op, forward and backward."""
    results = []
    for half in (None, torch.bfloat16, torch.float16):
        model, x = dense().double(), tokens().detach().double().requires_grad_()
        torch.manual_seed(0)
        with fo.recipe(recipe), torch.autocast("cpu", half, enabled=half is not None):
            y = model(x)
            y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in model.parameters())])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@pytest.mark.parametrize("mark", [offload.mark_offload, offload.mark_not_offload])
def test_a_mark_reaches_every_component_of_a_quantized_tensor(mark: Any) -> None:
    q = fo.quantize(tokens().detach(), fo.recipes.Scaling())
    mark(q)
    offload.start_offload(q)
    kind = "offload" if mark is offload.mark_offload else "keep"
    assert len(q.components()) == 4
    assert {marks.marked.get(t.untyped_storage()) for t in q.components().values()} == {kind}
