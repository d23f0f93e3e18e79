"""Tables of mistakes in an op. Each is told at the moment when it can be seen: when the class is defined, before its
first call, in the forward or in the backward; with the op, the tensor and what to do.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fuseops as fo
from fuseops.rules.fused.linear_act import LinearAct


class XSaved(NamedTuple):
    x: Tensor | None


class XWSaved(NamedTuple):
    x: Tensor | None
    weight: Tensor | None


class XWPSaved(NamedTuple):
    x: Tensor | None
    weight: Tensor | None
    probs: Tensor | None


class WXSaved(NamedTuple):
    weight: Tensor | None
    x: Tensor | None


class Sine(fo.Op[XSaved]):
    """One mistake replaces what it is about."""

    def fwd(self, x: Tensor) -> fo.Out:
        return fo.Out(x.sin(), XSaved(x))

    def bwd(self, saved: XSaved, dy: Tensor) -> fo.Grads:
        return fo.Grads(dy * saved.x.cos())


class Product(fo.Op[XWSaved]):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def fwd(self, x: Tensor, *, weight: Tensor) -> fo.Out:
        return fo.Out(x * weight, XWSaved(x, weight))

    def bwd(self, saved: XWSaved, dy: Tensor) -> fo.Grads:
        return fo.Grads(dy * saved.weight, {"weight": (dy * saved.x).sum(0)})


class Level1(fo.Op):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def fwd(self, x: Tensor, *, weight: Tensor) -> Tensor:
        return x * weight


def wrong(base: type[fo.Op], **members: Any) -> type[fo.Op]:
    return type("Wrong", (base,), members)


def fwd(give: Callable[[Tensor], Any], base: type[fo.Op] = Sine, **members: Any) -> type[fo.Op]:
    """The op whose fwd gives this for x."""
    return wrong(base, fwd=lambda self, x: give(x), **members)


def bwd(give: Callable[[Any, Tensor], Any], base: type[fo.Op] = Sine) -> type[fo.Op]:
    """The op whose bwd gives this for what was saved and dy."""
    return wrong(base, bwd=lambda self, saved, dy: give(saved, dy))


def holding(base: type[fo.Op], **attributes: Any) -> type[fo.Op]:
    """The op whose `__init__` sets these too."""

    def begin(self: Any) -> None:
        base.__init__(self)
        for name, value in attributes.items():
            setattr(self, name, value)

    return wrong(base, __init__=begin)


CLASSES: dict[str, tuple[Callable[[], type], str]] = {
    "a parameter by position": (
        lambda: wrong(fo.Op, fwd=lambda self, x, weight: x),
        r"Wrong\.fwd\(self, x, weight\).*write fwd\(self, x, \*, weight\)",
    ),
    "call by position": (
        lambda: wrong(fo.Op, fwd=lambda self, x, call: x),
        r"write fwd\(self, x, \*, call\)",
    ),
    "no x": (lambda: wrong(fo.Op, fwd=lambda self: 1), r"Wrong\.fwd\(self\).*fwd\(self, x, \*"),
    "side inputs without names, to be run again by name": (
        lambda: wrong(fo.Op, reads=("w",), fwd=lambda self, x, **side: x * side["w"]),
        r"Wrong\.fwd takes \*\*side, and has no bwd.*Name the side inputs",
    ),
    "no saved": (
        lambda: wrong(Sine, bwd=lambda self, dy: dy),
        r"Wrong\.bwd\(self, dy\).*write bwd\(self, saved, dy, \*",
    ),
    "dside by position": (
        lambda: wrong(Sine, bwd=lambda self, saved, dy, dside: dy),
        r"write bwd\(self, saved, dy, \*, dside\)",
    ),
    "saves_for of a field that is not there": (
        lambda: wrong(Sine, saves_for={"x": ("y",)}),
        r"Wrong\.saves_for\['x'\] names \['y'\], but XSaved has \['x'\]",
    ),
    "saves_for as a string": (
        lambda: wrong(Sine, saves_for={"x": "x"}),
        r"saves_for\['x'\] is a tuple of fields, \('x',\)",
    ),
    "saves_for of a need that is not there": (
        lambda: wrong(Sine, saves_for={"weight": ("x",)}),
        r"saves_for has a need 'weight', but its fwd takes \['x'\]",
    ),
}


@pytest.mark.parametrize("mistake", CLASSES)
def test_a_class_is_refused_where_it_is_defined(mistake: str) -> None:
    define, told = CLASSES[mistake]
    with pytest.raises(fo.FuseOpsError, match=told):
        define()


DECLARATIONS: dict[str, tuple[type[fo.Op], str]] = {
    "reads as a string": (
        wrong(Sine, reads="probs"),
        r"Wrong.reads is the string 'probs'.*\('probs',\)",
    ),
    "writes as a string": (wrong(Sine, writes="y"), r"Wrong.writes is the string 'y'.*\('y',\)"),
    "reads a name twice": (
        wrong(fo.Op, reads=("w", "w"), fwd=lambda self, x, *, w: x * w),
        r"Wrong.reads is \('w', 'w'\), expected each name once",
    ),
    "reads what fwd does not take": (
        wrong(Sine, reads=("probs",)),
        r"Wrong reads \['probs'\], but its fwd takes no such keyword",
    ),
    "a keyword that nothing stands for": (
        wrong(fo.Op, fwd=lambda self, x, *, probs: x),
        r"takes 'probs' by keyword, which is neither a parameter",
    ),
    "a parameter that fwd does not take": (
        holding(Sine, gain=nn.Parameter(torch.ones(4))),
        r"op '1' \(Wrong\) has parameters \['gain'\], which its fwd does not take",
    ),
    "a module with parameters": (
        holding(Sine, inner=nn.Linear(4, 4)),
        r"has parameters \['inner.weight', 'inner.bias'\]",
    ),
    "a tensor that wants a gradient and is no parameter": (
        holding(Sine, gain=torch.ones(4, requires_grad=True)),
        r"has parameters \['gain'\], which its fwd does not take",
    ),
    "a side output whose gradient bwd does not take": (
        wrong(Sine, writes=("loss",)),
        r"publishes \['loss'\], whose gradients its bwd does not take: write bwd\(.*dside\)",
    ),
}


def sequence(op: fo.Op) -> fo.Sequential:
    return fo.Sequential(fo.ops.Linear(4, 4), op, fo.ops.Bias(4))


@pytest.mark.parametrize("mistake", DECLARATIONS)
def test_a_declaration_is_refused_before_the_first_call(mistake: str) -> None:
    cls, told = DECLARATIONS[mistake]
    seq = sequence(cls())
    with pytest.raises(fo.FuseOpsError, match=told):
        seq(torch.ones(3, 4), probs=torch.ones(3))


FORWARDS: dict[str, tuple[type[fo.Op], str]] = {
    "a number": (fwd(lambda x: 3.0), r"Wrong\.fwd returned float"),
    "a pair": (fwd(lambda x: (x, XSaved(x))), r"Wrong\.fwd returned tuple.*Out\(y"),
    "a number in Out": (fwd(lambda x: fo.Out(3.0, XSaved(x))), r"Wrong\.fwd returned float"),
    "a bare tensor": (fwd(lambda x: x.sin()), r"bare tensor.*Out\(y, XSaved\(\.\.\.\)\)"),
    "nothing saved": (fwd(lambda x: fo.Out(x)), r"saves nothing, and the backward.*\['x'\]"),
    "a tensor saved": (fwd(lambda x: fo.Out(x, x)), r"saved Tensor.*declares \['x'\]"),
    "too few values": (
        fwd(lambda x: fo.Out(x, ())),
        r"saved 0 values of Wrong, which declares \['x'\]",
    ),
    "too many values": (fwd(lambda x: fo.Out(x, (x, x))), r"saved 2 values.*declares \['x'\]"),
    "fields of another class": (
        fwd(lambda x: fo.Out(x, WXSaved(x, x))),
        r"saved WXSaved\['weight', 'x'\].*give XSaved\(",
    ),
    "fields in another order": (
        wrong(Product, fwd=lambda self, x, *, weight: fo.Out(x, WXSaved(weight, x))),
        r"declares \['x', 'weight'\]",
    ),
    "a list of tensors": (
        fwd(lambda x: fo.Out(x, XSaved([x]))),
        r"saves a list of tensors as 'x'.*field of its own",
    ),
    "x written": (
        fwd(lambda x: fo.Out(x.mul_(2), XSaved(x))),
        r"Wrong\.fwd writes in place to 'x'",
    ),
    "x written by a level-1 op": (
        wrong(fo.Op, fwd=lambda self, x: x.mul_(2)),
        r"Wrong\.fwd writes in place to 'x'",
    ),
    "a parameter written": (
        wrong(Level1, fwd=lambda self, x, *, weight: x * weight.mul_(2)),
        r"Wrong\.fwd writes in place to 'weight'",
    ),
    "what is not declared": (
        fwd(lambda x: fo.Out(x, XSaved(x), {"loss": x.sum()})),
        r"publishes 'loss'.*writes = \('loss',\)",
    ),
    "what is declared is missing": (
        fwd(lambda x: fo.Out(x), fo.Op, writes=("loss",)),
        r"writes 'loss', but its fwd published \[\]",
    ),
    "a number as a side output": (
        fwd(lambda x: fo.Out(x, None, {"loss": 3.0}), fo.Op, writes=("loss",)),
        r"publishes 'loss' as float",
    ),
    "integers into an op of floats": (
        fwd(lambda x: x.argmax(-1, keepdim=True), fo.Op),
        r"op '2' \(Bias\) expects x of a float dtype, got torch.int64",
    ),
}


def note(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


@pytest.mark.parametrize("mistake", FORWARDS)
def test_a_forward_is_refused_at_its_first_call(mistake: str) -> None:
    cls, told = FORWARDS[mistake]
    with pytest.raises(fo.FuseOpsError, match=told) as caught:
        sequence(cls())(torch.ones(3, 4))
    assert "in the forward of fuseops '" in note(caught.value)


@pytest.mark.parametrize(
    "mistake", ["x written", "a number in Out", "integers into an op of floats"]
)
def test_a_forward_is_refused_where_no_gradient_is_wanted(mistake: str) -> None:
    cls, told = FORWARDS[mistake]
    with torch.no_grad(), pytest.raises(fo.FuseOpsError, match=told):
        sequence(cls())(torch.ones(3, 4))


GLOBAL = nn.Parameter(torch.ones(4))

BACKWARDS: dict[str, tuple[type[fo.Op], str]] = {
    "no Grads": (bwd(lambda saved, dy: dy), r"Wrong\.bwd must return Grads, got Tensor"),
    "no gradient of x": (bwd(lambda saved, dy: fo.Grads()), r"no gradient of 'x'"),
    "a number": (bwd(lambda saved, dy: fo.Grads(2.0)), r"float as the gradient of 'x'"),
    "another shape": (bwd(lambda saved, dy: fo.Grads(dy[0])), r"'x' of shape \(4,\).*\(3, 4\)"),
    "integers": (bwd(lambda saved, dy: fo.Grads(dy.long())), r"'x' of torch.int64.*float32"),
    "complex numbers": (bwd(lambda saved, dy: fo.Grads(dy * 1j)), r"'x' of torch.complex64"),
    "another device": (bwd(lambda saved, dy: fo.Grads(dy.to("meta"))), r"'x' on meta.*on cpu"),
    "no gradient of a parameter": (
        bwd(lambda saved, dy: fo.Grads(dy), Product),
        r"no gradient of 'weight'.*Grads\(params=\{'weight'",
    ),
    "a gradient by another name": (
        bwd(lambda saved, dy: fo.Grads(dy, {"weight": dy[0], "wieght": dy[0]}), Product),
        r"gradient of 'wieght', which fwd of Wrong does not take",
    ),
    "gradients without names": (
        bwd(lambda saved, dy: fo.Grads(dy, (dy[0],)), Product),
        r"Grads\(params=tuple\): gradients of params come by name",
    ),
    "a number for a parameter": (
        bwd(lambda saved, dy: fo.Grads(dy, {"weight": 1.0}), Product),
        r"float as the gradient of 'weight'",
    ),
    "dy written": (bwd(lambda saved, dy: fo.Grads(dy.mul_(2))), r"writes in place to 'dy'"),
    "a saved tensor written": (
        bwd(lambda saved, dy: fo.Grads(dy * saved.x.cos_())),
        r"Wrong\.bwd writes in place to 'saved.x'",
    ),
    "a tensor from elsewhere": (
        wrong(fo.Op, fwd=lambda self, x: x * GLOBAL),
        r"Wrong\.fwd reads a tensor of shape \(4,\) that wants a gradient.*keyword",
    ),
}


@pytest.mark.parametrize("mistake", BACKWARDS)
def test_a_backward_is_refused_at_its_first_call(mistake: str) -> None:
    cls, told = BACKWARDS[mistake]
    y = sequence(cls())(torch.ones(3, 4, requires_grad=True))
    with pytest.raises(fo.FuseOpsError, match=told) as caught:
        y.square().sum().backward()
    assert "in the backward of fuseops '1' (Wrong)" in note(caught.value)


# --- ops that an attribute makes wrong


class SineAlone(fo.Op):
    def fwd(self, x: Tensor) -> Tensor:
        return x.sin()


def turning(cls: type[fo.Op]) -> type[fo.Op]:
    """The op that does what `cls` does once its `turned` is set, and before it what its base does."""
    base = SineAlone if cls.__base__ is fo.Op else cls.__base__

    def chosen(right: Any, other: Any) -> Any:
        @functools.wraps(right)
        def run(self: Any, *args: Any, **keywords: Any) -> Any:
            return (other if self.turned else right)(self, *args, **keywords)

        return run

    methods = {n: chosen(getattr(base, n), getattr(cls, n)) for n in ("fwd", "bwd")}
    own = {n: method for n, method in methods.items() if n in vars(cls)}
    return wrong(base, turned=False, **own)


WRITES = ["dy written", "a saved tensor written"]
PUBLISHES = {"what is declared is missing", "a number as a side output"}
TURNING = [("fwd", m) for m in FORWARDS if m not in PUBLISHES] + [("bwd", m) for m in BACKWARDS]
TURNING += [("between", m) for m in WRITES]  # other mistakes are errors of autograd by then


@pytest.mark.parametrize(("when", "mistake"), TURNING)
def test_an_op_that_an_attribute_makes_wrong_is_refused_as_at_its_first_call(
    when: str, mistake: str
) -> None:
    cls, told = (FORWARDS if when == "fwd" else BACKWARDS)[mistake]
    model, x = sequence(turning(cls)()), torch.ones(3, 4, requires_grad=True)
    for _ in range(3):
        model(x).square().sum().backward()
    y = model(x)
    model[1].turned = True
    y = y if when == "between" else None
    with pytest.raises(fo.FuseOpsError, match=told):
        (model(x) if y is None else y).square().sum().backward()


# --- fused ops


class Scaled(fo.Op[XWPSaved]):
    """x * weight * probs: a gradient of every kind."""

    reads = ("probs",)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def fwd(self, x: Tensor, *, weight: Tensor, probs: Tensor) -> fo.Out:
        return fo.Out(x * weight * probs, XWPSaved(x, weight, probs))

    def bwd(self, saved: Any, dy: Tensor) -> fo.Grads:
        x, weight, probs = saved
        dprobs = (dy * x * weight).sum(1, keepdim=True)
        params = {"weight": (dy * x * probs).sum(0)}
        return fo.Grads(dy * weight * probs, params, {"probs": dprobs})


class FusedScaled(fo.FusedOp):
    """A Scaled as a joint op that does what `fwd` and `bwd` of its member do."""

    Saved = XWPSaved

    def fwd(self, x: Tensor, t: Any, calls: Any, keep: Any) -> fo.Out:
        return self.members[0].fwd(x, **t[0])

    def bwd(self, saved: Any, dy: Tensor, calls: Any, dside: Any) -> tuple[fo.Grads, ...]:
        return (self.members[0].bwd(saved, dy),)


def as_op(give: Callable[[str, Any], Any]) -> fo.Sequential:
    """One whose fwd and bwd give something else in the place of their results."""
    methods = {
        "fwd": lambda self, x, *, weight, probs: give(
            "fwd", Scaled.fwd(self, x, weight=weight, probs=probs)
        ),
        "bwd": lambda self, saved, dy: give("bwd", Scaled.bwd(self, saved, dy)),
    }
    return fo.Sequential(wrong(Scaled, **methods)())


def as_rule(give: Callable[[str, Any], Any]) -> fo.Sequential:
    """The same by a rule."""

    class Wrong(FusedScaled):
        def fwd(self, x: Tensor, t: Any, calls: Any, keep: Any) -> fo.Out:
            return give("fwd", super().fwd(x, t, calls, keep))

        def bwd(self, saved: Any, dy: Tensor, calls: Any, dside: Any) -> tuple[fo.Grads, ...]:
            (grads,) = super().bwd(saved, dy, calls, dside)
            return (give("bwd", grads),)

    model = fo.Sequential(Scaled())
    fo.configure(model, rules=[fo.Rule("wrong", (Scaled,), Wrong, "joint")])
    return model


def gives(method: str, change: Callable[[Any], Any]) -> Callable[[str, Any], Any]:
    return lambda where, result: change(result) if where == method else result


def scaled_step(model: fo.Sequential) -> None:
    probs = torch.rand(3, 1, requires_grad=True)
    model(torch.ones(3, 4, requires_grad=True), probs=probs).square().sum().backward()


FUSED: dict[str, tuple[Callable[[str, Any], Any], str]] = {
    "y of another dtype": (
        gives("fwd", lambda out: out._replace(y=out.y.double())),
        r"Wrong\.fwd gave y of torch.float64.*members give torch.float32",
    ),
    "y of another shape": (
        gives("fwd", lambda out: out._replace(y=out.y[:1])),
        r"Wrong\.fwd gave y .*shape \(1, 4\).*members give .*\(3, 4\)",
    ),
    "dx of another dtype": (
        gives("bwd", lambda grads: grads._replace(x=grads.x.half())),
        r"Wrong\.bwd gave a gradient of 'x' of torch.float16; 'x' is torch.float32",
    ),
    "dx of another shape": (
        gives("bwd", lambda grads: grads._replace(x=grads.x[0])),
        r"Wrong\.bwd gave a gradient of 'x' of shape \(4,\)",
    ),
}


@pytest.mark.parametrize("mistake", FUSED)
def test_a_fused_op_that_gives_another_kind_of_tensor_is_refused_at_its_first_call(
    mistake: str,
) -> None:
    give, told = FUSED[mistake]
    with pytest.raises(fo.FuseOpsError, match=told):
        scaled_step(as_rule(give))
    scaled_step(as_rule(lambda where, result: result))


DECLARED: dict[str, tuple[dict[str, Any], str]] = {
    "a need of no member": ({"saves_for": {"weight": ("x",)}}, r"Wrong has 'weight' in .*0 to 0"),
    "a field that is not saved": ({"saves_for": {"x": ("y",)}}, r"saves_for\['x'\] names \['y'\]"),
    "the name of another field": ({"names": {"y": "0.x"}}, r"Wrong\.names has \['y'\]"),
    "the name of another member": ({"names": {"x": "1.x"}}, r"Wrong has '1\.x' in .*0 to 0"),
    "a name without a member": ({"names": {"x": "x"}}, r"Wrong has 'x' in names"),
    "a member without a name": ({"names": {"x": "0."}}, r"Wrong has '0\.' in names"),
    "a Saved without names": ({"Saved": tuple}, r"Wrong\.Saved is .*expected a NamedTuple"),
}


@pytest.mark.parametrize("mistake", DECLARED)
def test_what_a_joint_op_declares_is_refused_when_it_is_planned(mistake: str) -> None:
    declared, told = DECLARED[mistake]
    model = fo.Sequential(Scaled())
    rule = fo.Rule("wrong", (Scaled,), type("Wrong", (FusedScaled,), declared), "joint")
    fo.configure(model, rules=[rule])
    with pytest.raises(fo.FuseOpsError, match=told):
        model.plan(torch.ones(3, 4), probs=torch.rand(3, 1))


BUILT: dict[str, tuple[Callable[..., Any], str]] = {
    "nothing": (lambda *ops: None, "build must return a FusedOp, got NoneType"),
    "an op": (lambda *ops: ops[0], "build must return a FusedOp, got Linear"),
    "of fewer ops": (
        lambda *ops: LinearAct(ops[0]),
        r"LinearAct\.members has 1 ops, the match has 2",
    ),
}


@pytest.mark.parametrize("recipe", [None, fo.recipes.Float8BlockScaling()])
@pytest.mark.parametrize("mistake", BUILT)
def test_what_a_rule_builds_is_refused_when_it_is_planned(
    mistake: str, recipe: fo.recipes.Recipe | None
) -> None:
    build, told = BUILT[mistake]
    model = fo.Sequential(fo.ops.Linear(4, 4), fo.ops.SiLU())
    fo.configure(
        model, recipe=recipe, rules=[fo.Rule("wrong", (fo.ops.Linear, fo.ops.SiLU), build)]
    )
    with pytest.raises(fo.FuseOpsError, match=f"rule 'wrong': {told}"):
        model.plan(torch.ones(3, 4))


# --- every call


LEFT_OUT: dict[str, Callable[[fo.Grads], fo.Grads]] = {
    "x": lambda grads: grads._replace(x=None),
    "weight": lambda grads: grads._replace(params={"weight": None}),
    "probs": lambda grads: grads._replace(side={"probs": None}),
}


@pytest.mark.parametrize("made", [as_op, as_rule])
@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.parametrize("good_calls", [0, 1, 3])
def test_a_gradient_left_out_is_found_in_any_call(
    made: Callable[..., fo.Sequential], name: str, good_calls: int
) -> None:
    calls = 0

    def give(where: str, result: Any) -> Any:
        nonlocal calls
        if where == "fwd":
            return result
        calls += 1
        return LEFT_OUT[name](result) if calls > good_calls else result

    model = made(give)
    for _ in range(good_calls):
        scaled_step(model)
    with pytest.raises(fo.FuseOpsError, match=rf"Wrong\.bwd gave no gradient of '{name}'"):
        scaled_step(model)


@pytest.mark.parametrize("forwards", [1, 4])
def test_the_contract_is_checked_once_forward_and_once_backward(
    forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fuseops.run import contract

    asked = {"fwd": 0, "bwd": 0}

    def counted(check: Callable[..., Any], way: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            asked[way] += 1
            return check(*args)

        return run

    monkeypatch.setattr(contract, "_check_published", counted(contract._check_published, "fwd"))
    monkeypatch.setattr(contract, "_check_names", counted(contract._check_names, "bwd"))
    model, x = fo.Sequential(Product()), torch.ones(3, 4, requires_grad=True)
    for _ in range(2):
        y = [model(x) for _ in range(forwards)][-1]
        y.sum().backward()
    assert asked == {"fwd": 1, "bwd": 1}


def test_a_backward_that_is_the_first_of_many_forwards_is_checked() -> None:
    model = as_op(gives("bwd", lambda grads: grads._replace(x=grads.x[0])))
    probs = torch.rand(3, 1)
    for rows in (3, 1):
        y = model(torch.ones(rows, 4, requires_grad=True), probs=probs[:rows])
    with pytest.raises(fo.FuseOpsError, match=r"'x' of shape \(4,\); 'x' has shape \(1, 4\)"):
        y.sum().backward()


def test_a_field_that_saves_for_left_out_is_named() -> None:
    cls = wrong(Sine, saves_for={"x": ()})
    with pytest.raises(AttributeError) as caught:
        sequence(cls())(torch.ones(3, 4)).sum().backward()
    assert "by saves_for it reads no x, and has not saved it" in note(caught.value)


@pytest.mark.parametrize("op", [Sine, Product, Level1])
def test_the_ops_that_were_made_wrong_are_right(op: type[fo.Op]) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(op().double(), x)


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.view(3, 4), lambda x: x.t().t()])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_a_view_of_the_input_is_a_result_like_any(
    view: Callable[[Tensor], Tensor], by_hand: bool, inside: bool
) -> None:
    """Written in place afterwards, it is refused by torch, or its gradients are right."""
    if by_hand:
        cls = bwd(lambda saved, dy: fo.Grads(dy), fwd(lambda x: fo.Out(view(x), XSaved(None))))
    else:
        cls = fwd(view, fo.Op)
    op = cls()
    model = sequence(op) if inside else op
    x = torch.randn(3, 4, requires_grad=True)

    def gradient(times: float) -> Tensor:
        before = x * 1
        y = model(before)
        if times != 1:
            y.mul_(times)
        (dx,) = torch.autograd.grad(y.sum() + before.square().sum(), x)
        return dx

    once = gradient(1)
    try:
        twice = gradient(2)
    except RuntimeError as error:
        assert "view" in str(error) and not inside
    else:
        torch.testing.assert_close(twice, 2 * once - 2 * x)
