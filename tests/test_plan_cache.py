"""A stale plan never runs: whatever changes between two calls, the result is that of a fresh Sequential.

And what a plan does not depend on, the number of rows above all, makes no new plan.
"""

import copy
import gc
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops.ops import (
    GELU,
    Add,
    Bias,
    Dropout,
    GroupedLinear,
    Identity,
    Linear,
    RMSNorm,
    ScaledSwiGLU,
    SiLU,
    Tap,
    scopes,
)
from fuseops.plan.key import CallFacts, KeyGuard, OpFacts, ParameterFacts, PlanKey
from fuseops.recipes import Float8CurrentScaling
from fuseops.run import plan_cache, plan_lookup
from fuseops.run.runner import runner_of


@pytest.fixture(autouse=True)
def checked_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test of this file calls: where a guard fits, the key is that of the call."""
    fits = KeyGuard.fits

    def judged(self: KeyGuard, *call: object) -> bool:
        found = fits(self, *call)
        assert not found or PlanKey.of(self.chain, *call[:4]) == self.key
        return found

    monkeypatch.setattr(KeyGuard, "fits", judged)


def model() -> fo.Sequential:
    torch.manual_seed(4)
    return fo.Sequential(
        RMSNorm(8), Linear(8, 16), Bias(16), SiLU(), Dropout(0.5), Linear(16, 8), GELU()
    )


def data(rows: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 8, generator=g).to(dtype).requires_grad_()


def fresh(seq: fo.Sequential) -> fo.Sequential:
    """A Sequential over the same modules that never ran: nothing in it can be stale."""
    new = fo.Sequential(dict(seq._modules))
    new.__dict__["_settings"] = seq.__dict__.get("_settings", 0)
    return new.train(seq.training) if all(m.training == seq.training for m in seq) else new


def outcome(seq: fo.Sequential, x: Tensor, **options: object) -> list[Tensor | None]:
    """The outputs of one call, and the gradient of x and of every parameter that has one."""
    torch.manual_seed(11)
    y = seq(x, **options)
    outputs = list(y) if isinstance(y, tuple) else [y]
    wanted = [t for t in (x, *seq.parameters()) if t.requires_grad]
    if not outputs[0].requires_grad:
        return outputs
    loss = sum(o.float().square().sum() for o in outputs)
    return [*outputs, *torch.autograd.grad(loss, wanted, allow_unused=True)]


def assert_as_fresh(seq: fo.Sequential, x: Tensor, **options: object) -> None:
    ours, theirs = outcome(seq, x, **options), outcome(fresh(seq), x, **options)
    assert [t is None or t.dtype for t in ours] == [t is None or t.dtype for t in theirs]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@contextmanager
def plans() -> Iterator[list]:
    """Every plan that runs, by its spans."""
    seen: list = []
    with scopes.watch_plans(seen.append):
        yield seen


def the_plan(seq: fo.Sequential, x: Tensor, **options: object) -> object:
    with plans() as seen:
        seq(x, **options)
    return seen[0]


class Flipped(SiLU):
    def fwd(self, x: Tensor) -> fo.Out:
        out = SiLU.fwd(self, x)
        return out._replace(y=-out.y)

    def bwd(self, saved: object, dy: Tensor) -> fo.Grads:
        return SiLU.bwd(self, saved, -dy)


def flip_class(op: SiLU) -> None:
    op.__class__ = Flipped


def replace_linear(seq: fo.Sequential) -> None:
    seq[5] = Linear(16, 8, bias=False)


CHANGES: dict[str, Callable[[fo.Sequential], object]] = {
    "setattr": lambda s: setattr(s, "3", GELU()),
    "setitem": lambda s: s.__setitem__(3, GELU()),
    "_modules": lambda s: s._modules.__setitem__("3", GELU()),
    "a plain module": lambda s: s.__setitem__(3, nn.SiLU()),
    "a nested Sequential": lambda s: s.__setitem__(3, fo.Sequential(GELU())),
    "one of the same class": replace_linear,
    "append": lambda s: s.append(SiLU()),
    "insert": lambda s: s.insert(3, GELU()),
    "delete": lambda s: s.__delitem__(2),
    "swap": lambda s: s._modules.update({"3": s[6], "6": s[3]}),
    "the class of an op": lambda s: flip_class(s[3]),
    "eval": lambda s: s.eval(),
    "the training flag of one op": lambda s: s[4].eval(),
    "p of Dropout": lambda s: setattr(s[4], "p", 0.0),
    "frozen": lambda s: s.requires_grad_(False),
    "one weight frozen": lambda s: s[5].weight.requires_grad_(False),
    "one bias frozen": lambda s: s[1].bias.requires_grad_(False),
    "all but one frozen": lambda s: s.requires_grad_(False)[2].requires_grad_(),
    "a new weight": lambda s: setattr(s[1], "weight", nn.Parameter(torch.ones(16, 8))),
    "a bias taken away": lambda s: setattr(s[1], "bias", None),
    "a new eps": lambda s: setattr(s[0], "eps", 0.5),
    "a new kind": lambda s: setattr(s[3], "kind", "srelu"),
    "configure(fusion)": lambda s: fo.configure(s, fusion=False),
    "configure(disable)": lambda s: fo.configure(s, disable=["linear_act"]),
    "configure(recipe)": lambda s: fo.configure(s, recipe=Float8CurrentScaling()),
    "configure(prefer)": lambda s: fo.configure(s, prefer="memory"),
    "configure(rules)": lambda s: fo.configure(s, rules=[SCALED]),
    "a forward hook": lambda s: s[3].register_forward_hook(lambda m, i, o: -o),
    "a pre-hook": lambda s: s[3].register_forward_pre_hook(lambda m, i: (-i[0],)),
    "forward on the instance": lambda s: setattr(s[3], "forward", lambda x: -x),
    "a parametrization": lambda s: parametrizations.weight_norm(s[5]),
}


@pytest.mark.parametrize("calls", [1, 3], ids=["cold", "warm"])  # before: the third looks at no op
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of(what: str, calls: int) -> None:
    seq, x = model(), data()
    for _ in range(calls):
        before = outcome(seq, x)
    CHANGES[what](seq)
    assert_as_fresh(seq, x)
    assert len(before) == 8  # y, x and six parameters: the first call wanted every gradient


@pytest.mark.parametrize(
    "what", ["a forward hook", "a pre-hook", "forward on the instance", "a parametrization"]
)
def test_undoing(what: str) -> None:
    seq, x = model(), data()
    before = outcome(seq, x)
    undo = CHANGES[what](seq)
    outcome(seq, x)
    if what == "a parametrization":
        parametrize.remove_parametrizations(seq[5], "weight")
    elif what == "forward on the instance":
        del seq[3].__dict__["forward"]
    else:
        undo.remove()
    assert_as_fresh(seq, x)
    # weight_norm splits the weight into norm and direction and multiplies them again: two roundings
    torch.testing.assert_close(outcome(seq, x)[0], before[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_change_of_dtype(dtype: torch.dtype) -> None:
    seq = model()
    outcome(seq, data())
    seq.to(dtype)
    x = data(dtype=dtype)
    assert_as_fresh(seq, x)
    assert seq(x).dtype is dtype


def test_a_change_of_the_inputs_dtype_alone() -> None:
    seq = fo.Sequential(SiLU(), Identity(), RMSNorm(8))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert_as_fresh(seq, data(dtype=dtype))


def test_a_change_of_device() -> None:
    seq = model()
    outcome(seq, data())
    meta = copy.deepcopy(seq).to("meta")
    assert meta(data().detach().to("meta")).is_meta
    seq.to("meta")
    assert seq(data().detach().to("meta")).is_meta


def test_a_change_of_what_wants_a_gradient() -> None:
    seq, x = model(), data()
    outcome(seq, x)
    assert_as_fresh(seq, x.detach())
    assert_as_fresh(seq.requires_grad_(False), x.detach())
    assert_as_fresh(seq, x)


def test_a_bias_that_comes_after_calls_without_one() -> None:
    seq, x = fo.Sequential(Linear(8, 8, bias=False), SiLU()), data()
    for _ in range(3):
        outcome(seq, x)
    seq[0].bias = nn.Parameter(torch.ones(8))
    assert_as_fresh(seq, x)


@pytest.mark.parametrize("where", ["_parameters", "_buffers"])
def test_a_weight_in_another_dict_of_its_op(where: str) -> None:
    op, x = Linear(8, 8, bias=False), data()
    weight = op._parameters.pop("weight")
    op.__dict__[where]["weight"] = weight.detach()
    seq = fo.Sequential(op)
    for _ in range(3):
        assert_as_fresh(seq, x)
    op.__dict__[where] = {**op.__dict__[where], "weight": nn.Parameter(weight.detach())}
    assert_as_fresh(seq, x)


class ScaledInTraining(fo.Op):
    """y = 2x in training: what the plan says, by `call`."""

    def fwd(self, x: Tensor, *, call: fo.ops.op.Call) -> Tensor:
        return 2 * x if call.training else x


def test_a_weight_that_two_ops_share_until_one_gets_another() -> None:
    seq, x = fo.Sequential(Linear(8, 8), Linear(8, 8)), data()
    seq[1].weight = seq[0].weight.requires_grad_(False)
    for _ in range(2):
        assert_as_fresh(seq, x)
    seq[1].weight = nn.Parameter(torch.ones(8, 8))
    assert_as_fresh(seq, x)
    seq[0].weight = seq[1].weight
    assert_as_fresh(seq, x)


def test_a_change_of_the_mode_that_an_op_is_told() -> None:
    seq, x = fo.Sequential(ScaledInTraining()), data()
    for mode, factor in [(True, 2), (False, 1), (True, 2)]:
        assert torch.equal(seq.train(mode)(x), factor * x)


def test_a_dropout_that_drops_nothing_runs_outside_of_the_node() -> None:
    seq, x = fo.Sequential(Dropout(0.5)), data()
    for p, kind in [(0.5, "op"), (0.0, "plain"), (0.5, "op")]:
        seq[0].p = p
        assert the_plan(seq, x).forward[0].kind == kind


def test_a_change_of_grad_mode() -> None:
    seq = model()
    for x in (data(), data().detach()):
        for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                assert_as_fresh(seq, x)


def test_a_change_of_autocast() -> None:
    seq, x = model(), data()
    for options in ({}, {"dtype": torch.bfloat16}, {"dtype": torch.float16}, {"enabled": False}):
        with torch.autocast("cpu", **options):
            assert_as_fresh(seq, x)
    assert_as_fresh(seq, x)


def test_autocast_casts_no_double_as_torch_does_not() -> None:
    seq, x = model().double(), data(dtype=torch.float64)
    expected = outcome(seq, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.linear(x, seq[1].weight).dtype is torch.float64
        torch.testing.assert_close(outcome(seq, x), expected, rtol=0, atol=0)


class FusedScaled(fo.FusedOp):
    """What a rule in scope makes of a SiLU: -silu, so that a stale plan is seen."""

    def fwd(self, x: Tensor, t: tuple, calls: tuple) -> fo.Out:
        out = SiLU.fwd(self.members[0], x)
        return fo.Out(-out.y, (out.saved,))


SCALED = fo.Rule("scaled", (SiLU,), FusedScaled)
SCOPES: dict[str, Callable] = {
    "fusion": lambda: fo.fusion(False),
    "disable": lambda: fo.fusion(disable=["linear_act"]),
    "rules": lambda: fo.rules(SCALED),
    "recipe": lambda: fo.recipe(Float8CurrentScaling()),
    "another recipe": lambda: fo.recipe(Float8CurrentScaling(bwd=torch.float8_e4m3fn)),
    "reference": lambda: fo.reference(),
}


@pytest.mark.parametrize("what", SCOPES)
def test_a_change_of_scope(what: str) -> None:
    seq, x = model(), data()
    outcome(seq, x)
    with SCOPES[what]():
        assert_as_fresh(seq, x)
    assert_as_fresh(seq, x)


def test_a_rule_made_in_each_step_leaves_a_bounded_number_of_plans(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is another rule, with plans of its own; the log says so once."""
    monkeypatch.setattr(plan_cache, "MAX_KEYS", 4)
    monkeypatch.setattr(plan_cache, "_warned", False)
    seq, x = fo.Sequential(Linear(8, 8), SiLU()), data()
    expected, tokens = outcome(seq, x), 0
    with caplog.at_level("WARNING", "fuseops.fusion"):
        for step in range(12):
            with fo.rules(fo.Rule("never", (SiLU,), FusedScaled, when=(lambda ops, c: "no",))):
                assert_as_fresh(seq, x)
            tokens = tokens if step > 4 else len(scopes._by_token)
    gc.collect()
    (run,) = [piece for _, piece in seq._runner.pieces]
    assert len(run.plans.cache) == 4 and len(scopes._by_token) <= tokens + 1
    assert [r.message for r in caplog.records if "make it once" in r.message] == [
        record.message for record in caplog.records[:1]
    ]
    torch.testing.assert_close(outcome(seq, x), expected)


KINDS = [
    data(dtype=dtype).detach().requires_grad_(wanted)
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
    for wanted in (True, False)
]


@given(kinds=st.lists(st.integers(0, len(KINDS) - 1), max_size=20), room=st.integers(1, len(KINDS)))
def test_a_plan_is_built_once_while_its_kind_of_call_is_among_those_made_last(
    kinds: list[int], room: int
) -> None:
    seq, known, expected = fo.Sequential(SiLU()), OrderedDict[int, None](), 0
    with (
        mock.patch.multiple(plan_cache, MAX_KEYS=room, _warned=True),
        mock.patch.object(plan_lookup, "build", wraps=plan_lookup.build) as built,
    ):
        for kind in kinds:
            expected += kind not in known
            known[kind] = None
            known.move_to_end(kind)
            if len(known) > room:
                known.popitem(last=False)
            seq(KINDS[kind])
            assert built.call_count == expected


def test_settings_outlive_the_plans_that_were_made_under_them() -> None:
    """A recomputation enters the scopes of its forward, or compares them, when its plans are forgotten."""
    seq, x = fo.Sequential(Linear(8, 8), SiLU()), data()
    expected = outcome(seq, x)[1]

    def forward(**options: Callable) -> Tensor:
        with fo.rules(fo.Rule("never", (SiLU,), FusedScaled, when=(lambda ops, c: "no",))):
            y = checkpoint(seq, x, use_reentrant=False, **options)
        for _, run in seq._runner.pieces:
            run.plans.cache.clear()
            run.plans.last_call = None
        gc.collect()
        return y

    (dx,) = torch.autograd.grad(forward(context_fn=fo.checkpoint_contexts).square().sum(), x)
    torch.testing.assert_close(dx, expected)
    with pytest.raises(fo.FuseOpsError, match="rules was"):
        forward().square().sum().backward()


def test_the_tests_above_can_fail() -> None:
    seq, x = fo.Sequential(SiLU()), data()
    with fo.rules(SCALED):
        scaled = seq(x)
    assert torch.equal(scaled, -seq(x))


def test_a_change_of_strict() -> None:
    seq, x = fo.Sequential(Linear(8, 8), Bias(8), SiLU()), data()
    outcome(seq, x)
    with fo.fusion(strict=True), pytest.raises(fo.FusionMissError):
        seq(x)
    outcome(seq, x)


def test_a_change_of_the_process_default() -> None:
    seq, x = fo.Sequential(SiLU()), data()
    before = seq(x)
    fo.configure(rules=[SCALED])
    assert torch.equal(seq(x), -before)
    fo.configure(rules=[])
    assert torch.equal(seq(x), before)


def test_a_change_of_returns() -> None:
    seq = fo.Sequential(Tap("a"), Linear(8, 8), Tap("b"), SiLU(), Add("a"), Add("b"))
    x = data()
    for returns in ((), ("a",), ("b", "a"), (), ("b",)):
        assert_as_fresh(seq, x, returns=returns)


def test_a_change_of_what_side_inputs_want() -> None:
    seq = fo.Sequential(ScaledSwiGLU(), Linear(4, 4))
    x, probs = data(), torch.rand(5)
    for wanted in (True, False, True):
        probs = probs.detach().requires_grad_(wanted)
        y = seq(x.detach(), probs=probs)
        if wanted:
            (dprobs,) = torch.autograd.grad(y.sum(), probs)
            (expected,) = torch.autograd.grad(fresh(seq)(x.detach(), probs=probs).sum(), probs)
            assert torch.equal(dprobs, expected)


def test_a_change_of_a_side_inputs_dtype() -> None:
    seq = fo.Sequential(Linear(8, 8), Add("a"))
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        a = torch.ones(5, 8, dtype=dtype)
        assert seq(data(), a=a).dtype is fresh(seq)(data(), a=a).dtype


def test_a_change_of_a_name_that_an_op_reads_or_writes() -> None:
    seq, x = fo.Sequential(Tap("a"), SiLU(), Add("a")), data()
    outcome(seq, x)
    seq[0].writes = seq[2].reads = ("b",)
    assert_as_fresh(seq, x)
    seq[2].reads = ("c",)
    seq[0].writes = ("c",)
    assert_as_fresh(seq, x)
    seq[2].reads = ("d",)
    with pytest.raises(fo.SideInputError, match="'d'"):
        seq(x)


def test_a_renamed_child_is_called_by_its_new_name() -> None:
    seq, x = fo.Sequential({"a": SiLU(), "b": SiLU()}), data()
    seq(x)
    a, b = seq.a, seq.b
    seq._modules.clear()
    seq._modules.update({"c": a, "b": b})
    assert [name for span in the_plan(seq, x).forward for name in span.ops] == ["c", "b"]


def test_a_change_inside_a_nested_sequential() -> None:
    inner = fo.Sequential(Linear(8, 8), SiLU())
    seq, x = fo.Sequential(SiLU(), inner), data()
    outcome(seq, x)
    inner[1] = GELU()
    assert_as_fresh(seq, x)
    inner.append(Add("a"))
    assert_as_fresh(seq, x, a=torch.ones(5, 8))
    del inner[2]
    assert_as_fresh(seq, x)


# --- conditions -------------------------------------------------------------------------------


def when(condition: Callable) -> fo.Rule:
    return fo.Rule("conditional", (SiLU,), FusedScaled, when=(condition,))


@pytest.mark.parametrize("op", [Bias(8), RMSNorm(8), Linear(8, 8), SiLU()])
@pytest.mark.parametrize("shape", [(1,), (), (5, 1), (5, 3, 1), (5, 7)])
def test_a_plan_takes_no_width_that_a_new_one_refuses(op: fo.Op, shape: tuple[int, ...]) -> None:
    seq, x = fo.Sequential(op), torch.ones(shape)
    seq(data())
    try:
        expected = fresh(seq)(x)
    except fo.FuseOpsError as refusal:
        with pytest.raises(type(refusal), match=re.escape(str(refusal))):
            seq(x)
    else:
        assert torch.equal(seq(x), expected)


@pytest.mark.parametrize(
    ("condition", "yes", "no"),
    [
        (lambda ops, c: fo.require(c.k == 6, "k"), (2, 6), (2, 4)),
        (lambda ops, c: fo.require(len(c.shape) == 3, "axes"), (2, 2, 4), (4, 4)),
        (lambda ops, c: fo.require(c.shape[1] == 3, "middle"), (2, 3, 4), (2, 5, 4)),
        (lambda ops, c: fo.require(c.rows % 2 == 0, "rows"), (4, 4), (3, 4)),
    ],
)
def test_a_shape_that_changes_a_conditions_answer(
    condition: Callable, yes: tuple, no: tuple
) -> None:
    seq, rule = fo.Sequential(SiLU()), when(condition)
    with fo.rules(rule):
        for shape, sign in [(yes, -1), (no, 1), (yes, -1), (no, 1)]:
            x = torch.ones(shape)
            assert torch.equal(seq(x), sign * nn.functional.silu(x))


def test_an_attribute_of_an_op_that_changes_a_conditions_answer() -> None:
    op = SiLU()
    op.wanted = True
    seq, x = fo.Sequential(op), data()
    with fo.rules(when(lambda ops, c: fo.require(ops[0].wanted, "unwanted"))):
        assert torch.equal(seq(x), -nn.functional.silu(x))
        op.wanted = False
        assert torch.equal(seq(x), nn.functional.silu(x))


def test_training_and_needs_that_change_a_conditions_answer() -> None:
    seq, x = fo.Sequential(SiLU()), data()
    with fo.rules(when(lambda ops, c: fo.require(c.training and "x" in c.needs[0], "no"))):
        assert torch.equal(seq(x), -nn.functional.silu(x))
        assert torch.equal(seq(x.detach()), nn.functional.silu(x))
        assert torch.equal(seq.eval()(x), nn.functional.silu(x))


# --- what makes no new plan -------------------------------------------------------------------


def count_plans(calls: Callable[[], object]) -> int:
    with plans() as seen:
        calls()
    return len({id(plan) for plan in seen})


def test_row_counts_make_no_new_plan() -> None:
    seq = model()
    assert count_plans(lambda: [seq(data(rows)) for rows in (1, 2, 3, 64, 1000, 1, 7)]) == 1


def test_row_counts_make_no_new_plan_with_three_axes() -> None:
    seq = model()
    assert count_plans(lambda: [seq(torch.ones(b, t, 8)) for b, t in [(1, 5), (2, 7), (3, 1)]]) == 1


def test_a_parametrization_that_comes_again_makes_no_new_plan() -> None:
    """Though torch makes another class for it each time."""

    def times(n: int) -> None:
        seq, x = model(), data()
        for _ in range(n):
            seq(x)
            parametrizations.weight_norm(seq[5])
            seq(x)
            parametrize.remove_parametrizations(seq[5], "weight")

    assert count_plans(lambda: times(3)) == count_plans(lambda: times(1))


def test_routings_make_no_new_plan() -> None:
    seq = fo.Sequential(
        GroupedLinear(3, 8, 8, bias=False), ScaledSwiGLU(), GroupedLinear(3, 4, 8, bias=False)
    )

    def calls() -> None:
        for counts in ([1, 2, 3], [4, 0, 0], [0, 0, 9]):
            seq(torch.ones(sum(counts), 8), fo.Routing.from_counts(counts, torch.ones(sum(counts))))

    assert count_plans(calls) == 1


def test_the_same_settings_said_again_make_no_new_plan() -> None:
    seq, x = model(), data()

    def calls() -> None:
        for _ in range(3):
            with fo.fusion(disable=["linear_act"]), fo.recipe(Float8CurrentScaling()):
                seq(x)

    assert count_plans(calls) == 1


def test_new_values_of_weights_and_a_training_step_make_no_new_plan() -> None:
    seq, x = model(), data()
    sgd = torch.optim.SGD(seq.parameters(), 0.1)

    def step() -> None:
        seq(x).sum().backward()
        sgd.step()
        sgd.zero_grad()

    assert count_plans(lambda: [step() for _ in range(3)]) == 1


@pytest.mark.parametrize("theirs", ["nothing", "an entry"])
def test_another_thread_between_the_guard_and_the_plan(
    theirs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seq, x = model().requires_grad_(False), data()
    seq(x.detach())
    run = seq._runner.pieces[0][1]
    # of a call that wants no gradient
    other = run.plans.last_call if theirs == "an entry" else None
    expected = outcome(seq, x)
    fits = KeyGuard.fits

    def interrupted(self: KeyGuard, *call: object) -> bool:
        found = fits(self, *call)
        run.plans.last_call = other
        return found

    monkeypatch.setattr(KeyGuard, "fits", interrupted)
    torch.testing.assert_close(outcome(seq, x), expected, rtol=0, atol=0)


def set_on(op: fo.Op, name: str, value: object) -> None:
    op.__dict__[name] = value


def hook(op: fo.Op) -> None:
    op.register_forward_hook(lambda m, i, o: o)


LINEAR, DROPOUT = 0, 1  # of the chain below
# what a plan depends on, by field: a change of the ops, or what the next call has
CHANGED: dict[type, dict[str, Callable]] = {
    OpFacts: {
        "kind": lambda ops: setattr(ops[DROPOUT], "__class__", type("Other", (Dropout,), {})),
        "training": lambda ops: ops[LINEAR].eval(),
        "alias": lambda ops: setattr(ops[DROPOUT], "p", 0.0),
        "bare": lambda ops: hook(ops[LINEAR]),
        "methods": lambda ops: set_on(ops[LINEAR], "bwd", ops[LINEAR].bwd),
        "local": lambda ops: set_on(ops[LINEAR], "_local", {}),
    },
    ParameterFacts: {
        "needs": lambda ops: ops[LINEAR].weight.requires_grad_(False),
        "dtype": lambda ops: ops[LINEAR].double(),
        "meta": lambda ops: ops[LINEAR].to("meta"),
        "kind": lambda ops: setattr(
            ops[LINEAR], "weight", type("Mine", (nn.Parameter,), {})(torch.ones(8, 8))
        ),
    },
    CallFacts: {
        "tokens": lambda x, side, tokens: (x, side, (tokens[0] + 1, *tokens[1:]), ()),
        "live": lambda x, side, tokens: (x, side, tokens, ("a",)),
        "sides": lambda x, side, tokens: (x, {"a": side["a"].double()}, tokens, ()),
        "dtype": lambda x, side, tokens: (x.double(), side, tokens, ()),
        "device": lambda x, side, tokens: (x.to("meta"), side, tokens, ()),
        "layout": lambda x, side, tokens: (x.to_sparse(), side, tokens, ()),
        "grad": lambda: torch.no_grad(),
        "x_needs": lambda x, side, tokens: (x.detach(), side, tokens, ()),
        "x_class": lambda x, side, tokens: (nn.Parameter(x.detach()), side, tokens, ()),
        "autocast": lambda: torch.autocast("cpu"),
        "hooked": lambda: hook_on_all(),
        "compiling": lambda: mock.patch("torch.compiler.is_compiling", lambda: True),
    },
}


@contextmanager
def hook_on_all() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: None)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("facts", "field"), [(kind, name) for kind in CHANGED for name in kind._fields]
)
def test_a_guard_sees_each_field_of_the_key(facts: type, field: str) -> None:
    seq, change = fo.Sequential(Linear(8, 8), Dropout(0.5), Add("a")), CHANGED[facts][field]
    side, tokens, x = {"a": torch.ones(5, 8)}, (1, 2, 3), data()
    chain = runner_of(seq).pieces[0][1].chain
    guard = KeyGuard(chain, before := PlanKey.of(chain, x, side, tokens, ()))
    assert guard.fits(x, side, tokens, ())
    call, around = (x, side, tokens, ()), nullcontext()
    if facts is not CallFacts:
        change(chain.ops)
    elif not change.__code__.co_argcount:
        around = change()
    else:
        call = change(x, side, tokens)
    with around:
        after = PlanKey.of(chain, *call)
        assert not guard.fits(*call)
    values = [
        [
            getattr(of, field)
            for of in {CallFacts: (key.call,), OpFacts: key.ops}.get(facts, key.parameters[LINEAR])
        ]
        for key in (before, after)
    ]
    assert values[0] != values[1]


def test_a_method_that_comes_as_another_attribute_goes_is_seen() -> None:
    seq, x = fo.Sequential(Linear(8, 8), Linear(8, 8)), data()
    seq[0].note = "mine"
    before = seq(x), seq(x)
    del seq[0].note
    seq[0].fwd = lambda x, **given: Linear.fwd(seq[0], 2 * x, **given)
    assert not torch.equal(seq(x), before[1])


@pytest.mark.parametrize("told", [True, False], ids=["by version", "by looking"])
def test_a_write_that_changes_nothing_plans_nothing(
    told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is an op looked into again that nobody wrote to since, where torch tells."""
    if not told:
        monkeypatch.setattr("fuseops.run.runner.dict_version", lambda _: object())
    seq, x, looks = fo.Sequential(Linear(8, 8), Linear(8, 8)), data(), []
    seq(x), seq(x)
    alike, run = KeyGuard._ops_match, seq._runner.pieces[0][1]
    monkeypatch.setattr(KeyGuard, "_ops_match", lambda *given: looks.append(run) or alike(*given))
    guard = run.plans.last_call.guard
    seq(x), seq(x)
    assert bool(looks) is not told
    seq[0].eval(), seq[0].train()
    seq(x)
    assert looks and run.plans.last_call.guard is guard


def test_plans_die_with_their_sequential_and_the_graph_lives_on() -> None:
    seq, x = model(), data()
    y = seq(x)
    runner = weakref.ref(seq.__dict__["_runner"])
    del seq
    gc.collect()
    assert runner() is None
    y.sum().backward()
    assert x.grad is not None


def test_what_a_run_keeps_by_shape_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder's cache has another length in each call."""
    monkeypatch.setattr(plan_lookup, "MAX_SHAPES", 4)
    seq = fo.Sequential(RMSNorm(8), fo.ops.SiLU())
    for length in range(1, 12):
        x = torch.randn(2, length, 8)
        torch.testing.assert_close(seq(x), F.silu(F.rms_norm(x, (8,))))
    plans = seq._runner.pieces[0][1].plans
    assert len(plans.checked_shapes) <= 4 and len(plans.last_call.plans) <= 4
