"""What quantization did to numbers, under `fo.debug()` and in `explain()`, against the same computed here."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fuseops as fo
from fuseops.testing.strategies import filled

D, E, T = 128, 2, 200
BLOCK, CURRENT = fo.recipes.Float8BlockScaling, fo.recipes.Float8CurrentScaling
E4M3 = torch.float8_e4m3fn


def dense() -> Any:
    op = fo.ops.Linear(D, 64, bias=False, dtype=torch.bfloat16)
    return torch.nn.Sequential(fo.Sequential({"fc": op}))


def experts() -> Any:
    return fo.MoE(D, D, E, 2, dtype=torch.bfloat16)


def rows(width: int, seed: int = 0) -> Tensor:
    return filled((T, width), torch.bfloat16, "normal", seed)


def seen_in(model: Any, x: Tensor, recipe: Any) -> Any:
    fo.configure(model, recipe=recipe)
    with fo.debug() as seen:
        model(x.detach().requires_grad_()).sum().backward()
    return seen


def test_numbers_of_operands_are_those_of_the_tensors() -> None:
    model = dense()
    x = torch.full((4, D), 1.0)
    x[0, 0], x[0, 1:11] = 448.0, 1e-4  # ten of 512 elements fall below the smallest code, 2^-9
    op = next(m for m in model.modules() if isinstance(m, fo.ops.Linear))
    seen = seen_in(model, x.bfloat16(), CURRENT())
    found = {n.role: n for n in seen.operands()}
    assert found.keys() == {"input", "weight", "grad_output"} and {
        n.op for n in seen.operands()
    } == {"0.fc"}
    assert found["input"].amax == 448.0 and found["input"].flushed == pytest.approx(10 / 512)
    assert found["input"].saturated == 0.0
    assert found["weight"].amax == pytest.approx(op.weight.abs().max().item())
    assert found["grad_output"].amax == 1.0 and found["grad_output"].flushed == 0.0


def test_an_infinity_saturates() -> None:
    model = dense()
    x = torch.ones(4, D)
    x[0, 0] = torch.inf
    found = {n.role: n for n in seen_in(model, x.bfloat16(), BLOCK()).operands()}
    assert found["input"].amax == torch.inf and found["input"].saturated == pytest.approx(1 / 512)


@pytest.mark.parametrize("recipe", [BLOCK(), BLOCK(wgrad="block"), CURRENT()], ids=str)
def test_a_gradient_that_goes_into_a_main_grad_has_its_error_too(recipe: Any) -> None:
    x, offs, errors = rows(D), torch.tensor([70, T], dtype=torch.int32), []
    for into in (False, True):
        torch.manual_seed(0)
        options = {"dtype": torch.bfloat16, "accumulate_into_main_grad": into}
        op = fo.ops.GroupedLinear(E, D, 64, bias=False, **options)
        op.weight.main_grad = torch.ones(op.weight.shape)
        with fo.recipe(recipe), fo.debug() as seen:
            op(x.detach().requires_grad_(), offs=offs).backward(rows(64, seed=1))
        errors.append({n.gemm: n.error for n in seen.gemms()})
    assert errors[0].keys() == errors[1].keys() and "weight gradient" in errors[0]
    # it is not rounded to bfloat16
    assert errors[1]["weight gradient"] == pytest.approx(errors[0]["weight gradient"], rel=1e-2)


@pytest.mark.parametrize("recipe", [BLOCK(), BLOCK(wgrad="block"), CURRENT()], ids=str)
def test_errors_of_gemms_are_those_of_the_results(recipe: Any) -> None:
    model = dense()
    x, op = rows(D), next(m for m in model.modules() if isinstance(m, fo.ops.Linear))
    leaf = x.detach().requires_grad_()
    fo.configure(model, recipe=recipe)
    with fo.debug() as seen:
        y = model(leaf)
        dy = rows(64, seed=1)
        y.backward(dy)
    exact = {
        "forward": (y, x.double() @ op.weight.double().t()),
        "input gradient": (leaf.grad, dy.double() @ op.weight.double()),
        "weight gradient": (op.weight.grad, dy.double().t() @ x.double()),
    }
    found = {n.gemm: n.error for n in seen.gemms()}
    assert found.keys() == exact.keys()
    for name, (mine, theirs) in exact.items():
        error = float(((mine.double() - theirs).norm() / theirs.norm()).detach())
        assert found[name] == pytest.approx(error, rel=1e-3) and 1e-3 < error < 0.1


@pytest.mark.parametrize("power", [-55, 50])
@pytest.mark.parametrize("recipe", [BLOCK(), CURRENT()], ids=str)
def test_errors_are_relative_however_small_or_large_the_numbers_are(
    recipe: Any, power: int
) -> None:
    model, dy = dense(), rows(64, seed=1)
    op = next(m for m in model.modules() if isinstance(m, fo.ops.Linear))
    fo.configure(model, recipe=recipe)

    def errors(factor: float) -> list[float]:
        with fo.debug() as seen:
            model((rows(D) * factor).requires_grad_()).backward(dy * factor)
        return [n.error for n in seen.gemms()]

    usual = errors(1.0)
    op.weight.grad = None
    assert errors(2.0**power) == pytest.approx(usual, rel=1e-3)


@pytest.mark.parametrize("recipe", [BLOCK(weights="step"), CURRENT()], ids=str)
def test_fused_experts_are_named_one_by_one_and_compute_the_same(recipe: Any) -> None:
    model = experts()
    x = rows(D)

    def outputs() -> list[Tensor]:
        model.zero_grad()
        leaf = x.detach().requires_grad_()
        y = model(leaf)
        y.float().square().sum().backward()
        return [y, leaf.grad, *(p.grad for p in model.parameters())]

    fo.configure(model, recipe=recipe)
    plain = outputs()
    with fo.debug() as seen:
        watched = outputs()
    for a, b in zip(plain, watched, strict=True):
        assert torch.equal(a, b)
    roles = {(n.op, n.role) for n in seen.operands()}
    assert roles == {(op, r) for op in ("fc1", "fc2") for r in ("input", "weight", "grad_output")}
    assert len(seen.gemms()) == 6 and all(1e-3 < n.error < 0.2 for n in seen.gemms())
    assert "fc2 weight gradient: relative error" in str(seen)
    with fo.debug():
        assert "note: fc1 input: amax" in str(model.explain(x))
    assert "amax" not in str(model.explain(x))


@settings(max_examples=10)
@given(st.lists(st.sampled_from([1.0, 3.0, 5.0]), min_size=1, max_size=4), st.booleans())
def test_each_op_has_its_own_numbers_in_whatever_layers_the_same_name_is(
    factors: list[float], known: bool
) -> None:
    model = torch.nn.Sequential(*[dense() for _ in factors])
    for layer, factor in zip(model, factors, strict=True):
        torch.nn.init.constant_(layer[0].fc.weight, factor)
    if known:
        fo.configure(model)
    with fo.debug() as seen, fo.recipe(CURRENT()):
        for _ in range(2):  # one entry for both
            for layer in model:
                layer(rows(D).requires_grad_()).sum().backward()
    numbers = range(1, len(factors) + 1)
    paths = [
        f"{i - 1}.0.fc" if known else f"fc #{i}" if len(factors) > 1 else "fc" for i in numbers
    ]
    found = [(n.op, n.amax) for n in seen.operands() if n.role == "weight"]
    assert found == list(zip(paths, factors, strict=True))
    for gemm in ("forward", "input gradient", "weight gradient"):
        assert [n.op for n in seen.gemms() if n.gemm == gemm] == paths


def test_a_write_that_nobody_announced_is_found() -> None:
    model = dense()
    x = rows(D)
    seen_in(model, x, BLOCK(weights="step"))
    for p in model.parameters():
        p.data.mul_(1.5)
    with pytest.raises(fo.FuseOpsError, match=r"0\.fc: its cached quantized weight is stale"):
        seen_in(model, x, BLOCK(weights="step"))
    fo.weights_changed(model)
    seen_in(model, x, BLOCK(weights="step"))
