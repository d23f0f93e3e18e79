"""Ranks that train in turn without offload and with it, by plans: steps, peaks, and what the plans said of both."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fuseops import offload

from . import measure

GIB = 2**30
SETTLE = 8  # steps of each way before any counts: where sizes vary, memory and kernels for them are found one by one
Visit = dict[str, float]


class OffloadedRank:
    """A rank, and what a step of it may run in, by name: nothing, or a scheduler that follows a plan.

    options: steps, that count in a visit, and seconds, of all rounds
    """

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device, self.cuda = options, device, device.type == "cuda"
        self.plans: dict[str, Any] = {}
        self.schedulers: dict[str, offload.Scheduler] = {}

    def step(self) -> None:
        raise NotImplementedError

    def follow(self, name: str, model: nn.Module, plan: Any) -> None:
        """Have a way by this name, in which the blocks of a model follow a plan."""
        self.plans[name] = plan
        self.schedulers[name] = offload.Scheduler(model, "blocks.*", plan=plan)

    def way(self, name: str) -> Any:
        return self.schedulers.get(name) or contextlib.nullcontext()

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)
        dist.barrier()

    def moved(self, name: str) -> int:
        """Bytes so far."""
        if name not in self.schedulers:
            return 0
        return int(dict(self.schedulers[name].report().schedule)["out_bytes"])

    def visit(self, name: str) -> Visit:
        """A step to get in, and some that count: ms of one, bytes at the peak (CUDA), bytes moved in one."""
        with self.way(name):
            self.step()
            self.sync()
            if self.cuda:
                torch.cuda.reset_peak_memory_stats(self.device)
            moved, begun, steps = self.moved(name), time.perf_counter(), self.options.steps
            for _ in range(steps):
                self.step()
            self.sync()
            ms = (time.perf_counter() - begun) * 1e3 / steps
            stats = torch.cuda.memory_stats(self.device) if self.cuda else {}
            peak = stats.get("active_bytes.all.peak", 0)
            return {"ms": ms, "peak": peak, "moved": (self.moved(name) - moved) / steps}

    def rounds(self) -> dict[str, list[Visit]]:
        """All ways in turn, in balanced order, until the first rank's clock says that it is enough."""
        found: dict[str, list[Visit]] = {name: [] for name in ("nothing", *self.schedulers)}
        for name in found:
            with self.way(name):
                for _ in range(SETTLE if self.cuda else 0):
                    self.step()
        orders, end, go = measure.orders(found), time.perf_counter() + self.options.seconds, True
        while go:
            for name in next(orders):
                found[name].append(self.visit(name))
            more = torch.tensor([time.perf_counter() < end], device=self.device).int()
            dist.broadcast(more, 0)
            go = bool(more)
        return found

    def same(self, gradients: Callable[[str], list[torch.Tensor]]) -> dict[str, dict[str, bool]]:
        """Of each plan whether gradients with offload are to the bit those without, which are repeated: under
        deterministic kernels, as `torch.use_deterministic_algorithms(True)` has them without `warn_only`.
        """
        torch.use_deterministic_algorithms(True)
        first = gradients("nothing")
        equal = {
            name: all(map(torch.equal, first, gradients(name)))
            for name in ("nothing", *self.schedulers)
        }
        torch.use_deterministic_algorithms(False)
        repeats = equal.pop("nothing")
        return {
            name: {"gradients_bit_equal": bits, "repeats_bit_equal": repeats}
            for name, bits in equal.items()
        }

    def summary(self, rounds: dict[str, list[Visit]], name: str) -> dict[str, Any]:
        """Of a plan: steps and peaks beside those without offload, and beside what it said."""
        base, moved, plan = rounds["nothing"], rounds[name], self.plans[name]
        before, after = (max(r["peak"] for r in rows) for rows in (base, moved))
        to_leave, to_move = plan.before.peak - plan.after.peak, plan.bytes_of("offload")
        ratios = [b["ms"] / a["ms"] for a, b in zip(base, moved, strict=True)]
        row = {
            "ms": statistics.median(r["ms"] for r in base),
            "ms_with_offload": statistics.median(r["ms"] for r in moved),
            "step_ratio": statistics.median(ratios),
            "step_ratio_interval": measure.median_interval(ratios),
            "rounds": len(ratios),
            "to_leave_gib": to_leave / GIB,
            "plan_moves_gib_a_step": to_move / GIB,
            "moves_over_planned": statistics.median(r["moved"] for r in moved) / max(to_move, 1),
            "predicted_peak_gib": plan.before.peak / GIB,
            "predicted_ms": plan.before.seconds * 1e3,
            "predicted_stalls_ms": plan.after.stall * 1e3,
            "schedule": dict(self.schedulers[name].report().schedule),
        }
        if self.cuda:
            row |= {
                "peak_gib": before / GIB,
                "peak_with_offload_gib": after / GIB,
                "left_of_it": (before - after) / max(to_leave, 1),
                "peak_error_over_moved": abs(before - after - to_leave) / max(to_move, 1),
            }
        return row
