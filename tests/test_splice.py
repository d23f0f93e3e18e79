"""Nested Sequentials run as part of the plan around them, or say why not."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuseops as fo
from fuseops.ops.linear import Linear
from fuseops.ops.norms import RMSNorm
from fuseops.ops.op import NothingSaved
from fuseops.ops.structure import Add, AddSaved, Tap
from fuseops.run.bridge import Node

D, ROWS = 8, 5


class AddNorm(fo.FusedOp):
    """y = x + the residual, published for the next Add, and normalised."""

    def fwd(self, x: Tensor, t: Any, calls: Any) -> fo.Out:
        add, tap, norm = self.members
        other = t[0][add.reads[0]]
        total = x + other
        out = norm.fwd(total, **t[2])
        saved = (AddSaved((x.dtype, other.dtype)), NothingSaved(), out.saved)
        return fo.Out(out.y, saved, {tap.writes[0]: total})


ADD_NORM = fo.Rule("user_add_norm", (Add, Tap, RMSNorm), AddNorm)


def block() -> fo.Residual:
    return fo.Residual(RMSNorm(D), Linear(D, 2 * D), fo.ops.SiLU(), Linear(2 * D, D))


def stack(n: int = 3) -> fo.Sequential:
    torch.manual_seed(0)
    return fo.Sequential(*(block() for _ in range(n)))


def data(*shape: int) -> Tensor:
    return torch.randn(*(shape or (ROWS, D)), requires_grad=True)


def unspliced(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, fo.Sequential) and module is not model:
            module.register_forward_hook(lambda *_: None)
    return model


def step(model: nn.Module, x: Tensor, **side: Tensor) -> list[Tensor]:
    y = model(x, **side)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *side.values(), *model.parameters()])]


def outcome_of_unpacking(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Nodes of a step, and the most bytes that one of them unpacks at once."""
    sizes: list[list[int]] = []

    class Watch(torch.autograd.graph.saved_tensors_hooks):
        pass

    backward = Node.backward

    def watched(ctx: Any, *grads: Any) -> Any:
        sizes.append([])
        return backward(ctx, *grads)

    def unpack(t: Tensor) -> Tensor:
        sizes[-1].append(0 if t.is_leaf and t.requires_grad and t is not x else t.nbytes)
        return t

    with pytest.MonkeyPatch.context() as patch, Watch(lambda t: t, unpack):
        patch.setattr(Node, "backward", staticmethod(watched))
        model(x).sum().backward()
    return len(sizes), max(map(sum, sizes))


def fired(model: Any, x: Tensor, **side: Any) -> list[str | None]:
    return [span.rule for span in model.plan(x, **side).fused]


# --- what a rule sees -----------------------------------------------------------------------------


def test_a_rule_of_a_user_fires_between_residual_blocks() -> None:
    model, x = stack(3), data()
    expected = step(model, x)
    with fo.rules(ADD_NORM):
        assert fired(model, x).count("user_add_norm") == 2
        torch.testing.assert_close(step(model, x), expected, rtol=0, atol=0)
        plan = model.plan(x)
    assert ("0.add", "1.tap", "1.0") in [span.ops for span in plan.fused]
    assert not plan.nested


def test_the_add_after_a_border_meets_the_next_norm() -> None:
    inner = fo.Sequential(Linear(D, D), fo.ops.SiLU())
    inner.register_forward_hook(lambda *_: None)
    model, x = fo.Sequential(fo.Residual(RMSNorm(D), inner), block()), data()
    with fo.rules(ADD_NORM):
        assert fired(model, x).count("user_add_norm") == 1


def test_a_fused_op_publishes_each_keyword_once() -> None:
    class Both(fo.FusedOp):
        def fwd(self, x: Tensor, t: Any, calls: Any) -> fo.Out:
            raise NotImplementedError

    model = fo.Sequential(Tap("a"), fo.Sequential(Tap("a"), fo.ops.SiLU(), Add("a")), Add("a"))
    with fo.rules(fo.Rule("two_taps", (Tap, Tap), Both)):
        plan = model.plan(data())
    assert ("two_taps", (0, 2), "two of its ops publish 'a'") in plan.misses


# --- memory ---------------------------------------------------------------------------------------


# What begins at the norm saves less, and the rule across blocks takes the norm away from it.
JOINT = ["norm_mlp", "norm_linear"]


@pytest.mark.parametrize("rules", [(), (ADD_NORM,)], ids=["as built", "across blocks"])
@pytest.mark.parametrize("make", [stack, lambda n: fo.Sequential(stack(n), stack(n))])
def test_splicing_joins_no_nodes(rules: Any, make: Callable[[int], fo.Sequential]) -> None:
    blocks, x = 4, data(64, D)
    with fo.rules(*rules), fo.fusion(disable=JOINT if rules else ()):
        nodes, unpacked = outcome_of_unpacking(make(blocks), x)
        _, before = outcome_of_unpacking(unspliced(make(blocks)), x)
    assert nodes >= blocks and unpacked <= before


@pytest.mark.parametrize("rules", [(), (ADD_NORM,)], ids=["as built", "across blocks"])
def test_splicing_does_not_raise_the_peak(rules: Any) -> None:
    x = data(64, D)
    with fo.rules(*rules), fo.fusion(disable=JOINT if rules else ()):
        peak, before = (m.plan(x).peak_bytes for m in (stack(4), unspliced(stack(4))))
    assert peak <= before


def test_a_residual_dies_with_its_block() -> None:
    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []

    class Count(fo.Op):
        def fwd(self, x: Tensor) -> Tensor:
            y = x + 1
            seen.append(weakref.ref(y))
            alive.append(sum(ref() is not None for ref in seen))
            return y

    model = fo.Sequential(*(fo.Residual(Count()) for _ in range(6)))
    with torch.no_grad():
        model(data())
    assert max(alive) <= 2


# --- what is a border, and when -------------------------------------------------------------------


class Own(fo.Sequential):
    def forward(self, x: Any, *args: Any, **side: Any) -> Any:
        return super().forward(x, *args, **side)


def call_of_its_own(m: fo.Sequential) -> None:
    call = type(m).__call__
    members = {"__call__": lambda self, *args, **side: call(self, *args, **side)}
    m.__class__ = type("Called", (type(m),), members)


BORDERS: dict[str, Callable[[fo.Sequential], Any]] = {
    "has hooks": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "overrides forward": lambda m: m.__dict__.update(forward=m.forward),
    "overrides __call__": call_of_its_own,
    "is compiled by itself": lambda m: m.__dict__.update(_compiled_call_impl=m.forward),
    "has settings of its own": lambda m: fo.configure(m, fusion=False),
}


@pytest.mark.parametrize("reason", BORDERS)
def test_a_border_says_why(reason: str) -> None:
    model, x = stack(2), data()
    expected = step(model, x)
    with fo.rules(ADD_NORM):
        assert "user_add_norm" in fired(model, x)
        undo = BORDERS[reason](model[1])
        torch.testing.assert_close(step(model, x), expected, rtol=0, atol=0)
        plan = model.plan(x)
        assert [nested.path for nested in plan.nested] == ["1"]
        assert any(m.rule == "user_add_norm" and reason in m.reason for m in plan.misses)
        assert reason in str(plan)
        if undo is not None:
            undo.remove()
            assert "user_add_norm" in fired(model, x)


def test_a_forward_of_its_own_is_a_border() -> None:
    model, x = fo.Sequential(Linear(D, D), Own(fo.ops.SiLU())), data()
    assert [nested.path for nested in model.plan(x).nested] == ["1"]
    assert "1' is Own, a nested Sequential that overrides forward" in str(model.plan(x))


def test_settings_that_come_to_the_same_are_no_border() -> None:
    model, x = stack(2), data()
    fo.configure(model[0], fusion=True)
    assert not model.plan(x).nested
    with fo.fusion(False):
        assert not model.plan(x).nested
    fo.configure(fusion=False)
    try:
        assert [nested.path for nested in model.plan(x).nested] == ["0"]
    finally:
        fo.configure(fusion=True)


def _renamed(m: fo.Sequential) -> None:
    children = dict(m._modules)
    m._modules.clear()
    m._modules.update({f"n{name}": child for name, child in children.items()})


CHANGES: dict[str, Callable[[fo.Sequential], Any]] = {
    "a child replaced": lambda m: m[0].__setitem__(2, fo.ops.GELU()),
    "a child added": lambda m: m[0].append(fo.ops.SiLU()),
    "a child gone": lambda m: m[0].__delitem__(2),
    "deep below": lambda m: m.append(fo.Sequential(fo.Sequential(fo.ops.SiLU()))),
    "renamed": lambda m: _renamed(m[0]),
    **{reason: (lambda m, change=change: change(m[0])) for reason, change in BORDERS.items()},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_later_change_takes_effect_at_the_next_call(change: str) -> None:
    model, fresh, x = stack(2), stack(2), data()
    step(model, x)
    for m in (model, fresh):
        CHANGES[change](m)
    torch.testing.assert_close(step(model, x), step(fresh, x), rtol=0, atol=0)
    assert str(model.plan(x)) == str(fresh.plan(x))


@pytest.mark.parametrize("border", [None, *BORDERS])
def test_what_has_not_changed_is_not_spliced_again(border: str | None) -> None:
    model, x = stack(2), data()
    if border is not None:
        BORDERS[border](model[0])
    runners = [(model(x), model.__dict__["_runner"])[1] for _ in range(3)]
    assert runners == 3 * runners[:1]


def test_a_change_deep_below_takes_effect() -> None:
    inner = fo.Sequential(fo.ops.SiLU())
    model, x = fo.Sequential(fo.Sequential(inner)), data()
    model(x)
    inner.append(fo.ops.SiLU())
    torch.testing.assert_close(model(x), nn.functional.silu(nn.functional.silu(x)))


# --- names ----------------------------------------------------------------------------------------


def test_saved_names_are_the_users_paths() -> None:
    x = data()
    names = [{t.name for t in m.plan(x).saved} for m in (stack(2), unspliced(stack(2)))]
    assert names[0] == names[1] and "1.2.x" in names[0]


def test_names_of_side_tensors_belong_to_where_they_were_written() -> None:
    inner = fo.Sequential(Tap("a"), fo.ops.SiLU(), Add("a"))
    model, x = fo.Sequential(Tap("a"), inner, fo.Sequential(Add("a")), Add("b")), data()
    b = torch.randn_like(x)
    y, a = model(x, b=b, returns="a")
    torch.testing.assert_close(y, nn.functional.silu(x) + 2 * x + b)
    assert a is x or torch.equal(a, x)
    with pytest.raises(fo.SideInputError, match=r"written at '1', after it was read at '0\.0'"):
        fo.Sequential(fo.Sequential(Add("a")), Tap("a"))(x)


def test_a_buffer_of_the_caller_is_named_by_path() -> None:
    model, x = fo.Sequential(fo.Sequential(fo.ops.SiLU(), Linear(D, D))), data()
    buffer = torch.empty(ROWS, D)
    y = model(x, out={"0.1.y": buffer})
    assert y.data_ptr() == buffer.data_ptr()
    torch.testing.assert_close(y, model(x))


def test_scratch_belongs_to_the_sequential_as_it_was_written() -> None:
    class Note(fo.Op):
        live_call = True

        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def fwd(self, x: Tensor, *, call: fo.Call) -> Tensor:
            self.seen.append(call.scratch)
            return 2 * x

    a, b, c, d = (Note() for _ in range(4))
    fo.Sequential(a, fo.Sequential(b, c), d)(data())
    assert a.seen[0] is d.seen[0] and b.seen[0] is c.seen[0]
    assert a.seen[0] is not b.seen[0]


# --- planning -------------------------------------------------------------------------------------


def test_planning_is_linear_in_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(RMSNorm, "out_shape", lambda self, shape: asked.append(1) or shape)

    def when(ops: Any, c: fo.Conditions) -> None:
        return None

    def count(n: int) -> int:
        asked.clear()
        with fo.rules(fo.Rule("user_add_norm", (Add, Tap, RMSNorm), AddNorm, when=(when,))):
            stack(n)(data())
        return len(asked)

    assert count(24) <= 6 * count(4)
