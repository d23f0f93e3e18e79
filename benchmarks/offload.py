"""Training steps with saved tensors kept, recomputed and moved: time and peak memory, side by side.

    python benchmarks/offload.py [--model moe] [--seconds 40] [--parts rounds,exact] [--out FILE] [--small]

The models, bf16, of fuseops ops: `dense`, 12 transformer blocks (D 4096, F 14336, 32 heads, 8192
tokens); `moe`, 32 blocks with 32 experts of which each token takes 8 (D 1024, F 1024, 8 heads, 8
sequences of 4096 tokens), whose saved tensors exceed 40 GiB. One step is recorded and planned for a few
peaks: so many GiB above what is there before a step; "free", what leaves without a stall; "carried",
what the simulator says leaves without a stall by a link of 55 GB/s each way. One scheduler follows the
plans in turn. The parts:

rounds  the plain step and the plans take turns, until the seconds are over: a step to get in and some
        that count; medians of the ratio to the plain step of the same round, with the interval in which
        the median of all such rounds lies with 95 %
exact   gradients under each plan equal those of the plain step to the bit, with a delay on each stream
        in turn before every block, forward and backward
fit     with less memory allowed than the plain step takes, a plan trains
dry     time and peak of the plain step by a dry run, beside those that were recorded
beyond  by itself, with --blocks 88: a stack that the device has no room for, planned dry and trained
others  the ways that there are already, two rounds beside the plain step: checkpoint every block,
        hooks with side streams, and once save_on_cpu (the last alone takes 15 s of pinning)

Peaks are active bytes (allocated bytes hide what `record_stream` keeps from being used again) above
what is there before a step; gradients are set to None before each. --small: any device, a few rows.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common.measure import environment, mark, orders, paired
from common.offload_stacks import SHAPES, AsyncHooks, Stack, stack
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fuseops import offload
from fuseops.offload.lanes.devices import lanes_of
from fuseops.offload.planning.plan import Limits, OffloadPlan, plan_profile

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts

PEAKS = {"dense": "12.8,11,7", "moe": "carried"}
PARTS = "rounds,exact,fit,dry,others"
DELAY = 20_000_000  # cycles: longer than a block
LANES = ("compute", "d2h", "h2d")


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

    # --- the parts

    def rounds(self, stop: float, ways: list[str], least: int = 3, steps: int = 0) -> Any:
        """Rounds of these ways, in balanced order, until the clock says `stop`, but so many at least; what is
        known after each.
        """
        self.visit("nothing", steps)  # hot, as in training
        found: dict[str, list[Row]] = {way: [] for way in ways}
        launched: dict[str, Callable[[], Row]] = {}
        for number, order in enumerate(orders(ways)):
            if number >= least and time.perf_counter() >= stop:
                break
            before, launched = launched, {}
            for way in order:
                launched[way] = self.visit(way, steps)
            for way, read in before.items():
                found[way].append(read())
            if before:
                yield self.summary(found)
        for way, read in launched.items():
            found[way].append(read())
        yield self.summary(found)

    def summary(self, found: dict[str, list[Row]]) -> dict[str, Any]:
        return {
            way: summary(rows, found["nothing"], self.plans.get(way), self.base)
            | self.host.get(way, {})
            for way, rows in found.items()
        }

    def warm_up(self) -> None:
        """A few steps each: compiled kernels, the order of layers, pinned memory."""
        for way in self.ways:
            self.visit(way, steps=1)()
            say(f"{way} is warm")
        gc.collect()
        gc.freeze()  # as training loops do: no pause that belongs to no way
        for way in self.ways:
            self.host[way] = self.launching(way)
            say(f"{way}: {self.host[way]}")

    def exact(self) -> dict[str, Any]:
        """For each plan whether gradients are equal, by the lane that is slow. "nothing": whether two
        plain steps are.
        """
        torch.use_deterministic_algorithms(True)
        found: dict[str, Any] = {}
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            plain = self.gradients()
            found["nothing"] = all(map(torch.equal, plain, self.gradients()))
            for name, plan in self.plans.items():
                with self.following(plan):
                    self.step()  # these kernels save other tensors: the order of them
                    found[name] = {lane: self.equal(plain, lane) for lane in LANES}
        torch.use_deterministic_algorithms(False)
        return found

    def equal(self, plain: list[Tensor], lane: Any) -> bool:
        hooks = self.delays(lane)
        try:
            return all(map(torch.equal, plain, self.gradients()))
        finally:
            for hook in hooks:
                hook.remove()

    def gradients(self) -> list[Tensor]:
        self.step()
        return [p.grad for p in (*self.leaves, *self.model.parameters())]

    def delays(self, lane: Any) -> list[Any]:
        if not self.cuda:
            return []
        lanes = lanes_of(self.leaves[0].device)

        def sleep(*_: Any) -> None:
            with torch.cuda.stream(lanes.stream(lane)):
                torch.cuda._sleep(DELAY)

        hooks = [m.register_forward_pre_hook(sleep) for m in self.model.blocks]
        return hooks + [m.register_full_backward_pre_hook(sleep) for m in self.model.blocks]

    def fit(self) -> dict[str, Any]:
        """The plain step and the plan of the lowest peak, where only the plan has room."""
        name = min(self.plans, key=lambda way: self.plans[way].after.peak)
        plan, device = self.plans[name], self.leaves[0].device
        cap = (plan.after.peak + plan.before.peak) // 2
        found: dict[str, Any] = {"allowed_gib": self.above(cap)}
        if not self.cuda:
            return found
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(cap / total, device)
        for way in ("nothing", name):
            try:
                found[way] = self.visit(way)()
            except torch.OutOfMemoryError as error:
                found[way] = str(error).splitlines()[0][:200]
            self.forget_gradients()
            torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        return found

    def beyond(self) -> dict[str, Any]:
        """Steps of a stack that takes more memory than there is."""
        found: dict[str, Any] = {"parameters_gib": self.active("current") / GIB}
        try:
            found["nothing"] = self.launched(1)()
        except torch.OutOfMemoryError as error:
            found["nothing"] = str(error).splitlines()[0][:200]
        self.forget_gradients()
        if self.cuda:
            torch.cuda.empty_cache()
        room = torch.cuda.mem_get_info()[1] if self.cuda else 1 << 40
        say(f"without offload: {found['nothing']}")
        with offload.Scheduler(self.model, LAYERS, peak=int(0.93 * room)) as scheduler:
            self.step()
            say("planned, and trained a step")
            found["trained"] = {"ms": self.launched(2)()}
        plan, report = scheduler.plan, scheduler.report()
        return found | {
            "device_gib": room / GIB,
            "peak_gib": self.active("peak") / GIB,
            "predicted_peak_gib": plan.after.peak / GIB,
            "predicted_before_gib": plan.before.peak / GIB,
            "predicted_ms": plan.after.seconds * 1e3,
            "made_from": plan.profile.kind,
            "recomputed": len(plan.recomputed),
            "moved_gib": plan.after.moved / GIB,
            "schedule": dict(report.schedule),
        }

    def dry(self) -> dict[str, float]:
        """What a dry run says of the plain step, and how far it is from the recorded one."""
        plan = next(iter(self.plans.values()))
        options = {"hardware": plan.hardware, "min_bytes": self.least}
        guess = offload.plan(self.model, self.batch(), layers=LAYERS, **options).before
        return {
            "ms": guess.seconds * 1e3,
            "peak_gib": self.above(guess.peak),
            "time_error": guess.seconds / plan.before.seconds - 1,
            "peak_error": guess.peak / plan.before.peak - 1,
        }

    def others(self) -> Iterator[dict[str, Any]]:
        """The ways that there are already."""
        self.ways["checkpoint"] = self.recomputed
        hooks = AsyncHooks(self.leaves[0].device) if self.cuda else contextlib.nullcontext
        self.ways["async hooks"] = hooks
        found: dict[str, Any] = {}
        ways = ["nothing", "checkpoint", "async hooks"]
        for found in self.rounds(0.0, ways, least=2, steps=1):
            del found["nothing"]
            yield found
        del self.ways["async hooks"], hooks  # torch's allocator keeps their pinned memory
        scope = lambda: torch.autograd.graph.save_on_cpu(pin_memory=self.cuda)  # noqa: E731
        with scope():
            yield found | {"save_on_cpu": {"ms": self.launched(1)()}}


def forward_seconds(plan: OffloadPlan) -> float:
    return plan.profile.clock[max(call.leave for call in plan.profile.calls)]


# --- what is said


START = time.perf_counter()
GIB = 1 << 30

Row = dict[str, float]  # what a visit of a way found


def summary(
    mine: list[Row], base: list[Row], plan: OffloadPlan | None, before: int
) -> dict[str, Any]:
    """Of one way over its rounds, beside the plain step of the same rounds.

    plan    that it followed; before: bytes on the device before a step
    """
    found: dict[str, Any] = {
        "rounds": len(mine),
        **paired([r["ms"] for r in base], [r["ms"] for r in mine]),
        "ms": statistics.median(r["ms"] for r in mine),
        "peak_gib": max(r["peak_gib"] for r in mine),
        "resident_gib": mine[-1]["resident_gib"],
    }
    return found if plan is None else found | beside_plan(plan, found, mine[-1], base[-1], before)


def beside_plan(
    plan: OffloadPlan, found: dict[str, Any], mine: Row, base: Row, before: int
) -> dict[str, Any]:
    """What was predicted, and how near it came."""
    lower = base["peak_gib"] - found["peak_gib"]
    wanted = plan.before.peak - plan.after.peak
    rest = {
        "moved_gib": mine["moved_gib"],
        "predicted": {
            "before_gib": (plan.before.peak - before) / GIB,
            "peak_gib": (plan.after.peak - before) / GIB,
            "ms": plan.after.seconds * 1e3,
            "ratio": plan.after.seconds / plan.before.seconds,
            "stall_ms": plan.after.stall * 1e3,
            "lag": plan.settings.lag,
            "offload_gib": plan.bytes_of("offload") / GIB,
            "recomputed": list(plan.recomputed),
            "warnings": list(plan.warnings),
        },
        "lower_over_predicted": lower * GIB / max(wanted, 1),
        "peak_error": found["peak_gib"] * GIB / max(plan.after.peak - before, 1) - 1,
        "time_error": found["ms"] / 1e3 / plan.after.seconds - 1,
    }
    if mine["moved_gib"] and not plan.recomputed:
        rest["gone_over_moved"] = lower / mine["moved_gib"]
    return rest


SLOWER = {"plan 12.8 GiB": 1.015, "plan 11 GiB": 1.06, "plan carried": 1.008}  # at most


def bars(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the plans are held to, of the parts that ran: what was found, the bar, whether it is met."""
    found: dict[str, dict[str, Any]] = {}

    def at_most(what: str, value: float, bar: float) -> None:
        found[what] = {"found": value, "at most": bar, "met": value <= bar}

    def at_least(what: str, value: float, bar: float) -> None:
        found[what] = {"found": value, "at least": bar, "met": value >= bar}

    rounds = record.get("rounds", {})
    for way, row in rounds.items():
        if way in SLOWER:
            at_most(f"{way}: ratio, upper end of the interval", row["interval"][1], SLOWER[way])
        if "predicted" not in row:
            continue
        at_most(f"{way}: peak beside the prediction", abs(row["peak_error"]), 0.01)
        at_most(f"{way}: time beside the prediction", abs(row["time_error"]), 0.05)
        at_least(f"{way}: lower peak over the prediction", row["lower_over_predicted"], 0.997)
        if "gone_over_moved" in row:
            at_least(f"{way}: bytes gone over bytes chosen", row["gone_over_moved"], 0.999)
    if "plan carried" in rounds:
        row = rounds["plan carried"]
        at_most("plan carried: host over device, of a step", row["host_ms"] / row["ms"], 0.6)
        at_most("plan carried: us of the host a saved tensor", row["host_us_a_tensor"], 25)
        chosen = row["predicted"]["offload_gib"]
        carried = record["plans"]["carried_at_55_gbs_gib"]
        at_least("plan carried: GiB chosen over those that 55 GB/s carry for free", chosen, carried)
    others = record.get("others", {})
    if "plan 7 GiB" in rounds and "checkpoint" in others:
        at_most(
            "plan 7 GiB: ms, less than checkpoint of every block",
            rounds["plan 7 GiB"]["ms"],
            others["checkpoint"]["ms"],
        )
    return found


def say(what: str) -> None:
    print(f"{time.perf_counter() - START:6.1f} s  {what}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of rounds")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", choices=sorted(SHAPES), default="dense")
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--peaks", help="of the plans: GiB, free or carried, by comma")
    parser.add_argument("--parts", default=PARTS, help=f"of {PARTS}")
    parser.add_argument("--steps", type=int, default=3, help="that count in a visit")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    bench = Bench(
        *stack(args.model, args.small, args.blocks, device),
        least=1 if args.small else 1 << 20,
        steps=args.steps,
    )
    say("model made")
    record: dict[str, Any] = {**environment(), "model": args.model, "small": args.small}

    def write(name: str, found: Any) -> None:
        record[name] = found  # each time, so that a run that is cut off leaves something
        if args.out:
            args.out.write_text(json.dumps(record, indent=1) + "\n")

    if args.parts == "beyond":
        write("beyond", bench.beyond())
        say(json.dumps(record["beyond"]))
        return 0
    write("plans", bench.make_plans((args.peaks or PEAKS[args.model]).split(",")))
    say(json.dumps({k: v for k, v in record["plans"].items() if k != "machine"}))
    bench.warm_up()
    steps = {
        "rounds": lambda: bench.rounds(time.perf_counter() + args.seconds, list(bench.ways)),
        "exact": lambda: [bench.exact()],
        "fit": lambda: [bench.fit()],
        "dry": lambda: [bench.dry()],
        "others": bench.others,
    }
    for part in args.parts.split(","):
        bench.forget_gradients()
        try:
            for found in steps[part]():
                write(part, found)
        except Exception as error:  # reported; the other parts are worth their time without
            write(f"{part} failed", f"{type(error).__name__}: {error}"[:500])
        say(f"{part} {json.dumps(record.get(part, record.get(f'{part} failed')), indent=1)}")
        write("bars", bars(record))
        write("schedule", dict(bench.scheduler.report().schedule))  # of all steps so far
    say("\n".join(f"{what}: {found}" for what, found in record["bars"].items()))
    equal = record.get("exact", {}).values()
    return 0 if all(all(e.values()) if isinstance(e, dict) else e for e in equal) else 1


if __name__ == "__main__":
    sys.exit(main())
