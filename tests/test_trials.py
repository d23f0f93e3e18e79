"""A step on trial (a plan, recorded or dry, explain, a comparison) leaves modules and random states as they were."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuseops as fo
from fuseops import offload
from fuseops.errors import FuseOpsError

D = 8
TRIALS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "dry": offload.plan,
    "recorded": lambda model, x: offload.plan(model, x, record=True),
    "explain": fo.explain,
    "compared": fo.testing.assert_fused_matches_unfused,
}
trials = pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)


class Stats:
    """An object of a user."""

    def __init__(self) -> None:
        self.count, self.last, self.seen = 0, None, []


def _delete(m: Any, y: Tensor) -> None:
    vars(m).pop("old", None)


def _set(name: str, value: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], None]:
    return lambda m, y: setattr(m, name, value(m, y))


WRITES: dict[str, Callable[[Any, Tensor], Any]] = {
    "counts": _set("seen", lambda m, y: m.seen + 1),
    "keeps its output": _set("last", lambda m, y: y),
    "makes a table once": _set("late", lambda m, y: y.detach().cos() if m.late is None else m.late),
    "makes an attribute": _set("new", lambda m, y: y.detach()),
    "makes a pair": _set("pair", lambda m, y: (y.detach(), [y])),
    "replaces a container": _set("aux", lambda m, y: [*m.aux, y]),
    "deletes": _delete,
    "collects losses": lambda m, y: m.aux.append(y.square().mean()),
    "empties": lambda m, y: m.aux.clear(),
    "fills a dict": lambda m, y: m.stats.update(mean=y.detach().mean()),
    "writes a tensor": lambda m, y: m.stats["sum"].add_(y.detach().sum()),
    "fills a set": lambda m, y: m.shapes.add((*y.shape, len(m.shapes))),
    "fills a queue": lambda m, y: m.queue.append(y.detach()),
    "reorders": lambda m, y: m.ordered.move_to_end("a"),
    "writes an object": lambda m, y: vars(m.space).update(n=m.space.n + 1, t=y, new=1),
    "writes one of its own": lambda m, y: (vars(m.own).update(last=y), m.own.seen.append(y)),
    "writes below": lambda m, y: m.nested["losses"][0].append(y),
}


class Block(nn.Module):
    def __init__(self, writes: list[str]) -> None:
        super().__init__()
        self.mlp = fo.Sequential(fo.ops.Linear(D, D), fo.ops.GELU())
        self.writes = writes
        self.seen, self.last, self.late, self.old = 0, None, None, "old"
        self.aux, self.stats = [torch.ones(())], {"sum": torch.zeros(())}
        self.shapes, self.queue = {(1,)}, deque([torch.zeros(())], maxlen=2)
        self.ordered = OrderedDict(a=1, b=2)
        self.space, self.own = SimpleNamespace(n=0, t=None), Stats()
        self.nested: Any = {"losses": ([],)}
        self.cycle: list[Any] = []
        self.cycle.append(self.cycle)

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        for name in self.writes:
            WRITES[name](self, y)
        return x + y


def picture(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """What a value is, down to the identity of each container and tensor, and the numbers in it."""
    if isinstance(value, Tensor):
        return type(value), id(value), value.tolist()
    if id(value) in outer or isinstance(value, int | str | torch.Size | None):
        return value if isinstance(value, int | str) else id(value)
    inner: Any = ()
    if isinstance(value, dict):
        inner = [*value, *value.values()]
    elif isinstance(value, list | tuple | deque | set):
        inner = [*value]
    elif isinstance(value, SimpleNamespace | Stats):
        inner = [vars(value)]
    return type(value), id(value), [picture(v, (*outer, id(value))) for v in inner]


def pictures(model: nn.Module) -> list[Any]:
    blank = vars(nn.Module()).keys()
    return [
        {name: picture(v) for name, v in vars(m).items() if name not in blank}
        for m in model.modules()
        if isinstance(m, Block)
    ]


@trials
@settings(max_examples=12)
@given(
    writes=st.lists(st.lists(st.sampled_from([*WRITES]), max_size=6), min_size=1, max_size=2),
    before=st.booleans(),
)
def test_modules_hold_what_they_held(
    trial: Callable[[nn.Module, Tensor], Any], writes: list[list[str]], before: bool
) -> None:
    model, x = nn.Sequential(*map(Block, writes)), torch.randn(4, D)
    if before:
        model(x)
    known = pictures(model)
    trial(model, x)
    assert pictures(model) == known
    model(x).sum().backward()


class Collects(nn.Module):
    """Its loop adds the losses up and clears them, after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.below = nn.Linear(D, D), {"losses": deque([torch.ones(())]), "more": [0]}

    def forward(self, x: Tensor) -> Tensor:
        lengths.append((len(self.below["losses"]), len(self.below["more"])))
        y = self.l(x)
        self.below["losses"].append(y.square().mean())
        self.below["more"].append(1)
        return x + y + sum(self.below["losses"])


lengths: list[tuple[int, int]] = []


def test_the_steps_of_a_recorded_plan_do_not_see_what_each_other_collected() -> None:
    lengths.clear()
    offload.plan(nn.Sequential(Collects()), torch.randn(4, D), record=True)
    assert len(lengths) > 2 and {*lengths} == {(1, 1)}


elsewhere = torch.Generator()


class Draws(fo.Op):
    """A level-1 op that draws from a generator of its file, which is refused once it has drawn."""

    def fwd(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=elsewhere).sum() * 0


class Random(nn.Module):
    def __init__(self, draws: set[str]) -> None:
        super().__init__()
        self.l, self.draws = nn.Linear(D, D), draws
        self.held = {"torch": torch.Generator(), "python": random.Random(1)}
        self.rng, self.old = np.random.default_rng(1), np.random.RandomState(1)

    def forward(self, x: Tensor) -> Tensor:
        calls: dict[str, Callable[[], Any]] = {
            "python": random.random,
            "numpy": np.random.rand,
            "torch": lambda: torch.rand(2),
            "held by torch": lambda: torch.rand(2, generator=self.held["torch"]),
            "held by python": lambda: self.held["python"].random(),  # type: ignore[union-attr]
            "held by numpy": self.rng.random,
            "held by old numpy": self.old.rand,
        }
        for name in self.draws:
            calls[name]()
        return x + self.l(x)

    def states(self) -> list[Any]:
        states = [random.getstate(), self.held["python"].getstate(), self.rng.bit_generator.state]  # type: ignore[union-attr]
        numpy = [*np.random.get_state(), *self.old.get_state()]
        tensors = torch.get_rng_state(), self.held["torch"].get_state(), elsewhere.get_state()  # type: ignore[union-attr]
        return [*states, *map(str, numpy), *(t.tolist() for t in tensors)]


SOURCES = [
    "python",
    "numpy",
    "torch",
    *(f"held by {s}" for s in ("torch", "python", "numpy", "old numpy")),
]


@trials
@settings(max_examples=8)
@given(draws=st.sets(st.sampled_from(SOURCES), min_size=1))
def test_random_states_come_back(
    trial: Callable[[nn.Module, Tensor], Any], draws: set[str]
) -> None:
    model, x = Random(draws), torch.randn(4, D)
    before = model.states()
    trial(model, x)
    assert model.states() == before


def test_the_generator_in_the_code_of_an_op_comes_back_also_when_the_step_raises() -> None:
    model, x = nn.Sequential(fo.Sequential(fo.ops.Linear(D, D), Draws())), torch.randn(4, D)
    before = elsewhere.get_state()
    with pytest.raises(FuseOpsError, match="draws random numbers"):
        offload.plan(model, x, record=True)
    assert torch.equal(elsewhere.get_state(), before)


class Builds(nn.Module):
    """Builds its layer in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module | None = None
        self.bias = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is None:
            del self.inner
            self.inner, self.width = nn.Linear(x.shape[1], D), x.shape[1]
        return self.inner(x) + self.bias


def test_what_a_dry_run_builds_goes_and_what_a_real_one_builds_stays_whole() -> None:
    model, x = nn.Sequential(Builds(), nn.Tanh()), torch.randn(4, D)
    offload.plan(model, x)
    assert model[0].inner is None and not model[0]._modules and not hasattr(model[0], "width")
    offload.plan(model, x, record=True)
    assert isinstance(model[0].inner, nn.Linear) and model[0].width == D
    lazy = nn.Sequential(nn.LazyLinear(D), nn.Tanh())
    offload.plan(lazy, x, layers="*", record=True)
    assert type(lazy[0]) is nn.Linear and lazy[0].in_features == D
    for built in (model, lazy):
        built(x).sum().backward()


class Registry(OrderedDict[str, Any]):
    """As transformers' table of activations: reading makes an instance of what is registered."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()


@trials
def test_a_registry_that_reads_as_something_else_is_left_alone(trial: Callable[..., Any]) -> None:
    model = fo.Sequential(fo.ops.Linear(D, D))
    registry = model.registry = Registry(silu=nn.SiLU)
    model.holder = SimpleNamespace(registry=registry)
    trial(model, torch.randn(4, D))
    assert [*registry.values()] == [nn.SiLU]
