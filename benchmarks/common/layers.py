"""What the benchmarks of layers share: steps, captured graphs, memory held, time by kernel."""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fuseops.explain import FusionPlan

from . import measure
from .measure import Call


def training_step(forward: Call, dy: Tensor, leaves: Iterable[Tensor]) -> Call:
    """Forward and backward; gradients are made anew every time."""

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        forward().backward(dy)

    return step


def results(forward: Call, dy: Tensor, leaves: Iterable[Tensor]) -> list[Any]:
    """y, and the gradients of all leaves, which keep none."""
    leaves = list(leaves)
    training_step(forward, dy, leaves)()
    grads = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return [forward().detach(), *grads]


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


def active_bytes(step: Call) -> int:
    """Bytes that live at once in a step, at the most, beyond those that are there before it: what plans count."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    step()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["active_bytes.all.peak"] - before


def kernels(step: Call, steps: int = 5, least: float = 5.0) -> list[dict[str, Any]]:
    """Every kernel of a step in order, with its median microseconds; those above `least`.

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
        if us > least:
            name = re.sub(r"[^A-Za-z0-9_:<>, ]", "", same[0].name)[:100]
            listed.append({"kernel": name, "us": round(us, 1)})
    span = events[-1].time_range.end - events[0].time_range.start
    busy = sum(e.time_range.elapsed_us() for e in events)
    total = {"launches": each, "us": round(busy / steps, 1), "span_us": round(span / steps, 1)}
    return [*listed, {"kernel": "all", **total}]


def memory(
    plan: FusionPlan, forwards: Mapping[str, Call], steps: Mapping[str, Call],
    leaves: Iterable[Tensor], given: Iterable[Tensor],
) -> dict[str, Any]:  # fmt: skip
    """Bytes that each candidate holds and takes, and how near the plan of ours came.

    given: what the plan counts, but is there before the step
    """
    leaves = list(leaves)
    saved = {name: held_bytes(forward) for name, forward in forwards.items()}
    peak = {name: peak_bytes(step, leaves) for name, step in steps.items()}
    real = peak["fuseops"] + sum(t.nbytes for t in given)
    return {
        "plan_saved_bytes": plan.saved_bytes,
        "plan_peak_bytes": plan.peak_bytes,
        "saved_bytes": saved,
        "peak_bytes": peak,
        "plan_peak_over_real": round(plan.peak_bytes / real, 4),
    }


def times(
    forwards: Mapping[str, Call], steps: Mapping[str, Call], graphs: Iterable[str], flops: int,
    ratios: Callable[[measure.Rounds], dict[str, Any]], options: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Microseconds, TFLOP/s and ratios of the forward and of the training step.

    graphs: candidates that run as captured graphs too, if `options` ask for it; flops: of a forward
    """
    found: dict[str, Any] = {"us": {}, "tflops": {}, "ratios": {}}
    forward = {name: inference(call) for name, call in forwards.items()}
    timed = {"fwd": (forward, flops), "fwd+bwd": (steps, 3 * flops)}
    for what in options.what:
        calls, work = timed[what]
        if options.graphs:
            calls = {**calls, **{f"{name}_graph": captured(calls[name]) for name in graphs}}
        us = measure.in_turn(calls, options.rounds, options.span)
        found["us"][what] = measure.medians(us)
        found["tflops"][what] = {
            name: round(work / t / 1e6) for name, t in found["us"][what].items()
        }
        found["ratios"][what] = ratios(us)
        del calls  # and the memory of its graphs
    return found
