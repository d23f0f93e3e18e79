"""Joules of a product: our grouped GEMMs in bf16 beside `F.grouped_mm` and dense cuBLAS, of equal flops with one weight
for all rows and, of few experts, one GEMM an expert (`loop`), which reads as many weights as we do.

    python benchmarks/energy.py --out benchmarks/results/energy_h200.json

A GPU at its power limit gives a product the clock that its joules leave, so the rate that it settles at says what it
takes: these are the two side by side. Each candidate runs alone in its turn, `--settle` seconds to warm up and then
`--span` seconds and more under the eyes of NVML's counter of energy, from one of its ticks to another; the rate is that
of the whole turn. Rows are split evenly at random among the groups; `gathered` reads them by index. pJ/FLOP is watts
over TFLOP/s; ratios are of rates, round by round, above 1 where we are faster.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import statistics
import time
from functools import partial
from typing import Any, NamedTuple

import torch
from common import measure, runs
from common.grouped_problems import SHAPES, operands, ours, peers, split

from fuseops.kernels import grouped

SHAPES_ASKED = ("mixtral", "deepseek_v3", "qwen3_30b", "sonic_30b")
KINDS = ("fwd", "dgrad", "wgrad", "gathered")


class Turn(NamedTuple):
    """What one candidate's turn gave."""

    us: float
    watts: float
    mhz: float


class Meter:
    """NVML's counters of the GPU that torch calls 0, by its UUID."""

    SM = 1  # NVML_CLOCK_SM

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        self.device = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
        self.call("nvmlInit_v2")
        self.call("nvmlDeviceGetHandleByUUID", uuid, ctypes.byref(self.device))

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed: NVML status {status}")

    def joules(self) -> float:
        """Since the driver was loaded."""
        found = ctypes.c_ulonglong()
        self.call("nvmlDeviceGetTotalEnergyConsumption", self.device, ctypes.byref(found))
        return found.value / 1e3

    def mhz(self) -> int:
        """The clock of the multiprocessors, now."""
        found = ctypes.c_uint()
        self.call("nvmlDeviceGetClockInfo", self.device, self.SM, ctypes.byref(found))
        return found.value

    def tick(self) -> tuple[float, float]:
        """(seconds, joules) when the counter moves next."""
        before = after = self.joules()
        while after == before:
            time.sleep(5e-4)
            after = self.joules()
        return time.perf_counter(), after


def turn(meter: Meter, call: measure.Call, settle: float, span: float) -> Turn:
    """Run a candidate by itself: `settle` seconds, then until the counter has seen `span` of them."""
    heat, laps = (measure.repeats(call, seconds) for seconds in (settle, span + 0.4))
    while (seen := watched(meter, call, heat, laps, span)) is None:
        laps *= 2
    return seen


def watched(meter: Meter, call: measure.Call, heat: int, laps: int, span: float) -> Turn | None:
    """So many calls after others that heat; None where they end before the counter has seen the span."""
    for _ in range(heat):
        call()
    start = measure.mark()
    for _ in range(laps):
        call()
    end = measure.mark()
    start.synchronize()
    began, first = meter.tick()
    clocks = []
    while time.perf_counter() < began + span:
        clocks.append(meter.mhz())
        time.sleep(0.01)
    ended, last = meter.tick()
    early = end.query()
    end.synchronize()
    if early:
        return None
    us = start.elapsed_time(end) * 1e3 / laps
    return Turn(us, (last - first) / (ended - began), statistics.median(clocks))


def candidates(shape: str, layer: str, kind: str) -> tuple[dict[str, measure.Call], float]:
    """(what runs, its flops)"""
    groups, rows, d, f, k = SHAPES[shape]
    n, depth = (2 * f, d) if layer == "fc1" else (d, f)
    offs = split("uniform", groups, rows)
    t = operands(groups, rows, n, depth, offs)
    if kind != "gathered":
        return {"fuseops": ours(kind, t), **peers(kind, t, groups <= 8)}, 2.0 * rows * n * depth
    index = torch.arange(rows // k, device="cuda").repeat(k)[torch.randperm(rows, device="cuda")]
    x, tiles = t["x"][: rows // k].clone(), grouped.group_tiles(offs, rows)
    mm, at = grouped.grouped_mm, index.int()
    calls = {"fuseops": lambda: mm(x, t["w"], offs, tiles, None, at), **peers("fwd", t, False)}
    return calls, 2.0 * rows * n * depth


def cell(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds, TFLOP/s, watts, MHz and pJ/FLOP of each, and how many times as fast as each peer the first is."""
    calls, flops = candidates(*name.split("/"))
    meter = Meter()
    for call in calls.values():
        call()
    timers = {n: partial(turn, meter, c, options.settle, options.span) for n, c in calls.items()}
    turns = measure.in_rounds(timers, options.rounds, heat=0)
    us = {name: [each.us for each in found] for name, found in turns.items()}
    medians = measure.medians(us)
    mine, *others = us
    return {
        "us": medians,
        "tflops": {name: round(flops / t / 1e6, 1) for name, t in medians.items()},
        "watts": {name: _median(found, "watts") for name, found in turns.items()},
        "mhz": {name: _median(found, "mhz") for name, found in turns.items()},
        "pj_per_flop": {
            name: round(statistics.median(e.watts * e.us / flops * 1e6 for e in found), 4)
            for name, found in turns.items()
        },
        "ratios": {name: measure.paired(us[mine], us[name]) for name in others},
    }


def _median(turns: list[Turn], field: str) -> float:
    return round(statistics.median(getattr(turn, field) for turn in turns), 1)


def names() -> list[str]:
    """The cells: rows are gathered before fc1 alone."""
    every = itertools.product(SHAPES_ASKED, ("fc1", "fc2"), KINDS)
    return ["/".join(each) for each in every if each[1:] != ("fc2", "gathered")]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--settle", type=float, default=0.3, help="seconds before a span")
    parser.set_defaults(rounds=3, span=0.5, budget=300.0)


if __name__ == "__main__":
    runs.main(__doc__, names(), cell, more=add_options)
