"""What does not fuse, and what is said about it: conditions, near misses, overlaps, overridden ops."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from norm_linear import NORM_LINEAR
from torch import Tensor

import fuseops as fo
from fuseops.explain import FusionPlan
from fuseops.ops import scopes
from fuseops.ops.op import Op
from fuseops.ops.structure import Add
from fuseops.plan.cover import RuleMatch, Scan, choose
from fuseops.rules.builtin_rules import BUILTIN_RULES
from fuseops.rules.fused.bias_act import BiasAct
from fuseops.rules.fused.linear_act import LinearAct
from fuseops.rules.rule import OneOrMore
from fuseops.testing.catalogue import Wanted, entry
from fuseops.testing.shadowed import expansions
from fuseops.testing.strategies import Case, chains, with_readers
from fuseops.words import plural

OFFS = torch.tensor([2, 2, 5], dtype=torch.int32)
POS = torch.tensor([[3], [0], [-1], [4], [1], [2]], dtype=torch.int32)
INDEX = torch.tensor([1, 4, 5, 0, 3, 0])  # the last row is padding
ROUTING = {"offs": OFFS, "others": OFFS, "probs": torch.rand(6), "index": INDEX, "pos": POS}


class Found(NamedTuple):
    fired: tuple[str, ...]
    misses: dict[str, list[str]]


def planned(model: Any, x: Tensor, **side: Tensor) -> Found:
    """Which rules fired in a call, and the reasons of those that did not."""
    plans: list[Any] = []
    with scopes.watch_plans(plans.append):
        model(x, **side)
    misses: dict[str, list[str]] = {}
    for miss in (miss for plan in plans for miss in plan.misses):
        misses.setdefault(miss.rule, []).append(miss.reason)
    spans = (span for plan in plans for span in (*plan.forward, *plan.backward))
    return Found(tuple(dict.fromkeys(s.rule for s in spans if s.rule)), misses)


# --- conditions


def mlp(
    groups: int = 3,
    hidden: int = 8,
    gated: int = 4,
    biases: tuple[bool, bool] = (False, False),
    offs: str = "offs",
) -> fo.Sequential:
    return fo.Sequential(
        fo.ops.GroupedLinear(3, 6, hidden, bias=biases[0], offs=offs),
        fo.ops.ScaledSwiGLU(),
        fo.ops.GroupedLinear(groups, gated, 6, bias=biases[1]),
    )


def routed(top_k: int = 1, **sizes: Any) -> fo.Sequential:
    return fo.Sequential(fo.ops.Permute(1), *mlp(**sizes), fo.ops.Combine(top_k))


def quantized(model: fo.Sequential) -> fo.Sequential:
    """With low-rank weights, under a recipe."""
    at = next(i for i, op in enumerate(model) if isinstance(op, fo.ops.GroupedLinear))
    model[at] = fo.ops.GroupedLinear(3, 6, 8, bias=False, low_rank=2)
    fo.configure(model, recipe=fo.recipes.Float8BlockScaling())
    return model


def biased() -> fo.Sequential:
    return fo.Sequential(fo.ops.Linear(6, 8), fo.ops.Bias(8), fo.ops.SiLU())


def scaled(bias: bool) -> fo.Sequential:
    return fo.Sequential(fo.ops.Linear(6, 6, bias=bias), fo.ops.ConstantScale(0.5))


def dense(
    hidden: int = 8, inner: int = 4, bias: bool = False, norm: bool = True, after: bool = False
) -> fo.Sequential:
    ops = fo.ops
    front = [ops.RMSNorm(6)] if norm else []
    between = [ops.Bias(hidden)] if after else []
    fc1, fc2 = ops.Linear(6, hidden, bias=bias), ops.Linear(inner, 6)
    return fo.Sequential(*front, fc1, *between, ops.SwiGLU(), fc2)


# (rule, condition): a model that it refuses, and the reason. A new condition needs a line.
def two_axes_normed(*behind: Op[Any]) -> fo.Sequential:
    ops = fo.ops
    return fo.Sequential(
        ops.Tap("a"), ops.Add("a"), ops.Tap("b"), ops.RMSNorm((6, 6)), *behind, ops.Add("b")
    )


REFUSED: dict[tuple[str, str], tuple[fo.Sequential, str]] = {
    ("grouped_mlp", "same_groups"): (mlp(groups=2), "fc1 has 3 groups, fc2 has 2"),
    ("grouped_mlp", "act_widths"): (mlp(gated=5), "fc1 gives 8 features, fc2 takes 2 x 5"),
    ("grouped_mlp", "no_low_rank"): (
        quantized(mlp()),
        "low-rank weights multiply in high precision",
    ),
    ("routed_mlp", "no_low_rank"): (
        quantized(routed()),
        "low-rank weights multiply in high precision",
    ),
    ("grouped_mlp", "x_is_2d"): (
        fo.Sequential(fo.ops.Reshape(2, 3, 6), *mlp()),
        "x has 3 axes, the fused op takes (rows, width)",
    ),
    ("routed_mlp", "same_top_k"): (routed(2), "Permute has top_k 1, Combine has 2"),
    ("routed_mlp", "same_groups"): (routed(groups=2), "fc1 has 3 groups, fc2 has 2"),
    ("routed_mlp", "act_widths"): (routed(gated=5), "fc1 gives 8 features, fc2 takes 2 x 5"),
    ("grouped_mlp", "same_side_inputs"): (
        mlp(offs="others"),
        "read two tensors as 'offs': 'others' and 'offs'",
    ),
    ("routed_mlp", "same_side_inputs"): (
        routed(offs="others"),
        "read two tensors as 'offs': 'offs' and 'others'",
    ),
    ("norm_mlp", "one_norm_axis"): (
        two_axes_normed(fo.ops.Linear(6, 6), fo.ops.SiLU(), fo.ops.Linear(6, 6)),
        "the norm goes over 2 axes",
    ),
    ("norm_mlp", "single_bias"): (
        dense(bias=True, after=True),
        "the Linear has a bias of its own",
    ),
    ("norm_mlp", "act_widths"): (dense(inner=5), "fc1 gives 8 features, fc2 takes 2 x 5"),
    ("mlp", "single_bias"): (
        dense(bias=True, norm=False, after=True),
        "the Linear has a bias of its own",
    ),
    ("mlp", "act_widths"): (
        dense(inner=5, norm=False),
        "fc1 gives 8 features, fc2 takes 2 x 5",
    ),
    ("norm_linear", "one_norm_axis"): (
        two_axes_normed(fo.ops.Linear(6, 6)),
        "the norm goes over 2 axes",
    ),
    ("add_norm", "one_norm_axis"): (two_axes_normed(), "the norm goes over 2 axes"),
    ("norm_add", "one_norm_axis"): (two_axes_normed(), "the norm goes over 2 axes"),
    ("linear_add", "no_bias"): (
        fo.Sequential(fo.ops.Tap("a"), fo.ops.Linear(6, 6), fo.ops.Add("a")),
        "the Linear has a bias, and its GEMM adds one tensor",
    ),
    ("linear_scale", "no_bias"): (scaled(bias=True), "the Linear has a bias"),
    ("scale_linear", "no_bias"): (scaled(bias=True), "the Linear has a bias"),
    ("linear_act", "single_bias"): (biased(), "the Linear has a bias of its own"),
}
CONDITIONS = [(rule, condition) for rule in BUILTIN_RULES for condition in rule.when]


@pytest.mark.parametrize(
    ("rule", "condition"), CONDITIONS, ids=[f"{r.name}-{c.__name__}" for r, c in CONDITIONS]
)
def test_every_condition_gives_its_reason(rule: fo.Rule, condition: Any) -> None:
    key = rule.name, condition.__name__
    assert key in REFUSED, f"add a line to REFUSED: {key}, with a model that it refuses"
    model, reason = REFUSED[key]
    side = {name: ROUTING[name] for name in model.reads}
    seen: list[str | None] = []

    def spy(ops: Any, c: fo.Conditions) -> str | None:
        seen.append(condition(ops, c))
        return seen[-1]

    only = fo.Rule("only", rule.pattern, rule.build, rule.kind, (spy,))
    with fo.rules(only), fo.fusion(disable=[rule.name]):
        try:
            found = planned(model, torch.randn(6, 6), **side)
        except fo.FuseOpsError:  # these ops do not fit each other, fused or not
            found = Found((), {"only": [str(answer) for answer in seen if answer]})
            if not seen:
                seen.append(condition(tuple(model), conditions()))
                found = Found((), {"only": [str(seen[-1])]})
    assert any(reason in why for why in found.misses["only"]), found
    assert "only" not in found.fired and seen


def conditions() -> fo.Conditions:
    device, needs = torch.device("cpu"), (frozenset({"x"}),) * 3
    return fo.Conditions((6, 6), 6, 6, 6, torch.float32, device, None, None, needs, True)


def test_a_condition_that_answers_a_bool_is_refused() -> None:
    rule = fo.Rule("sloppy", (fo.ops.SReLU,), LinearAct, when=(lambda ops, c: c.k == 4,))  # type: ignore[arg-type, return-value]
    with fo.rules(rule), pytest.raises(TypeError, match=r"sloppy.*answered True.*fo\.require"):
        fo.Sequential(fo.ops.SReLU())(torch.randn(2, 4))


def test_conditions_see_the_call() -> None:
    seen: list[fo.Conditions] = []

    def look(ops: Any, c: fo.Conditions) -> str | None:
        seen.append(c)
        return "looked"

    rule = fo.Rule("look", (fo.ops.Bias, fo.ops.SiLU), BiasAct, "backward", (look,))
    model = fo.Sequential(fo.ops.Linear(6, 8), fo.ops.Bias(8), fo.ops.SiLU()).eval()
    model[1].bias.requires_grad_(False)
    with fo.rules(rule):
        found = planned(model, torch.randn(2, 3, 6))
    c = seen[0]
    assert (c.shape, c.k, c.n, c.rows) == ((2, 3, 8), 8, 8, 6)
    assert (c.dtype, c.device.type, c.training) == (torch.float32, "cpu", False)
    assert c.needs == (frozenset({"x"}), frozenset({"x"}))
    assert found.misses["look"] == ["looked"]


# --- near misses and overlaps


@pytest.mark.parametrize(
    ("ops", "rule", "why"),
    [
        ((fo.ops.Dropout(0.5), fo.ops.SiLU()), "linear_act", "op 2 is Dropout"),
        ((), "linear_act", "the sequence ends, wanted SiLU"),
        ((torch.nn.Tanh(), fo.ops.SiLU()), "linear_act", "is Tanh, a plain module"),
        ((torch.nn.SiLU(),), "bias_act", "is SiLU, a plain module, wanted SiLU"),
        ((fo.Sequential(),), "linear_act", "the sequence ends, wanted SiLU"),
        ((fo.ops.SwiGLU(),), "linear_act", "op 2 is SwiGLU, wanted SiLU"),
    ],
)
def test_the_longest_prefix_is_a_miss(ops: tuple[Any, ...], rule: str, why: str) -> None:
    """Behind a Linear and a Bias."""
    first = fo.ops.Linear(4, 4, bias=False), fo.ops.Bias(4)
    found = planned(fo.Sequential(*first, *ops), torch.randn(3, 4))
    assert len(found.misses[rule]) == 1 and why in found.misses[rule][0], found


def test_a_rule_far_from_matching_says_nothing() -> None:
    assert planned(fo.Sequential(fo.ops.SiLU()), torch.randn(3, 4)) == Found((), {})


def test_what_another_span_covers_is_an_overlap() -> None:
    ops = (fo.ops.RMSNorm(4), fo.ops.Linear(4, 4), fo.ops.SiLU())
    with fo.rules(NORM_LINEAR):
        found = planned(fo.Sequential(*ops), torch.randn(3, 4))
    assert found.fired == ("user_norm_linear", "act_linear")
    for rule in ("linear_act", "norm_linear"):
        assert found.misses[rule] == ["overlaps 0:2 of user_norm_linear"]


def test_a_rule_that_comes_second_is_an_overlap() -> None:
    late = fo.Rule("first", (fo.ops.Linear, fo.ops.SiLU), LinearAct)
    with fo.rules(late):
        found = planned(fo.Sequential(fo.ops.Linear(4, 4), fo.ops.SiLU()), torch.randn(3, 4))
    assert found.fired == ("first", "act_linear")
    assert found.misses["linear_act"] == ["overlaps 0:2 of first"]


@pytest.mark.parametrize(
    ("scope", "why"),
    [
        (lambda: fo.fusion(False), "fusion is off"),
        (lambda: fo.fusion(disable=["linear_act"]), "disabled"),
    ],
)
def test_what_is_switched_off_is_a_miss(scope: Callable[[], Any], why: str) -> None:
    model = fo.Sequential(fo.ops.Linear(4, 4), fo.ops.SiLU())
    with scope():
        found = planned(model, torch.randn(3, 4))
    assert "linear_act" not in found.fired and found.misses["linear_act"] == [why]


SPANS = {"off": [(0, 3)], "alike": [(0, 2), (1, 3)], "by length": [(0, 2), (0, 3), (1, 3)]}


@pytest.mark.parametrize("why", SPANS)
def test_a_refused_span_is_told_of_by_what_shows_most(why: str) -> None:
    """By the longest where a setting refuses all, by the shortest of one reason where a condition does."""
    rule = fo.Rule(
        "chain",
        OneOrMore(fo.ops.SiLU),
        LinearAct,
        when=lambda ops, c: f"{len(ops)} ops" if why == "by length" else "never",
    )
    with fo.rules(rule), fo.fusion(disable=["chain"] if why == "off" else []):
        plan = fo.Sequential(*(fo.ops.SiLU() for _ in range(3))).plan(torch.ones(2, 4))
    assert sorted(m.span for m in plan.misses if m.rule == "chain") == SPANS[why]


@pytest.mark.parametrize("last", [False, True])
def test_a_rule_that_goes_last_leaves_ops_to_the_built_in_ones(last: bool) -> None:
    """Of what it is left without, the longest span alone is an overlap."""
    own = fo.Rule("own", OneOrMore(fo.ops.SiLU), LinearAct, last=last)
    other = next(rule for rule in BUILTIN_RULES if rule.kind == own.kind)
    candidates = (
        *(RuleMatch(own, *span) for span in [(0, 3), (0, 2), (1, 3)]),
        RuleMatch(other, 1, 3),
    )
    found = choose(Scan(candidates, (), offset=4), [None] * len(candidates))
    assert found.forward == (candidates[-1 if last else 0],)
    told = {
        True: ("own", (4, 7), "overlaps 5:7 of"),
        False: (other.name, (5, 7), "overlaps 4:7 of"),
    }
    ((rule, span, why),) = found.misses
    assert (rule, span) == told[last][:2] and why.startswith(told[last][2])


def test_an_overlap_is_what_would_have_fired_alone_and_the_first_line_counts_the_others() -> None:
    seen: Counter[bool] = Counter()
    x, linear = torch.ones(2, 4), fo.ops.Linear(4, 4)
    both = (
        fo.Sequential(linear, fo.ops.GELU(), last) for last in (fo.ops.Linear(4, 4), fo.ops.Bias(4))
    )

    @given(case=chains(BUILTIN_RULES, torch.float32))
    @example(Case(next(both), x, {}))  # an overlap
    @example(Case(next(both), x, {}))  # none
    def law(case: Case) -> None:
        every = list(case.model.plan(case.x, **case.side).walk())
        alone: dict[str, list[FusionPlan]] = {}
        for rule in {miss.rule for plan in every for miss in plan.misses}:
            with fo.fusion(disable={r.name for r in BUILTIN_RULES} - {rule}):
                alone[rule] = list(case.model.plan(case.x, **case.side).walk())
        for at, plan in enumerate(every):
            for miss in plan.misses:
                fired = [(s.start, s.stop) for s in alone[miss.rule][at].fused]
                seen[miss in plan.not_fused] += 1
                if miss in plan.not_fused:
                    assert miss.span not in fired
                else:
                    assert any(a < miss.span[1] and miss.span[0] < b for a, b in fired), miss
        first = fo.explain(case.model, case.x, **case.side).partition("\n")[0]
        count = sum(len(plan.not_fused) for plan in every)
        assert not len(case.model) or f", {plural(count, 'miss')};" in first

    law()
    assert seen[True] and seen[False]


# --- overridden ops


def doubled(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` with twice the result; its signature stays the contract's."""

    @functools.wraps(method)
    def twice(self: Any, *args: Any, **keywords: Any) -> Any:
        out = method(self, *args, **keywords)
        if isinstance(out, fo.Out):
            return out._replace(y=out.y * 2)
        if isinstance(out, fo.Grads):
            return out._replace(x=None if out.x is None else out.x * 2)
        return times_two(out)

    return twice


def times_two(out: Any) -> Any:
    """y alone, or with what was published."""
    return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2


def overridden(op: Op[Any], how: str) -> Op[Any]:
    """`op` as an instance of a subclass with one method of its own, or with a forward of its own."""
    if how == "instance":
        op.forward = functools.partial(doubled(type(op).forward), op)  # type: ignore[method-assign]
    elif how == "hook":
        op.register_forward_hook(lambda module, args, y: times_two(y))
    else:
        old = type(op)
        op.__class__ = type(f"My{old.__name__}", (old,), {how: doubled(getattr(old, how))})
    return op


def exemplar(types: tuple[type, ...]) -> fo.Sequential:
    """A spelling of a pattern, of ops with the first option that the catalogue names for each."""
    made: list[Op[Any]] = []
    width = 6
    for k, op in enumerate(types):
        out = 6 if Add in types[k:] else 8  # what it adds is as wide as x
        made.append(
            entry(op).make(Wanted(lambda *options: options[0], width, out, groups=3, top_k=1))
        )
        width = made[-1].out_shape((6, width))[-1]
    return fo.Sequential(*with_readers(made, 6))


def trained(model: Callable[..., Tensor], params: list[Tensor], side: dict[str, Tensor]) -> Any:
    x = torch.linspace(-2, 2, 36).view(6, 6).requires_grad_()
    y = model(x, **side)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *params])]


PLACES = [(rule, i) for rule in BUILTIN_RULES for i in range(len(next(expansions(rule))))]


@pytest.mark.parametrize("how", ["fwd", "bwd", "forward", "instance", "hook"])
@pytest.mark.parametrize(("rule", "place"), PLACES, ids=[f"{r.name}-{i}" for r, i in PLACES])
def test_an_overridden_op_is_itself_inside_and_never_fused(
    rule: fo.Rule, place: int, how: str
) -> None:
    """In the longest spelling, which may lack an optional op."""
    types = next(spellings := expansions(rule))
    model = exemplar(types)
    side = {name: ROUTING.get(name, torch.ones(6, 6)) for name in model.reads}
    assert rule.name in planned(model, torch.randn(6, 6), **side).fired
    model[place] = overridden(model[place], how)

    def one_by_one(x: Tensor, **side: Tensor) -> Tensor:
        for op in model:
            x = op(x, **{name: side[name] for name in op.reads})
            if op.writes:
                x, side[op.writes[0]] = x
        return x

    params = list(model.parameters())
    inside, alone = (trained(run, params, side) for run in (model, one_by_one))
    for mine, theirs in zip(inside, alone, strict=True):
        torch.testing.assert_close(mine, theirs)
    found = planned(model, torch.randn(6, 6), **side)
    optional = (*types[:place], *types[place + 1 :]) in spellings
    assert rule.name not in found.fired or optional
    words = {"instance": "replaced on the instance", "hook": "has hooks"}
    assert any(words.get(how, f"overrides {how}") in why for why in found.misses[rule.name]), found


def test_a_class_defined_anew_is_named_as_such() -> None:
    Linear = type("Linear", (Op,), {"fwd": lambda self, x: x})
    found = planned(fo.Sequential(Linear(), fo.ops.SiLU()), torch.randn(3, 4))
    assert "same name, other class object" in found.misses["linear_act"][0]


def test_a_reason_is_that_of_the_call_and_not_of_the_first_one() -> None:
    def few_rows(ops: Any, c: fo.Conditions) -> str | None:
        return fo.require(c.rows < 2, f"{c.rows} rows")

    rule = fo.Rule("few", (fo.ops.Linear, fo.ops.SiLU), LinearAct, when=(few_rows,))
    model = fo.Sequential(fo.ops.Linear(4, 4), fo.ops.SiLU())
    with fo.rules(rule):
        for rows in (3, 9):
            reasons = [m.reason for m in model.plan(torch.randn(rows, 4)).misses if m.rule == "few"]
            assert reasons == [f"{rows} rows"]


def test_an_overridden_op_is_a_miss_although_the_rule_fired_elsewhere() -> None:
    odd = overridden(fo.ops.Linear(4, 4), "fwd")
    model = fo.Sequential(fo.ops.Linear(4, 4), fo.ops.SiLU(), odd, fo.ops.SiLU())
    found = planned(model, torch.randn(3, 4))
    assert found.fired == ("linear_act", "act_linear")
    assert found.misses["linear_act"] == ["op 2: MyLinear overrides fwd"]


def test_positions_count_from_the_start_of_the_sequential() -> None:
    ops = (fo.ops.Linear(4, 4), fo.ops.Bias(4), torch.nn.Tanh(), fo.ops.RMSNorm(4))
    model = fo.Sequential(*ops, fo.ops.Linear(4, 4), fo.ops.SiLU())
    fo.configure(model, rules=[NORM_LINEAR])
    found = planned(model, torch.randn(3, 4))
    assert "overlaps 3:5 of user_norm_linear" in found.misses["linear_act"]
    with pytest.raises(fo.FusionMissError, match="at 4:6: overlaps 3:5 of user_norm_linear"):
        with fo.fusion(strict=["linear_act"]):
            model(torch.randn(3, 4))


@pytest.mark.parametrize("given", [lambda one: one, lambda one: [one], lambda one: iter([one])])
def test_a_rule_of_one_op_and_one_condition_is_the_same_however_they_are_given(given: Any) -> None:
    def never(ops: Any, c: fo.Conditions) -> str | None:
        return "never"

    rules = (
        fo.Rule("mine", pattern, fo.FusedOp, when=when)
        for pattern, when in [((fo.ops.GELU,), (never,)), (given(fo.ops.GELU), given(never))]
    )
    assert len({*rules}) == 1


@pytest.mark.parametrize("wrong", [
    {"build": None}, {"when": ("k > 3",)}, {"pattern": ()}, {"pattern": (3,)}, {"kind": "both"},
    {"pattern": 3}, {"when": 3},
])  # fmt: skip
def test_a_rule_of_the_wrong_parts_says_which(wrong: dict[str, Any]) -> None:
    parts: dict[str, Any] = {"name": "mine", "pattern": fo.ops.GELU, "build": fo.FusedOp}
    assert fo.Rule(**parts).pattern == (fo.ops.GELU,)
    with pytest.raises(fo.FuseOpsError, match="'mine'"):
        fo.Rule(**parts | wrong)


class Doubled(fo.FusedOp):
    """A forward op of SiLU and Bias; `gives` says what of its members it leaves out."""

    gives: Any = None

    def fwd(self, x: Tensor, t: Any, calls: Any) -> Any:
        act, bias = self.members
        y = torch.nn.functional.silu(x) + t[1]["bias"]
        return {
            None: fo.Out(y, (act.Saved(x), bias.Saved())),
            "tensor": y,
            "nothing": fo.Out(y),
            "one": fo.Out(y, (act.Saved(x),)),
            "no fields": fo.Out(y, ((), bias.Saved())),
        }[self.gives]


def run_doubled(rule: fo.Rule) -> None:
    with fo.rules(rule):
        x = torch.ones(3, 4, requires_grad=True)
        fo.Sequential(fo.ops.SiLU(), fo.ops.Bias(4))(x).sum().backward()


@pytest.mark.parametrize("gives", [None, "tensor", "nothing", "one"])
def test_a_forward_rule_gives_what_every_member_saves(gives: str | None) -> None:
    fused = type("Doubled", (Doubled,), {"gives": gives})
    rule = fo.Rule("doubled", (fo.ops.SiLU, fo.ops.Bias), fused)
    if gives is None:
        return run_doubled(rule)
    with pytest.raises(fo.FuseOpsError, match=r"Doubled\.fwd of a forward rule.*each of its 2"):
        run_doubled(rule)


def test_a_forward_rule_saves_every_field_of_a_member() -> None:
    fused = type("Doubled", (Doubled,), {"gives": "no fields"})
    with pytest.raises(
        fo.FuseOpsError, match=r"Doubled\.fwd saved 0 values of SiLU.*\['x', 'form'\]"
    ):
        run_doubled(fo.Rule("doubled", (fo.ops.SiLU, fo.ops.Bias), fused))


@pytest.mark.parametrize("kind, missing", [("backward", "bwd"), ("joint", "bwd")])
def test_a_fused_op_defines_what_the_kind_of_its_rule_asks_for(kind: str, missing: str) -> None:
    rule = fo.Rule("doubled", (fo.ops.SiLU, fo.ops.Bias), Doubled, kind)
    with pytest.raises(fo.FuseOpsError, match=f"'doubled' is a {kind} rule.*define {missing}"):
        run_doubled(rule)


def test_an_error_inside_a_condition_names_the_rule() -> None:
    rule = fo.Rule("broken", (fo.ops.SReLU,), LinearAct, when=(lambda ops, c: c.nope,))  # type: ignore[attr-defined]
    with fo.rules(rule), pytest.raises(AttributeError) as raised:
        fo.Sequential(fo.ops.SReLU())(torch.randn(2, 4))
    assert any("rule 'broken'" in note for note in raised.value.__notes__)
