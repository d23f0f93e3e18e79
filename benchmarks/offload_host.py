"""What a saved tensor that moves costs the host, where nothing waits for the device.

    python benchmarks/offload_host.py [--rounds 12] [--blocks 8] [--out FILE]

Blocks of the MoE stack of `offload.py` with so few rows that the device always waits for the host. A step, forward and
backward, is timed in four ways that take turns: without a scheduler; with one that keeps all; with one that moves, each
storage by itself, or the small ones of a layer together; of a few steps the shortest counts. What a way takes beyond
another one, a tensor: the median of the rounds and the interval in which the median of all such rounds lies with 95 %.

us_saved   beyond the plain step, a tensor that is saved: the hooks of layers too
us_moved   beyond the scheduler that keeps all, a tensor that moves
calls_...  the same in Python functions and builtins, backward included, counted once
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common.measure import environment, median_interval, orders
from common.offload_stacks import SHAPES, SMALL, Stack, block
from host import python_calls

from fuseops import offload

LAYERS = "blocks.*"
TO_GET_IN, COUNT = 3, 5  # steps of a visit


class Bench:
    """A stack and the ways to run a step of it."""

    def __init__(self, blocks: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        shape = (SHAPES if cuda else SMALL)["moe"]._replace(blocks=blocks)
        shape = shape._replace(tokens=512 if cuda else shape.tokens)
        dtype = torch.bfloat16 if cuda else torch.float32
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Stack(shape._replace(blocks=0))
            self.model.blocks.extend(block(shape).to(dtype) for _ in range(blocks))
            self.rows = torch.randn(shape.tokens, shape.d, dtype=dtype, requires_grad=True)
        self.cuda = cuda
        kept = self.scheduler({}, 0)
        with kept:
            self.step()
        named = [e for e in kept.report().entries if e.reason == "not in the plan" and e.nbytes]
        plan = {e.name: "offload" for e in named if e.nbytes >= self.rows.nbytes}
        self.ways: dict[str, Any] = {
            "nothing": contextlib.nullcontext(),
            "kept": kept,
            "moved": self.scheduler(plan, 0),
            "moved together": self.scheduler(plan, None),
        }

    def scheduler(self, plan: dict[str, Any], small: int | None) -> offload.Scheduler:
        made = offload.Scheduler(self.model, LAYERS, plan=plan)
        if small is not None:
            made._scope.mover.schedule.small = small
        return made

    def step(self) -> None:
        for p in (*self.model.parameters(), self.rows):
            p.grad = None
        y = self.model(self.rows.clone())
        y.backward(torch.ones_like(y))

    def visit(self, way: str) -> float:
        """Microseconds of the shortest of a few steps."""
        times = []
        with self.ways[way]:
            for _ in range(TO_GET_IN + COUNT):
                self.wait()
                begun = time.perf_counter()
                self.step()
                times.append((time.perf_counter() - begun) * 1e6)
        return min(times[TO_GET_IN:])  # whatever else the host does only adds to it

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def counted(self, way: str) -> dict[str, int]:
        """Of a step: Python calls, tensors that are saved and that move, transfers out."""
        with self.ways[way] as scheduler:
            for _ in range(TO_GET_IN):
                self.step()
            if scheduler is None:
                return {"calls": python_calls(self.step)}
            before = numbers(scheduler.report())
            self.step()
            after = numbers(scheduler.report())
            calls = python_calls(self.step)
        return {"calls": calls, **{what: after[what] - before[what] for what in after}}


def numbers(report: offload.Report) -> dict[str, int]:
    return {
        "saved": sum(entry.times for entry in report.entries),
        "moved": report.moved_count,
        "transfers": dict(report.schedule)["out_count"],
    }


def beyond(mine: list[float], base: list[float], tensors: int) -> dict[str, Any]:
    more = [(a - b) / tensors for a, b in zip(mine, base, strict=True)]
    return {"median": statistics.median(more), "interval": median_interval(more)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    bench = Bench(args.blocks, device)
    counts = {way: bench.counted(way) for way in bench.ways}
    gc.collect()
    gc.disable()
    found: dict[str, list[float]] = {way: [] for way in bench.ways}
    for _, order in zip(range(args.rounds), orders(bench.ways), strict=False):
        for way in order:
            found[way].append(bench.visit(way))
    record: dict[str, Any] = {**environment(), "ways": {}}
    for way, times in found.items():
        row: dict[str, Any] = {"step_us": statistics.median(times), **counts[way]}
        for what, base in (("saved", "nothing"), ("moved", "kept")):
            if tensors := row.get(what):
                row[f"us_{what}"] = beyond(times, found[base], tensors)
                row[f"calls_{what}"] = (row["calls"] - counts[base]["calls"]) / tensors
        record["ways"][way] = row
    print(json.dumps(record, indent=1))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
