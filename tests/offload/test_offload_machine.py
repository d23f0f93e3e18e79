"""A state machine over training: whatever is run in whatever order, gradients equal those of a twin that offloads
nothing.
"""

import gc
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    precondition,
    rule,
)
from lazy_lanes import LazyLanes
from offload_pair import D, Model, Pair

from fuseops import offload


class Training(RuleBasedStateMachine):
    """Pairs of losses: of the model with a scheduler, and of its twin."""

    losses = Bundle("losses")
    ways = st.sampled_from(["plain", "plain", "layers", "reentrant"])

    @initialize(
        seed=st.integers(0, 1 << 20),  # no draws inside hooks: they may end the example
        lag=st.integers(0, 3),
        ahead=st.integers(1, 2),
        small=st.sampled_from([0, 300, 1 << 20]),
        least=st.sampled_from([1, 200]),
        budget=st.sampled_from([None, 4096]),
    )
    def start(self, **how: Any) -> None:
        self.pair = Pair(**how)

    @rule(target=losses, way=ways)
    def forward(self, way: str) -> Any:
        return self.pair.forward(way)

    @rule(target=losses, way=ways, scope=st.sampled_from(["to_host", "keep", "disabled"]))
    def forward_in_a_scope(self, way: str, scope: str) -> Any:
        return self.pair.forward_in_a_scope(way, scope)

    @rule(what=st.sampled_from(["evaluate", "forward_for_nothing", "error_in_forward", "step"]))
    def alone(self, what: str) -> None:
        getattr(self.pair, what)()

    @rule(loss=consumes(losses))
    def backward(self, loss: Any) -> None:
        self.pair.backward(loss)

    @rule(
        loss=consumes(losses), what=st.sampled_from(["backward_twice", "drop", "error_in_backward"])
    )
    def end_of_a_loss(self, loss: Any, what: str) -> None:
        getattr(self.pair, what)(loss)

    @precondition(lambda self: self.pair.attached)
    @rule()
    def detach(self) -> None:
        self.pair.detach()

    @precondition(lambda self: not self.pair.attached)
    @rule()
    def attach(self) -> None:
        self.pair.attach()

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.end()


def test_training_in_any_order_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each example has an arena of its own: at 64 MiB a region most of the time went into poisoning that.
    monkeypatch.setattr("fuseops.offload.lanes.arena.REGION", 1 << 14)
    Training.TestCase.settings = settings(stateful_step_count=25, deadline=None)
    case = Training.TestCase()
    case.runTest()


def test_nothing_is_left_after_training() -> None:
    lanes = LazyLanes(lambda n: n - 1)
    model = Model()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fuseops.offload.scheduler.make_lanes", lambda *_: lanes)
        scheduler = offload.Scheduler(model, "layers.*", policy=offload.Policy(min_bytes=1))
        with scheduler:
            for _ in range(3):
                y = model(torch.randn(4, D, requires_grad=True), "plain")
                y.sum().backward()
            del y
            assert scheduler.report().host_bytes == 0
    gc.collect()
    assert lanes.arena.used == 0
