"""Layers that FP8 cannot make faster stay in high precision, and say so."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fuseops as fo
from fuseops.ops import scopes
from fuseops.recipes import gain
from fuseops.recipes.gain import Gemm, LinearRun, min_rows_to_gain, speedup

BLOCK, CURRENT = fo.recipes.Float8BlockScaling, fo.recipes.Float8CurrentScaling
TABLE = Path(__file__).parent.parent / "benchmarks" / "results" / "fp8_h200.json"
# groups, rows, D, F of benchmarks/common/grouped_problems.py
SHAPES = {
    "mixtral": (8, 16384, 4096, 14336),
    "deepseek_v3": (32, 65536, 7168, 2048),
    "qwen3_30b": (128, 262144, 2048, 768),
    "qwen3_8k": (128, 65536, 2048, 768),
    "sonic_30b": (64, 131072, 4096, 1024),
    "sonic_7b": (128, 196608, 1536, 256),
}


def mlp(name: str, recipe: Any) -> tuple[LinearRun, int]:
    groups, rows, d, f = SHAPES[name]
    return LinearRun((Gemm(groups, 2 * f, d), Gemm(groups, d, f)), recipe.roles()), rows


def test_the_rates_are_those_that_were_measured() -> None:
    measured = json.loads(TABLE.read_text())["settled"]
    assert measured
    for key, found in measured.items():
        name, op, kind, _ = key.split("/")
        groups, rows, d, f = SHAPES[name]
        n, k = (2 * f, d) if op == "fc1" else (d, f)
        summed = {"fwd": k, "dgrad": n, "wgrad": rows / groups}[kind]
        kind = "wgrad" if kind == "wgrad" else "mm"
        low, high = (
            rates[kind].seconds(rows, n, k, summed, rows / groups)
            for rates in (gain.BLOCK_RATES, gain.BF16_RATES)
        )
        # within a tenth, and a launch; one figure of a power-limited GPU is as uncertain
        if min(d, f) >= 768:  # of narrower ones only the ratio is known, by which a layer is judged
            assert 1e6 * low == pytest.approx(found["us"]["fuseops"], rel=0.12), key
        assert high / low == pytest.approx(found["ratios"]["bf16"]["ratio"], rel=0.12), key


def test_the_layers_that_are_known_to_gain_do_and_the_others_stay() -> None:
    for name in ("mixtral", "deepseek_v3", "qwen3_30b", "sonic_30b"):
        layer, rows = mlp(name, BLOCK(weights="step"))
        assert rows >= (min_rows_to_gain(layer) or rows + 1)
    layer, rows = mlp("qwen3_8k", BLOCK())
    assert rows < (min_rows_to_gain(layer) or rows + 1)
    assert min_rows_to_gain(mlp("sonic_7b", BLOCK())[0]) is None


@given(
    st.sampled_from([1, 8, 128]), st.sampled_from([256, 1024, 4096]), st.sampled_from([512, 3072]),
    st.sampled_from([BLOCK(), BLOCK(weights="step"), BLOCK(wgrad="bf16"), CURRENT()]),
    st.integers(1, 1 << 20), st.booleans(),
)  # fmt: skip
def test_more_rows_never_gain_less(
    groups: int, n: int, k: int, recipe: Any, rows: int, both: bool
) -> None:
    gemms = (Gemm(groups, 2 * n, k), Gemm(groups, k, n)) if both else (Gemm(groups, n, k),)
    layer = LinearRun(gemms, recipe.roles())
    assert speedup(layer, rows) <= speedup(layer, rows + groups) + 1e-9
    min_rows = min_rows_to_gain(layer)
    if min_rows is not None:
        assert speedup(layer, min_rows) >= gain.MIN_SPEEDUP
        assert (
            min_rows == gain.MIN_GROUP_ROWS * groups
            or speedup(layer, min_rows - 1) < gain.MIN_SPEEDUP
        )


@given(
    st.sampled_from([2, 8]), st.sampled_from([256, 4096]), st.sampled_from([512, 3072]),
    st.integers(512, 1 << 14), st.booleans(),
)  # fmt: skip
def test_a_prediction_counts_groups_products_and_passes(
    groups: int, n: int, k: int, rows: int, both: bool
) -> None:
    def layer(count: int, recipe: Any) -> LinearRun:
        gemms = (Gemm(count, 2 * n, k), Gemm(count, k, n)) if both else (Gemm(count, n, k),)
        return LinearRun(gemms, recipe.roles())

    def nbytes(recipe: Any) -> float:
        return gain.gain_of(layer(groups, recipe), (), groups * rows).nbytes

    for recipe in (BLOCK(), CURRENT(weights="step")):  # as many groups of one size, as many times
        one = gain.gain_of(layer(1, recipe), (), rows)
        many = gain.gain_of(layer(groups, recipe), (), groups * rows)
        assert many.nbytes == pytest.approx(groups * one.nbytes, abs=groups)
        assert many.speedup >= one.speedup  # there are no more launches
        high, low = (
            [gain._gemms(layer(e, recipe), e * rows, rates) for e in (1, groups)]
            for rates in (gain.BF16_RATES, gain.TENSOR_RATES)
        )
        assert high[1] == pytest.approx(groups * high[0])
        assert low[1] == pytest.approx(groups * low[0])
        slow = LinearRun(layer(1, recipe).gemms, BLOCK(wgrad="bf16").roles())
        assert speedup(slow, rows) < speedup(layer(1, BLOCK()), rows)
    kept = layer(groups, BLOCK(weights="step"))
    products = (gain._gemms(kept, groups * rows, r) for r in (gain.BF16_RATES, gain.BLOCK_RATES))
    assert speedup(kept, groups * rows) < next(products) / next(products)  # no pass gives time back
    weights = groups * n * k * (3 if both else 1)
    # rows and transpose in the forward and in the backward, from two bytes; in one pass, once a step
    assert nbytes(BLOCK()) - nbytes(BLOCK(weights="step")) == pytest.approx(
        weights * (6 - 4 / gain.MICRO_BATCHES), abs=1
    )
    # x in the forward and the backward, dy once; SwiGLU and its backward write codes for numbers
    each = 6 * k + 4 * k - 2 * n if both else 4 * (n + k)
    assert nbytes(BLOCK()) == pytest.approx(6 * weights + groups * rows * each, abs=1)
    assert nbytes(CURRENT()) > nbytes(BLOCK()) + 2 * weights  # each is read for its amax too


# --- in a model. Where there is no Hopper GPU, somebody has to say that there is one


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One whose FP8 pays from 8 rows on."""
    monkeypatch.setattr("fuseops.run.gate.multiplies_codes", lambda device: True)
    monkeypatch.setattr("fuseops.run.gate.min_rows_to_gain", lambda layer: 8)
    monkeypatch.setattr("fuseops.recipes.gain.min_rows_to_gain", lambda layer: 8)
    yield


def dense() -> fo.Sequential:
    torch.manual_seed(0)
    return fo.Sequential({"fc": fo.ops.Linear(32, 32, bias=False), "act": fo.ops.GELU()}).bfloat16()


def routed() -> fo.MoE:
    torch.manual_seed(0)
    return fo.MoE(32, 32, 2, 2, dtype=torch.bfloat16)


def tokens(rows: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows)).to(dtype)


def outputs(model: Any, x: Tensor, recipe: Any, strict: bool = False) -> list[Tensor]:
    x = x.detach().requires_grad_()
    with fo.recipe(recipe, strict=strict):
        y = model(x)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()])]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


# a routed row is half a token
@pytest.mark.parametrize(
    ("make", "tokens_a_row", "compiled"),
    [(dense, 1, False), (routed, 2, False), (dense, 1, True)],
)
@pytest.mark.usefixtures("hopper")
def test_a_layer_of_few_rows_stays_as_it_is(make: Any, tokens_a_row: int, compiled: bool) -> None:
    model = make()
    run: Any = torch.compile(model, backend="eager", dynamic=True) if compiled else model
    few, many = tokens(8 // tokens_a_row - 1), tokens(8 // tokens_a_row)
    if compiled:  # which fuses as eager does, and rounds as eager does
        torch._dynamo.reset()
    run.parameters = model.parameters
    assert equal(outputs(run, few, BLOCK()), outputs(model, few, None))
    assert not equal(outputs(run, many, BLOCK()), outputs(model, many, None))
    assert not equal(outputs(model, few, BLOCK(), strict=True), outputs(model, few, None))
    exact = many.float()
    assert equal(outputs(model.float(), exact, BLOCK()), outputs(model, exact, BLOCK(), True))


@pytest.mark.usefixtures("hopper")
def test_explain_says_why_and_what_was_predicted() -> None:
    model = routed()
    with fo.recipe(BLOCK(weights="step")):
        few, many = str(model.plan(tokens(3))), model.plan(tokens(4))
    assert "fc1, fc2: high precision: a step in FP8 is predicted to be 0.0" in few
    assert "over 6 rows" in few and "it pays from 8 rows on" in few and "KiB; it" in few
    assert "formats of operands" not in few and "quantized weights" not in few
    assert "fc1, fc2: a step in FP8 is predicted" in str(many) and many.operands and many.weights
    with fo.recipe(BLOCK(), strict=True):
        plan = model.plan(tokens(3))
    assert plan.operands and "predicted" not in str(plan)


@pytest.mark.usefixtures("hopper")
def test_another_split_is_not_another_plan() -> None:
    op = fo.ops.GroupedLinear(2, 32, 32, bias=False, dtype=torch.bfloat16)
    plans: list[Any] = []
    with fo.recipe(BLOCK()), scopes.watch_plans(plans.append):
        for ends in ([8, 8], [0, 8], [4, 7]):
            fo.Sequential(op)(tokens(8), offs=torch.tensor(ends, dtype=torch.int32))
    assert all(plan.operands and plan.gains[0].rows == 8 for plan in plans)


@pytest.mark.usefixtures("hopper")
def test_a_rule_of_high_precision_fires_where_the_recipe_does_not_apply() -> None:
    rule = fo.Rule("mine", (fo.ops.Linear, fo.ops.GELU), _high_only)
    with fo.recipe(BLOCK()), fo.rules(rule):
        few, many = dense().plan(tokens(4)), dense().plan(tokens(8))
    assert "mine" in [s.rule for s in few.fused]
    assert "mine" not in [s.rule for s in many.fused]
    assert any("high precision only" in miss.reason for miss in many.misses)


def _high_only(*ops: Any) -> Any:
    from fuseops.rules.fused.linear_act import LinearAct

    fused = LinearAct(*ops)
    fused.recipes = False
    return fused


def test_without_the_kernels_a_recipe_is_obeyed() -> None:
    assert not equal(outputs(dense(), tokens(3), BLOCK()), outputs(dense(), tokens(3), None))
