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
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measure import environment, orders
from offload_bench import LAYERS, Bench
from offload_report import GIB, Row, bars, say, summary, table
from offload_stacks import SHAPES, AsyncHooks, stack
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fuseops import offload
from fuseops.offload.lanes.devices import lanes_of

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts

PEAKS = {"dense": "12.8,11,7", "moe": "carried"}
PARTS = "rounds,exact,fit,dry,others"
DELAY = 20_000_000  # cycles: longer than a block
LANES = ("compute", "d2h", "h2d")


class Parts(Bench):
    """What the parts find."""

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
    bench = Parts(
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
        if part in record:
            shown = table(record[part]) if part in ("rounds", "others") else record[part]
        say(f"{part}\n{shown if part in record else record[f'{part} failed']}")
        write("bars", bars(record))
        write("schedule", dict(bench.scheduler.report().schedule))  # of all steps so far
    say("\n".join(f"{what}: {found}" for what, found in record["bars"].items()))
    equal = record.get("exact", {}).values()
    return 0 if all(all(e.values()) if isinstance(e, dict) else e for e in equal) else 1


if __name__ == "__main__":
    sys.exit(main())
