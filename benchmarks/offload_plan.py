"""Plans of a recorded step beside what running them takes: peak memory and step time.

    python benchmarks/offload_plan.py [--seconds 24] [--shares 1 0.8] [--out FILE] [--small]

Measures the machine (what `fuseops env --measure` prints), records one step of the example of
`fuseops offload-plan`, plans it for a few budgets, and runs each plan under a scheduler in turns with
the plain step. Peaks are active bytes, absolute. --small: tiny, on any device, to try the script.
"""

import argparse
import datetime
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fuseops import offload
from fuseops.cli.env import describe
from fuseops.cli.offload_plan import Stack
from fuseops.offload.planning.plan import OffloadPlan, plan_profile
from fuseops.offload.planning.planner import Limits

GIB = 1 << 30


class Run:
    """A model, its batch, and one plain step."""

    def __init__(self, small: bool, device: torch.device) -> None:
        d, f, heads, tokens, blocks = (64, 128, 2, 64, 6) if small else (4096, 14336, 32, 8192, 12)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Stack(blocks, d, f, heads).to(dtype)
            self.x = torch.randn(tokens, d, dtype=dtype, requires_grad=True)
        self.cuda = device.type == "cuda"
        self.min_bytes = 1 << 10 if small else 1 << 20

    def clear(self) -> None:
        for t in (*self.model.parameters(), self.x):
            t.grad = None

    def step(self) -> tuple[float, int]:
        """-> seconds, peak bytes (0 without CUDA)"""
        self.clear()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        y = self.model(self.x)
        y.backward(torch.ones_like(y))
        if self.cuda:
            torch.cuda.synchronize()
        took = time.perf_counter() - start
        peak = torch.cuda.memory_stats()["active_bytes.all.peak"] if self.cuda else 0
        return took, peak


def compare(run: Run, plan: OffloadPlan, seconds: float) -> dict[str, Any]:
    """The plan's prediction and what happens, in turns with the plain step."""
    scheduler = offload.Scheduler(run.model, plan.layers, plan=plan)
    plain, mine, peak = [], [], 0
    with scheduler:
        for _ in range(3):
            run.step()  # learns the order, pins memory
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(mine) < 4:
        run.step()
        plain += [run.step()[0] for _ in range(2)]
        with scheduler:
            run.step()
            for _ in range(2):
                took, peak = run.step()
                mine.append(took)
    try:
        scheduler.assert_matched(plan)
        matched = "matched"
    except Exception as error:
        matched = str(error)[:500]
    after, before = plan.after, plan.before
    ms = statistics.median(mine) * 1e3
    return {
        "budget_gib": plan.limits.peak and plan.limits.peak / GIB,
        "fits": plan.fits,
        "moved_gib": after.moved / GIB,
        "recomputed": list(plan.recomputed),
        "predicted": {"ms": after.seconds * 1e3, "peak_gib": after.peak / GIB},
        "stall_ms": after.stall * 1e3,
        "plain": {"ms": statistics.median(plain) * 1e3, "peak_gib": before.peak / GIB},
        "measured": {"ms": ms, "peak_gib": peak / GIB},
        "peak_error": peak / after.peak - 1,
        "time_error": ms / 1e3 / after.seconds - 1,
        "slower": statistics.median(mine) / statistics.median(plain) - 1,
        "predicted_slower": after.seconds / before.seconds - 1,
        "rounds": len(mine),
        "matched": matched,
        "schedule": dict(scheduler.report().schedule),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=24.0, help="for all budgets together")
    parser.add_argument(
        "--shares",
        type=float,
        nargs="*",
        default=[1.0, 0.8, 0.6],
        help="budgets: of the plain peak above what is there before the step; 1: what leaves without a stall",
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    machine = offload.Hardware.measure() if device.type == "cuda" else offload.Hardware.h200()
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **{k: v for k, v in describe().items() if k in ("versions", "devices")},
        "measured": machine.to_json(),
        "plans": [],
    }

    def write() -> None:
        if args.out:
            args.out.write_text(json.dumps(found, indent=1) + "\n")

    write()
    print("measured", machine, flush=True)
    run = Run(args.small, device)
    before = torch.cuda.memory_allocated() if run.cuda else 0
    options: dict[str, Any] = {"layers": "blocks.*", "min_bytes": run.min_bytes}
    first = offload.plan(run.model, run.x, hardware=machine, record=True, **options)
    if args.out:
        first.profile.save(args.out.with_suffix(".profile.json"))
    plain = [run.step() for _ in range(3)][1:]
    found["plain"] = {
        "ms": statistics.median(t for t, _ in plain) * 1e3,
        "peak_gib": plain[-1][1] / GIB,
        "recorded": {"ms": first.before.seconds * 1e3, "peak_gib": first.before.peak / GIB},
    }
    print(json.dumps(found["plain"]), flush=True)
    for share in args.shares:
        peak = None if share == 1 else before + int(share * (first.before.peak - before))
        plan = plan_profile(first.profile, machine, Limits(peak), layers=first.layers)
        found["plans"].append(compare(run, plan, args.seconds / len(args.shares)))
        print(json.dumps(found["plans"][-1]), flush=True)
        write()
    run.clear()
    dry = offload.plan(run.model, run.x, hardware=machine, **options).before
    found["plain"]["dry_run"] = {"ms": dry.seconds * 1e3, "peak_gib": dry.peak / GIB}
    print(json.dumps(found["plain"]), flush=True)
    write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
