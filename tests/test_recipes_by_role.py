"""Recipes that differ from op to op, and plans that follow what a recipe says."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuseops as fo
from fuseops.ops import scopes
from fuseops.recipes.scales import ROLES
from fuseops.testing import assert_fused_matches_unfused
from fuseops.testing.strategies import recipes

MX, BLOCK = fo.recipes.MXFP8BlockScaling, fo.recipes.Float8BlockScaling


def model() -> nn.Sequential:
    torch.manual_seed(0)
    mlp = {
        "fc1": fo.ops.Linear(32, 64, bias=False),
        "act": fo.ops.SwiGLU(),
        "fc2": fo.ops.Linear(32, 32),
    }
    return nn.Sequential(fo.Sequential(mlp), fo.Sequential({"head": fo.ops.Linear(32, 8)}))


def x() -> Tensor:
    return torch.randn(20, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()


def step(m: nn.Module) -> list[Tensor]:
    given = x()
    y = m(given)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [given, *m.parameters()])]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def operands(m: nn.Module) -> dict[str, set[str]]:
    """Formats by op."""
    found: dict[str, set[str]] = {}

    def watch(plan: Any) -> None:
        for o in plan.operands:
            found.setdefault(o.op, set()).add(o.role)

    with scopes.watch_plans(watch):
        step(m)
    return found


@settings(max_examples=8)
@given(recipe=recipes())
def test_a_function_that_gives_a_recipes_formats_is_that_recipe(recipe: Any) -> None:
    roles = recipe.roles_of(None, "")
    same_formats = fo.recipes.ByRole(
        lambda op, name, role: getattr(roles, role), backward=roles.backward
    )
    if roles.high_wgrad and roles.backward is None:
        return  # which no format of an operand says
    if roles.delayed is not None:
        recipe = replace(recipe, margin=0)  # nor that
    with fo.recipe(recipe):
        # of delayed scaling a first step, whose scales are those of the tensors
        expected = step(model())
    with fo.recipe(same_formats):
        assert same(step(model()), expected)


@given(high=st.sets(st.sampled_from(ROLES)))
@settings(max_examples=8)
def test_a_function_is_asked_for_every_op_by_its_name_and_role(high: set[str]) -> None:
    asked = set()

    def choose(op: fo.Op, name: str, role: str) -> fo.recipes.Scaling | None:
        asked.add((type(op).__name__, name, role))
        return None if role in high else getattr(MX().roles(), role)

    m = model()
    fo.configure(m, recipe=fo.recipes.ByRole(choose))
    step(m)
    assert asked == {("Linear", n, role) for n in ("0.fc1", "0.fc2", "1.head") for role in ROLES}
    if len(high) == 3:
        assert same(step(m), step(model()))


def test_globs_over_names_leave_layers_in_high_precision() -> None:
    m = model()
    fo.configure(m, recipe={"1.**": None, "**": MX()})
    assert operands(m).keys() == {"fc1", "fc2"}
    left = model()
    fo.configure(left[0], recipe=MX())
    assert same(step(m), step(left))
    assert assert_fused_matches_unfused(m, x()) == ("mlp",)


def test_the_first_glob_that_matches_counts_and_no_match_is_high_precision() -> None:
    m = model()
    fo.configure(m, recipe={"0.fc1": BLOCK(), "0.*": MX()})
    found = m[0].plan(x()).operands
    assert {(o.op, o.format) for o in found if o.role == "input"} == {
        ("fc1", "float8_e4m3fn[1x128]"),
        ("fc2", "float8_e4m3fn[1x32, float8_e8m0fnu]"),
    }
    assert not m[1].plan(x().detach()[:, :32]).operands


def test_one_rule_does_not_run_ops_of_several_formats() -> None:
    m = model()
    fo.configure(m, recipe={"0.fc1": None, "**": MX()})
    reasons = {miss.rule: miss.reason for miss in m[0].plan(x()).misses}
    assert reasons["mlp"] == "the recipe gives its ops formats that differ"
    assert operands(m).keys() == {"fc2", "head"}
    assert_fused_matches_unfused(m, x())


@pytest.mark.parametrize(
    ("recipe", "error"),
    [
        (
            {"2.**": MX()},
            r"recipe\['2.\*\*'\] matches no op that multiplies; those of the model are",
        ),
        ({"**": "mxfp8"}, "must be a fuseops.recipes.Recipe or None, got 'mxfp8'"),
        ({3: MX()}, "expects globs over dotted names"),
    ],
)
def test_a_wrong_mapping_is_refused(recipe: Any, error: str) -> None:
    with pytest.raises(fo.FuseOpsError, match=error):
        fo.configure(model(), recipe=recipe)


@pytest.mark.parametrize(
    ("recipe", "meant"),
    [
        (MX, r"Call it: MXFP8BlockScaling\(\)\."),
        ({"**": MX()}, r"configure\(model, recipe="),
        (MX().roles(), "ByRole"),
        (fo.recipes.Scaling(), "ByRole"),
        ("float8", "got 'float8'"),
    ],
)
def test_what_is_no_recipe_is_refused_with_what_was_meant(recipe: Any, meant: str) -> None:
    with pytest.raises(fo.FuseOpsError, match=f"expects a fuseops.recipes.Recipe.*{meant}"):
        fo.recipe(recipe)
    with pytest.raises(fo.FuseOpsError, match=r"strict=\.\.\.\) expects True or False, got 'fc1'"):
        fo.recipe(BLOCK(), strict="fc1")  # type: ignore[arg-type]


def test_globs_need_a_model_and_a_function_gives_formats() -> None:
    with pytest.raises(fo.FuseOpsError, match="needs the model"):
        fo.configure(recipe={"**": MX()})
    with pytest.raises(fo.FuseOpsError, match="expected a function"):
        fo.recipes.ByRole(MX())  # type: ignore[arg-type]
    with pytest.raises(
        fo.FuseOpsError, match=r"'0.fc1' \(Linear\), input: the function gave 'fp8'"
    ):
        m = model()
        fo.configure(m, recipe=fo.recipes.ByRole(lambda op, name, role: "fp8"))  # type: ignore[arg-type, return-value]
        m(x())


# --- plans


@settings(max_examples=10)
@given(recipe=recipes())
def test_equal_recipes_are_equal_and_share_a_plan(recipe: Any) -> None:
    again = replace(recipe)
    assert again == recipe and hash(again) == hash(recipe) and again is not recipe
    m, plans = model()[0], []
    with scopes.watch_plans(plans.append):
        for r in (recipe, again):
            with fo.recipe(r):
                m(x())
    assert plans[0].segments is plans[1].segments


def test_another_content_is_another_plan() -> None:
    m, r = model(), MX()
    fo.configure(m, recipe=r)
    first = step(m)
    fo.configure(m, recipe=replace(r, fwd=torch.float8_e5m2))
    assert not same(step(m), first)
    fo.configure(m, recipe=replace(r))
    assert same(step(m), first)
