"""Every memory-bound kernel beside torch.compile, Liger-Kernel and eager torch, as a share of copy
bandwidth.

    python benchmarks/memory_bound.py --out benchmarks/results/memory_bound_h200.json [--only
    rmsnorm] [--tune]

Bandwidth: candidates are captured into CUDA graphs over rotated buffers (together larger than L2,
so nothing is L2-hot) and replayed round robin, order rotated each round; medians. ``copy`` moves the
same bytes in the same run: the faster of an elementwise kernel and the driver's copy, which at some
sizes loses a third of the bandwidth. Small shapes: microseconds a call, eager on the host and under graph
replay. A case whose results differ from its reference is reported as wrong, without times.
``--tune`` first writes the fastest configurations of this GPU to the user's cache; ``--warm 0/4`` only
compiles every fourth case, so that four processes fill the compilers' caches. ``launch_us`` is what a
graph takes for a kernel that does nothing; the floor of a case is the copy, and one of these for each
launch beyond the first: that of route and the router is made of little else.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import torch
from memory_cases import Call, Case, cases
from torch.utils._pytree import tree_leaves

from fuseops.kernels import configs
from fuseops.kernels.launch import recording
from fuseops.kernels.registry import arch_of

SMALL_ROWS = (64, 256, 1024)
SMALL_CASES = (
    "swiglu_fwd", "scaled_swiglu_bwd", "bias_bwd", "rmsnorm_fwd", "rmsnorm_bwd", "quantize_rows",
    "quantize_tensor", "quantize_1x128_both",
)  # fmt: skip
FOOTPRINT = 400 << 20


def candidates(case: Case) -> dict[str, Call | str]:
    """Name -> call on the arguments, or why the peer is absent."""
    found: dict[str, Call | str] = {"fuseops": case.op}
    found["eager"] = case.eager or case.op.twin
    found["compile"] = torch.compile(case.op.twin, fullgraph=True, dynamic=False)
    try:
        found["liger"] = case.liger() if case.liger else "no such kernel"
    except ImportError as error:
        found["liger"] = f"not installed: {error}"
    return found


def wrong(case: Case, args: tuple) -> str | None:
    """Why the kernel's result may not be timed, or None."""
    for got, want in zip(
        tree_leaves(case.op.launcher(*args)), tree_leaves(case.op.twin(*args)), strict=True
    ):
        if got.shape != want.shape or got.dtype != want.dtype:
            return f"gives {got.dtype}{tuple(got.shape)}, expected {want.dtype}{tuple(want.shape)}"
        if got.numel():
            got, want = got.float(), want.float()
            error = ((got - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()
            if not error < 0.02:
                return f"relative error {error:.2g}"
    return None


class Replay:
    """A candidate captured over rotated buffers; ``time()`` gives microseconds a call."""

    def __init__(self, call: Call, sets: list[tuple]) -> None:
        for _ in range(2):
            kept = [call(*args) for args in sets[:2]]
        torch.cuda.synchronize()
        self.graph, self.calls = torch.cuda.CUDAGraph(), len(sets)
        with torch.cuda.graph(self.graph):
            kept = [call(*args) for args in sets]
        self.kept = kept
        self.graph.replay()

    def time(self) -> float:
        """The second of two replays: each candidate meets the L2 that it left itself, and pays for its
        own writes only.
        """
        self.graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / self.calls


def round_robin(replays: dict[str, Replay], rounds: int) -> dict[str, list[float]]:
    """Times of every candidate, one each in every round, in rotated order; two rounds for one that
    takes ten times as long as the fastest.
    """
    times: dict[str, list[float]] = {name: [] for name in replays}
    names = list(replays)
    for i in range(rounds + 2):
        if i == 4:
            fastest = min(map(min, times.values()))
            names = [name for name in names if min(times[name]) < 10 * fastest]
        for name in names[i % len(names) :] + names[: i % len(names)]:
            taken = replays[name].time()
            if i >= 2:
                times[name].append(taken)
    return times


def launches(case: Case, args: tuple) -> int:
    """How many kernels a call launches."""
    with recording(arch_of(torch.device("cuda", 0))) as recorder:
        case.op.launcher(*args)
    return len(recorder.launches)


def bandwidth(case: Case, rows: int, n: int, rounds: int, launch_us: float) -> dict[str, Any]:
    """One case at one shape: microseconds of every candidate and the share of copy bandwidth."""
    first = (*case.make(rows, n), *case.tail)
    problem = wrong(case, first)
    record: dict[str, Any] = {"case": case.name, "rows": rows, "columns": n}
    if problem:
        return record | {"wrong": problem}
    nbytes = case.op.nbytes(*first)
    count = max(3, -(-FOOTPRINT // nbytes))
    sets = [first, *((*case.make(rows, n), *case.tail) for _ in range(count - 1))]
    replays, absent = {}, {}
    for name, call in candidates(case).items():
        try:
            if isinstance(call, str):
                absent[name] = call
            else:
                slow = name == "eager" and case.eager is None  # the twin: more than L2 in two sets
                replays[name] = Replay(call, sets[:2] if slow else sets)
        except Exception as error:  # a peer that cannot run is reported, not hidden
            torch.cuda.synchronize()
            absent[name] = f"{type(error).__name__}: {str(error)[:200]}"
    source = [
        torch.empty(nbytes // 16, dtype=torch.int64, device="cuda").random_() for _ in range(count)
    ]
    for name, copy in (("memcpy", torch.clone), ("copy_kernel", torch.bitwise_not)):
        replays[name] = Replay(copy, [(s,) for s in source])
    times = round_robin(replays, rounds)
    medians = {name: statistics.median(t) for name, t in times.items()}
    quartiles = {name: statistics.quantiles(t, n=4)[::2] for name, t in times.items()}
    ours = medians.get("fuseops")
    faster = [
        peer
        for peer in ("eager", "compile", "liger")
        if ours and peer in times and medians[peer] < quartiles["fuseops"][0]
    ]
    medians["copy"] = min(medians["memcpy"], medians["copy_kernel"])
    kernels = launches(case, first)
    floor = medians["copy"] + (kernels - 1) * launch_us
    return record | {
        "bytes": nbytes,
        "launches": kernels,
        "us": {name: round(us, 2) for name, us in medians.items()},
        "quartiles_us": {name: [round(v, 2) for v in q] for name, q in quartiles.items()},
        "gb_s": ours and round(nbytes / ours / 1e3),
        "share_of_copy": ours and round(medians["copy"] / ours, 3),
        "share_of_floor": ours and round(floor / ours, 3),
        "bar": 0.75 if case.name.endswith("_both") else 0.9,
        "faster_peers": faster,
        "absent": absent,
    }


def small(case: Case, rows: int, n: int) -> dict[str, Any]:
    """Launch cost: microseconds a call on the host (no waiting) and under graph replay."""
    args = (*case.make(rows, n), *case.tail)
    record: dict[str, Any] = {
        "case": case.name,
        "rows": rows,
        "columns": n,
        "host_us": {},
        "graph_us": {},
    }
    for name, call in candidates(case).items():
        if isinstance(call, str):
            continue
        try:
            for _ in range(5):
                call(*args)
            spans = []
            for _ in range(5):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(50):
                    call(*args)
                spans.append((time.perf_counter() - start) / 50 * 1e6)
            record["host_us"][name] = round(statistics.median(spans), 1)
            replay = Replay(call, [args] * 20)
            record["graph_us"][name] = round(statistics.median(replay.time() for _ in range(7)), 2)
        except Exception as error:
            record["host_us"][name] = f"{type(error).__name__}: {str(error)[:100]}"
    return record


def warm(case: Case, rows: int, n: int) -> None:
    """Compile what ``bandwidth`` will call."""
    args = (*case.make(rows, n), *case.tail)
    for name, call in candidates(case).items():
        if not isinstance(call, str) and name != "eager":
            with contextlib.suppress(Exception):  # reported when it is timed
                call(*args)


def launch_us() -> float:
    """Microseconds of a kernel that has nothing to do, in a graph of them."""
    nothing = torch.zeros(1, dtype=torch.int64, device="cuda")
    replay = Replay(torch.bitwise_not, [(nothing,)] * 100)
    return round(statistics.median(replay.time() for _ in range(9)), 2)


def tune(case: Case, rows: int, n: int) -> dict[str, Any]:
    """Store the fastest configuration of every kernel of this case."""
    sets = [(*case.make(rows, n), *case.tail) for _ in range(4)]

    def time_us(_: Callable[[], Any]) -> float:
        replay = Replay(case.op, sets)
        return statistics.median(replay.time() for _ in range(5))

    return configs.tune(lambda: case.op(*sets[0]), time_us)


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """What is wrong, below its bar, or slower than a peer."""
    cells = {f"{r['case']} {r['rows']}x{r['columns']}": r for r in report["bandwidth"]}
    timed = {name: r for name, r in cells.items() if "us" in r}
    shares = {name: r["share_of_copy"] or 0.0 for name, r in timed.items()}
    return {
        "cells": len(cells),
        "wrong": {name: r["wrong"] for name, r in cells.items() if "wrong" in r},
        "below_bar": {n: s for n, s in shares.items() if s < timed[n]["bar"]},
        "faster_peers": {name: r["faster_peers"] for name, r in timed.items() if r["faster_peers"]},
        "skipped": len(report["skipped"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("memory_bound.json"))
    parser.add_argument("--only", default="", help="cases whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--budget", type=float, default=420.0, help="seconds after which no new case is begun"
    )
    parser.add_argument(
        "--tune", action="store_true", help="tune this GPU first and keep the result in its cache"
    )
    parser.add_argument("--warm", metavar="I/N", help="compile case I of every N, time nothing")
    options = parser.parse_args()
    begun = time.perf_counter()
    parts = options.only.split(",")
    chosen = [case for case in cases() if any(part in case.name for part in parts)]
    large = [(c, s) for c in chosen for s in c.shapes]
    few = [(c, (r, 4096)) for c in chosen if c.name in SMALL_CASES for r in SMALL_ROWS]
    if options.warm:
        first, every = map(int, options.warm.split("/"))
        for case, shape in (large + few)[first::every]:
            torch.compiler.reset()
            warm(case, *shape)
            torch.cuda.empty_cache()
        return
    report: dict[str, Any] = {
        "environment": measure.environment(), "launch_us": launch_us(), "summary": {}, "skipped": [],
        "bandwidth": [], "small": [], "tuned": {},
    }  # fmt: skip
    timed = functools.partial(bandwidth, rounds=options.rounds, launch_us=report["launch_us"])
    work: list[tuple] = [("tuned", tune, *cell) for cell in large if options.tune]
    work += [("bandwidth", timed, *cell) for cell in large] + [
        ("small", small, *cell) for cell in few
    ]
    for place, cell, case, shape in work:
        if time.perf_counter() - begun > options.budget:
            report["skipped"].append([place, case.name, *shape])
            continue
        torch.compiler.reset()
        result = cell(case, *shape)
        if place == "tuned":
            report[place].update(result)
        else:
            report[place].append(result)
            print(json.dumps(result), flush=True)
        torch.cuda.empty_cache()
        save(report, options.out)
    save(report, options.out)
    print(f"{time.perf_counter() - begun:.0f} s", json.dumps(report["summary"]))


def save(report: dict[str, Any], out: Path) -> None:
    """After each case: a run that is cut off leaves what it has."""
    report["summary"] = summary(report)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
