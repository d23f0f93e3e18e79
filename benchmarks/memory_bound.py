"""Every memory-bound kernel beside torch.compile, Liger-Kernel and eager torch, as a share of copy
bandwidth.

    python benchmarks/memory_bound.py --out benchmarks/results/memory_bound_h200.json [--only rmsnorm]

Several processes compile all cases at once, which takes most of the time. Then the cases are timed one
after another, each in the process that compiled it, while the others wait for their turn.

Bandwidth: candidates are captured into CUDA graphs over rotated buffers (together larger than L2,
so nothing is L2-hot) and replayed in turn, in balanced order; medians. ``copy`` moves the
same bytes in the same run: the faster of an elementwise kernel and the driver's copy, which at some
sizes loses a third of the bandwidth. Our kernel is captured twice: the two differ in where their
results lie, which changes times by some tenths of a percent. ``ratios`` are a peer's time over ours, round by
round, of the capture that does better; a peer counts as faster where the 95 % interval of their median lies
below 1. Small shapes: microseconds a call, eager on the host and under graph replay, in turn. A case whose
results differ from its reference is reported as wrong, without times. ``--warm`` only fills the compilers' caches.
``mixed`` reads and writes the bytes of the case in its proportion, ``idle`` is its launches without work
(``floors.py``), ``launch_us`` one of one program; the floor of a case is ``mixed``, and one of these for each launch
beyond the first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import floors, measure, runs
from common.memory_cases import Call, Case, cases
from torch.utils._pytree import tree_leaves

from fuseops.kernels.launch import Launch, arch_of
from fuseops.kernels.replay import recording

SMALL_ROWS = (64, 256, 1024)
SMALL_CASES = (
    "swiglu_fwd", "scaled_swiglu_bwd", "bias_bwd", "rmsnorm_fwd", "rmsnorm_bwd",
    "quantize_vectors", "quantize_groups",
)  # fmt: skip
FOOTPRINT = 400 << 20
COMPILED = 64
"""Compiled forms of one function that a process keeps; torch's own limit is 8."""
Calls = dict[str, Call | str]


class Cell(NamedTuple):
    """One case at one shape, of one part of the report."""

    part: str
    case: Case
    shape: tuple[int, int]


def candidates(case: Case) -> Calls:
    """Name -> call on the arguments, or why the peer is absent."""
    found: Calls = {"fuseops": case.op}
    found["eager"] = case.eager or case.op.twin
    found["compile"] = torch.compile(case.compiled or case.op.twin, fullgraph=True, dynamic=False)
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
        return measure.elapsed_us(self.graph.replay) / self.calls


def timed(replays: dict[str, Replay], rounds: int) -> measure.Rounds:
    """Times of every candidate; two rounds for one that takes ten times as long as the fastest."""
    timers = {name: replay.time for name, replay in replays.items()}
    times = measure.in_rounds(timers, rounds=2, heat=2)
    slowest = 10 * min(map(min, times.values()))
    quick = {name: timer for name, timer in timers.items() if min(times[name]) < slowest}
    for name, more in measure.in_rounds(quick, rounds - 2, heat=0).items():
        times[name] += more
    return times


def over_peer(times: measure.Rounds, peer: str) -> dict[str, Any]:
    """How many times as fast as the peer the capture is that does better, by where its median lies."""
    ours = (times[name] for name in ("fuseops", "again") if name in times)
    return max((measure.paired(us, times[peer]) for us in ours), key=lambda r: r["interval"])


def launches(case: Case, args: tuple) -> list[Launch]:
    """The kernels that a call launches."""
    with recording(arch_of(torch.device("cuda", 0))) as recorder:
        case.op.launcher(*args)
    return recorder.launches


def bandwidth(
    case: Case, shape: tuple[int, int], calls: Calls, options: argparse.Namespace
) -> dict[str, Any]:
    """One case at one shape: microseconds of every candidate and the share of copy bandwidth."""
    rows, n = shape
    first = (*case.make(rows, n), *case.tail)
    problem = wrong(case, first)
    record: dict[str, Any] = {"case": case.name, "rows": rows, "columns": n}
    if problem:
        return record | {"wrong": problem}
    nbytes = case.op.nbytes(*first)
    count = max(3, -(-FOOTPRINT // nbytes))
    sets = [first, *((*case.make(rows, n), *case.tail) for _ in range(count - 1))]
    replays, absent = {}, {}
    for name, call in calls.items():
        try:
            if isinstance(call, str):
                absent[name] = call
            else:
                slow = name == "eager" and case.eager is None  # the twin: more than L2 in two sets
                replays[name] = Replay(call, sets[:2] if slow else sets)
        except Exception as error:  # a peer that cannot run is reported, not hidden
            torch.cuda.synchronize()
            absent[name] = f"{type(error).__name__}: {str(error)[:200]}"
    with contextlib.suppress(Exception):  # reported above
        replays["again"] = Replay(case.op, sets)
    half = (nbytes // 16,)
    source = [torch.empty(half, dtype=torch.int64, device="cuda").random_() for _ in range(count)]
    kernels = launches(case, first)
    written = sum(t.nbytes for t in tree_leaves(case.op.launcher(*first)))
    words = [(torch.cat([s, s]),) for s in source]
    for name, copy in (("memcpy", torch.clone), ("copy_kernel", torch.bitwise_not)):
        replays[name] = Replay(copy, [(s,) for s in source])
    replays["mixed"] = Replay(floors.mixed(max(nbytes - written, 0), written), words)
    replays["idle"] = Replay(floors.idle(kernels), words)
    times = timed(replays, options.rounds)
    medians = {name: statistics.median(t) for name, t in times.items()}
    quartiles = {name: statistics.quantiles(t, n=4)[::2] for name, t in times.items()}
    ours = medians.get("fuseops")
    peers = [name for name in calls if name in times and name != "fuseops" and ours]
    ratios = {peer: over_peer(times, peer) for peer in peers}
    medians["copy"] = min(medians["memcpy"], medians["copy_kernel"])
    floor = medians["mixed"] + (len(kernels) - 1) * options.launch_us
    return record | {
        "bytes": nbytes,
        "written": written,
        "launches": len(kernels),
        "us": {name: round(us, 2) for name, us in medians.items()},
        "quartiles_us": {name: [round(v, 2) for v in q] for name, q in quartiles.items()},
        "gb_s": ours and round(nbytes / ours / 1e3),
        "share_of_copy": ours and round(medians["copy"] / ours, 3),
        "share_of_floor": ours and round(floor / ours, 3),
        "bar": 0.75 if case.name.endswith("_both") else 0.9,
        "ratios": ratios,
        "faster_peers": [peer for peer, ratio in ratios.items() if ratio["interval"][1] < 1],
        "absent": absent,
    }


def small(
    case: Case, shape: tuple[int, int], calls: Calls, options: argparse.Namespace
) -> dict[str, Any]:
    """Launch cost: microseconds a call on the host (no waiting) and under graph replay."""
    args = (*case.make(*shape), *case.tail)
    host, graph, failed = {}, {}, {}
    for name, call in calls.items():
        if isinstance(call, str):
            continue
        try:
            for _ in range(5):
                call(*args)
            host[name] = partial(measure.host_us, partial(call, *args), 50)
            graph[name] = Replay(call, [args] * 20).time
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:100]}"
    names = {"case": case.name, "rows": shape[0], "columns": shape[1]}
    return names | {
        "host_us": measure.medians(measure.in_rounds(host, options.rounds, heat=0)) | failed,
        "graph_us": measure.medians(measure.in_rounds(graph, options.rounds, heat=0), digits=2),
    }


def compiled(cell: Cell) -> Calls:
    """The candidates of a cell, after a first call of those that compile something."""
    calls = candidates(cell.case)
    args = (*cell.case.make(*cell.shape), *cell.case.tail)
    for name, call in calls.items():
        if not isinstance(call, str) and name != "eager":
            with contextlib.suppress(Exception):  # reported when it is timed
                call(*args)
    return calls


def worker(pipe: Connection, mine: list[int], options: argparse.Namespace) -> None:
    """Compile some of the cells, then time those that are asked for, one at a time."""
    torch._dynamo.config.recompile_limit = COMPILED
    every, ready = cells(options), {}
    for number in mine:
        if time.time() < options.compile_until:
            ready[number] = compiled(every[number])
            torch.cuda.empty_cache()
    pipe.send(len(ready))
    for number in iter(pipe.recv, None):
        part, case, shape = every[number]
        calls = ready.get(number) or candidates(case)
        try:
            record = TIMED[part](case, shape, calls, options)
        except Exception as error:  # reported, not hidden
            why = f"{type(error).__name__}: {str(error)[:200]}"
            record = {"case": case.name, "rows": shape[0], "columns": shape[1], "wrong": why}
        torch.cuda.empty_cache()
        pipe.send(record)


TIMED = {"small": small, "bandwidth": bandwidth}


def launch_us() -> float:
    """Microseconds of a kernel that has nothing to do, in a graph of them."""
    nothing = torch.zeros(1, dtype=torch.int64, device="cuda")
    replay = Replay(torch.bitwise_not, [(nothing,)] * 100)
    return round(statistics.median(replay.time() for _ in range(9)), 2)


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


def cells(options: argparse.Namespace) -> list[Cell]:
    """What is still to be timed, in this order: small shapes, which take least, first."""
    parts = options.only.split(",")
    chosen = [case for case in cases() if any(part in case.name for part in parts)]
    few = [c for c in chosen if c.name in SMALL_CASES]
    every = [Cell("small", c, (rows, 4096)) for c in few for rows in SMALL_ROWS] + [
        Cell("bandwidth", c, shape) for c in chosen for shape in c.shapes
    ]
    return [c for c in every if [c.part, c.case.name, *c.shape] not in options.done]


def named(record: dict[str, Any]) -> list[Any]:
    return [record["case"], record["rows"], record["columns"]]


def main() -> None:
    parser = runs.parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("memory_bound.json"))
    parser.add_argument("--only", default="", help="cases whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--budget", type=float, default=420.0, help="seconds after which no new case is begun"
    )
    parser.add_argument(
        "--jobs", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile"
    )
    parser.add_argument("--warm", action="store_true", help="compile, time nothing")
    parser.add_argument("--resume", action="store_true", help="keep the cases that --out has")
    options = parser.parse_args()
    options.compile_until = time.time() + options.budget * (1.0 if options.warm else 0.5)
    for name in ("TORCHINDUCTOR_COMPILE_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # each of the jobs
    run = runs.Run(options, "liger-kernel", summary={}, bandwidth=[], small=[])
    run.summary, report = summary, run.report
    options.done = [[part, *named(record)] for part in TIMED for record in report[part]]
    every = cells(options)
    report["launch_us"] = options.launch_us = launch_us()
    pipes = [begin(options, list(range(first, len(every), options.jobs)))
             for first in range(min(options.jobs, len(every)))]  # fmt: skip
    print(f"{sum(ask(pipe) or 0 for pipe in pipes)} of {len(every)} compiled", flush=True)
    report["compile_seconds"] = round(run.seconds(), 1)
    for number, (part, case, shape) in enumerate(() if options.warm else every):
        if run.late([part, case.name, *shape]):
            continue
        record = ask(pipes[number % len(pipes)], number)
        if record is None:
            report["skipped"].append([part, case.name, *shape, "its process ended"])
            continue
        report[part].append(record)
        print(json.dumps(record), flush=True)
        run.write()
    for pipe in pipes:
        with contextlib.suppress(OSError):
            pipe.send(None)
    if not options.warm:
        run.write()  # what was skipped last
    print(f"{run.seconds():.0f} s", json.dumps(report["summary"]))


def begin(options: argparse.Namespace, mine: list[int]) -> Connection:
    """Start a worker.   -> its pipe: how many cells it compiled, then a record for each number"""
    here, there = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    context.Process(target=worker, args=(there, mine, options), daemon=True).start()
    there.close()
    return here


def ask(pipe: Connection, *numbers: int) -> Any:
    """What a worker answers; None where it has ended."""
    with contextlib.suppress(EOFError, OSError):
        for number in numbers:
            pipe.send(number)
        return pipe.recv()
    return None


if __name__ == "__main__":
    main()
