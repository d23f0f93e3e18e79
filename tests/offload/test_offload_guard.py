"""Laws 6 to 8 and 13: buffers end with the graph, writes are seen, little is back at once."""

import gc
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuseops as fo
from fuseops import offload
from fuseops.errors import InPlaceError
from fuseops.offload import records
from fuseops.offload.lanes.arena import aligned
from fuseops.offload.lanes.cpu import CpuLanes
from fuseops.offload.lanes.protocol import Buf, Place
from fuseops.torch_private import WeakStorage


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def mlp() -> fo.Sequential:
    return fo.Sequential(fo.ops.Linear(8, 16), fo.ops.SwiGLU(), nn.Tanh(), fo.ops.Linear(8, 8))


# --- law 6


def test_law_06_buffers_end_with_the_backward(no_gc: None) -> None:
    with offload.to_host(min_bytes=1) as scope:
        y = mlp()(torch.randn(4, 8))
    assert scope.report().host_bytes == scope.report().moved_bytes > 0
    y.sum().backward(retain_graph=True)
    assert scope.report().host_bytes > 0
    y.sum().backward()
    assert scope.report().host_bytes == 0


def test_law_06_buffers_end_with_a_dropped_graph(no_gc: None) -> None:
    with offload.to_host(min_bytes=1) as scope:
        y = mlp()(torch.randn(4, 8))
        assert scope.report().host_bytes > 0
        del y
        assert scope.report().host_bytes == 0


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, when: str) -> Tensor:
        ctx.save_for_backward(x)
        if when == "forward":
            raise ValueError("in forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        raise ValueError("in backward")


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_law_06_buffers_end_after_an_error(when: str, no_gc: None) -> None:
    scope, model = offload.to_host(min_bytes=1), mlp()

    def step() -> None:
        with scope:
            y = Fails.apply(model(torch.randn(4, 8)), when)
        y.sum().backward()

    try:
        step()
    except ValueError as error:
        assert str(error) == f"in {when}"
    else:
        pytest.fail("nothing was raised")
    assert scope.report().moved_bytes > 0 and scope.report().host_bytes == 0


def test_law_06_what_was_moved_is_let_go() -> None:
    with offload.to_host(min_bytes=1) as scope:
        h = torch.randn(64, requires_grad=True) * 2
        storage = WeakStorage(h.untyped_storage())
        y = h.sin()
        assert scope.report().held == (("MulBackward0.0", 256),)
        del h
    assert storage.expired() and scope.report().held == ()
    y.sum().backward()


# --- law 7


SCOPES = {
    "to_host": lambda: offload.to_host(min_bytes=1),
    "keep": offload.keep,
    "too small": lambda: offload.to_host(min_bytes=1 << 40),
}


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES.keys())
def test_law_07_a_write_in_place_is_seen_and_named(scope: Any) -> None:
    seq = fo.Sequential({"fc": fo.ops.Linear(4, 4)})
    with scope():
        h = torch.randn(2, 4, requires_grad=True) * 1
        y = seq(h)
        h.add_(1)
    with pytest.raises(InPlaceError, match=r"'fc\.x' of Linear .*version 1,.*version 0"):
        y.sum().backward()


def before_the_save(x: Tensor) -> Tensor:
    return x.mul_(2).sin()


def through_a_view(x: Tensor) -> Tensor:
    y = x.sin()
    x[0].zero_()
    return y


def output_through_an_alias(x: Tensor) -> Tensor:
    y = x.exp()
    y.detach().zero_()
    return y * 1


def what_nobody_saved(x: Tensor) -> Tensor:
    return (x + 1).add_(1)


def activation_in_place(x: Tensor) -> Tensor:
    return torch.relu_(x * 1)


def saved_twice_around_a_write(x: Tensor) -> Tensor:
    y = x.sin()
    return y + x.mul_(2).cos()


WRITES = [
    *(before_the_save, through_a_view, output_through_an_alias, what_nobody_saved),
    *(activation_in_place, saved_twice_around_a_write),
]


@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES.keys())
@pytest.mark.parametrize("model", WRITES, ids=lambda f: f.__name__)
def test_law_07_the_guard_says_what_torch_says(model: Any, scope: Any) -> None:
    outcomes = []
    for inside in (offload.disabled, scope):
        leaf = torch.ones(3, 2, requires_grad=True)
        with inside():
            y = model(leaf * 1)
        try:
            outcomes.append(torch.autograd.grad(y.sum(), leaf)[0].tolist())
        except RuntimeError:
            outcomes.append("raises")
    assert outcomes[0] == outcomes[1]


def test_law_07_an_optimizer_step_before_the_backward_is_seen() -> None:
    model = nn.Linear(4, 4)
    with offload.to_host(min_bytes=1):
        y = model(torch.randn(2, 4, requires_grad=True))
    with torch.no_grad():
        model.weight.mul_(2)
    with pytest.raises(InPlaceError, match="Linear"):
        y.sum().backward()


def test_law_07_the_guard_holds_no_memory() -> None:
    with offload.to_host(min_bytes=1):
        h = torch.randn(8, requires_grad=True) * 1
        storage = WeakStorage(h.untyped_storage())
        y = h.sin().sum()
    del h
    assert storage.expired()
    y.backward()


# --- law 8


def catalogue() -> Iterator[tuple[Any, Tensor, dict[str, Tensor]]]:
    x = torch.randn(6, 8, requires_grad=True)
    offs = torch.tensor([2, 6], dtype=torch.int32)
    ops = fo.ops
    plain = [ops.Linear(8, 8), ops.Bias(8), ops.RMSNorm(8), ops.SiLU(), ops.GELU(), ops.SReLU()]
    plain += [ops.SwiGLU(), ops.ConstantScale(2.0), ops.Dropout(0.5), ops.Reshape(8, 6)]
    yield from ((op, x, {}) for op in plain)
    yield ops.ScaledSwiGLU(), x, {"probs": torch.rand(6, requires_grad=True)}
    yield ops.GroupedLinear(2, 8, 8), x, {"offs": offs}
    yield ops.Add(), x, {"residual": torch.randn(6, 8, requires_grad=True)}


def test_law_08_ops_write_no_tensor_without_a_new_version() -> None:
    """What the guard counts on: no op changes a tensor that was there before, unannounced."""
    for op, x, side in catalogue():
        with offload.keep():
            y = op(x, **side)
        watched = [x, y, *op.parameters(), *side.values()]
        before = [(t.detach().clone(), t._version) for t in watched]
        y.square().sum().backward(retain_graph=True)
        op(x, **side)
        for t, (value, version) in zip(watched, before, strict=True):
            assert t._version > version or torch.equal(t, value), type(op).__name__


def test_law_08_what_is_outside_the_promise_is_written_down() -> None:
    text = inspect.getdoc(records) or ""
    assert all(word in text for word in ("increment_version", ".data", "set_", "numpy"))


# --- law 13


class Counting(CpuLanes):
    """Remembers which storages that were brought back are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.came: list[tuple[WeakStorage, int]] = []
        self.peak = 0

    def alloc(self, nbytes: int, device: Place, name: str) -> Buf:
        buf = super().alloc(nbytes, device, name)
        if device == "device":
            self.came.append((WeakStorage(buf.data), nbytes))
            self.peak = max(self.peak, sum(n for ref, n in self.came if not ref.expired()))
        return buf


@pytest.mark.parametrize("blocks", [2, 8])
def test_law_13_at_most_two_segments_are_back_at_once(
    blocks: int, monkeypatch: pytest.MonkeyPatch, no_gc: None
) -> None:
    counting = Counting()
    monkeypatch.setattr("fuseops.offload.scopes.lanes_of", lambda device: counting)
    parts: list[nn.Module] = []
    for _ in range(blocks):
        parts += [fo.ops.RMSNorm(8), fo.ops.Linear(8, 32), fo.ops.SwiGLU(), fo.ops.Linear(16, 8)]
    with offload.to_host(min_bytes=1) as scope:
        y = fo.Sequential(*parts)(torch.randn(64, 8, requires_grad=True))
    y.sum().backward()
    assert sum(nbytes for _, nbytes in counting.came) >= scope.report().moved_bytes
    assert len(counting.came) >= blocks  # what a node saves comes back together
    assert counting.peak <= 2 * largest_block(scope.report())
    assert blocks == 2 or counting.peak < scope.report().moved_bytes / 3


def largest_block(report: offload.Report) -> int:
    """Bytes of one block, each tensor's as allocators round them: here a segment is a norm and all that follows it."""
    blocks: dict[int, int] = {}
    for e in report.entries:
        block = int(e.name.split(".")[0]) // 4
        blocks[block] = blocks.get(block, 0) + aligned(e.nbytes)
    return max(blocks.values())


def test_law_13_a_storage_is_back_once_while_somebody_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counting = Counting()
    monkeypatch.setattr("fuseops.offload.scopes.lanes_of", lambda device: counting)
    with offload.to_host(min_bytes=1):
        h = torch.randn(4, requires_grad=True) * 1
        y = h * h  # saves it twice
    y.sum().backward()
    assert len(counting.came) == 1


def test_law_12_what_was_saved_before_is_back_before_it_is_read() -> None:
    with offload.to_host(min_bytes=1) as scope:
        y = torch.randn(4, requires_grad=True)
        for _ in range(6):
            y = y.sin()
    y.sum().backward()
    (mover,) = scope._movers.values()
    assert mover.schedule.stats.back_count == 6 and mover.schedule.stats.misses == 1
