"""The lanes of CUDA without a GPU: streams that are queues of host memory, late wherever no wait forces them."""

import contextlib
import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuseops as fo
from fuseops import offload, torch_private
from fuseops.offload.lanes import cuda, devices
from fuseops.offload.lanes.cuda import CudaLanes
from fuseops.offload.scopes import IN_FLIGHT

CPU = torch.device("cpu")


class Stream:
    """A stream does what it is given when somebody waits for it; the one that computes, at once."""

    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.given: list[Callable[[], None]] = []
        self.done = 0

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.given[self.done - 1]()

    def give(self, work: Callable[[], None]) -> None:
        self.given.append(work)
        if not self.cuda_stream:
            self.run(len(self.given))


class Native:
    """An event stands for what a stream had been given when it was recorded last."""

    point: tuple[Stream, int]


class Driver:
    """Counts what the driver is asked for, by name and stream (0 computes, 1 goes out, 2 comes back)."""

    def __init__(self) -> None:
        self.streams = [Stream(number) for number in range(3)]
        self.calls: Counter[tuple[str, int]] = Counter()

    def event(self) -> Native:
        self.calls["event", 0] += 1
        return Native()

    def record(self, event: Native, stream: Stream) -> None:
        self.calls["record", stream.cuda_stream] += 1
        event.point = stream, len(stream.given)

    def wait(self, event: Native, stream: Stream) -> None:
        self.calls["wait", stream.cuda_stream] += 1
        other, until = event.point
        stream.give(partial(other.run, until))

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> int:
        self.calls["copy", stream] += 1
        self.streams[stream].give(partial(ctypes.memmove, target, source, nbytes))
        return 0


@contextlib.contextmanager
def driven() -> Iterator[Driver]:
    """Inside, tensors of the CPU are offloaded by the lanes of CUDA."""
    driver = Driver()
    _, out, back = driver.streams
    replaced = (
        (torch_private, "record_event", driver.record),
        (torch_private, "wait_event", driver.wait),
        (torch_private, "current_stream", lambda index: (0, 0, 1)),
        (torch_private, "current_device", lambda: 0),
        (torch_private, "is_capturing", lambda: False),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "Stream", lambda **number: driver.streams[number["stream_id"]]),
        (torch.cuda, "synchronize", lambda device: None),
        (torch.cuda, "Event", driver.event),
        (cuda, "copy_streams", lambda device: {"d2h": out, "h2d": back}),
        (cuda, "memcpy", lambda: driver.copy),
        (cuda, "pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)),
        (cuda, "unpin", lambda device, regions: None),
        (devices, "CpuLanes", lambda budget: CudaLanes(CPU, budget)),
    )
    with pytest.MonkeyPatch.context() as patch:
        for where, name, value in replaced:
            patch.setattr(where, name, value)
        devices.lanes_of.cache_clear()
        yield driver
    devices.lanes_of.cache_clear()


@pytest.fixture
def driver() -> Iterator[Driver]:
    with driven() as driver:
        yield driver


def linears(n: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [fo.Sequential(*(fo.ops.Linear(24, 24) for _ in range(2))) for _ in range(n)]
    return nn.Sequential(*blocks)


def step(net: nn.Module, scope: Any) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(16, 24, requires_grad=True)
    net.zero_grad()
    with scope:
        y = net(x).square().sum()
        torch.full((16, 24), float("nan"))  # would lie in what was let go too early
    y.backward()
    return [y.detach(), *(t.grad.clone() for t in (x, *net.parameters()) if t.grad is not None)]


@pytest.mark.parametrize("small", [0, 1 << 30])
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_late_copies_change_nothing(driver: Driver, lag: int, small: int) -> None:
    net = linears(4)
    resident = step(net, offload.disabled())
    policy = offload.Policy(min_bytes=1)
    with offload.Scheduler(net, "*", policy=policy, lag=lag) as scheduler:
        scheduler._scope.mover.schedule.small = small
        for _ in range(5):
            assert all(map(torch.equal, resident, step(net, contextlib.nullcontext())))
    assert dict(scheduler.report().schedule)["back_count"] > 0
    scope = offload.to_host(min_bytes=1)
    for _ in range(5):
        assert all(map(torch.equal, resident, step(net, scope)))
    assert driver.calls["copy", 1] and driver.calls["copy", 2]


@pytest.mark.parametrize("small", [0, 1 << 30])
def test_what_a_layer_moves_shares_events(driver: Driver, small: int) -> None:
    """Of two storages a layer. Small ones share what is on the host, too, and come back by one copy."""
    net, policy = linears(8), offload.Policy(min_bytes=1)
    with offload.Scheduler(net, "*", policy=policy, lag=1) as scheduler:
        scheduler._scope.mover.schedule.small = small
        for _ in range(3):
            before = driver.calls.copy()
            step(net, contextlib.nullcontext())
    asked = driver.calls - before
    layers = asked["copy", 1] / 2
    assert layers >= 5 and asked["copy", 0] == 0
    assert asked["copy", 2] == (layers if small else 2 * layers)
    assert asked["record", 2] == asked["wait", 2] == layers
    assert asked["record", 1] == asked["wait", 1] == layers


def test_a_moved_tensor_asks_the_driver_for_little(driver: Driver) -> None:
    """Of two models, what the longer one asks for beyond the shorter, a tensor that is moved: two are saved together,
    and share all but their copies out.
    """
    scope, asked, moved = offload.to_host(min_bytes=1), [], []
    for n in (8, 16):
        net = linears(n)
        for _ in range(3):
            for mover in scope._movers.values():  # type: ignore[attr-defined]
                mover.schedule.lag = IN_FLIGHT
            before, out = driver.calls.copy(), scope.report().moved_count
            step(net, scope)
        asked.append(driver.calls - before)
        moved.append(scope.report().moved_count - out)
    each = {call: n / (moved[1] - moved[0]) for call, n in (asked[1] - asked[0]).items()}
    assert each == {
        **{("record", 0): 1, ("record", 1): 0.5, ("record", 2): 0.5},
        **{("wait", 0): 1, ("wait", 1): 0.5, ("wait", 2): 0.5},
        **{("copy", 1): 1, ("copy", 2): 0.5},
    }
