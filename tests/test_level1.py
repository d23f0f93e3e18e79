"""A level-1 op's backward is autograd over its `fwd`, run again on the op as it was in the forward."""

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ops_state import attributes, check_in_flight, other_values
from torch import Tensor, nn

import fuseops as fo
from fuseops.ops.op import Op
from fuseops.testing.catalogue import exported
from fuseops.testing.strategies import op_cases

some = settings(max_examples=settings.default.max_examples // 5)
# not Dropout, which draws, and not those that take side inputs without naming them
NAMING = [op for op in exported() if op is not fo.ops.Dropout and not op.signature.any_side]


def ones(*shape: int) -> Tensor:
    return torch.ones(*(shape or (3, 4)), dtype=torch.float64, requires_grad=True)


def level1(op: type[Op]) -> type[Op]:
    """An op of the catalogue with its `fwd` alone."""
    return type(f"{op.__name__}Alone", (op,), {"fwd": op.fwd, "bwd": Op.bwd})


@pytest.mark.parametrize("op", NAMING, ids=lambda op: op.__name__)
@some
@given(data=st.data())
def test_the_backward_runs_the_op_as_it_was(op: type[Op], data: st.DataObject) -> None:
    case = data.draw(op_cases(op, kinds=["normal"], layouts=["contiguous"]))
    case.model.__class__ = level1(op)
    case.model.__dict__.pop("saves_for", None)  # a level-1 op saves its inputs
    for name in attributes(case.model):
        case.model.__class__ = op  # the catalogue knows that one
        value = data.draw(st.sampled_from(list(other_values(case.model, name))))
        case.model.__class__ = level1(op)
        check_in_flight(case, case.model, name, value)


class Product(fo.Op):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)))

    def fwd(self, x: Tensor, *, weight: Tensor) -> Tensor:
        return (x @ weight.t()).float().exp() @ weight


def test_the_backward_runs_it_under_the_autocast_of_the_forward() -> None:
    op, x = Product(), torch.randn(3, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours, plain = fo.Sequential(op)(x), op.fwd(x, weight=op.weight)
    leaves = [x, op.weight]
    found, expected = (torch.autograd.grad(y.sum(), leaves) for y in (ours, plain))
    assert torch.equal(ours, plain) and all(map(torch.equal, found, expected))


class Inner(nn.Module):
    factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor if self.training else x


class WithInner(fo.Op):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def fwd(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_modules_inside_of_it_are_as_they_were_too() -> None:
    model, x = fo.Sequential(WithInner()), ones()
    y = model(x)
    model.eval()
    model[0].inner.factor = 7.0
    assert torch.autograd.grad(y.sum(), x, retain_graph=True)[0].eq(2).all()
    assert torch.autograd.grad(y.sum(), x)[0].eq(2).all()


# --- random numbers


def helper(x: Tensor) -> Tensor:
    return x * random.random()


own, drawer = torch.Generator(), np.random.default_rng(0)
closed = random.Random(0)


class Draws(fo.Op):
    """Draws in the way of `draw`, once it is told to."""

    draw: Any

    def __init__(self) -> None:
        super().__init__()
        self.on = False
        self.generator, self.random = torch.Generator(), random.Random(0)

    def fwd(self, x: Tensor) -> Tensor:
        return self.draw(x) if self.on else x


def importing(what: str, factor: str) -> Any:
    """A fwd of a module that imports nothing itself."""
    scope: dict[str, Any] = {}
    exec(f"def fwd(self, x):\n    {what}\n    return x * {factor}\n", scope)
    return scope["fwd"]


def made(closed: random.Random) -> Any:
    return lambda self, x: x * closed.random()


WAYS = {
    "torch": lambda self, x: torch.rand_like(x) * x,
    "a method": lambda self, x: x.bernoulli(),
    "a generator of its own": lambda self, x: x * torch.rand(3, 4, generator=self.generator),
    "a generator of the module": lambda self, x: x * torch.rand(3, 4, generator=own),
    "random": lambda self, x: x * random.random(),
    "random, imported inside": importing("import random as drawn", "drawn.random()"),
    "a function of it": importing("from random import uniform", "uniform(1.0, 2.0)"),
    "a method of random": lambda self, x: x * random.choice([1.0, 2.0]),
    "random, in a helper": lambda self, x: helper(x),
    "random, in an inner function": lambda self, x: (lambda: x * random.random())(),
    "a Random of its own": lambda self, x: x * self.random.random(),
    "a Random that is closed over": made(closed),
    "numpy": lambda self, x: x * np.random.rand(),
    "a generator of numpy": lambda self, x: x * drawer.random(),
}


@pytest.mark.parametrize("way", WAYS)
def test_random_numbers_are_found_in_every_call(way: str) -> None:
    class Noise(Draws):
        draw = WAYS[way]

    model, x = fo.Sequential(Noise()), ones()
    model(x).sum().backward()
    model[0].on = True
    with torch.no_grad():
        model(x)  # no backward will run it again
    with pytest.raises(fo.FuseOpsError, match=r"Noise\.fwd draws random numbers, and has no bwd"):
        model(x)


@pytest.mark.parametrize("of_x", [False, True])
def test_a_fwd_that_asks_whether_gradients_are_on_is_refused(of_x: bool) -> None:
    """They are off in the forward, and on where the backward runs it again: that would be of another function."""

    class Asks(fo.Op):
        def fwd(self, x: Tensor) -> Tensor:
            on = torch.is_grad_enabled() and (x.requires_grad or not of_x)
            return x.sin() if on else x.cos()

    model = fo.Sequential(fo.ops.ConstantScale(2.0), Asks())
    with torch.no_grad():
        model(ones())
    y = model(ones())
    with pytest.raises(fo.FuseOpsError, match=r"Asks\.fwd gives another y with gradients on"):
        y.sum().backward()


def test_numbers_that_others_draw_do_not_matter() -> None:
    class Doubled(Draws):
        def draw(self, x: Tensor) -> Tensor:
            return 2 * x

    model, x = fo.Sequential(Doubled(), fo.ops.Dropout(0.5)), ones()
    model[0].on = True
    model(x).sum().backward()


# --- tensors of self


class Scaled(fo.Op):
    def __init__(self, buffer: bool) -> None:
        super().__init__()
        w = torch.ones((), dtype=torch.float64)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("w", w) if buffer else setattr(self, "w", w)

    def fwd(self, x: Tensor) -> Tensor:
        return x * self.w


@pytest.mark.parametrize("buffer", [False, True])
def test_a_tensor_that_was_written_before_the_backward_reads_it_is_refused(buffer: bool) -> None:
    model, x = fo.Sequential(Scaled(buffer)), ones()
    y = model(x)
    model[0].count.add_(1)  # nobody reads it
    model[0].w = 3 * model[0].w  # another tensor
    assert torch.autograd.grad(y.sum(), x)[0].eq(1).all()
    y = model(x)
    model[0].w.mul_(2)
    with pytest.raises(RuntimeError, match="'w' of Scaled was modified in place"):
        torch.autograd.grad(y.sum(), x)


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Holder(NamedTuple):
    make: Callable[[Any], Any]
    get: Callable[[Any], Any]
    put: Callable[[Any, Any], Any] | None = None


def set_value(held: Any, value: Any) -> None:
    held.value = value


def set_first(held: Any, value: Any) -> None:
    held[0] = value


def set_closed(held: Any, value: Any) -> None:
    held.__closure__[0].cell_contents = value


HOLDERS = {
    "object": Holder(lambda v: SimpleNamespace(other=1, value=v), lambda h: h.value, set_value),
    "slots": Holder(Slotted, lambda h: h.value, set_value),
    "list": Holder(lambda v: [v, 1], lambda h: h[0], set_first),
    "deque": Holder(lambda v: deque([v, 1]), lambda h: h[0], set_first),
    "dict": Holder(lambda v: {"a": 1, 0: v}, lambda h: h[0], set_first),
    "a dict's other keys": Holder(
        lambda v: {"usual": v}, lambda h: h.get(0, h["usual"]), set_first
    ),
    "tuple": Holder(lambda v: (1, v), lambda h: h[1]),
    "closure": Holder(lambda v: lambda: v, lambda h: h(), set_closed),
}


class Reads(fo.Op):
    """Multiplies by what it reads in an attribute, through holders in holders."""

    def __init__(self, kinds: list[str], value: Any) -> None:
        super().__init__()
        self.kinds, self.unread = tuple(kinds), [1]
        self.held = value
        for kind in kinds:
            self.held = HOLDERS[kind].make(self.held)

    def path(self) -> list[Any]:
        """The value, and its holders."""
        found = [self.held]
        for kind in reversed(self.kinds):
            found.append(HOLDERS[kind].get(found[-1]))
        return found[::-1]

    def fwd(self, x: Tensor) -> Tensor:
        return x * self.path()[0]


class Part(NamedTuple):
    """A value of which an op reads 2, and a change after which it reads 6, over the same constants in one order."""

    make: Callable[[], Any]
    change: Callable[[Any], Any]
    read: Callable[[Any], Any]


def rename_attribute(h: Any) -> None:
    h.b = h.a
    del h.a


PARTS = {
    "key": Part(lambda: {"a": 2.0}, lambda h: h.update(b=h.pop("a")), lambda h: h.get("a", 6.0)),
    "attribute": Part(
        lambda: SimpleNamespace(a=2.0), rename_attribute, lambda h: getattr(h, "a", 6.0)
    ),
    "container": Part(
        lambda: [[2.0], [6.0]], lambda h: h[0].append(h[1].pop()), lambda h: h[0][-1]
    ),
    "tensor": Part(
        lambda: [torch.tensor(2.0)],
        lambda h: h.append(torch.tensor(6.0)) or h.pop(0),
        lambda h: h[0],
    ),
}


class ReadsPart(Reads):
    part = ""

    def fwd(self, x: Tensor) -> Tensor:
        return x * PARTS[self.part].read(self.path()[0])


@pytest.mark.parametrize("part", PARTS)
@some
@given(kinds=st.lists(st.sampled_from([*HOLDERS]), max_size=2))
def test_what_has_the_same_values_in_other_places_was_modified(part: str, kinds: list[str]) -> None:
    op, x = ReadsPart(kinds, PARTS[part].make()), ones()
    op.part = part
    model = fo.Sequential(op)
    y = model(x)
    assert torch.autograd.grad(y.sum(), x, retain_graph=True)[0].eq(2).all()
    PARTS[part].change(op.path()[0])
    with pytest.raises(fo.errors.InPlaceError, match="'held' of ReadsPart was modified in place"):
        torch.autograd.grad(y.sum(), x)
    assert torch.autograd.grad(model(x).sum(), x)[0].eq(6).all()


class ReadsOverDefault(Reads):
    held = None


class ReadsInside(fo.Op):
    def __init__(self, inner: Reads) -> None:
        super().__init__()
        self.inner = inner

    def fwd(self, x: Tensor) -> Tensor:
        return self.inner.fwd(x)


@some
@given(
    data=st.data(),
    kinds=st.lists(st.sampled_from(list(HOLDERS)), min_size=1, max_size=4),
    tensor=st.booleans(),
    inside=st.booleans(),
    cls=st.sampled_from([Reads, ReadsOverDefault]),
)
def test_what_an_attribute_holds_is_as_it_was_or_refused(
    data: st.DataObject, kinds: list[str], tensor: bool, inside: bool, cls: type[Reads]
) -> None:
    two = torch.full((), 2.0, dtype=torch.float64)
    op, x = cls(kinds, two if tensor else 2.0), ones()
    model = fo.Sequential(ReadsInside(op) if inside else op)
    for _ in range(data.draw(st.integers(0, 2))):
        model(x).sum().backward()
    y = model(x)
    op.unread[0] = 2
    assert torch.autograd.grad(y.sum(), x, retain_graph=True)[0].eq(2).all()

    places = [k for k, kind in enumerate(kinds) if HOLDERS[kind].put] + [-1] * tensor
    at = data.draw(st.sampled_from(places)) if places else None
    if at is None:
        return  # tuples of numbers
    if at < 0:
        two.mul_(3)
    else:
        new: Any = 6.0
        for kind in kinds[:at]:
            new = HOLDERS[kind].make(new)
        HOLDERS[kinds[at]].put(op.path()[at + 1], new)  # type: ignore[misc]
    assert op.path()[0] == 6
    owner = "ReadsInside.inner" if inside else cls.__name__
    with pytest.raises(fo.errors.InPlaceError, match=f"'held' of {owner} was modified in place"):
        torch.autograd.grad(y.sum(), x)
    assert torch.autograd.grad(model(x).sum(), x)[0].eq(6).all()


def test_fwd_may_keep_what_it_computed_in_an_attribute() -> None:
    class Tabled(fo.Op):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[int, Tensor] = {}

        def fwd(self, x: Tensor) -> Tensor:
            if x.shape[0] not in self.tables:
                self.tables[x.shape[0]] = torch.full((), 2.0, dtype=x.dtype)
            return x * self.tables[x.shape[0]]

    model = fo.Sequential(Tabled())
    for rows in (3, 5, 3):
        x = ones(rows, 4)
        assert torch.autograd.grad(model(x).sum(), x)[0].eq(2).all()


class Frozen(fo.Op):
    """Multiplies by a tensor that does not come by keyword."""

    def __init__(self, way: str, w: Tensor) -> None:
        super().__init__()
        self.way = way
        if way == "attribute":
            self.w = w
        elif way == "buffer":
            self.register_buffer("w", w)
        elif way == "inner attribute":
            self.inner = nn.Module()
            self.inner.w = w
        elif way == "list":
            self.held = [w]
        elif way == "object":
            self.held = {"a": SimpleNamespace(w=w)}

    def tensor(self) -> Tensor:
        if self.way in ("list", "object"):
            return self.held[0] if self.way == "list" else self.held["a"].w
        return self.inner.w if "inner" in self.way else self.w

    def fwd(self, x: Tensor) -> Tensor:
        return x * self.tensor()


# (parameters that fwd does not take are refused when an op is planned, frozen or not)
WAYS_TO_HOLD = "attribute, buffer, inner attribute, list, object"


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("way", WAYS_TO_HOLD.split(", "))
def test_a_tensor_that_is_unfrozen_and_gets_no_gradient_is_refused(
    way: str, steps: int, alone: bool
) -> None:
    op, x = Frozen(way, torch.ones((), dtype=torch.float64)), ones()
    model = op if alone else fo.Sequential(fo.ops.ConstantScale(2.0), op)
    for _ in range(steps):
        model(x).sum().backward()
    op.tensor().requires_grad_()
    with pytest.raises(fo.FuseOpsError, match=r"Frozen.*would get no(ne| gradient)"):
        model(x).sum().backward()


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_tensor_that_fwd_writes_is_refused_by_name(by_keyword: bool) -> None:
    class Running(fo.Op):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        if by_keyword:

            def fwd(self, x: Tensor, *, mean: Tensor) -> Tensor:
                return x - mean.add_(x.detach().mean())
        else:

            def fwd(self, x: Tensor) -> Tensor:
                return x - self.mean.add_(x.detach().mean())

    model, x = fo.Sequential(Running()), ones()
    with torch.no_grad():
        model(x)
    assert model[0].mean == 1
    with pytest.raises(fo.FuseOpsError, match=r"Running\.fwd writes in place to its 'mean'"):
        model(x)


def test_an_attribute_that_fwd_sets_is_set_once() -> None:
    class Counting(fo.Op):
        calls = 0

        def fwd(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    model, x = fo.Sequential(Counting()), ones()
    y = model(x)
    model(x)
    assert torch.autograd.grad(y.sum(), x)[0].eq(1).all()
    assert model[0].calls == 2
