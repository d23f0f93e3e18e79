"""Recipes through the whole path, against quantize and dequantize written a second time, here."""

import copy
import itertools
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuseops as fo
from fuseops.ops import names as naming
from fuseops.ops import scopes
from fuseops.rules.builtin_rules import BUILTIN_RULES
from fuseops.testing import assert_fused_matches_unfused
from fuseops.testing.strategies import (
    DRAWN,
    Case,
    Split,
    chains,
    filled,
    group_splits,
    recipes,
    row_counts,
    rule_cases,
    widths,
)

RECIPE = fo.recipes.Float8CurrentScaling()
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def through(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What a tensor stands for after it went through the format with one scale of its own."""
    amax = x.float().abs().max() if x.numel() else torch.zeros(())
    most = torch.finfo(dtype).max
    inv = torch.tensor(most) / amax if amax > 0 else torch.ones(())
    data = (x.float() * inv).clamp(-most, most).to(dtype)
    return data.double() / inv.double()


def varied(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Normal numbers whose magnitude changes from block to block: else nearly every block has the same scale, and one
    that is read from a wrong place passes.
    """
    x = filled(shape, dtype, "normal", seed)
    rows, k = x.flatten(0, -2).shape
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-4, 4, (-(-rows // 128), -(-k // 128)), generator=generator)
    blocks = exponents.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :k]
    return (x.flatten(0, -2) * torch.exp2(blocks.float()).to(dtype)).view(shape)


class Expected(NamedTuple):
    y: Tensor
    dx: Tensor
    dweight: Tensor
    dbias: Tensor


def dense(x: Tensor, w: Tensor, b: Tensor, dy: Tensor, recipe: Any = RECIPE) -> Expected:
    """A linear layer whose three products see quantized operands; the bias does not."""
    qx, qw, qdy = through(x, recipe.fwd), through(w, recipe.fwd), through(dy, recipe.bwd)
    dbias = dy.double().flatten(0, -2).sum(0)
    dweight = qdy.flatten(0, -2).t() @ qx.flatten(0, -2)
    return Expected(qx @ qw.t() + b.double(), qdy @ qw, dweight, dbias)


def grouped(
    x: Tensor, w: Tensor, b: Tensor, dy: Tensor, split: Split, dense: Any = dense
) -> Expected:
    """`dense` for every group by itself; nothing for padding rows."""
    end = sum(split.counts)
    parts = zip(x[:end].split(split.counts), w, b, dy[:end].split(split.counts), strict=True)
    y, dx, dweight, dbias = zip(*(dense(*part) for part in parts), strict=True)
    padding = split.rows - end
    pad_y, pad_x = torch.zeros(padding, w.shape[1]), torch.zeros(padding, w.shape[2])
    return Expected(
        torch.cat([*y, pad_y]), torch.cat([*dx, pad_x]), torch.stack(dweight), torch.stack(dbias)
    )


def summed(x: Tensor, dy: Tensor, offs: Tensor | None = None) -> dict[str, float]:
    """How large the terms are, all together, that a gradient of parameters is the sum of: one number may cancel."""
    rows, grad = (t.detach().double().abs().flatten(0, -2) for t in (x, dy))
    ends = [len(rows)] if offs is None else offs.tolist()
    groups = [slice(a, b) for a, b in itertools.pairwise([0, *ends])]
    weight = max(float((grad[g].t() @ rows[g]).max()) for g in groups)
    return {"dweight": weight, "dbias": max(float(grad[g].sum(0).max()) for g in groups)}


def check(op: Any, x: Tensor, dy: Tensor, expected: Expected, recipe: Any, **side: Tensor) -> None:
    sizes = summed(x, dy, side.get("offs"))
    x = x.detach().requires_grad_()
    with fo.recipe(recipe):
        y = fo.Sequential(op)(x, **side)
    grads = torch.autograd.grad(y, [x, op.weight, op.bias], dy)
    # Products are summed in float32 and rounded to it; bfloat16 rounds once more.
    tol = 1e-5 if x.dtype is torch.float32 else 1e-2
    for name, mine, theirs in zip(Expected._fields, [y, *grads], expected, strict=True):
        scale = float(theirs.abs().max()) if theirs.numel() else 0.0
        scale = max(scale, sizes.get(name, 0.0))
        assert mine.dtype is x.dtype, name
        torch.testing.assert_close(
            mine.double(),
            theirs.double(),
            rtol=tol,
            atol=tol * scale,
            msg=lambda m, n=name: f"{n}: {m}",
        )


RECIPES = [
    RECIPE,
    fo.recipes.Float8CurrentScaling(fwd=E5M2),
    fo.recipes.Float8CurrentScaling(bwd=E4M3),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@given(rows=row_counts(), k=widths(), n=widths(), rank=st.sampled_from([2, 3]))
def test_linear_is_a_product_of_quantized_operands(
    recipe: Any, dtype: torch.dtype, rows: int, k: int, n: int, rank: int
) -> None:
    op, lead = fo.ops.Linear(k, n, dtype=dtype), (2, rows) if rank == 3 else (rows,)
    x, dy = filled((*lead, k), dtype, "normal", 1), filled((*lead, n), dtype, "normal", 2)
    check(op, x, dy, dense(x, op.weight.detach(), op.bias.detach(), dy, recipe), recipe)


@given(split=group_splits(), k=widths(), n=widths())
def test_grouped_linear_has_a_scale_a_group(split: Split, k: int, n: int) -> None:
    op = fo.ops.GroupedLinear(len(split.counts), k, n)
    x = filled((split.rows, k), torch.float32, "normal", 1)
    dy = filled((split.rows, n), torch.float32, "normal", 2)
    x[sum(split.counts) :] = float("nan")
    dy[sum(split.counts) :] = float("nan")
    expected = grouped(x, op.weight.detach(), op.bias.detach(), dy, split)
    check(op, x, dy, expected, RECIPE, offs=split.offs)


# --- blocks

BLOCKS = fo.recipes.Float8BlockScaling()
UNEVEN = st.sampled_from([1, 100, 128, 130, 300])


def in_blocks(x: Tensor, dtype: torch.dtype, rows: int, cols: int) -> Tensor:
    """What a matrix stands for after it went through blocks of that size, with a power of two each."""
    most, padded = torch.finfo(dtype).max, x.float()
    padded = F.pad(padded, (0, -x.shape[1] % cols, 0, -x.shape[0] % rows))
    tiles = padded.unflatten(1, (-1, cols)).unflatten(0, (-1, rows))
    scale = scales(tiles.abs().amax((1, 3), keepdim=True), dtype)
    data = (tiles / scale).clamp(-most, most).to(dtype)
    return (data.double() * scale.double()).view_as(padded)[: x.shape[0], : x.shape[1]]


def shifted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What the columns of a matrix stand for: codes of the rows, brought to the largest scale of their square."""
    rows, k = x.shape
    padded = F.pad(x.float(), (0, -k % 128))
    tiles = padded.unflatten(1, (-1, 128))
    scale = scales(tiles.abs().amax(2), dtype)  # (R, K/128)
    codes = (tiles / scale[:, :, None]).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    codes = codes.to(dtype).float()
    blocks = F.pad(scale, (0, 0, 0, -rows % 128)).unflatten(0, (-1, 128)).amax(1)
    square = blocks.repeat_interleave(128, 0)[:rows]
    data = (codes * (scale / square)[:, :, None]).to(dtype).double()
    return (data * square.double()[:, :, None]).flatten(1)[:, :k]


def scales(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The powers of two that bring these magnitudes into the range, none below 2^-63."""
    ratio = (torch.finfo(dtype).max / amax).clamp(max=2.0**63)
    return torch.ldexp(torch.ones_like(ratio), 1 - torch.frexp(ratio).exponent)


def dense_in_blocks(x: Tensor, w: Tensor, b: Tensor, dy: Tensor, recipe: Any = BLOCKS) -> Expected:
    """Vectors along the axis that is summed, squares of the weight."""
    rows, grad = x.flatten(0, -2), dy.flatten(0, -2)
    weight = in_blocks(w, recipe.fwd, 128, 128)
    y = in_blocks(rows, recipe.fwd, 1, 128) @ weight.t() + b.double()
    dx = in_blocks(grad, recipe.bwd, 1, 128) @ weight
    if recipe.wgrad == "square":
        columns = shifted(grad, recipe.bwd), shifted(rows, recipe.fwd)
    elif recipe.wgrad == "block":
        columns = in_blocks(grad, recipe.bwd, 128, 1), in_blocks(rows, recipe.fwd, 128, 1)
    else:
        columns = grad.double(), rows.double()
    dweight = columns[0].t() @ columns[1]
    return Expected(y.view(dy.shape), dx.view(x.shape), dweight, grad.double().sum(0))


WGRADS = [fo.recipes.Float8BlockScaling(wgrad=wgrad) for wgrad in ("square", "block", "bf16")]


@pytest.mark.parametrize("recipe", [*WGRADS, fo.recipes.Float8BlockScaling(bwd=E5M2)], ids=str)
@given(
    rows=st.sampled_from([0, 1, 127, 129]), k=UNEVEN, n=UNEVEN, rank=st.sampled_from([2, 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)  # fmt: skip
def test_linear_in_blocks_is_a_product_of_what_its_operands_stand_for(
    recipe: Any, dtype: torch.dtype, rows: int, k: int, n: int, rank: int
) -> None:
    op, lead = fo.ops.Linear(k, n, dtype=dtype), (2, rows) if rank == 3 else (rows,)
    x, dy = varied((*lead, k), dtype, 1), varied((*lead, n), dtype, 2)
    expected = dense_in_blocks(x, op.weight.detach(), op.bias.detach(), dy, recipe)
    check(op, x, dy, expected, recipe)


@given(
    counts=st.lists(st.sampled_from([0, 1, 127, 128, 200]), min_size=1, max_size=4),
    padding=st.sampled_from([0, 1, 130]), k=UNEVEN, n=UNEVEN, recipe=st.sampled_from(WGRADS),
)  # fmt: skip
def test_blocks_of_a_grouped_linear_lie_in_one_group(
    counts: list[int], padding: int, k: int, n: int, recipe: Any
) -> None:
    split = Split(counts, padding)
    op = fo.ops.GroupedLinear(len(counts), k, n)
    x = varied((split.rows, k), torch.float32, 1)
    dy = varied((split.rows, n), torch.float32, 2)
    x[sum(counts) :] = float("nan")
    dy[sum(counts) :] = float("nan")
    weights = op.weight.detach(), op.bias.detach()
    expected = grouped(x, *weights, dy, split, partial(dense_in_blocks, recipe=recipe))
    check(op, x, dy, expected, recipe, offs=split.offs)


def test_the_operands_of_blocks_are_exact_in_bfloat16() -> None:
    x = filled((300, 300), torch.bfloat16, "normal", 1) * torch.logspace(-30, 30, 300).bfloat16()
    for rows, cols in ((1, 128), (128, 1), (128, 128)):
        value = in_blocks(x, E4M3, rows, cols)
        assert torch.equal(value.bfloat16().double(), value)


@pytest.mark.parametrize("grouped", [False, True], ids=["dense", "grouped"])
def test_blocks_save_the_columns_with_their_scales(grouped: bool) -> None:
    op = fo.ops.GroupedLinear(2, 4, 6, bias=False) if grouped else fo.ops.Linear(4, 6, bias=False)
    model = fo.Sequential({"fc1": op})
    side = {"offs": torch.tensor([2, 5], dtype=torch.int32)} if grouped else {}
    found = saving(model, torch.randn(5, 4, requires_grad=True), BLOCKS, **side)
    expected = {"fc1.x.col", "fc1.x.col_scale", "fc1.weight"}
    assert found.names == expected | ({"fc1.offs", "fc1.x.offs"} if grouped else set())
    vectors, squares = "float8_e4m3fn[1x128]", "float8_e4m3fn[128x128]"
    formats = {"fc1 input": vectors, "fc1 weight": squares, "fc1 grad_output": vectors}
    assert found.operands == formats


def test_a_main_grad_takes_the_float32_sums_of_blocks() -> None:
    x, dy = (
        filled((130, 64), torch.bfloat16, "normal", 1),
        filled((130, 32), torch.bfloat16, "normal", 2),
    )
    op = fo.ops.GroupedLinear(
        1, 64, 32, bias=False, dtype=torch.bfloat16, accumulate_into_main_grad=True
    )
    op.weight.main_grad = torch.zeros(1, 32, 64)
    with fo.recipe(BLOCKS):
        op(x, offs=torch.tensor([130], dtype=torch.int32)).backward(dy)
    expected = dense_in_blocks(x, op.weight.detach()[0], torch.zeros(32), dy).dweight
    # rounded to bfloat16 the sums would be off by 2^-9
    torch.testing.assert_close(op.weight.main_grad[0].double(), expected, rtol=1e-5, atol=1e-4)


# --- all recipes


@pytest.mark.parametrize("recipe", [RECIPE, BLOCKS], ids=str)
def test_it_is_not_high_precision(recipe: Any) -> None:
    op, x = fo.ops.Linear(64, 64), torch.randn(32, 64)
    with fo.recipe(recipe):
        error = (op(x) - torch.nn.functional.linear(x, op.weight, op.bias)).abs().max()
    assert error > 1e-3


# --- what is saved, and under which name


class Saving(NamedTuple):
    names: set[str]
    dtypes: dict[str, torch.dtype]
    operands: dict[str, str]


def saving(model: fo.Sequential, x: Tensor, recipe: Any = RECIPE, **side: Tensor) -> Saving:
    """Names and dtypes of what a call saves, and the formats of its operands."""
    dtypes: dict[str, torch.dtype] = {}
    operands: dict[str, str] = {}

    def pack(t: Tensor) -> Tensor:
        saved = naming.take_name(t)
        assert type(t) in (Tensor, torch.nn.Parameter), "saved as a wrapper"
        dtypes.update(dict.fromkeys(saved.names if saved else ("plain",), t.dtype))
        return t

    def watch(plan: Any) -> None:
        operands.update({f"{o.op} {o.role}": o.format for o in plan.operands})

    with scopes.watch_plans(watch):
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
        with fo.recipe(recipe), naming.observe(), hooks:
            model(x, **side)
    return Saving(set(dtypes), dtypes, operands)


QUANTIZED, WEIGHT = {"fc1.x.col", "fc1.x.col_scale"}, {"fc1.weight"}


@pytest.mark.parametrize(
    ("x_needs", "weight_needs", "saved"),
    [
        (True, True, QUANTIZED | WEIGHT),
        (True, False, WEIGHT),
        (False, True, QUANTIZED),
        (False, False, set()),
    ],
)
@pytest.mark.parametrize("grouped", [False, True], ids=["dense", "grouped"])
@pytest.mark.parametrize("recipe", [RECIPE, fo.recipes.Float8BlockScaling()], ids=str)
def test_only_the_layouts_that_a_product_reads_are_saved(
    recipe: Any, grouped: bool, x_needs: bool, weight_needs: bool, saved: set[str]
) -> None:
    op = fo.ops.GroupedLinear(2, 4, 6, bias=False) if grouped else fo.ops.Linear(4, 6, bias=False)
    op.weight.requires_grad_(weight_needs)
    model = fo.Sequential({"fc1": op})
    side = {"offs": torch.tensor([2, 5], dtype=torch.int32)} if grouped else {}
    found = saving(model, torch.randn(5, 4, requires_grad=x_needs), recipe, **side)
    offs = {"fc1.offs"} if grouped and saved else set()
    offs |= {"fc1.x.offs"} if grouped and weight_needs else set()
    assert found.names == saved | offs
    roles = {"fc1 input", "fc1 weight"} | (
        {"fc1 grad_output"} if x_needs or weight_needs else set()
    )
    assert found.operands.keys() == roles
    if weight_needs:
        assert (
            found.dtypes["fc1.x.col"] is E4M3 and found.dtypes["fc1.x.col_scale"] is torch.float32
        )


@pytest.mark.parametrize(
    "recipe",
    [
        *(fo.recipes.Float8BlockScaling(wgrad=w) for w in ("square", "block", "bf16")),
        fo.recipes.Float8BlockScaling(fwd=E5M2, bwd=E5M2, square_weights=False),
        fo.recipes.MXFP8BlockScaling(),
        fo.recipes.MXFP8BlockScaling(fwd=E5M2, bwd=E5M2, square_weights=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("where", ["x", "dy", "weight"])
@pytest.mark.parametrize("is_grouped", [False, True])
def test_an_infinity_stays_one_where_powers_of_two_scale_blocks(
    recipe: Any, where: str, is_grouped: bool
) -> None:
    """However small what it is multiplied by: its block gets a scale that brings the largest code beyond float32."""
    op = fo.ops.GroupedLinear(2, 96, 80) if is_grouped else fo.ops.Linear(96, 80)
    side = {"offs": torch.tensor([30, 50], dtype=torch.int32)} if is_grouped else {}
    x, dy = (filled((50, n), torch.float32, "normal", n) * 1e-3 for n in (96, 80))
    weight = op.weight.detach().view(-1, 80, 96)[0]
    {"x": x, "dy": dy, "weight": weight}[where][3, 5] = -torch.inf
    x.requires_grad_()
    with fo.recipe(recipe):
        y = fo.Sequential(op)(x, **side)
        y.backward(dy)
    dw = op.weight.grad.view(-1, 80, 96)[0]
    rows = {"x": (y[3], dw[:, 5]), "dy": (x.grad[3], dw[5]), "weight": (y[:30, 3], x.grad[:30, 5])}
    assert not any(t.isfinite().any() for t in rows[where])


def test_a_bias_gradient_reads_high_precision() -> None:
    # All that the gradient of a bias takes is a sum: quantizing dy would only add an error.
    op, x, dy = fo.ops.Linear(4, 6), torch.randn(50, 4), torch.randn(50, 6)
    with fo.recipe(RECIPE):
        op(x).backward(dy)
    assert op.bias.grad is not None
    torch.testing.assert_close(op.bias.grad, dy.sum(0))


def test_one_offs_is_saved_once_under_all_its_names() -> None:
    seen: list[tuple[str, ...]] = []

    def pack(t: Tensor) -> Tensor:
        saved = naming.take_name(t)
        seen.append(saved.names if saved else ())
        return t

    model = fo.Sequential({"fc1": fo.ops.GroupedLinear(2, 4, 6, bias=False)})
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)
    with fo.recipe(RECIPE), naming.observe(), hooks:
        model(torch.randn(5, 4), offs=torch.tensor([2, 5], dtype=torch.int32))
    assert any(set(names) == {"fc1.offs", "fc1.x.offs"} for names in seen), seen


# --- together with fusion


@settings(max_examples=30)
@given(recipe=recipes(), case=chains(BUILTIN_RULES, torch.float32, ("normal", "zeros")))
def test_any_chain_equals_itself_unfused_under_any_recipe(recipe: Any, case: Case) -> None:
    with fo.recipe(recipe):
        assert_fused_matches_unfused(case.model, case.x, **case.side)


@pytest.mark.parametrize("rule", BUILTIN_RULES, ids=lambda rule: rule.name)
@settings(max_examples=6)
@given(data=st.data(), recipe=st.sampled_from([RECIPE, BLOCKS]))
def test_a_fused_op_runs_under_a_recipe_only_if_it_says_that_it_takes_them(
    rule: fo.Rule, recipe: Any, data: st.DataObject
) -> None:
    """Whoever the rule is from: one of a user has the fused op of a built-in rule, by a function of its own."""
    mine = fo.Rule("mine", rule.pattern, lambda *ops: rule.build(*ops), rule.kind, rule.when)
    case = data.draw(rule_cases(rule, torch.float32, ["normal"]))
    takes = rule.build(*case.model).recipes or not any(op.multiplies for op in case.model)
    plans: list[Any] = []
    with fo.recipe(recipe), fo.rules(mine):
        with scopes.watch_plans(plans.append):
            fired = assert_fused_matches_unfused(case.model, case.x, **case.side)
    found = {m.reason for plan in plans for m in plan.misses if m.rule == "mine"}
    refused = f"runs in high precision only, the recipe is {type(recipe).__name__}"
    fits = not found - {refused, "fusion is off"}
    assert ("mine" in fired) is (takes and fits)
    assert (refused in found) is (fits and not takes)
    if fits and not takes:
        with fo.recipe(recipe), fo.rules(mine), fo.fusion(strict=True):
            with pytest.raises(fo.FusionMissError, match="high precision"):
                case.model(case.x, **case.side)


class Partly(fo.recipes.Recipe):
    """A recipe with some roles of another left in high precision."""

    def __init__(self, whole: fo.recipes.Recipe, high: tuple[str, ...]) -> None:
        self.whole, self.high = whole, high

    def roles(self) -> fo.recipes.Roles:
        return replace(self.whole.roles(), **dict.fromkeys(self.high))


ROLES = ("input", "weight", "grad_output")


@pytest.mark.parametrize("whole", [RECIPE, BLOCKS], ids=str)
@pytest.mark.parametrize("grouping", [False, True], ids=["dense", "grouped"])
@given(
    high=st.sets(st.sampled_from(ROLES)),
    rows=st.sampled_from([0, 1, 130]),
    rank=st.sampled_from([2, 3]),
)
def test_a_role_of_none_is_high_precision(
    whole: Any, grouping: bool, high: set[str], rows: int, rank: int
) -> None:
    def one(x: Tensor, w: Tensor, b: Tensor, dy: Tensor) -> Expected:
        x, dy = x.flatten(0, -2), dy.flatten(0, -2)
        through_ = {role: _operand(whole, role, high) for role in ROLES}
        qx, qw, qdy = through_["input"](x), through_["weight"](w), through_["grad_output"](dy)
        columns = whole is BLOCKS and not high & {"input", "grad_output"}
        left, right = (shifted(t, E4M3) if columns else q for t, q in ((dy, qdy), (x, qx)))
        return Expected(qx @ qw.t() + b.double(), qdy @ qw, left.t() @ right, dy.double().sum(0))

    k, n = 40, 24
    split = Split([rows, 0, 3], 2)
    op = fo.ops.GroupedLinear(3, k, n) if grouping else fo.ops.Linear(k, n)
    x = filled((split.rows, k), torch.float32, "normal", 1)
    dy = filled((split.rows, n), torch.float32, "normal", 2)
    weights = op.weight.detach(), op.bias.detach()
    expected = grouped(x, *weights, dy, split, one) if grouping else one(x, *weights, dy)
    lead = (1, split.rows) if rank == 3 else (split.rows,)
    shapes = (*lead, n), (*lead, k), op.weight.shape, op.bias.shape
    expected = Expected(*(t.view(s) for t, s in zip(expected, shapes, strict=True)))
    side = {"offs": split.offs} if grouping else {}
    recipe = Partly(whole, tuple(high))
    check(op, x.view(*lead, k), dy.view(*lead, n), expected, recipe, **side)


def _operand(whole: Any, role: str, high: set[str]) -> Any:
    """What an operand in its role stands for, in rows."""
    if role in high:
        return Tensor.double
    dtype = whole.bwd if role == "grad_output" else whole.fwd
    if whole is RECIPE:
        return lambda t: through(t, dtype)
    return lambda t: in_blocks(t, dtype, 128 if role == "weight" else 1, 128)


@pytest.mark.parametrize("make", [
    lambda: nn.Linear(8, 8), lambda: nn.Sequential(), lambda: fo.ops.RMSNorm(8),
    lambda: nn.Sequential(nn.Linear(8, 8), fo.Residual(fo.ops.RMSNorm(8), fo.ops.SiLU())),
])  # fmt: skip
def test_a_model_without_an_op_that_could_follow_a_recipe_refuses_it(
    make: Callable[[], nn.Module],
) -> None:
    model = make()
    with pytest.raises(fo.FuseOpsError, match=r"recipe=Float8CurrentScaling.*change nothing"):
        fo.configure(model, recipe=RECIPE)
    fo.configure(model, recipe=None)
    fo.configure(nn.Sequential(model, fo.ops.Linear(8, 8)), recipe=RECIPE)


def test_an_op_that_ignores_the_recipe_says_so_and_is_refused_under_strict() -> None:
    model, x = fo.Sequential({"fc": fo.ops.Linear(8, 6), "act": fo.ops.SiLU()}), torch.randn(5, 8)
    ignored = "reference; the recipe Float8CurrentScaling is ignored"
    plans: list[Any] = []
    with fo.recipe(RECIPE), fo.reference(), scopes.watch_plans(plans.append):
        model(x)
        assert "the recipe Float8CurrentScaling is ignored" in str(model.plan(x))
        with fo.fusion(strict=True), pytest.raises(fo.FusionMissError, match=f"'fc' .*{ignored}"):
            model(x)
    assert [s.note for s in plans[0].forward] == [ignored, "reference"]
    asked = copy.deepcopy(model)
    fo.configure(asked, strict_recipe=True)
    with fo.recipe(RECIPE, strict=True):
        model(x)
        with fo.reference(), pytest.raises(fo.FusionMissError, match=ignored):
            model(x)
    fo.configure(asked, recipe=RECIPE)
    asked(x)
    with fo.reference(), pytest.raises(fo.FusionMissError, match=ignored):
        asked(x)
    with fo.recipe(RECIPE, strict=True):
        with fo.reference(), fo.recipe(None):
            model(x)


def test_a_rule_fires_under_a_recipe() -> None:
    model = fo.Sequential(fo.ops.Linear(8, 6), fo.ops.GELU())
    with fo.recipe(RECIPE):
        fired = assert_fused_matches_unfused(model, torch.randn(5, 8))
        assert fired == ("linear_act", "act_linear")


@pytest.mark.parametrize("rows", [0, 1])
def test_no_rows(rows: int) -> None:
    model, x = fo.Sequential(fo.ops.Linear(4, 6)), torch.randn(rows, 4, requires_grad=True)
    with fo.recipe(RECIPE):
        model(x).sum().backward()
    assert x.grad is not None and x.grad.shape == (rows, 4)
    assert model[0].weight.grad.isfinite().all()


@pytest.mark.parametrize("recipe", [type(RECIPE), type(BLOCKS)])
@pytest.mark.parametrize("role", ["fwd", "bwd"])
def test_another_format_is_refused(recipe: Any, role: str) -> None:
    with pytest.raises(fo.FuseOpsError, match=rf"{recipe.__name__}\({role}=torch.float16"):
        recipe(**{role: torch.float16})


@pytest.mark.parametrize(
    "name", ["input", "weight", "grad_output", "hidden", "weights", "backward"]
)
def test_roles_of_something_else_are_refused(name: str) -> None:
    with pytest.raises(fo.FuseOpsError, match=rf"Roles\({name}='other'\): expected "):
        fo.recipes.Roles(**{name: "other"})


@pytest.mark.parametrize("given", [None, fo.recipes.Scaling()])
def test_a_recipe_that_gives_no_roles_is_refused(given: Any) -> None:
    class Mine(fo.recipes.Recipe):
        def roles(self) -> Any:
            return given

    with pytest.raises(fo.FuseOpsError, match=r"Mine gave .* as the roles of '0' \(Linear\)"):
        with fo.recipe(Mine()):
            fo.Sequential(fo.ops.Linear(4, 4))(torch.ones(2, 4))


@pytest.mark.parametrize("recipe", DRAWN, ids=lambda recipe: recipe.__name__)
def test_an_option_that_is_not_there_is_refused(recipe: Any) -> None:
    """Each of every recipe, by its name and with what it may be."""
    needed = {"choose": lambda *_: None} if recipe is fo.recipes.ByRole else {}
    wrong = {f.name: "other" for f in fields(recipe) if f.metadata}
    assert recipe(**needed) == recipe(**needed) and "weights" in wrong
    for name, value in wrong.items():
        with pytest.raises(
            fo.FuseOpsError, match=rf"{recipe.__name__}\({name}='other'\): expected "
        ):
            recipe(**needed, **{name: value})


def test_a_bias_alone_in_need_of_a_gradient_asks_for_no_layout() -> None:
    op, x = fo.ops.Linear(16, 8), torch.randn(4, 16)
    op.weight.requires_grad_(False)
    dy = torch.randn(4, 8)
    with fo.recipe(RECIPE):
        op(x).backward(dy)
    torch.testing.assert_close(op.bias.grad, dy.sum(0))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "recipe",
    [
        *(fo.recipes.Float8BlockScaling(wgrad=wgrad) for wgrad in ("square", "block", "bf16")),
        fo.recipes.Float8CurrentScaling(),
        fo.recipes.MXFP8BlockScaling(),
    ],
    ids=repr,
)
def test_adapters_beside_quantized_weights_have_their_gradients(recipe: Any, frozen: bool) -> None:
    """The weight's gradient reads columns, theirs reads rows."""
    model = fo.Sequential(fo.ops.GroupedLinear(3, 128, 256, low_rank=4)).bfloat16()
    for p in model.parameters():
        p.data.normal_(0, 0.1)
    model[0].weight.requires_grad_(not frozen)
    x, offs = torch.randn(300, 128).bfloat16(), torch.tensor([70, 70, 300], dtype=torch.int32)

    def gradients(precision: Any) -> dict[str, Tensor]:
        model.zero_grad()
        with fo.recipe(precision, strict=True):
            model(x, offs=offs).float().square().mean().backward()
        return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients(None)
    for name, found in gradients(recipe).items():
        off = (found - expected[name]).norm() / expected[name].norm()
        assert off < 2**-3, (name, off)  # a step of e4m3
