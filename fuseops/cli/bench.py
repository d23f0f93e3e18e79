"""`fuseops bench`: time a training step of a model fused, unfused and as plain torch, in interleaved
rounds.

Without a target it measures the Python overhead of a Sequential: eight Linear(16, 16), against
`nn.Sequential`.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fuseops.explain.charts import ChartBar, bar_chart
from fuseops.layers.sequential import Sequential
from fuseops.observe.memory import tensors_in
from fuseops.ops import Linear
from fuseops.run.config import fusion, reference
from fuseops.words import plural

from .target import Target, add_target, load, writing
from .terminal import (
    ProgressCallback,
    file_option,
    number_option,
    print_json,
    print_table,
    progress,
    threads,
)

Step = Callable[[], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser, instead="eight small Linears")
    number_option(parser, "--rounds", "rounds; each times every way once", 20)
    number_option(parser, "--calls", "training steps of each way in a round", 10)
    number_option(
        parser, "--threads", "CPU threads of torch (default: torch's; 1 without a target)"
    )
    file_option(parser, "--plot", "draw the times to FILE, an SVG image")


def run(args: argparse.Namespace) -> int:
    with threads(args.threads or (None if args.target else 1)):
        target, others = (load(args.target), {}) if args.target else _overhead()
        steps = {**ways(target), **others}
        cuda = any(p.is_cuda for p in target.model.parameters())
        wait = torch.cuda.synchronize if cuda else lambda: None
        with progress("timing", quiet=args.json, lines=False) as report:
            times = measure(steps, args.rounds, args.calls, wait, report)
        thread_count = torch.get_num_threads()
    device = next((p.device for p in target.model.parameters()), torch.device("cpu"))
    title = f"{target.name} on {device}, {plural(thread_count, 'thread')}"
    if args.plot:
        _draw(title, times, args.plot)
    if args.json:
        print_json(
            "bench",
            target=target.name,
            device=str(device),
            threads=thread_count,
            rounds=args.rounds,
            microseconds=times,
            plot=args.plot and str(args.plot),
        )
        return 0
    print(f"{title}; microseconds, forward and backward")
    fastest = {name: f"{t['median'] / times['fused']['median']:.2f}" for name, t in times.items()}
    rows = [
        [n, *(f"{t[k]:.1f}" for k in ("median", "low", "high")), fastest[n]]
        for n, t in times.items()
    ]
    print_table([["way", "median", "25 %", "75 %", "fused = 1"], *rows])
    if device.type == "cpu":
        print("on a CPU every op is plain torch: what kernels and fusion gain shows on a GPU")
    if args.plot:
        print(f"wrote {args.plot}")
    return 0


def _draw(title: str, times: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draw a bar chart of the medians with quartiles."""
    kinds = {"fused": "ours", "unfused": "peer"}
    bars = [
        ChartBar(
            way, t["median"], f"{t['median']:.0f}", kinds.get(way, "other"), (t["low"], t["high"])
        )
        for way, t in times.items()
    ]
    note = "microseconds, forward and backward; medians with quartiles"
    with writing(path):
        path.write_text(bar_chart("A training step", note, {title: bars}, label_width=64), "utf-8")


def ways(target: Target) -> dict[str, Step]:
    """The training step under each of three settings."""
    scopes: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
        "fused": nullcontext,
        "unfused": lambda: fusion(False),
        "reference": reference,
    }
    return {name: training_step(target, scope) for name, scope in scopes.items()}


def training_step(
    target: Target, scope: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Step:
    """A function that runs the forward inside `scope`, and the backward of the sum of the outputs."""

    def step() -> None:
        with scope():
            output = target.model(*target.args, **target.side)
        outputs = [t for t in tensors_in(output) if t.requires_grad]
        if outputs:
            torch.autograd.backward([t.sum() for t in outputs])

    return step


def _overhead() -> tuple[Target, dict[str, Step]]:
    torch.manual_seed(0)
    ours = Sequential(*(Linear(16, 16) for _ in range(8)))
    plain = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(16, 16)
    target = Target("eight Linear(16, 16), batch 16", ours, (x,), {})
    return target, {"nn.Sequential": training_step(target._replace(model=plain), nullcontext)}


def measure(
    steps: Mapping[str, Step],
    rounds: int,
    calls: int,
    wait: Callable[[], None],
    report: ProgressCallback,
) -> dict[str, dict[str, float]]:
    """Median and quartiles of each step in microseconds; steps are interleaved, so that drift affects all alike.

    wait: synchronises the device.  report: called outside of the timed parts.
    """
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds):
        for name, step in steps.items():
            report(f"round {number + 1}, {name}", number, rounds)
            wait()
            start = time.perf_counter()
            for _ in range(calls):
                step()
            wait()
            times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: _quartiles(values) for name, values in times.items()}


def _quartiles(values: list[float]) -> dict[str, float]:
    low, median, high = (
        statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    )
    return {"median": round(median, 2), "low": round(low, 2), "high": round(high, 2)}
