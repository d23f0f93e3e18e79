"""Overrides for torchtitan, on stand-ins with the interface of its public classes: torchtitan is not installed."""

from __future__ import annotations

import copy
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchtitan_stand_ins
from torch import Tensor, nn

import fuseops as fo

D, HIDDEN, EXPERTS = 8, 12, 3


def stand_ins(named: bool, axes: bool, method: bool) -> dict[str, types.ModuleType]:
    """Modules of torchtitan. named: its decorator takes a name; axes: weights are named by their axes; method: experts
    compute in a method of their own.
    """
    registered: dict[str, Callable[[Any], Any]] = {}

    def override(*, target: Any, exact: bool = False, description: str = "") -> Any:
        assert exact and description
        return lambda factory: registered.setdefault(factory.__name__, factory)

    def with_name(name: str, *, target: Any, exact: bool = False, description: str = "") -> Any:
        assert name.startswith("fuseops_")
        return override(target=target, exact=exact, description=description)

    def derive(cfg: Any, new: Any, **deltas: Any) -> Any:
        return new(**{f.name: getattr(cfg, f.name) for f in fields(cfg)} | deltas)

    class GroupedExperts(nn.Module):
        @dataclass(kw_only=True, slots=True)
        class Config:
            dim: int
            hidden_dim: int
            num_experts: int

        def __init__(self, config: Any) -> None:
            super().__init__()
            e, f, d = config.num_experts, config.hidden_dim, config.dim
            shapes = {"w1": (e, f, d), "w2": (e, d, f), "w3": (e, f, d)}
            ends = {"w1": "_EFD", "w2": "_EDF", "w3": "_EFD"}
            for name, shape in shapes.items():
                weight = nn.Parameter(torch.randn(shape) / 3)
                self.register_parameter(name + ends[name] * axes, weight)

        def compute(self, x: Tensor, counts: Tensor) -> Tensor:
            w1, w2, w3 = (p.bfloat16() for p in self.parameters())
            parts = x.bfloat16().split(counts.tolist())
            done = [
                (F.silu(p @ a.T) * (p @ c.T)) @ b.T
                for p, a, b, c in zip(parts, w1, w2, w3, strict=True)
            ]
            return torch.cat(done).type_as(x)

        def forward(self, x: Tensor, counts: Tensor) -> Tensor:
            return self._experts_forward(x, counts) if method else self.compute(x, counts)

        if method:

            def _experts_forward(self, x: Tensor, counts: Tensor) -> Tensor:
                return self.compute(x, counts)

    class FeedForward(nn.Module):
        @dataclass(kw_only=True, slots=True)
        class Config:
            dim: int
            hidden_dim: int
            bias: bool = False

        def __init__(self, config: Any) -> None:
            super().__init__()
            d, f = config.dim, config.hidden_dim
            self.w1, self.w3 = (nn.Linear(d, f, bias=config.bias) for _ in range(2))
            self.w2 = nn.Linear(f, d, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.w2(F.silu(self.w1(x)) * self.w3(x))

    def module(name: str, **held: Any) -> types.ModuleType:
        made = types.ModuleType(name)
        vars(made).update(held)
        return made

    found = [
        module("torchtitan"),
        module("torchtitan.config", override=with_name if named else override, derive=derive),
        module("torchtitan.models"),
        module("torchtitan.models.common"),
        module("torchtitan.models.common.moe", GroupedExperts=GroupedExperts),
        module("torchtitan.models.common.feed_forward", FeedForward=FeedForward),
    ]
    return {m.__name__: m for m in found}


@pytest.fixture(params=[(True, False, False), (False, True, False), (True, True, True)], ids=str)
def titan(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The integration over stand-ins of one version."""
    for name, module in stand_ins(*request.param).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "fuseops.integrations.torchtitan", raising=False)
    yield importlib.import_module("fuseops.integrations.torchtitan")
    sys.modules.pop("fuseops.integrations.torchtitan", None)


def pair(stock: Any, config: Any, factory: Any) -> tuple[nn.Module, nn.Module]:
    """The stock module and the overridden one, with the same weights under the same keys."""
    torch.manual_seed(0)
    made = stock(config)
    replaced = factory(config)
    module = sys.modules["fuseops.integrations.torchtitan"]
    owners = (module.FusedExperts, module.FusedFeedForward)
    (owner,) = (cls for cls in owners if vars(cls)["Config"] is type(replaced))
    ours = owner(replaced)
    ours.load_state_dict(made.state_dict())
    return made, ours


def check(stock: nn.Module, ours: nn.Module, *args: Tensor, tol: float) -> None:
    results = []
    for model in (stock, ours):
        x = args[0].clone().requires_grad_()
        y = model(x, *args[1:])
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    for mine, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(mine, want, rtol=tol, atol=tol * float(want.abs().max()))
    assert [*ours.state_dict()] == [*stock.state_dict()]


def test_experts_compute_what_the_stock_ones_do(titan: Any) -> None:
    config = titan.GroupedExperts.Config(dim=D, hidden_dim=HIDDEN, num_experts=EXPERTS)
    stock, ours = pair(titan.GroupedExperts, config, titan.grouped_experts)
    counts = torch.tensor([4, 0, 7])
    check(stock, ours, torch.randn(11, D), counts, tol=2e-2)
    assert titan._mlp(
        ours, {"fc1.weight": torch.empty(3, 24, 8), "fc2.weight": torch.empty(3, 8, 12)}
    )
    assert not [*ours.children()]  # what computes is no child


def test_feed_forward_computes_what_the_stock_one_does(titan: Any) -> None:
    config = titan.FeedForward.Config(dim=D, hidden_dim=HIDDEN)
    stock, ours = pair(titan.FeedForward, config, titan.feed_forward)
    check(stock, ours, torch.randn(2, 5, D), tol=1e-5)
    assert titan._CACHE in ours.__dict__
    assert [n for n, _ in ours.named_children()] == [n for n, _ in stock.named_children()]


def test_a_layer_in_another_form_runs_as_the_stock_one(
    titan: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = titan.FeedForward.Config(dim=D, hidden_dim=HIDDEN, bias=True)
    stock, ours = pair(titan.FeedForward, config, titan.feed_forward)
    check(stock, ours, torch.randn(5, D), tol=1e-6)
    assert "w1 has a bias" in caplog.text


# --- its classes of today: one w13, experts as grouped linears, tokens by a child of theirs


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, module in torchtitan_stand_ins.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "fuseops.integrations.torchtitan", raising=False)
    yield importlib.import_module("fuseops.integrations.torchtitan")
    sys.modules.pop("fuseops.integrations.torchtitan", None)


def twin(stock: nn.Module, ours: nn.Module) -> nn.Module:
    ours.load_state_dict(stock.state_dict())
    return ours


@pytest.mark.parametrize("dispatcher", [None, "torchtitan"])
@pytest.mark.parametrize("theirs", ["LocalTokenDispatcher", "DeepEPTokenDispatcher"])
def test_routed_experts_compute_what_the_stock_ones_do(
    today: Any, dispatcher: str | None, theirs: str
) -> None:
    top_k, tokens = 2, 9
    make = getattr(torchtitan_stand_ins, theirs)
    config = today.RoutedExperts.Config(
        w13=(EXPERTS, D, HIDDEN, 2),
        w2=(EXPERTS, HIDDEN, D),
        token_dispatcher=make(EXPERTS, top_k),
    )
    torch.manual_seed(0)
    stock = today.RoutedExperts(config)
    ours = twin(
        stock, today.FusedRoutedExperts(today.routed_experts(config, dispatcher=dispatcher))
    )
    ids = torch.stack([torch.randperm(EXPERTS)[:top_k] for _ in range(tokens)])
    counts = torch.bincount(ids.view(-1), minlength=EXPERTS)
    scores = torch.rand(tokens, top_k)
    check(stock, ours, torch.randn(tokens, D), scores, ids, counts, tol=3e-2)
    assert [*ours.state_dict()] == ["w13.weight", "w2.weight"]
    whole = "dispatch" in ours.__dict__[today._CACHE][1]._modules
    assert whole == (dispatcher is None and theirs == "LocalTokenDispatcher")


def test_experts_whose_weights_have_got_another_width_are_planned_anew(today: Any) -> None:
    def made(make: Any, width: int) -> Any:
        return make(
            today.RoutedExperts.Config(
                w13=(EXPERTS, width, HIDDEN, 2),
                w2=(EXPERTS, HIDDEN, width),
                token_dispatcher=torchtitan_stand_ins.LocalTokenDispatcher(EXPERTS, 1),
            )
        )

    torch.manual_seed(0)
    ids = torch.arange(9)[:, None] % EXPERTS
    rest = torch.rand(9, 1), ids, torch.bincount(ids.view(-1))
    ours = made(lambda config: today.FusedRoutedExperts(today.routed_experts(config)), D)
    ours(torch.randn(9, D), *rest)  # planned for D
    wide = made(today.RoutedExperts, 2 * D)
    ours.w13, ours.w2 = copy.deepcopy((wide.w13, wide.w2))
    check(wide, ours, torch.randn(9, 2 * D), *rest, tol=3e-2)


def test_stacked_feed_forward_is_read_without_a_copy(today: Any) -> None:
    config = today.FeedForward.Config(width=D, hidden=HIDDEN)
    stock = today.FeedForward(config)
    ours = twin(stock, today.FusedFeedForward(today.feed_forward(config)))
    check(stock, ours, torch.randn(2, 5, D), tol=1e-5)
    assert ours.w13.weight.flatten(0, 1).data_ptr() == ours.w13.weight.data_ptr()


class Twice(torchtitan_stand_ins.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def hold_a_tensor(layer: Any) -> None:
    weight = layer.w2.weight.detach().requires_grad_()
    del layer.w2.weight
    layer.w2.weight = weight


CHANGES: dict[str, Callable[[Any], Any]] = {
    "w2 is a Twice": lambda layer: setattr(layer.w2, "__class__", Twice),
    "w2 has hooks": lambda layer: layer.w2.register_forward_hook(lambda _, x, y: 2 * y),
    "w13 has hooks": lambda layer: layer.w13.register_forward_pre_hook(lambda _, x: (2 * x[0],)),
    "w2 has a weight that is a Tensor": hold_a_tensor,
    "w2 has no weight": lambda layer: setattr(layer, "w2", nn.Identity()),
    "w13 has no weight": lambda layer: setattr(layer, "w13", nn.Unflatten(-1, (2, D // 2))),
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_changed_layer_runs_as_the_stock_one(
    today: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    config = today.FeedForward.Config(width=D, hidden=D // 2)
    stock = today.FeedForward(config)
    ours = twin(stock, today.FusedFeedForward(today.feed_forward(config)))
    for layer in (stock, ours):
        CHANGES[reason](layer)
    check(stock, ours, torch.randn(5, D), tol=1e-6)
    assert reason in caplog.text


def test_a_layer_whose_weights_have_got_another_width_is_planned_anew(today: Any) -> None:
    config = today.FeedForward.Config(width=D, hidden=HIDDEN)
    ours = today.FusedFeedForward(today.feed_forward(config))
    ours(torch.randn(5, D))  # planned for D
    wide = today.FeedForward(today.FeedForward.Config(width=2 * D, hidden=HIDDEN))
    ours.w13, ours.w2 = copy.deepcopy((wide.w13, wide.w2))
    check(wide, ours, torch.randn(5, 2 * D), tol=1e-5)


def test_another_activation_runs_as_the_stock_one(
    today: Any, caplog: pytest.LogCaptureFixture
) -> None:
    situ = torchtitan_stand_ins.SiTUGLU()
    config = today.FeedForward.Config(width=D, hidden=HIDDEN, activation_fn=situ)
    stock = today.FeedForward(config)
    ours = twin(stock, today.FusedFeedForward(today.feed_forward(config)))
    check(stock, ours, torch.randn(5, D), tol=1e-6)
    assert "its activation is SiTUGLU" in caplog.text
    assert today._CACHE not in ours.__dict__


def test_the_loss_of_the_head_is_what_the_chunks_give(today: Any) -> None:
    torch.manual_seed(0)
    head = torchtitan_stand_ins.Linear(D, 11)
    labels = torch.randint(0, 11, (6,))
    labels[2] = -100
    called: list[Any] = []
    head.register_forward_hook(lambda *_: called.append(1))
    results = []
    config = today.ChunkedLossWrapper.Config()
    for make in (today.ChunkedLossWrapper, today.FusedChunkedLoss):
        loss = make(config if make is today.ChunkedLossWrapper else today.chunked_loss(config))
        loss.set_lm_head(head)
        x = torch.randn(6, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
        head.zero_grad()
        called.clear()
        value, metrics = loss(x, labels, torch.tensor(5.0))
        assert metrics == {} and len(called) == (2 if make is today.ChunkedLossWrapper else 1)
        value.backward()
        results.append([value.detach(), x.grad, head.weight.grad.clone()])
    for mine, want in zip(*results, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-6)
    assert "forward" not in head.__dict__


class ScaledLoss(torchtitan_stand_ins.CrossEntropyLoss):
    def __call__(self, pred: Tensor, labels: Tensor, valid: Any = None) -> Any:
        loss, metrics = super().__call__(pred, labels, valid)
        return 2 * loss, metrics


class Scale(nn.Module):
    """A head that is no Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Marked(Tensor):
    pass


def plain_head() -> nn.Module:
    return torchtitan_stand_ins.Linear(D, D)


OTHER_LOSSES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "the loss of a chunk is a ScaledLoss": (ScaledLoss, plain_head, Tensor, {}),
    "the head is a Scale, or has a bias": (None, Scale, Tensor, {}),
    "the head is a Linear, or has a bias": (None, lambda: nn.Linear(D, D), Tensor, {}),
    "more than one plain tensor of hidden states": (None, plain_head, Marked, {}),
    "more than one plain tensor": (None, plain_head, Tensor, {"extra": 1}),
}


@pytest.mark.parametrize("reason", OTHER_LOSSES)
def test_another_loss_of_the_head_runs_as_the_stock_one(
    today: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    loss_fn, head, kind, more = OTHER_LOSSES[reason]
    config = today.ChunkedLossWrapper.Config(
        loss_fn=(loss_fn or torchtitan_stand_ins.CrossEntropyLoss)()
    )
    own = head()
    x, labels = torch.randn(6, D).as_subclass(kind), torch.randint(0, D, (6,))
    found = []
    for loss in (
        today.ChunkedLossWrapper(config),
        today.FusedChunkedLoss(today.chunked_loss(config)),
    ):
        loss.set_lm_head(own)
        found.append(loss(x, labels, torch.tensor(5.0), **more)[0])
    assert torch.equal(*found)
    assert reason in caplog.text


class MeshOf(int):
    """A mesh of so many ranks of experts."""

    def __getitem__(self, axis: str) -> MeshOf:
        return self

    def size(self) -> int:
        return int(self)


@pytest.mark.parametrize(("ranks", "why"), [(None, "is not there"), (3, "has 3 ranks of experts")])
def test_experts_without_a_mesh_of_their_ranks_say_so(
    today: Any, monkeypatch: pytest.MonkeyPatch, ranks: int | None, why: str
) -> None:
    types_of_mesh = sys.modules["torchtitan.distributed.spmd_types"]
    mesh = None if ranks is None else MeshOf(ranks)
    monkeypatch.setattr(types_of_mesh, "spmd_sparse_mesh", lambda: mesh)
    dispatcher = torchtitan_stand_ins.AllToAllTokenDispatcher(4, 2)
    config = today.RoutedExperts.Config(
        w13=(2, D, HIDDEN, 2), w2=(2, HIDDEN, D), token_dispatcher=dispatcher
    )
    ours = today.FusedRoutedExperts(today.routed_experts(config))
    ids = torch.zeros(3, 2, dtype=torch.int64)
    with pytest.raises(fo.FuseOpsError, match=f"has 2 of 4 experts on this rank, .*{why}"):
        ours(torch.randn(3, D), torch.rand(3, 2), ids, torch.tensor([6, 0, 0, 0]))
