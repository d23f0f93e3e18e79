"""What benchmarks share: what ran them, timing in turn, captured graphs, memory held, time by kernel."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import metadata
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fuseops as fo
from fuseops.kernels import configs

Call = Callable[[], Any]
T = TypeVar("T")


def environment() -> dict[str, Any]:
    """What the figures belong to: when they were measured, and with what."""
    found = {
        "date": datetime.date.today().isoformat(),
        "fuseops": fo.__version__,
        "python": platform.python_version(),
        **configs.versions(),
    }
    if not torch.cuda.is_available():
        return found | {"cpu": f"{platform.machine()}, {os.cpu_count()} cores"}
    device = torch.cuda.get_device_properties(0)
    return found | {"gpu": device.name, "sms": device.multi_processor_count}


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def rnd(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(scale)


def training_step(forward: Call, dy: Tensor, leaves: Iterable[Tensor]) -> Call:
    """Forward and backward; gradients are made anew every time."""

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(dy)

    return step


def inference(forward: Call) -> Call:
    def step() -> Any:
        with torch.no_grad():
            return forward()

    return step


def captured(call: Call) -> Call:
    """A CUDA graph of the call, which has run before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


Rounds = dict[str, list[float]]  # microseconds of a call, by candidate, in each round


def in_rounds(timers: Mapping[str, Callable[[], T]], rounds: int, heat: int) -> dict[str, list[T]]:
    """What each timer gives, once in every round, in `balanced` order. The first `heat` rounds only heat."""
    found: dict[str, list[T]] = {name: [] for name in timers}
    names, orders = list(timers), balanced(len(timers))
    for i in range(heat + rounds):
        for name in (names[place] for place in orders[i % len(orders)]):
            reading = timers[name]()
            if i >= heat:
                found[name].append(reading)
    return found


def in_turn(calls: dict[str, Call], rounds: int, repeat: int) -> Rounds:
    """Microseconds of a call, hot: as many calls to warm up as are timed.

    A GPU at its power limit owes its clock to what ran before: an H200 that was idle for 30 ms runs the next
    40 ms up to 12 % faster, then slower than it settles at, and goes on swinging by 3 % for 0.3 to 0.6 s. So nobody
    follows the same candidate in every round, the GPU has work when the one before ends, the clock starts late, and a
    first round only heats. Medians of rounds of 0.1 s came out 4 % apart, of 0.35 s less than 1 %.
    """
    end = torch.cuda.Event()

    def span(call: Call) -> tuple[Any, Any]:
        nonlocal end
        call()
        end.synchronize()  # from here on the host is no further ahead than it gets by itself
        for _ in range(repeat):
            call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeat):
            call()
        end.record()
        return start, end

    spans = in_rounds({name: partial(span, call) for name, call in calls.items()}, rounds, heat=1)
    end.synchronize()
    return {
        name: [start.elapsed_time(end) * 1e3 / repeat for start, end in found]
        for name, found in spans.items()
    }


def hot(calls: dict[str, Call], span: float, rounds: int = 6) -> dict[str, float]:
    """Median microseconds of each `in_turn`, all of them timed for `span` seconds, at least one call a round."""
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    each = time.perf_counter() - begun
    repeat = min(max(round(span / (rounds * each)), 1), 100)
    return {name: statistics.median(us) for name, us in in_turn(calls, rounds, repeat).items()}


def balanced(n: int) -> list[list[int]]:
    """Orders of n things, in which everyone stands at every place, and comes after every other, equally often
    (E. J. Williams, Australian Journal of Scientific Research A 2, 1949): n orders, of odd n twice as many.
    """
    zigzag = [(k + 1) // 2 if k % 2 else n - k // 2 for k in range(n)]  # 0, 1, n - 1, 2, n - 2, ...
    rows = [[(first + z) % n for z in zigzag] for first in range(n)]
    return rows if n % 2 == 0 else rows + [row[::-1] for row in rows]


def medians(us: Rounds) -> dict[str, float]:
    return {name: round(statistics.median(found), 1) for name, found in us.items()}


def paired(mine: list[float], peer: list[float], digits: int = 3) -> dict[str, Any]:
    """How many times as fast as the peer: the median of the ratios of the rounds that both ran, and its interval."""
    ratios = [theirs / ours for theirs, ours in zip(peer, mine, strict=False)]
    return {
        "ratio": round(statistics.median(ratios), digits),
        "interval": [round(end, digits) for end in median_interval(ratios)],
    }


def repeats(flops: int, seconds: float) -> int:
    """How many calls of so many flops fill the time, at 600 TFLOP/s."""
    return max(round(seconds / flops * 6e14), 1)


def held_bytes(forward: Call) -> int:
    """Bytes that a forward leaves allocated for its backward, beyond its inputs and its output."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = forward()
    held = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
    del y
    return held


def peak_bytes(step: Call, leaves: Iterable[Tensor]) -> int:
    """Bytes that a training step allocates at the most, new gradients of the leaves too."""
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def kernels(step: Call, steps: int = 5) -> list[dict[str, Any]]:
    """Every kernel of a step in order, with its median microseconds; those above 5 us.

    The first step under the profiler waits for it to start, and is not counted.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps + 1):
            step()
        torch.cuda.synchronize()
    events = [e for e in found.events() if e.device_type.name == "CUDA"]
    events.sort(key=lambda e: e.time_range.start)
    each = len(events) // (steps + 1)
    del events[:each]
    listed = []
    for place in range(each):
        same = events[place::each]
        us = statistics.median(e.time_range.elapsed_us() for e in same)
        if us > 5:
            name = re.sub(r"[^A-Za-z0-9_:<>, ]", "", same[0].name)[:100]
            listed.append({"kernel": name, "us": round(us, 1)})
    span = events[-1].time_range.end - events[0].time_range.start
    busy = sum(e.time_range.elapsed_us() for e in events)
    total = {"launches": each, "us": round(busy / steps, 1), "span_us": round(span / steps, 1)}
    return [*listed, {"kernel": "all", **total}]


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Frobenius norm of the difference over that of the exact value; NaN is infinite."""
    error = (got.to(exact.dtype) - exact).norm() / exact.norm().clamp_min(1e-30)
    return math.inf if error.isnan() else error.item()


def median_interval(values: Iterable[float], level: float = 0.95) -> tuple[float, float]:
    """Between which two of the values the median of what they were drawn from lies, with that
    probability at least, whatever the distribution: of n fair coins, no more than k heads. Below six
    values the least and the greatest, which are less sure.
    """
    found = sorted(values)
    n, k, outside = len(found), 0, 1.0
    while 2 * (outside + math.comb(n, k + 1)) <= (1 - level) * 2**n:
        k += 1
        outside += math.comb(n, k)
    return found[k], found[n - 1 - k]


def geomean(values: Iterable[float]) -> float:
    return round(math.exp(statistics.fmean(map(math.log, values))), 3)


@contextlib.contextmanager
def fresh_memory() -> Any:
    """Frees what a cell held, compiled code and its graphs included."""
    try:
        yield
    finally:
        torch._dynamo.reset()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def run_cells(
    options: argparse.Namespace,
    report: dict[str, Any],
    cell: Callable[[str], dict[str, Any]],
    summary: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    """One cell for each name of `options.only` within `options.budget` seconds, printed, and written to
    `options.out` after each: a run that is cut off leaves what it has.
    """
    begun = time.perf_counter()
    report |= {"cells": {}, "skipped": []}
    torch.manual_seed(0)
    for name in options.only:
        if time.perf_counter() - begun > options.budget:
            report["skipped"].append(name)
            continue
        try:
            with fresh_memory():
                record = cell(name)
        except Exception as error:  # reported, not hidden
            record = {"failed": f"{type(error).__name__}: {error}"[:500]}
        report["cells"][name] = record
        shown = {k: v for k, v in record.items() if k != "kernels"}
        print(f"{time.perf_counter() - begun:.0f} s", name, json.dumps(shown), flush=True)
        report["summary"] = summary(report["cells"])
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["summary"]))


def add_options(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """What every benchmark of cells is told."""
    names = list(names)
    parser.add_argument("--only", nargs="*", default=names, choices=names)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--span", type=float, default=0.3, help="seconds timed of a candidate in a round"
    )
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; no new cell after it")
    parser.add_argument("--graphs", action="store_true", help="captured graphs beside eager")
    parser.add_argument("--profile", action="store_true", help="time by kernel")
    parser.add_argument("--warm", action="store_true", help="compile and check, time nothing")
