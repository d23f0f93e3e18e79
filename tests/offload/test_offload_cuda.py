"""The CUDA copies: exact under delays on every lane, ordered by events, device memory let go."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuseops as fo
from fuseops import offload
from fuseops.errors import InPlaceError
from fuseops.offload.lanes.cuda import CudaLanes, pinned
from fuseops.offload.lanes.devices import lanes_of
from fuseops.offload.lanes.protocol import Lane

pytestmark = pytest.mark.gpu

CYCLES = 4_000_000  # about 2 ms on one stream


def model() -> nn.Module:
    torch.manual_seed(0)
    block = lambda: fo.Residual(  # noqa: E731
        fo.ops.RMSNorm(256),
        fo.ops.Linear(256, 1024),
        fo.ops.SwiGLU(),
        nn.Tanh(),
        fo.ops.Linear(512, 256),
    )
    return fo.Sequential(*(block() for _ in range(6))).cuda()


def step(net: nn.Module, scope: Any, before: Callable[[], None] = lambda: None) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(512, 256, device="cuda", requires_grad=True)
    net.zero_grad()
    with scope:
        before()
        y = net(x)
        scratch = [torch.randn_like(y) for _ in range(8)]  # would reuse memory let go too early
        del scratch
    before()
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in net.parameters())]


@pytest.fixture
def lanes() -> CudaLanes:
    found = lanes_of(torch.empty(0, device="cuda").device)
    assert isinstance(found, CudaLanes)
    return found


SLOW = [None, "compute", "d2h", "h2d"]


def delays(slow: Lane | None, lanes: CudaLanes) -> Callable[[], None]:
    def delay() -> None:
        if slow is None:
            return
        with torch.cuda.stream(lanes.stream(slow)):
            torch.cuda._sleep(CYCLES)

    return delay


@pytest.mark.parametrize("slow", SLOW)
def test_offloaded_equals_resident_whichever_lane_is_slow(
    slow: Lane | None, lanes: CudaLanes
) -> None:
    net = model()
    resident = step(net, offload.disabled())
    scope = offload.to_host(min_bytes=1)
    for _ in range(3):
        offloaded = step(net, scope, delays(slow, lanes))
        assert all(map(torch.equal, resident, offloaded))
    assert scope.report().moved_bytes > 6 * 512 * 256 * 4


@pytest.mark.parametrize("slow", SLOW)
@pytest.mark.parametrize("small", [0, 1 << 30])
def test_a_scheduler_is_exact_whichever_lane_is_slow(
    slow: Lane | None, small: int, lanes: CudaLanes
) -> None:
    """Delays before every layer, forward and backward; small tensors alone and gathered."""
    net = model()
    resident = step(net, contextlib.nullcontext())
    delay = delays(slow, lanes)
    slowed = [m.register_forward_pre_hook(lambda *_: delay()) for m in net]
    slowed += [m.register_full_backward_pre_hook(lambda *_: delay()) for m in net]
    policy = offload.Policy(min_bytes=1)
    with offload.Scheduler(net, "*", policy=policy, lag=1) as scheduler:
        scheduler._scope.mover.schedule.small = small
        for _ in range(10):
            assert all(map(torch.equal, resident, step(net, contextlib.nullcontext(), delay)))
    facts = dict(scheduler.report().schedule)
    assert facts["back_bytes"] > 10 * 512 * 256 * 4 and facts["misses"] == 0
    assert facts["mispredicted"] == 0
    for hook in slowed:
        hook.remove()


def test_after_the_first_step_no_host_memory_is_asked_for() -> None:
    net = model()
    with offload.Scheduler(net, "*", policy=offload.Policy(min_bytes=1), lag=1) as scheduler:
        reserved = []
        for _ in range(5):
            step(net, contextlib.nullcontext())
            reserved.append(dict(scheduler.report().schedule)["host_reserved"])
    assert len(set(reserved)) == 1


def test_a_repeated_step_asks_torch_for_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.current_stream` looks into the environment each time: 50 us, twice a moved tensor."""
    net, scope = model(), offload.to_host(min_bytes=1)
    first = step(net, scope)

    def asked(*args: Any) -> None:
        raise AssertionError("a stream was asked for")

    for name in ("current_stream", "stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, asked)
    assert all(map(torch.equal, first, step(net, scope)))


def test_a_slow_copy_out_is_not_overwritten(lanes: CudaLanes) -> None:
    """The memory of a moved tensor is used again only after it was copied."""
    leaf = torch.ones(1 << 20, device="cuda", requires_grad=True)
    with torch.cuda.stream(lanes.stream("d2h")):
        torch.cuda._sleep(10 * CYCLES)
    with offload.to_host(min_bytes=1):
        y = (leaf * 3).square()
        for _ in range(20):
            torch.full((1 << 20,), -1.0, device="cuda")
    for _ in range(20):
        torch.full((1 << 20,), -2.0, device="cuda")
    y.sum().backward()
    assert torch.equal(leaf.grad, torch.full_like(leaf, 18.0))


def test_a_slow_copy_back_is_waited_for_and_its_memory_is_free_before(lanes: CudaLanes) -> None:
    leaf = torch.ones(1 << 20, device="cuda", requires_grad=True)
    with offload.to_host(min_bytes=1):
        y = (leaf * 3).square()
    torch.cuda._sleep(CYCLES)
    busy = torch.full((1 << 20,), 5.0, device="cuda")
    total = busy.sum()  # reads memory that a reload may get
    del busy
    with torch.cuda.stream(lanes.stream("h2d")):
        torch.cuda._sleep(10 * CYCLES)
    y.sum().backward()
    assert total.item() == 5 * (1 << 20)
    assert torch.equal(leaf.grad, torch.full_like(leaf, 18.0))


def test_buffers_are_pinned_and_device_memory_is_let_go(lanes: CudaLanes) -> None:
    assert pinned(1 << 20).is_pinned()
    net = model()
    step(net, offload.to_host(min_bytes=1))  # warm up
    held = {}
    for name, scope in (("resident", offload.disabled()), ("moved", offload.to_host(min_bytes=1))):
        torch.cuda.synchronize()
        x = torch.randn(512, 256, device="cuda", requires_grad=True)
        before = torch.cuda.memory_allocated()
        with scope:
            y = net(x)
        held[name] = torch.cuda.memory_allocated() - before
        y.sum().backward()
        del x, y
        net.zero_grad()
    # what stays is the output, which the caller holds
    assert held["moved"] < held["resident"] / 10


def test_nothing_waits_on_the_host(
    no_synchronisation: Callable[[], AbstractContextManager[None]],
) -> None:
    net = model()
    scope = offload.to_host(min_bytes=1)
    step(net, scope)
    x = torch.randn(512, 256, device="cuda", requires_grad=True)
    with no_synchronisation():
        with scope:
            y = net(x)
        y.sum().backward()


def test_a_tensor_read_on_two_streams_comes_back_for_each() -> None:
    side = torch.cuda.Stream()
    leaf = torch.ones(1 << 16, device="cuda", requires_grad=True)
    with offload.to_host(min_bytes=1) as scope:
        h = leaf * 3
        y = h.square()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z = h.sin()
        torch.cuda.current_stream().wait_stream(side)
        total = (y + z).sum()
    del h
    total.backward()
    expected = 3 * (6.0 + torch.full((1 << 16,), 3.0, device="cuda").cos())
    assert torch.allclose(leaf.grad, expected)
    assert scope.report().moved_count >= 1


def test_cpu_tensors_stay_beside_cuda_ones() -> None:
    with offload.to_host(min_bytes=1) as scope:
        y = torch.ones(4, device="cuda", requires_grad=True) * 2
        y.sin().sum().backward()
        torch.ones(4, requires_grad=True).sin()
    assert "on the CPU, in a scope that moves from CUDA" in {
        e.reason for e in scope.report().entries
    }


def test_backward_inside_the_scope_stands_aside_in_autograds_thread() -> None:
    x = torch.randn(64, device="cuda", requires_grad=True)
    with offload.to_host(min_bytes=1) as scope:
        torch.utils.checkpoint.checkpoint(
            lambda t: t.sin().exp(), x * 1, use_reentrant=True
        ).sum().backward()
    assert "inside backward" in {e.reason for e in scope.report().entries}


def test_writes_in_place_are_seen() -> None:
    x = torch.ones(64, device="cuda", requires_grad=True)
    with offload.to_host(min_bytes=1):
        h = x * 2
        y = h.sin()
        h.add_(1)
    with pytest.raises(InPlaceError):
        y.sum().backward()


def test_graph_capture_is_left_alone() -> None:
    x = torch.ones(64, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(x.sin().sum(), x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), offload.to_host(min_bytes=1) as scope:
        (grad,) = torch.autograd.grad(x.sin().sum(), x)
    graph.replay()
    assert torch.equal(grad, x.cos())
    assert {e.reason for e in scope.report().entries} == {"CUDA graph capture"}


def captured(net: nn.Module, x: Tensor, scope: Any) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    """A whole training step as a graph, and where its results are."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), scope:
        for _ in range(3):
            net.zero_grad()
            net(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    net.zero_grad()
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), scope:
        y = net(x)
        y.square().sum().backward()
    return graph, [y.detach(), x.grad, *(p.grad for p in net.parameters())]


def test_a_captured_step_offloads_and_replays_exactly() -> None:
    """Gradients, with new data at every replay and eager steps in between."""
    net = model()
    policy = offload.Policy(min_bytes=1)
    scheduler = offload.Scheduler(net, "*", policy=policy, lag=1)
    x, twin_x = (torch.zeros(512, 256, device="cuda", requires_grad=True) for _ in range(2))
    graph, found = captured(net, x, scheduler)
    moved = scheduler.report().moved_bytes
    other = model()
    plain, expected = captured(other, twin_x, contextlib.nullcontext())
    assert moved > 4 * 4 * 512 * 256 * 4
    for seed in range(4):
        torch.manual_seed(seed)
        data = torch.randn(512, 256, device="cuda")
        for static, run in ((x, graph), (twin_x, plain)):
            with torch.no_grad():
                static.copy_(data)
            torch.cuda._sleep(CYCLES)
            run.replay()
        assert all(map(torch.equal, found, expected))
        with scheduler:
            step(net, contextlib.nullcontext())
