"""Faults that the records of other offloaders document, and one of our own, as laws that hold in every mode."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuseops as fo
from fuseops import offload

MODES = ["to_host", "scheduler", "plan", "manual"]


class Saves(nn.Module):
    """A layer that saves the components of something for its backward."""

    def __init__(self, make: Callable[[], Any], mark: Callable[[Any], None]) -> None:
        super().__init__()
        self.make, self.mark = make, mark

    def forward(self, x: Tensor) -> Tensor:
        value = self.make()
        self.mark(value)
        for t in components(value):
            x = x + _Keep.apply(x, t)
        return x


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, t: Tensor) -> Tensor:
        ctx.save_for_backward(t)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy * ctx.saved_tensors[0].float().mean(), None


def components(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for part in value for t in components(part)]
    if isinstance(value, dict):
        return components(list(value.values()))
    if hasattr(value, "__dataclass_fields__"):
        parts = [getattr(value, name) for name in value.__dataclass_fields__]
        return components([p for p in parts if isinstance(p, (Tensor, tuple, list, dict))])
    return []


def quantized() -> Any:
    """fp8 data by rows and by columns, and their scales."""
    return fo.quantize(torch.randn(8, 4), fo.recipes.Scaling())


CONTAINERS = {
    "tensor": lambda: torch.randn(8, 4),
    "quantized": quantized,
    "group of quantized": lambda: {"experts": [quantized(), (quantized(), torch.randn(3))]},
}


def decided(mode: str, model: nn.Module) -> list[tuple[str, str]]:
    """Decision and reason of all that `_Keep` saves, after a step in that mode."""
    x = torch.randn(8, 4, requires_grad=True)
    if mode == "to_host":
        with offload.to_host(min_bytes=1) as scope:
            model(x).sum().backward()
        return rows(scope.report())
    everything = offload.Policy(min_bytes=1)
    options: dict[str, Any] = {"policy": everything}
    if mode == "plan":
        with offload.Scheduler(model, "*", policy=everything) as first:
            model(x).sum().backward()
        options = {"plan": {e.name: "offload" for e in first.report().entries}}
    with offload.Scheduler(model, "*", manual=mode == "manual", **options) as scheduler:
        y = model(x)
        if mode == "manual":
            for layer in ("0", "1"):
                scheduler.offload_layer(layer)
                scheduler.release_layer(layer)
        y.sum().backward()
    return rows(scheduler.report())


def rows(report: offload.Report) -> list[tuple[str, str]]:
    return [(e.decision, e.reason) for e in report.entries if "leaf" in e.name]


def stack(make: Callable[[], Any], mark: Callable[[Any], None]) -> nn.Module:
    return nn.Sequential(Saves(make, mark), Saves(make, mark), nn.Tanh(), nn.Tanh())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_an_opt_out_is_no_no_op_in_any_mode_and_reaches_every_component(
    mode: str, make: Callable[[], Any]
) -> None:
    """The mark went to the wrapper, and the tensors in it were moved all the same; elsewhere the mark
    set an attribute that nothing read.
    """
    unmarked = decided(mode, stack(make, lambda value: None))
    assert {decision for decision, _ in unmarked} == {"moved"}
    marked = decided(mode, stack(make, offload.mark_not_offload))
    assert len(marked) >= 1 and set(marked) == {("kept", "marked keep")}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_an_opt_in_reaches_every_component(make: Callable[[], Any]) -> None:
    policy = offload.Policy(min_bytes=1 << 30)
    model = stack(make, offload.mark_offload)
    with offload.Scheduler(model, "*", policy=policy) as scheduler:
        model(torch.randn(8, 4, requires_grad=True)).sum().backward()
    assert {d for d, _ in rows(scheduler.report())} == {"moved"}


@pytest.mark.parametrize("mode", ["to_host", "scheduler"])
@pytest.mark.parametrize("where", ["around the model", "inside a layer"])
def test_a_nested_disable_is_off_and_what_is_outside_is_on_again(mode: str, where: str) -> None:
    """`enabled=False` inside an enabled context was a null context: the outer one stayed in force."""

    class Off(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with offload.disabled():
                x = x.sin()
            return x.cos()

    inside = where == "inside a layer"
    model = nn.Sequential(Off() if inside else nn.Tanh(), nn.Sigmoid(), nn.Sigmoid())
    policy = offload.Policy(min_bytes=1)
    scope: Any = (
        offload.to_host(min_bytes=1)
        if mode == "to_host"
        else offload.Scheduler(model, "*", policy=policy)
    )
    x = torch.randn(4, requires_grad=True) * 1
    with scope:
        if inside:
            model(x).sum().backward()
        else:
            with offload.disabled():
                model(x).sum().backward()
            assert not any(e.decision == "moved" for e in scope.report().entries)
            model(torch.randn(4, requires_grad=True)).sum().backward()
    moved = [e for e in scope.report().entries if e.decision == "moved"]
    assert moved and not any("MulBackward" in e.name for e in moved)
    assert not inside or any("SinBackward" in e.name for e in moved)


def test_the_layers_of_micro_batches_are_told_apart() -> None:
    """A counter of layers that the next micro-batch went on counting handed one the activations of
    another. Here each micro-batch has other data, and they run as in a pipeline.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)))
    order = ["F0", "F1", "B0", "F2", "B1", "F3", "B3", "B2"]

    def step(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        batches = [torch.randn(3, 4, requires_grad=True) for _ in range(4)]
        losses: dict[int, Tensor] = {}
        for way, k in order:
            if way == "F":
                losses[int(k)] = model(batches[int(k)]).square().sum()
            else:
                losses.pop(int(k)).backward()
        found = [b.grad for b in batches] + [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return found

    expected = [step(seed) for seed in range(4)]
    policy = offload.Policy(min_bytes=1)
    with offload.Scheduler(model, "*", policy=policy, lag=0) as scheduler:
        late = []
        for seed in range(4):
            assert all(map(torch.equal, step(seed), expected[seed]))
            late.append(dict(scheduler.report().schedule)["misses"])
    facts = dict(scheduler.report().schedule)
    assert facts["mispredicted"] == 0 and facts["steps"] == 4
    assert late[0] == late[-1]  # from the second step on nothing is late
    schedule = scheduler._scope.mover.schedule
    assert {key.ordinal for _, key in schedule.order.recorded} == {0, 1, 2, 3}
    assert schedule.calls("0") == []


# --- 5: host memory that waits for the garbage collector


def once(mode: str, model: nn.Module) -> list[weakref.ref[Any]]:
    """One step; what it leaves: a scope, or a scheduler and its host memory."""
    if mode in ("to_host", "keep"):
        with offload.to_host(min_bytes=1) if mode == "to_host" else offload.keep() as scope:
            loss = model(torch.randn(4, 8, requires_grad=True)).sum()
        loss.backward()
        return [weakref.ref(scope)]
    scheduler = offload.Scheduler(model, "*", policy=offload.Policy(min_bytes=1))
    with scheduler:
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
        assert scheduler.report().moved_bytes
    return [*map(weakref.ref, (scheduler, scheduler._scope, scheduler._scope.mover.lanes.arena))]


@pytest.mark.parametrize("mode", ["to_host", "keep", "scheduler"])
def test_what_is_dropped_goes_without_the_garbage_collector(mode: str) -> None:
    model = nn.Sequential(fo.Sequential(fo.ops.Linear(8, 8), fo.ops.SiLU()), nn.Linear(8, 8))
    gc.collect()
    gc.disable()
    try:
        assert all(dropped() is None for dropped in once(mode, model))
    finally:
        gc.enable()
