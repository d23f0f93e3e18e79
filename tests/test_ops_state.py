"""What a call reads besides its arguments: laws over every registered op."""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuseops as fo
from fuseops.ops.op import Op
from fuseops.rules.builtin_rules import BUILTIN_RULES
from fuseops.rules.rule import Rule
from fuseops.testing.catalogue import Wanted, entry, exported
from fuseops.testing.strategies import Case, op_cases, rule_cases

OPS = exported()
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
# A third of the profile's examples, for laws that few drawn choices can break.
some = settings(max_examples=settings.default.max_examples // 3)

DIGITS = "0123456789"  # of a group's own parameter
every_rule = pytest.mark.parametrize("rule", BUILTIN_RULES, ids=lambda rule: rule.name)
# attributes by which the engine plans, which belong to its own laws, and torch's own
PLANNED = {"delays", "accumulate_into_main_grad", "repacks", "pure", "signature", "kinds"}
PLANNED |= {name for name in dir(Op) if name != "training" and not name.startswith("_")}
# they describe parameters that are there, whose shapes a plan has seen
WIDTHS = {"size", "dim", "in_features", "out_features", "num_groups", "num_experts"}


def without_values(t: Tensor) -> Tensor:
    return torch.empty_like(t, device="meta")


@every_op
@some
@given(data=st.data())
def test_a_tensor_without_values_beside_others_is_refused_by_name(
    op: type[Op], data: st.DataObject
) -> None:
    """torch itself multiplies a real matrix by one on meta, into memory that nobody wrote."""
    case = data.draw(op_cases(op, kinds=["normal"], layouts=["contiguous"]))
    inside = not case.model.writes and data.draw(st.booleans())
    model = fo.Sequential({"op": case.model}) if inside else case.model
    if data.draw(st.booleans()):
        model(case.x, **case.side)  # there is a plan already
    inner, held = case.model, {**case.model._parameters, **case.model._buffers}
    held = {name: t for name, t in held.items() if t is not None}
    given = {"x": case.x, **case.side, **held}
    if len(given) == 1:
        return  # nothing to mix
    name = data.draw(st.sampled_from(sorted(given)))
    if name in held:
        registry = inner._parameters if name in inner._parameters else inner._buffers
        value = without_values(held[name].detach())
        registry[name] = nn.Parameter(value) if registry is inner._parameters else value
    side = {n: without_values(t) if n == name else t for n, t in case.side.items()}
    with pytest.raises(fo.FuseOpsError, match=rf"\b{name.rstrip(DIGITS)}\d*\b.*on the meta device"):
        model(without_values(case.x) if name == "x" else case.x, **side)


def test_a_model_that_is_all_on_meta_runs_there() -> None:
    moe = fo.MoE(16, 32, num_experts=4, top_k=2, device="meta")
    assert moe(torch.empty(8, 16, device="meta")).shape == (8, 16)


# --- attributes


def attributes(op: Op) -> list[str]:
    """Public attributes of an instance that may be assigned."""
    names = sorted({name for name in dir(op) if not name.startswith("_")} - PLANNED)
    held = {*op._parameters, *op._buffers, *op._modules}
    found = []
    for name in names:
        value = getattr(op, name)
        if name not in held and not callable(value) and not isinstance(value, dict | frozenset):
            found.append(name)
    return found


def other_values(op: Op, name: str) -> Iterator[Any]:
    """What somebody may assign in place of an attribute: what other instances have, and other numbers."""
    value = getattr(op, name)
    for choice in range(3):
        wanted = Wanted(lambda *of, k=choice: of[k % len(of)], 8, 8, 4, 2)
        other = getattr(entry(type(op)).make(wanted), name)
        if isinstance(other, str | tuple | bool | None):
            yield other
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield value + 1
    elif isinstance(value, Tensor):
        yield value * 3
    elif value is None:
        yield 0.5
    elif isinstance(value, tuple):
        yield tuple(v + 1 if isinstance(v, int | float) else v for v in value)


def same(a: Any, b: Any) -> bool:
    return (
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b
    )


def results(out: Any) -> list[Tensor]:
    tensors = [out] if isinstance(out, Tensor) else list(out)
    return [t for t in tensors if t.is_floating_point()]


def gradients(case: Case, out: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
    ys = [y for y in out if y.requires_grad]
    dys = [torch.linspace(1, 2, y.numel(), dtype=y.dtype).view(y.shape) for y in ys]
    return list(torch.autograd.grad(ys, wanted, dys, materialize_grads=True))


def leaves(case: Case) -> tuple[Tensor, dict[str, Tensor], list[Tensor]]:
    x = case.x.detach().requires_grad_()
    side = {
        n: t.detach().requires_grad_() if t.is_floating_point() else t for n, t in case.side.items()
    }
    floats = [t for t in side.values() if t.is_floating_point()]
    return x, side, [x, *floats, *case.model.parameters()]


def check_in_flight(case: Case, op: Op, name: str, value: Any) -> None:
    """Gradients with another value of an attribute at the time of the backward are those without, or refused."""
    found = []
    before = getattr(op, name)
    for changes in (False, True):
        x, side, wanted = leaves(case)
        torch.manual_seed(0)
        out = results(case.model(x, **side))
        if changes:
            with suppress(AttributeError):  # it is read-only
                setattr(op, name, value)
        try:
            found.append(gradients(case, out, wanted))
        except fo.FuseOpsError:
            assert changes
            return
        finally:
            if changes:
                with suppress(AttributeError):
                    setattr(op, name, before)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=0, atol=0, equal_nan=True)


@every_op
@some
@given(data=st.data())
def test_an_attribute_that_changes_before_the_backward_changes_nothing(
    op: type[Op], data: st.DataObject
) -> None:
    case = data.draw(op_cases(op, kinds=["normal"], layouts=["contiguous"]))
    for name in attributes(case.model):
        value = data.draw(st.sampled_from(list(other_values(case.model, name))))
        check_in_flight(case, case.model, name, value)


@every_rule
@given(data=st.data())
def test_an_attribute_of_a_fused_op_that_changes_before_the_backward_changes_nothing(
    rule: Rule, data: st.DataObject
) -> None:
    case = data.draw(rule_cases(rule, kinds=["normal"]))
    op = data.draw(st.sampled_from(list(case.model)))
    name = data.draw(st.sampled_from(attributes(op)))
    for value in other_values(op, name):
        check_in_flight(case, op, name, value)


def outcome(case: Case, model: nn.Module) -> list[Tensor] | None:
    """Outputs and gradients of a call; None where it raises."""
    x, side, _ = leaves(case)
    torch.manual_seed(0)
    try:
        out = results(model(x, **side))
        return [*out, *gradients(case, out, [x, *model.parameters()])]
    except Exception:
        return None


def check_equal(got: Any, expected: Any) -> None:
    if got is None or expected is None:
        assert got is expected
        return
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@every_rule
@some
@given(data=st.data())
def test_an_attribute_holds_in_a_model_that_has_run_as_in_a_new_one(
    rule: Rule, data: st.DataObject
) -> None:
    """No plan, and no fused op in it, keeps what an op said before."""
    case = data.draw(rule_cases(rule, kinds=["normal"]))
    k = data.draw(st.integers(0, len(case.model) - 1))
    name = data.draw(st.sampled_from(sorted({*attributes(case.model[k])} - WIDTHS)))
    ran, new = case.model, copy.deepcopy(case.model)
    for value in other_values(ran[k], name):
        check_equal(outcome(case, ran), outcome(case, copy.deepcopy(ran)))
        for model in (ran, fresh := copy.deepcopy(new)):
            with suppress(AttributeError):
                setattr(model[k], name, value)
        check_equal(outcome(case, ran), outcome(case, fresh))


@every_op
@some
@given(data=st.data())
def test_ops_that_print_alike_compute_alike(op: type[Op], data: st.DataObject) -> None:
    """What the constructor takes and the op keeps under that name may be assigned later, and means the same."""
    case = data.draw(op_cases(op, kinds=["normal"], layouts=["contiguous"]))
    choose = lambda *of: data.draw(st.sampled_from(of))  # noqa: E731
    width = case.x.shape[-1]
    groups = getattr(case.model, "num_groups", getattr(case.model, "num_experts", 4))
    top_k = getattr(case.model, "top_k", 2)
    out = getattr(case.model, "vocab_size", None) or case.model.out_shape((1, width))[-1]
    other = entry(op).make(Wanted(choose, width, out, groups, top_k)).to(torch.float64)
    assigned = copy.deepcopy(case.model)
    for name in inspect.signature(op.__init__).parameters:
        if name in attributes(assigned):
            with suppress(AttributeError):  # it is read-only
                setattr(assigned, name, getattr(other, name))
    shapes = [{n: t.shape for n, t in m.state_dict().items()} for m in (assigned, other)]
    alike = shapes[0] == shapes[1]
    if repr(assigned) == repr(other) and alike and assigned.training == other.training:
        other.load_state_dict(assigned.state_dict())
        check_equal(outcome(case, assigned), outcome(case, other))


def test_what_an_attribute_says_is_what_runs() -> None:
    gelu, x = fo.ops.GELU(), torch.linspace(-3, 3, 12)
    gelu(x)
    gelu.approximate = "tanh"
    assert torch.equal(gelu(x), fo.ops.GELU("tanh")(x))
    assert not torch.equal(gelu(x), fo.ops.GELU()(x))
    gelu.approximate = "other"
    with pytest.raises(fo.FuseOpsError, match="expected 'none' or 'tanh'"):
        gelu(x)


def test_a_coefficient_that_is_set_later_publishes_the_loss() -> None:
    moe, x = fo.MoE(8, 6, 4, 2), torch.randn(5, 8)
    moe(x)
    moe["router"].z_loss = 0.5
    _, loss = moe(x, returns="router_loss")
    assert loss > 0


@pytest.mark.parametrize("disabled", [(), ("norm_linear",), ("norm_linear", "norm_add")])
def test_a_tap_that_is_renamed_before_the_backward_keeps_its_gradient(
    disabled: tuple[str, ...],
) -> None:
    """By each rule over a Tap, and by none."""

    def step(renamed: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        ops = fo.ops.Tap("a"), fo.ops.Linear(8, 8, bias=False), fo.ops.Add("a")
        model = fo.Sequential(*ops, fo.ops.Tap("b"), fo.ops.RMSNorm(8), fo.ops.Linear(8, 8))
        x = torch.randn(4, 8).requires_grad_()
        with fo.fusion(disable=disabled):
            y, h = model(x, returns="b")
            if renamed:
                model[0].writes, model[3].writes = ("c",), ("d",)
            (y.sum() + h.square().sum()).backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    check_equal(step(True), step(False))


class Knobs:
    """Numbers of a user's program, which a block sets for its own time."""

    gain = 2.0

    @staticmethod
    def scaled(x: Tensor) -> Tensor:
        return x * Knobs.gain


GAIN, SETTINGS = 2.0, SimpleNamespace(gain=2.0)


def helped(x: Tensor) -> Tensor:
    return x * GAIN


class Level1(fo.Op):
    """x times a number that stands elsewhere."""

    gain = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.own = 2.0


class OneSaved(NamedTuple):
    x: Tensor | None
    kept: float


class Level2(fo.Op[OneSaved]):
    """Its bwd multiplies by a number that stands elsewhere."""

    gain = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.own, self.kept, self.calls = 2.0, 2.0, 0

    def times(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def fwd(self, x: Tensor) -> fo.Out:
        return fo.Out(self.times(x), OneSaved(None, self.kept))

    def bwd(self, saved: OneSaved, dy: Tensor) -> fo.Grads:
        self.calls += 1  # a write of its own is no other function
        return fo.Grads(self.times(dy) * saved.kept / 2.0)


MODULE = sys.modules[__name__]
TIMES: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[Any], tuple[Any, str]]]] = {
    "a global": (lambda op, x: x * GAIN, lambda op: (MODULE, "GAIN")),
    "a global of a helper": (lambda op, x: helped(x), lambda op: (MODULE, "GAIN")),
    "an object": (lambda op, x: x * SETTINGS.gain, lambda op: (SETTINGS, "gain")),
    "a class": (lambda op, x: x * Knobs.gain, lambda op: (Knobs, "gain")),
    "a static method": (lambda op, x: Knobs.scaled(x), lambda op: (Knobs, "gain")),
    "the class of the op": (lambda op, x: x * op.gain, lambda op: (type(op), "gain")),
    "the op": (lambda op, x: x * op.own, lambda op: (op, "own")),
    "the mode": (lambda op, x: x * (2.0 if op.training else 3.0), lambda op: (op, "training")),
}


@pytest.mark.parametrize("level", [Level1, Level2])
@pytest.mark.parametrize("where", TIMES)
def test_a_backward_is_of_the_forward_or_says_what_has_changed_since(
    where: str, level: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    times, place = TIMES[where]
    op = type("Mine", (level,), {"fwd" if level is Level1 else "times": times})()
    model = fo.Sequential(op, fo.ops.Identity())
    owner, name = place(op)
    value, x = getattr(owner, name), torch.randn(3, requires_grad=True)
    for other in (value, not value if isinstance(value, bool) else 3.0):
        for _ in range(2):  # the contract is checked, and then is not
            y, x.grad = model(x), None
            monkeypatch.setattr(owner, name, other)
            if other == value or (level is Level1 and owner is op):  # which has its attributes back
                y.sum().backward()
                torch.testing.assert_close(x.grad, torch.full((3,), 2.0))
            else:
                with pytest.raises(fo.FuseOpsError, match=rf"{name}, which was {value}"):
                    y.sum().backward()
            monkeypatch.setattr(owner, name, value)


def test_an_attribute_by_the_name_of_what_is_saved_may_change_before_the_backward() -> None:
    op = type("Mine", (Level2,), {"times": lambda self, x: x * 2.0})()
    x = torch.randn(3, requires_grad=True)
    for kept in (2.0, 4.0):
        op.kept = kept
        y, x.grad = op(x), None
        op.kept = 7.0
        y.sum().backward()
        torch.testing.assert_close(x.grad, torch.full((3,), kept))
