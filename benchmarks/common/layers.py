"""What the benchmarks of layers share: steps, captured graphs, memory held, time by kernel, cells."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fuseops.explain import FusionPlan

from . import measure
from .measure import Call

BEGUN = time.perf_counter()


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
    summary: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    part: str = "cells",
    names: Iterable[str] | None = None,
) -> None:
    """One cell for each of `names` (of `options.only`) within `options.budget` seconds, printed, and written to
    `options.out` after each: a run that is cut off leaves what it has, and `--resume` goes on from there.
    """
    cells = report.setdefault(part, {})
    torch.manual_seed(0)
    for name in options.only if names is None else names:
        if name in cells and "failed" not in cells[name]:
            continue
        if time.perf_counter() - BEGUN > options.budget:
            report.setdefault("skipped", []).append(name)
            continue
        try:
            with fresh_memory():
                record = cell(name)
        except Exception as error:  # reported, not hidden
            record = {"failed": f"{type(error).__name__}: {error}"[:500]}
        cells[name] = record
        shown = {k: v for k, v in record.items() if k != "kernels"}
        print(f"{time.perf_counter() - BEGUN:.0f} s", name, json.dumps(shown), flush=True)
        if summary is not None:
            report["summary"] = summary(cells)
        write(report, options.out)
    print(json.dumps(report.get("summary", {})))


def write(report: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")


MACHINE = ("gpu", "torch", "triton", "liger-kernel", "transformers")  # of which one file speaks


def begin(options: argparse.Namespace, *peers: str) -> dict[str, Any]:
    """The report of a run: a new one, or with `--resume` what is in `options.out`.

    peers: packages beside, whose versions it names.  Raises SystemExit where that file is of another machine.
    """
    now = measure.environment(*peers)
    if not (options.resume and options.out and options.out.exists()):
        return {"environment": now}
    found: dict[str, Any] = json.loads(options.out.read_text())
    then = found["environment"]
    if others := [key for key in MACHINE if then.get(key) != now.get(key)]:
        said = ", ".join(f"{key} {then.get(key)}, here {now.get(key)}" for key in others)
        raise SystemExit(f"{options.out} was written with {said}: name another --out.")
    found.pop("skipped", None)
    found.setdefault("resumed", []).append(now["command"])
    return found


def main(
    doc: str | None,
    names: Iterable[str],
    cell: Callable[[str, argparse.Namespace], dict[str, Any]],
    summary: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    peers: Iterable[str] = (),
    more: Callable[[argparse.ArgumentParser], Any] = lambda parser: None,
) -> None:
    """The command line of a script that measures one cell for each of the names.

    doc: the script's.  peers: packages whose versions the file names.  more: adds options of its own
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    add_options(parser, names)
    more(parser)
    options = parser.parse_args()
    report = begin(options, *peers)
    run_cells(options, report, lambda name: cell(name, options), summary)


def add_options(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """What every benchmark of cells is told."""
    names = list(names)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=names, choices=names)
    add_run_options(parser)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """How long, and whether from the begin."""
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--span", type=float, default=0.3, help="seconds timed of a candidate in a round"
    )
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; no new cell after it")
    parser.add_argument("--resume", action="store_true", help="keep the cells that --out has")


def add_step_options(parser: argparse.ArgumentParser) -> None:
    """What benchmarks of training steps are told beside."""
    parser.add_argument("--what", nargs="+", default=["fwd", "fwd+bwd"], choices=("fwd", "fwd+bwd"))
    parser.add_argument("--graphs", action="store_true", help="captured graphs beside eager")
    parser.add_argument("--profile", action="store_true", help="time by kernel")
    parser.add_argument("--warm", action="store_true", help="compile and check, time nothing")
