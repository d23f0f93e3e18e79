"""Quantized tensors as values: into Sequentials, out of them and through them, with the gradient in high precision."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload
from fuseops.recipes import Quantized
from fuseops.recipes.operands import _nan_unless
from fuseops.recipes.validate import component_mismatch
from fuseops.rules.builtin_rules import BUILTIN_RULES
from fuseops.testing.catalogue import catalogue
from fuseops.testing.strategies import Case, filled, op_cases, rule_cases

BLOCK = fo.recipes.Float8BlockScaling
CURRENT = fo.recipes.Float8CurrentScaling()
MX, NV = fo.recipes.MXFP8BlockScaling(), fo.recipes.NVFP4BlockScaling()
RECIPES = [
    BLOCK(),
    BLOCK(wgrad="block"),
    BLOCK(wgrad="bf16"),
    BLOCK(fwd=torch.float8_e5m2),
    CURRENT,
    MX,
]
D, F, E, K, T = 128, 128, 3, 2, 200
BF16 = torch.bfloat16


def tokens(*shape: int, seed: int = 1) -> Tensor:
    x = filled(shape or (T, D), BF16, "normal", seed).float()
    scale = torch.exp2(torch.arange(x.shape[-2]) % 9 - 4.0)[:, None]  # from row to row
    return (x * scale).to(BF16).requires_grad_()


def input_of(recipe: Any) -> Any:
    return recipe.roles().input


def step(model: Any, x: Any, leaf: Tensor, **side: Any) -> list[Tensor | None]:
    """Outputs and gradients of a call, that of the leaf first."""
    torch.manual_seed(0)
    leaf.grad = None
    for p in model.parameters():
        p.grad = None
    out = model(x, **side)
    ys = [
        y.dequantize() if isinstance(y, Quantized) else y
        for y in (out if isinstance(out, tuple) else (out,))
    ]
    asking = [y for y in ys if y.requires_grad]
    if asking:
        dys = [filled(y.shape, y.dtype, "normal", 7) for y in asking]
        torch.autograd.backward(asking, dys)
    return [leaf.grad, *(y.detach() for y in ys), *(p.grad for p in model.parameters())]


def assert_same(found: list[Any], expected: list[Any], terms: int = 0) -> None:
    """Equal bits; where sums of so many products may be in another order, equal to the rounding of float32."""
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) is (theirs is None)
        if mine is not None and terms:
            largest = float(theirs.abs().nan_to_num(posinf=0.0).max()) if theirs.numel() else 0.0
            order = terms * torch.finfo(torch.float32).eps * largest
            torch.testing.assert_close(
                mine, theirs, equal_nan=True, rtol=1.3e-6, atol=max(order, 1e-5)
            )
        elif mine is not None:
            torch.testing.assert_close(mine, theirs, equal_nan=True, rtol=0.0, atol=0.0)


# --- into ops and rules


def check_case(case: Case, recipe: Any, takes: bool) -> None:
    """Codes that arrive are those that the op would make, or stand for what any other op gets: to the rounding of
    float32, since a scale found again may differ in its last place, and a sum over rows has zeros behind them or not.
    """
    scaling = input_of(recipe)
    offs = (
        case.side["offs"]
        if isinstance(next(iter(case.model.modules())), fo.ops.GroupedLinear)
        else None
    )
    x = case.x.detach().contiguous().requires_grad_()
    with fo.recipe(recipe):
        q = fo.quantize(x, scaling, offs)
        found = step(case.model, q, x, **case.side)
        other = x if takes else q.dequantize().detach().requires_grad_()
        expected = step(case.model, other, other, **case.side)
    # a weight's gradient sums over rows, the others over features
    assert_same(found, expected, terms=max(x.shape[-1], x[..., 0].numel()))


OPS = [
    op
    for op, e in catalogue().items()
    if (not e.heads and e.width != "ends") or op is fo.ops.LinearCrossEntropy
]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
@settings(max_examples=4)
@given(data=st.data(), recipe=st.sampled_from([BLOCK(), BLOCK(wgrad="block"), CURRENT, MX]))
def test_any_op_takes_codes_or_what_they_stand_for(op: Any, recipe: Any, data: Any) -> None:
    case = data.draw(op_cases(op, torch.float32, ["normal", "zeros"], ["contiguous"]))
    adapted = "down" in case.model._parameters  # which reads what they stand for
    check_case(case, recipe, op.takes_quantized and op.multiplies and not adapted)


@pytest.mark.parametrize("rule", BUILTIN_RULES, ids=lambda rule: rule.name)
@settings(max_examples=4)
@given(data=st.data())
def test_any_rule_takes_codes_or_what_they_stand_for(rule: fo.Rule, data: Any) -> None:
    case = data.draw(rule_cases(rule, torch.float32, ["normal"]))
    first = next(iter(case.model))
    takes = first.multiplies or (isinstance(first, fo.ops.Permute) and len(case.model) > 1)
    adapted = any("down" in op._parameters for op in case.model)  # which reads what they stand for
    check_case(case, BLOCK(), takes and not adapted)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_the_rows_of_a_linear_may_have_any_shape(recipe: Any, lead: tuple[int, ...]) -> None:
    op, x = fo.ops.Linear(D, F, dtype=BF16), tokens(*lead, 10, D)
    with fo.recipe(recipe):
        q = fo.quantize(x, input_of(recipe))
        high = recipe.roles().high_wgrad
        leaf = q.dequantize().detach().requires_grad_() if high else x
        assert_same(step(op, q, x), step(op, leaf, leaf))


def experts() -> tuple[fo.Sequential, dict[str, Tensor]]:
    torch.manual_seed(0)
    layer = fo.MoE(D, F, E, K, dtype=BF16)
    weights, chosen = torch.rand(T, K), torch.randint(0, E, (T, K), dtype=torch.int32)
    routing = fo.Routing.from_topk(chosen, weights, num_experts=E)
    side = {n: getattr(routing, n) for n in ("offs", "probs", "index", "pos")}
    return fo.Sequential({n: layer[n] for n in ("permute", "fc1", "act", "fc2", "combine")}), side


@pytest.mark.parametrize("recipe", [BLOCK(), BLOCK(hidden="float8"), BLOCK(wgrad="bf16")], ids=str)
def test_tokens_in_fp8_go_through_the_experts_and_their_rows_are_saved(recipe: Any) -> None:
    model, side = experts()
    x = tokens()
    with fo.recipe(recipe):
        q = fo.quantize(x, input_of(recipe), col=False)
        leaf = q.dequantize().detach().requires_grad_() if recipe.wgrad == "bf16" else x
        assert_same(step(model, q, x, **side), step(model, leaf, leaf, **side))
        saved = {t.name: t for t in model.plan(q, **side).saved}
    assert saved["fc1.x.row"].dtype is torch.float8_e4m3fn and "fc1.x" not in saved


# --- the gradient


def test_the_gradient_is_that_of_high_precision_and_the_carrier_has_no_bytes() -> None:
    x = tokens()
    q = fo.quantize(x, fo.recipes.Scaling())
    assert q.requires_grad and q.carrier is not None and q.carrier.untyped_storage().nbytes() == 2
    assert q.carrier.isnan().all() and q.shape == x.shape and q.dtype is BF16
    dy = tokens(seed=2).detach()
    q.dequantize().backward(dy)
    assert torch.equal(x.grad, dy)  # type: ignore[arg-type]
    with torch.no_grad():
        assert not fo.quantize(x, fo.recipes.Scaling()).requires_grad
    assert not q.detach().requires_grad and not q.detach().dequantize().requires_grad


def test_to_clone_and_groups_keep_values_and_gradients() -> None:
    offs = torch.tensor([0, 70, 70, 190], dtype=torch.int32)
    x = tokens()
    for recipe in RECIPES:
        q = fo.quantize(x, input_of(recipe), offs)
        assert q.clone().components()["row"].data_ptr() != q.components()["row"].data_ptr()
        assert torch.equal(q.clone().dequantize(), q.dequantize())
        wide = q.to(torch.float32)
        assert wide.dtype is torch.float32 and torch.equal(
            wide.dequantize().to(BF16), q.dequantize()
        )
        part = q.groups(1, 4)
        assert torch.equal(part.dequantize(), q.dequantize()[0:190])
        tail = q.groups(2, 4)
        assert tail.offs.tolist() == [0, 120] and torch.equal(
            tail.dequantize(), q.dequantize()[70:190]
        )  # type: ignore[union-attr]
        again = fo.quantize(x[70:190], input_of(recipe), tail.offs)
        for name, t in again.components().items():
            mine = tail.components()[name]
            live = [(0, 120)] if name.startswith("row") else None
            assert mine.shape == t.shape and (
                live is None or torch.equal(mine.view(torch.uint8), t.view(torch.uint8))
            )
        assert torch.equal(values_of_columns(tail), values_of_columns(again))
        x.grad = None
        (wide.dequantize().sum() + tail.dequantize().sum()).backward()
        assert torch.equal(
            x.grad,
            1 + ((torch.arange(T) >= 70) & (torch.arange(T) < 190)).to(BF16)[:, None].expand(T, D),
        )  # type: ignore[arg-type]


def values_of_columns(q: Quantized) -> Tensor:
    from dataclasses import replace

    return replace(q, row=None, carrier=None).dequantize()


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_what_casts_the_leaves_of_a_tree_casts_what_codes_stand_for(recipe: Any) -> None:
    """As mixed precision of FSDP2 does, of all floating-point inputs of a module."""
    x = tokens()
    q = fo.quantize(x, input_of(recipe))
    half = pytree.tree_map(lambda t: t.half() if torch.is_floating_point(t) else t, q)
    assert half.dtype is half.dequantize().dtype is torch.float16
    same = zip(half.components().values(), q.components().values(), strict=True)
    assert all(a.dtype is b.dtype and torch.equal(a.float(), b.float()) for a, b in same)
    half.dequantize().sum().backward()
    assert x.grad is not None and x.grad.dtype is x.dtype


def test_what_is_no_value_is_refused_in_words() -> None:
    x, scaling = tokens(), fo.recipes.Scaling()
    q = fo.quantize(x, scaling)
    op = fo.ops.Linear(D, F, dtype=BF16)
    with pytest.raises(
        fo.FuseOpsError, match=r"arrived as float8_e5m2\[1x128\] by row and col; .*float8_e4m3fn"
    ):
        with fo.recipe(BLOCK()):
            op(fo.quantize(x, fo.recipes.Scaling(torch.float8_e5m2)))
    with pytest.raises(fo.FuseOpsError, match=r"by row; .* by row and col.*both layouts"):
        with fo.recipe(BLOCK(wgrad="block")):
            op(fo.quantize(x, input_of(BLOCK(wgrad="block")), col=False))
    with pytest.raises(fo.FuseOpsError, match=r"in blocks of \(128, 1\), not \(128, 128\)"):
        with fo.recipe(BLOCK(wgrad="block")):
            op(fo.quantize(x, input_of(BLOCK())))
    grouped = fo.ops.GroupedLinear(2, D, F, bias=False, dtype=BF16)
    with pytest.raises(fo.FuseOpsError, match=r"of 2 groups.*same offs"):
        with fo.recipe(BLOCK(wgrad="block")):
            scaling = input_of(BLOCK(wgrad="block"))
            grouped(fo.quantize(x, scaling), offs=torch.tensor([100, T], dtype=torch.int32))
    model, side = experts()
    with (
        pytest.raises(fo.FuseOpsError, match="after they are permuted"),
        fo.recipe(BLOCK(wgrad="block")),
    ):
        model(fo.quantize(x, scaling), **side)
    with pytest.raises(fo.FuseOpsError, match=r"torch\.linear got a Quantized.*dequantize"):
        nn.functional.linear(q, op.weight)  # type: ignore[arg-type]
    with pytest.raises(fo.FuseOpsError, match="with rows"):
        op(fo.quantize(x, scaling, row=False))
    with pytest.raises(fo.FuseOpsError, match="neither rows nor columns"):
        fo.quantize(x, scaling, row=False, col=False)
    with pytest.raises(fo.FuseOpsError, match="has no groups"):
        q.groups(0, 1)
    with pytest.raises(fo.FuseOpsError, match="floating-point"):
        q.to(torch.int32)


FORMATS = st.sampled_from(
    [
        scaling
        for recipe in [*RECIPES, BLOCK(wgrad="block", powers_of_two=False), NV]
        for scaling in (recipe.roles().input, recipe.roles().grad_output)
    ]
    + [fo.recipes.Scaling(columns=(128, 1), colwise=MX.roles().input)]
)


@given(
    scaling=FORMATS,
    rows=st.sampled_from([0, 1, 127, 128, 200]),
    width=st.sampled_from([16, 100, 128, 300]),
    groups=st.sampled_from([None, 1, 3]),
    col=st.booleans(),
    data=st.data(),
)
def test_components_are_those_of_the_format_or_named(
    scaling: Any, rows: int, width: int, groups: int | None, col: bool, data: Any
) -> None:
    ends = [rows // 2] * ((groups or 1) - 1) + [rows]
    offs = None if groups is None else torch.tensor(ends, dtype=torch.int32)
    q = fo.quantize(filled((rows, width), BF16, "normal", 0), scaling, offs, col=col)
    values = [q, q.clone(), q.to(torch.float32), *([q.groups(0, 1)] if groups else [])]
    assert [component_mismatch(value) for value in values] == [None] * len(values)
    name = data.draw(st.sampled_from(sorted(q.components())))
    t = q.components()[name]
    wrong = data.draw(st.sampled_from([t[None], t.double()]))
    op = fo.ops.GELU()
    with pytest.raises(fo.FuseOpsError, match=f"got a Quantized of .*: its {name} is .*, expected"):
        op(q.of({**q.components(), name: wrong}))


@pytest.mark.parametrize("recipe", [CURRENT, fo.recipes.DelayedScaling(), NV], ids=str)
@pytest.mark.parametrize("trains", [True, False])
def test_scales_of_other_groups_are_refused(recipe: Any, trains: bool) -> None:
    x, offs = tokens(), torch.tensor([70, T], dtype=torch.int32)
    q = fo.quantize(x, input_of(recipe), offs)
    linear = fo.ops.Linear(D, F, dtype=BF16)
    grouped = fo.ops.GroupedLinear(3, D, F, bias=False, dtype=BF16)
    with fo.recipe(recipe), torch.set_grad_enabled(trains):
        with pytest.raises(fo.FuseOpsError, match=r"of 2 groups; .*, without groups: quantize"):
            linear(q)
        with pytest.raises(fo.FuseOpsError, match=r"of 2 groups; .* of 3 groups.*same offs"):
            grouped(q, offs=torch.tensor([70, 71, T], dtype=torch.int32))


@pytest.mark.parametrize("recipe", [CURRENT, NV], ids=str)
@pytest.mark.parametrize("trains", [True, False])
def test_scales_of_groups_are_refused_where_rows_are_read_by_index(
    recipe: Any, trains: bool
) -> None:
    x, (model, side) = tokens(), experts()
    offs = torch.arange(1, E + 1, dtype=torch.int32) * (T // E)
    with fo.recipe(recipe, strict=True), torch.set_grad_enabled(trains):
        q = fo.quantize(x, input_of(recipe), offs)
        with pytest.raises(fo.FuseOpsError, match="and its rows by index: quantize the tokens"):
            model(q, **side)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("trains", [True, False])
def test_another_split_of_as_many_groups_is_refused(recipe: Any, trains: bool) -> None:
    """Unless rows alone are read, and a scale is of one row."""
    scaling, offs = input_of(recipe), torch.tensor([70, T], dtype=torch.int32)
    op, x = fo.ops.GroupedLinear(2, D, F, bias=False, dtype=BF16), tokens()
    with fo.recipe(recipe, strict=True), torch.set_grad_enabled(trains):
        q = fo.quantize(x, scaling, offs)
        assert torch.equal(op(q, offs=offs), op(q, offs=offs.clone()))
        other = torch.tensor([71, T], dtype=torch.int32)
        of_groups = scaling.block is None or scaling.scale is torch.float8_e4m3fn
        if of_groups or (trains and recipe.roles().columns):
            with pytest.raises(fo.FuseOpsError, match=r"end at \[70, 200\].*end at \[71, 200\]"):
                op(q, offs=other)
        else:
            assert torch.equal(op(q, offs=other), op(x, offs=other))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("alike", [True, False])
def test_what_is_lost_for_another_split_is_nan(recipe: Any, alike: bool) -> None:
    q = fo.quantize(tokens(), input_of(recipe), torch.tensor([70, T], dtype=torch.int32))
    assert q.col is not None
    q = replace(q, row=None, col=_nan_unless(torch.tensor(alike), q.col), carrier=None)
    assert bool(q.dequantize()[:, :70].isnan().all()) is not alike
    assert alike or not q.dequantize().isfinite().any()


# --- Quantize


def mlp() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    where: dict[str, Any] = {"bias": False, "dtype": BF16}
    return {
        "fc1": fo.ops.Linear(D, 2 * F, **where),
        "act": fo.ops.SwiGLU(),
        "fc2": fo.ops.Linear(F, D, **where),
    }


class Passes(nn.Module):
    """A plain module that has a Sequential."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(x)


AROUND = {
    "one": lambda ops: fo.Sequential({"q": fo.ops.Quantize(), **ops}),
    "nested": lambda ops: fo.Sequential(fo.Sequential(fo.ops.Quantize()), fo.Sequential(ops)),
    "plain": lambda ops: fo.Sequential(fo.ops.Quantize(), Passes(fo.Sequential(ops))),
    "bordered": lambda ops: nn.Sequential(fo.Sequential(fo.ops.Quantize()), fo.Sequential(ops)),
    "behind": lambda ops: fo.Sequential(
        fo.ops.Identity(), fo.ops.Quantize(), fo.ops.Identity(), *ops.values()
    ),
}


@pytest.mark.parametrize("recipe", [BLOCK(), BLOCK(wgrad="block"), CURRENT, MX], ids=str)
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_a_quantize_changes_nothing_but_who_quantizes(around: Any, recipe: Any) -> None:
    x = tokens()
    with fo.recipe(recipe):
        plain = step(fo.Sequential(mlp()), x, x)
        assert_same(step(around(mlp()), x, x), plain)
    with fo.fusion(False):
        exact = step(fo.Sequential(mlp()), x, x)
        assert_same(step(around(mlp()), x, x), exact)  # no recipe: y is x


@pytest.mark.parametrize("recipe", [BLOCK(), CURRENT], ids=str)
def test_a_quantize_rounds_the_gradient_where_it_is_asked(recipe: Any) -> None:
    x = tokens()
    dy = tokens(seed=3).detach()
    with fo.recipe(recipe):
        fo.Sequential(fo.ops.Quantize(forward=False, backward=True))(x).backward(dy)
        expected = fo.quantize(dy, recipe.roles().grad_output).dequantize()
    assert torch.equal(x.grad, expected) and not torch.equal(x.grad, dy)  # type: ignore[arg-type]


def test_a_quantized_comes_out_as_y_and_by_name() -> None:
    x = tokens()
    seq = fo.Sequential(fo.ops.SiLU(), fo.ops.Quantize(), fo.ops.Tap("q"), *mlp().values())
    with fo.recipe(BLOCK()):
        for _ in range(2):  # planned, and from the cache
            y, q = seq(x, returns=("q",))
            assert isinstance(q, Quantized) and q.requires_grad and isinstance(y, Tensor)
        q.dequantize().sum().backward()
        grad = torch.nn.functional.silu(x.detach().float().requires_grad_())
        assert x.grad is not None and grad.shape == x.grad.shape
        out = fo.Sequential(fo.ops.SiLU(), fo.ops.Quantize())(x)
        assert isinstance(out, Quantized) and torch.equal(out.dequantize(), q.dequantize())
        with torch.no_grad():
            assert isinstance(fo.Sequential(fo.ops.SiLU(), fo.ops.Quantize())(x), Quantized)
        added = fo.Sequential(fo.ops.Quantize(), fo.ops.Tap("q"), fo.ops.SiLU(), fo.ops.Add("q"))
        wanted = (
            torch.nn.functional.silu(q := fo.quantize(x, fo.recipes.Scaling()).dequantize()) + q
        )
        torch.testing.assert_close(added(x), wanted)


# --- what holds of any call


def kept(model: Any, q: Any) -> Any:
    return model(q)


def recomputed(model: Any, q: Any) -> Any:
    return checkpoint(model, q, use_reentrant=False, context_fn=fo.checkpoint_contexts)


def on_the_host(model: Any, q: Any) -> Any:
    with offload.to_host(min_bytes=0):
        return model(q)


def marked(model: Any, q: Any) -> Any:
    offload.mark_offload(q)
    offload.start_offload(q)
    with offload.to_host(min_bytes=1 << 40) as scope:
        y = model(q)
    moved = [e.name for e in scope.report().entries if e.decision == "moved"]
    assert any(".row" in name or ".col" in name for name in moved), scope.report()
    return y


def without_hidden(model: Any, q: Any) -> Any:
    with offload.recompute():
        return model(q)


@pytest.mark.parametrize("call", [recomputed, on_the_host, marked, without_hidden])
@pytest.mark.parametrize("recipe", [BLOCK(), BLOCK(wgrad="block"), CURRENT, MX], ids=str)
def test_codes_are_saved_by_component_and_may_go_and_come_back(call: Any, recipe: Any) -> None:
    model, x = fo.Sequential(mlp()), tokens()
    with fo.recipe(recipe):
        expected = step(lambda_of(kept, model), fo.quantize(x, input_of(recipe)), x)
        found = step(lambda_of(call, model), fo.quantize(x, input_of(recipe)), x)
    assert_same(found, expected)


def lambda_of(call: Any, model: nn.Module) -> nn.Module:
    class Called(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, q: Any) -> Any:
            return call(self.model, q)

    return Called()


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_code_takes_what_a_quantized_stands_for() -> None:
    model, x = fo.Sequential(mlp()), tokens()
    with fo.recipe(BLOCK()):
        q = fo.quantize(x, fo.recipes.Scaling())
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_same(step(compiled, q, x), step(model, q, x))


def test_autocast_casts_what_it_stands_for() -> None:
    model, x = fo.Sequential(mlp()).float(), tokens().detach().float().requires_grad_()
    with fo.recipe(BLOCK()), torch.autocast("cpu", BF16):
        found = step(model, fo.quantize(x, fo.recipes.Scaling()), x)
        assert_same(found, step(model, x, x))
