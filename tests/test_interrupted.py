"""Whatever stops a forward or a backward, and wherever: nothing stays behind, and the next step is right."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload
from fuseops.observe import modules
from fuseops.offload import nesting
from fuseops.ops import names, scopes
from fuseops.torch_private import top_saved_tensor_hooks

D = 8


class StoppedError(Exception):
    pass


class Stop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: "Trap") -> Tensor:
        ctx.trap = trap
        trap.spring("forward")
        return x * 1

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        ctx.trap.spring("backward")
        return dy, None


class Trap(nn.Module):
    """Raises where it is told to, once."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.error = "", StoppedError

    def spring(self, where: str) -> None:
        if self.where == where:
            self.where = ""
            raise self.error

    def forward(self, x: Tensor) -> Tensor:
        return Stop.apply(x, self)


class Block(nn.Module):
    """A layer with a layer inside, which the trap is in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = fo.Residual({"fc": fo.ops.Linear(D, D), "trap": Trap(), "act": fo.ops.SiLU()})

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(fo.Sequential(fo.ops.RMSNorm(D)), Block(), nn.Sequential(nn.Linear(D, D)))


@contextmanager
def scheduled(model: nn.Module) -> Iterator[None]:
    with offload.Scheduler(model, ["*", "1.inner"], policy=offload.Policy(min_bytes=1)):
        yield


Around = Callable[[nn.Module], AbstractContextManager[Any]]
AROUND: dict[str, Around] = {
    "to_host": lambda model: offload.to_host(min_bytes=1, root=model),
    "keep": lambda model: offload.keep(),
    "disabled": lambda model: offload.disabled(),
    "recompute": lambda model: offload.recompute(),
    "scheduler": scheduled,
    "fusion off": lambda model: fo.fusion(False),
    "reference": lambda model: fo.reference(),
    "debug": lambda model: fo.debug(),
    "names": lambda model: names.observe(),
}


def step(model: nn.Module, way: str) -> list[Tensor]:
    """Its gradients."""
    model.zero_grad()
    x = torch.linspace(-1, 1, 4 * D).view(4, D).requires_grad_()
    y = model(x) if way == "plain" else checkpoint(model, x, use_reentrant=way == "reentrant")
    y.square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def on_the_thread() -> tuple[Any, ...]:
    """What others on the thread would run under."""
    return (
        *(top_saved_tensor_hooks(), names.thread.observers, names.thread.outermost),
        *(names.thread.frame, list(modules.thread.watchers)),
        *(list(nesting.open_scopes()), scopes.current().token, torch.is_grad_enabled()),
    )


def left() -> tuple[Any, ...]:
    return (*on_the_thread(), list(modules.thread.running))


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [StoppedError, KeyboardInterrupt])
@pytest.mark.parametrize("way", ["plain", "checkpoint", "reentrant"])
def test_a_step_that_is_stopped_changes_nothing(
    around: str, where: str, error: type[BaseException], way: str
) -> None:
    """Inside a scope that goes on, and by an error that leaves it."""
    expected = step(make(), "plain")
    model, before = make(), left()
    trap = model[1].inner.trap
    trap.error = error

    def stopped() -> None:
        trap.where = where
        step(model, way)

    with AROUND[around](model):
        inside = on_the_thread()
        with pytest.raises(error):
            stopped()
        assert on_the_thread() == inside, "as soon as the error has left the model"
        with torch.no_grad():
            model(torch.ones(2, D))
        for _ in range(2):
            torch.testing.assert_close(step(model, way), expected)
    assert left() == before
    with suppress(error), AROUND[around](model):
        stopped()
    assert left() == before
    torch.testing.assert_close(step(model, way), expected)


def chain() -> fo.Sequential:
    return fo.Sequential(fo.ops.RMSNorm(D), fo.ops.Linear(D, 2 * D), fo.ops.SwiGLU())


def backward_twice(x: Tensor) -> None:
    y = chain()(x).sum()
    y.backward()
    y.backward()


def differentiated_twice(x: Tensor) -> None:
    (dx,) = torch.autograd.grad((chain()(x) ** 2).sum(), x, create_graph=True)
    torch.autograd.grad(dx.sum(), x)


WRONG: dict[str, Callable[[Tensor], object]] = {
    "dtype": lambda x: chain()(x.double()),
    "dtype of a lone op": lambda x: fo.ops.Linear(D, D)(x.double()),
    "dtype of experts": lambda x: fo.MoE(D, 16, 4, 2)(x.double()),
    "integers": lambda x: chain()(x.long()),
    "width": lambda x: chain()(x[:, :5]),
    "width of experts": lambda x: fo.MoE(D, 16, 4, 2)(x[:, :5]),
    "width of a residual": lambda x: fo.Residual(fo.ops.Linear(D, 2 * D))(x),
    "more": lambda x: chain()(x, other=x),
    "less": lambda x: fo.Sequential(fo.ops.Add("other"))(x),
    "device": lambda x: chain().to("meta")(x),
    "backward twice": backward_twice,
    "differentiated twice": differentiated_twice,
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_error_that_is_caught_holds_no_tensor(wrong: str) -> None:
    def caught() -> weakref.ref[Tensor]:
        x = torch.randn(4, D, requires_grad=True)
        with pytest.raises(Exception):  # noqa: B017 - of any kind
            WRONG[wrong](x)
        return weakref.ref(x)

    gc.collect()
    gc.disable()
    try:
        assert caught()() is None
    finally:
        gc.enable()
