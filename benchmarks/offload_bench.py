"""One model whose saved tensors move, its plans, and the ways to run a step of it."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measure import mark
from offload_report import GIB, Row, say
from offload_stacks import Stack
from torch import Tensor

from fuseops import offload
from fuseops.offload.planning.plan import Limits, OffloadPlan, plan_profile

LAYERS = "blocks.*"
LINK = 55.0  # GB/s each way, what "carried" bytes are counted for
HOST_STEPS = 7  # of which two to get in


class Bench:
    """One model, its plans, and the ways to run a step of it."""

    def __init__(self, model: Stack, rows: Tensor, least: int, steps: int) -> None:
        self.model, self.leaves, self.least, self.steps = model, (rows,), least, steps
        self.batch = rows.clone  # no leaf: autograd holds those to the end
        self.cuda = rows.is_cuda
        self.scheduler = offload.Scheduler(model, LAYERS, plan={})  # one arena for all plans
        self.plans: dict[str, OffloadPlan] = {}
        self.base = 0  # bytes before a step
        self.forward_left = 0  # bytes after the last forward that was looked at
        self.host: dict[str, Row] = {}  # what the host takes for a step, by way
        self.ways: dict[str, Callable[[], Any]] = {"nothing": contextlib.nullcontext}

    # --- plans

    def make_plans(self, peaks: list[str]) -> dict[str, Any]:
        """Plans of one recorded step, by name of the peak."""
        self.step()
        self.forget_gradients()
        machine = offload.Hardware.measure() if self.cuda else offload.Hardware.h200()
        say("machine measured")
        options = {"record": True, "hardware": machine, "min_bytes": self.least}
        self.base = self.active("current")
        free = offload.plan(self.model, self.batch(), layers=LAYERS, **options)
        carried = plan_profile(free.profile, machine.with_link(LINK), layers=(LAYERS,))
        known = {"free": free, "carried": carried}
        for peak in peaks:
            if peak in known:
                plan, name = known[peak], f"plan {peak}"
            else:
                limits = Limits(self.base + int(float(peak) * GIB))
                plan = plan_profile(free.profile, machine, limits, layers=(LAYERS,))
                name = f"plan {peak} GiB"
            self.plans[name] = plan
            self.ways[name] = lambda plan=plan: self.following(plan)
        return {
            "machine": machine.to_json(),
            "recorded_ms": free.before.seconds * 1e3,
            "recorded_peak_gib": self.above(free.before.peak),
            "carried_at_55_gbs_gib": carried.free / GIB,
            "free_plan_gib": free.bytes_of("offload") / GIB,
            "link_in_forward_gib": forward_seconds(free) * LINK * 1e9 / GIB,
        }

    @contextlib.contextmanager
    def following(self, plan: OffloadPlan) -> Iterator[None]:
        self.scheduler.plan = plan
        with self.scheduler:
            yield

    @contextlib.contextmanager
    def recomputed(self) -> Iterator[None]:
        self.model.recompute = True
        try:
            yield
        finally:
            self.model.recompute = False

    # --- steps

    def step(self, look: bool = False) -> None:
        self.forget_gradients()
        y = self.model(self.batch())
        if look:
            self.forward_left = self.active("current")
        y.backward(torch.ones_like(y))

    def forget_gradients(self) -> None:
        for p in (*self.model.parameters(), *self.leaves):
            p.grad = None

    def active(self, what: str) -> int:
        return torch.cuda.memory_stats()[f"active_bytes.all.{what}"] if self.cuda else 0

    def above(self, nbytes: float) -> float:
        return (nbytes - self.base) / GIB

    def visit(self, way: str, steps: int = 0) -> Callable[[], Row]:
        """A step to get in, and some that count.   -> their time and memory, once it is called: the
        device has no pause between visits, after which it would run faster for a while.
        """
        with self.ways[way]():
            moved = self.scheduler.report().moved_bytes
            self.step(look=True)
            self.forget_gradients()
            moved = self.scheduler.report().moved_bytes - moved
            before = self.active("current")
            found = {
                "resident_gib": (self.forward_left - before) / GIB,
                "moved_gib": moved / GIB,
            }
            ms = self.launched(steps or self.steps)
            found["peak_gib"] = (self.active("peak") - before) / GIB
        return lambda: found | {"ms": ms()}

    def launched(self, steps: int) -> Callable[[], float]:
        """Launches steps.   -> milliseconds of one, once it is called"""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        start = self.mark()
        for _ in range(steps):
            self.step()
        end = self.mark()
        self.forget_gradients()
        if isinstance(start, float):
            return lambda: (end - start) * 1e3 / steps

        def read() -> float:
            end.synchronize()
            return start.elapsed_time(end) / steps

        return read

    def mark(self) -> Any:
        """Now, on the device; seconds where there is none."""
        if not self.cuda:
            return time.perf_counter()
        return mark()

    def launching(self, way: str) -> Row:
        """What the host takes for a step: of an eighth of the rows, so that it never waits for the
        device. host_us_a_tensor: beyond the plain step, for each saved tensor.
        """
        whole, self.batch = self.batch, self.leaves[0][: len(self.leaves[0]) // 8].clone
        times = []
        with self.ways[way]():
            for _ in range(HOST_STEPS):
                saved = self.saved()
                if self.cuda:
                    torch.cuda.synchronize()
                begun = time.perf_counter()
                self.step()
                times.append((time.perf_counter() - begun) * 1e3)
            saved = self.saved() - saved
        self.batch = whole
        found = {"host_ms": statistics.median(times[2:])}
        if saved:
            more = found["host_ms"] - self.host["nothing"]["host_ms"]
            found |= {"saved_tensors": saved, "host_us_a_tensor": more * 1e3 / saved}
        return found

    def saved(self) -> int:
        """Saved tensors that the scheduler has seen."""
        return sum(entry.times for entry in self.scheduler.report().entries)


def forward_seconds(plan: OffloadPlan) -> float:
    return plan.profile.clock[max(call.leave for call in plan.profile.calls)]
