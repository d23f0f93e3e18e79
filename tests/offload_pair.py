"""Training with an `offload.Scheduler` beside a twin without one: copies happen only when something waits for them, and
memory is poisoned when it is freed.
"""

import random
from typing import Any

import pytest
import torch
from lazy_lanes import LazyLanes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload
from fuseops.observe import modules
from fuseops.offload import nesting
from fuseops.ops import names
from fuseops.torch_private import top_saved_tensor_hooks

D = 8


class InterruptionError(Exception):
    """Raised by a model in the middle of a forward or a backward."""


class Interrupt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, where: dict[str, bool]) -> Tensor:
        ctx.where = where
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        if ctx.where["backward"]:
            raise InterruptionError
        return dy, None


class Trap(nn.Module):
    """Raises in the forward or the backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.where = {"forward": False, "backward": False}

    def forward(self, x: Tensor) -> Tensor:
        if self.where["forward"]:
            raise InterruptionError
        return Interrupt.apply(x, self.where)


class Qkv(nn.Module):
    """Slices of one buffer, views, and a tensor saved by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + torch.softmax(q @ k.t(), -1) @ (v * v)


class Model(nn.Module):
    """Four layers, of which the second runs twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            [
                fo.Residual(fo.ops.RMSNorm(D), fo.ops.Linear(D, 2 * D), fo.ops.SwiGLU()),
                nn.Sequential(nn.Linear(D, D), nn.Tanh()),
                Qkv(),
                nn.Sequential(fo.ops.Linear(D, D), Trap(), fo.ops.SiLU(), nn.Linear(D, D)),
            ]
        )

    @property
    def trap(self) -> Trap:
        return self.layers[3][1]

    def forward(self, x: Tensor, way: str) -> Tensor:
        for k in (0, 1, 2, 1, 3):
            if way == "layers" and k in (1, 2):
                x = checkpoint(self.layers[k], x, use_reentrant=False)
            elif way == "reentrant" and k == 2:
                x = checkpoint(self.layers[k], x, use_reentrant=True)
            else:
                x = self.layers[k](x)
        return x


class Pair:
    """A model with a scheduler and its twin; a loss is a pair, one of each."""

    def __init__(
        self, seed: int, lag: int, ahead: int, small: int, least: int, budget: int | None
    ) -> None:
        self.model, self.twin = Model(), Model()
        self.lanes = LazyLanes(random.Random(seed).randrange, budget)
        policy = offload.Policy(min_bytes=least)
        self.scheduler = offload.Scheduler(
            self.model, "layers.*", policy=policy, lag=lag, ahead=ahead
        )
        make, lanes = self.scheduler._make_mover, self.lanes

        def with_lanes(inputs: Any = ()) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("fuseops.offload.scheduler.make_lanes", lambda *_: lanes)
                mover = make(inputs)
            mover.schedule.small = small
            return mover

        self.scheduler._scope._make_mover = with_lanes
        self.scheduler.attach()
        self.attached = True
        self.seed = 0

    def run(self, model: Model, way: str, scope: Any) -> Tensor:
        torch.manual_seed(self.seed)
        with scope:
            return model(torch.randn(4, D, requires_grad=True), way).square().sum()

    def forward(self, way: str) -> Any:
        self.seed += 1
        pair = (
            self.run(self.model, way, torch.enable_grad()),
            self.run(self.twin, way, torch.enable_grad()),
        )
        assert torch.equal(*(loss.detach() for loss in pair))
        return pair

    def forward_in_a_scope(self, way: str, scope: str) -> Any:
        self.seed += 1
        scopes = {
            "to_host": lambda: offload.to_host(min_bytes=1),
            "keep": offload.keep,
            "disabled": offload.disabled,
        }
        return (
            self.run(self.model, way, scopes[scope]()),
            self.run(self.twin, way, torch.enable_grad()),
        )

    def evaluate(self) -> None:
        self.run(self.model, "plain", torch.no_grad())

    def forward_for_nothing(self) -> None:
        self.run(self.model, "plain", torch.enable_grad())

    def backward(self, pair: Any) -> None:
        for loss in pair:
            loss.backward()
        self.compare()

    def backward_twice(self, pair: Any) -> None:
        for loss in pair:
            loss.backward(retain_graph=True)
            loss.backward()
        self.compare()

    def drop(self, pair: Any) -> None:
        pass

    def error_in_forward(self) -> None:
        self.model.trap.where["forward"] = True
        with pytest.raises(InterruptionError):
            self.run(self.model, "plain", torch.enable_grad())
        self.model.trap.where["forward"] = False

    def error_in_backward(self, pair: Any) -> None:
        for model, loss in zip((self.model, self.twin), pair, strict=True):
            model.trap.where["backward"] = True
            with pytest.raises(InterruptionError):
                loss.backward()
            model.trap.where["backward"] = False
        self.compare()

    def step(self) -> None:
        with torch.no_grad():
            for model in (self.model, self.twin):
                for p in model.parameters():
                    p.grad = None

    def detach(self) -> None:
        self.scheduler.detach()
        self.attached = False

    def attach(self) -> None:
        self.scheduler.attach()
        self.attached = True

    def compare(self) -> None:
        for (name, mine), other in zip(
            self.model.named_parameters(), self.twin.parameters(), strict=True
        ):
            assert (mine.grad is None) == (other.grad is None), name
            if mine.grad is not None:
                assert torch.equal(mine.grad, other.grad), name

    def end(self) -> None:
        """Nothing is left on the thread."""
        if self.attached:
            self.detach()
        assert top_saved_tensor_hooks() is None and names.thread.observers == 0
        assert modules.thread.watchers == [] == modules.thread.running
        assert list(nesting.open_scopes()) == []
