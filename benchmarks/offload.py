"""Training steps with saved tensors kept, recomputed and moved: time and peak memory, side by side.

    python benchmarks/offload.py [--seconds 90] [--out FILE] [--small]

The models, bf16, of fuseops ops: `dense`, 12 transformer blocks (D 4096, F 14336, 32 heads, 8192
tokens); `moe`, 32 blocks with 32 experts of which each token takes 8 (D 1024, F 1024, 8 heads, 8
sequences of 4096 tokens), whose saved tensors exceed 40 GiB.
Ways take turns, two steps a visit, of which the second counts; the medians of their ratio to the plain
step of the same round are printed with quartiles. Peaks are active bytes (allocated bytes hide what
`record_stream` keeps from being used again) above what is there before a step, gradients included:
those are set to None before each.
--small: a few rows on any device, to try the script.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload
from fuseops.offload.lanes.devices import lanes_of
from fuseops.offload.planning.plan import Limits, plan_profile

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts

START = time.perf_counter()
GIB = 1 << 30


class Attention(nn.Module):
    """Causal attention over one packed buffer of queries, keys and values."""

    def __init__(self, heads: int, sequences: int) -> None:
        super().__init__()
        self.heads, self.sequences = heads, sequences

    def forward(self, qkv: Tensor) -> Tensor:
        rows, width = qkv.shape
        q, k, v = qkv.view(self.sequences, -1, 3, self.heads, width // 3 // self.heads).permute(
            2, 0, 3, 1, 4
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(rows, width // 3)


class Shape(NamedTuple):
    """Sizes of a stack; experts 0: dense."""

    blocks: int
    d: int
    f: int
    heads: int
    tokens: int
    sequences: int = 1
    experts: int = 0
    top_k: int = 0


SHAPES = {
    "dense": Shape(12, 4096, 14336, 32, 8192),
    "moe": Shape(32, 1024, 1024, 8, 8 * 4096, 8, 32, 8),
}
SMALL = {"dense": Shape(4, 64, 128, 2, 64), "moe": Shape(4, 64, 64, 2, 64, 2, 4, 2)}


def block(s: Shape) -> fo.Sequential:
    linear = lambda i, o: fo.ops.Linear(i, o, bias=False)  # noqa: E731
    attention = (linear(s.d, 3 * s.d), Attention(s.heads, s.sequences), linear(s.d, s.d))
    mlp: tuple[nn.Module, ...] = (
        (fo.MoE(s.d, s.f, s.experts, s.top_k),)
        if s.experts
        else (linear(s.d, 2 * s.f), fo.ops.SwiGLU(), linear(s.f, s.d))
    )
    return fo.Sequential(
        {
            "attn": fo.Residual(fo.ops.RMSNorm(s.d), *attention),
            "mlp": fo.Residual(fo.ops.RMSNorm(s.d), *mlp),
        }
    )


class Stack(nn.Module):
    """A stack of blocks; `recompute` checkpoints each."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(shape) for _ in range(shape.blocks))
        self.recompute = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x


class AsyncHooks:
    """Offload as it is usually written: each tensor of 1 MiB or more is copied on a side stream when it
    is saved and when it is read, with `record_stream` for lifetimes.
    """

    def __init__(self, device: torch.device) -> None:
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.pool: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}

    def pack(self, t: Tensor) -> Any:
        if t.nbytes < 1 << 20 or isinstance(t, nn.Parameter) or not t.is_contiguous():
            return t.detach()
        free = self.pool.setdefault((t.shape, t.dtype), [])
        host = free.pop() if free else torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
        self.out.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.out):
            host.copy_(t, non_blocking=True)
            t.record_stream(self.out)
        return host, t.device

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        host, device = packed
        self.back.wait_stream(self.out)
        with torch.cuda.stream(self.back):
            t = host.to(device, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self.back)
        t.record_stream(torch.cuda.current_stream())
        self.out.wait_stream(self.back)
        self.pool[t.shape, t.dtype].append(host)
        return t

    def __call__(self) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)


class Bench:
    """One model and the ways to run a step of it."""

    def __init__(self, model: nn.Module, rows: Tensor) -> None:
        self.model, self.leaves = model, (rows,)
        self.batch = rows.clone  # no leaf: autograd holds those to the end
        self.cuda = rows.is_cuda
        self.ways: dict[str, Callable[[], Any]] = {"nothing": contextlib.nullcontext}
        self.schedulers: dict[str, offload.Scheduler] = {}
        self.resident = 0  # bytes on the device after a forward
        self.predicted: dict[str, dict[str, Any]] = {}

    def add_scheduler(self, name: str, **options: Any) -> None:
        scheduler = offload.Scheduler(self.model, "blocks.*", **options)
        self.schedulers[name] = scheduler
        self.ways[name] = lambda: scheduler

    def add_plan(self, name: str, plan: dict[str, Any]) -> None:
        """A way that follows decisions made before."""
        self.add_scheduler(name, plan=plan["decisions"])
        self.predicted[name] = plan["predicted"]

    @contextlib.contextmanager
    def recomputed(self) -> Iterator[None]:
        self.model.recompute = True
        try:
            yield
        finally:
            self.model.recompute = False

    def step(self, look: bool = False) -> Tensor:
        self.forget_gradients()
        before = self.active("current") if look else 0
        y = self.model(self.batch())
        if look:
            self.resident = self.active("current") - before
        y.backward(torch.ones_like(y))
        return y.detach()

    def forget_gradients(self) -> None:
        for p in (*self.model.parameters(), *self.leaves):
            p.grad = None

    def visit(self, way: str, steps: int = 2) -> dict[str, float]:
        """Milliseconds of the last of some steps, on the device and on the host, and its peak."""
        scheduler = self.schedulers.get(way)
        with self.ways[way]():
            for k in range(steps - 1):
                self.step(look=k == steps - 2)
            self.forget_gradients()
            moved = scheduler.report().moved_bytes if scheduler else 0
            start, end = self.mark(), self.mark()
            if self.cuda:
                torch.cuda.reset_peak_memory_stats()
                start.record()
            before = self.active("current")
            host = time.perf_counter()
            self.step()
            host = time.perf_counter() - host
            found = {"ms": host * 1e3, "host_ms": host * 1e3, "peak_gib": 0.0}
            found["resident_gib"] = self.resident / GIB
            if self.cuda:
                end.record()
                torch.cuda.synchronize()
                found["ms"] = start.elapsed_time(end)
                found["peak_gib"] = (self.active("peak") - before) / GIB
            if scheduler:
                found["moved_gib"] = (scheduler.report().moved_bytes - moved) / GIB
            return found

    def mark(self) -> Any:
        return torch.cuda.Event(enable_timing=True) if self.cuda else None

    def active(self, what: str) -> int:
        return torch.cuda.memory_stats()[f"active_bytes.all.{what}"] if self.cuda else 0

    def run(self, stop: float) -> Iterator[dict[str, Any]]:
        """Rounds of all ways until the clock says `stop`, three at least; what is known after each."""
        for way in list(self.ways):
            try:
                self.visit(way)
            except Exception as error:  # a way that fails takes the others' time, not their figures
                print(f"{way} failed: {type(error).__name__}: {error}", flush=True)
                del self.ways[way]
        rounds: dict[str, list[dict[str, float]]] = {way: [] for way in self.ways}
        while time.perf_counter() < stop or len(rounds["nothing"]) < 3:
            for way in self.ways:
                rounds[way].append(self.visit(way))
            yield {way: self.summary(way, rounds) for way in rounds}

    def exact(self, way: str) -> dict[str, bool]:
        """Whether gradients equal those of the plain step to the bit, with a delay on each stream in
        turn before every block, forward and backward. "nothing": whether two plain steps are equal.
        """
        torch.use_deterministic_algorithms(True)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            plain = self.gradients()
            found = {"nothing": all(map(torch.equal, plain, self.gradients()))}
            with self.ways[way]():
                self.step()  # the order becomes known
                for lane in ("compute", "d2h", "h2d"):
                    hooks = self.delays(lane)
                    found[lane] = all(map(torch.equal, plain, self.gradients()))
                    for hook in hooks:
                        hook.remove()
        torch.use_deterministic_algorithms(False)
        return found

    def gradients(self) -> list[Tensor]:
        self.step()
        return [p.grad for p in (*self.leaves, *self.model.parameters())]

    def delays(self, lane: Any) -> list[Any]:
        if not self.cuda:
            return []
        lanes = lanes_of(self.leaves[0].device)

        def sleep(*_: Any) -> None:
            with torch.cuda.stream(lanes.stream(lane)):
                torch.cuda._sleep(20_000_000)

        hooks = [m.register_forward_pre_hook(sleep) for m in self.model.blocks]
        return hooks + [m.register_full_backward_pre_hook(sleep) for m in self.model.blocks]

    def once(self, way: str, scope: Callable[[], Any]) -> dict[str, Any]:
        """One step of a way that takes too long for rounds."""
        self.ways[way] = scope
        return {way: self.visit(way, steps=1)}

    def summary(self, way: str, rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
        mine, base = rounds[way], rounds["nothing"]
        ratios = sorted(a["ms"] / b["ms"] for a, b in zip(mine, base, strict=False))
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        found: dict[str, Any] = {
            "rounds": len(mine),
            "ratio": statistics.median(ratios),
            "quartiles": [quartiles[0], quartiles[2]],
            **{k: statistics.median(r[k] for r in mine) for k in ("ms", "host_ms")},
            "peak_gib": max(r["peak_gib"] for r in mine),
            "resident_gib": mine[-1]["resident_gib"],
        }
        scheduler = self.schedulers.get(way)
        if scheduler is not None:
            moved = found["moved_gib"] = mine[-1]["moved_gib"]
            if moved:  # which share of the bytes that moved is off the device
                gone = base[-1]["resident_gib"] - found["resident_gib"]
                lower = base[-1]["peak_gib"] - found["peak_gib"]
                found["gone_over_moved"], found["peak_over_moved"] = gone / moved, lower / moved
            if way in self.predicted:
                found["predicted"] = self.predicted[way]
            found["schedule"] = dict(scheduler.report().schedule)
        return found


PEAKS: dict[str, list[float | None]] = {"dense": [12.8, 11.0, 9.0, 7.0], "moe": [None]}


def plans(
    model: nn.Module, rows: Tensor, base: int, peaks: list[float | None], **options: Any
) -> dict[str, dict[str, Any]]:
    """Decisions for each peak, in GiB above `base`, by one step recorded or run dry. None: what leaves
    without a stall.
    """
    first = offload.plan(model, rows, layers="blocks.*", **options)
    found = {}
    for peak in peaks:
        limits = Limits(None if peak is None else base + int(peak * GIB), None)
        plan = plan_profile(first.profile, first.hardware, limits, layers=("blocks.*",))
        again = dict.fromkeys(plan.recomputed, "recompute")
        predicted = {
            "made_from": first.profile.kind,
            "before_gib": (plan.before.peak - base) / GIB,
            "peak_gib": (plan.after.peak - base) / GIB,
            "ratio": plan.after.seconds / plan.before.seconds,
            "offload_gib": plan.bytes_of("offload") / GIB,
            "recomputed": len(again),
            "warnings": list(plan.warnings),
        }
        name = "plan free" if peak is None else f"plan {peak} GiB"
        found[name] = {"predicted": predicted, "decisions": {**plan.decisions, **again}}
    return found


def stack(kind: str, small: bool, blocks: int | None, device: torch.device) -> tuple[Any, Tensor]:
    shape = (SMALL if small else SHAPES)[kind]
    shape = shape._replace(blocks=blocks or shape.blocks)
    dtype = torch.float32 if small else torch.bfloat16
    torch.manual_seed(0)
    with torch.device(device):
        rows = torch.randn(shape.tokens, shape.d, dtype=dtype, requires_grad=True)
        return Stack(shape).to(dtype), rows


def bench_of(args: argparse.Namespace, device: torch.device) -> Bench:
    model, rows = stack(args.model, args.small, args.blocks, device)
    bench = Bench(model, rows)
    bench.ways["checkpoint"] = bench.recomputed
    if bench.cuda:
        bench.ways["async hooks"] = AsyncHooks(device)
    least = 1 if args.small else 1 << 20
    for units in (2, 4, 6):  # a unit is one activation of the width of the model
        policy = offload.Policy(layer_bytes=units * rows.nbytes, min_bytes=least)
        bench.add_scheduler(f"scheduler {units} units", policy=policy)
    try:
        made = json.loads(args.plans.read_text()) if args.plans else recorded(bench, args, least)
        for name, plan in made.items():
            bench.add_plan(name, plan)
    except Exception as error:  # the other ways are worth their time without
        print(f"plans failed: {type(error).__name__}: {error}", flush=True)
    return bench


def recorded(bench: Bench, args: argparse.Namespace, least: int) -> dict[str, dict[str, Any]]:
    """Plans of one step on this device, as it runs."""
    bench.step()
    bench.forget_gradients()
    hardware = offload.Hardware.measure() if bench.cuda else offload.Hardware.h200()
    options = {"record": True, "hardware": hardware, "min_bytes": least}
    base = bench.active("current")
    return plans(bench.model, bench.batch(), base, peaks_of(args), **options)


def dry(args: argparse.Namespace) -> None:
    """Plans of a dry run, without any memory, into a file."""
    model, rows = stack(args.model, args.small, args.blocks, torch.device("meta"))
    base = sum(t.nbytes for t in (rows, *model.parameters()))
    options = {"hardware": offload.Hardware.h200(), "min_bytes": 1 << 20}
    args.plans.write_text(json.dumps(plans(model, rows, base, peaks_of(args), **options)))


def peaks_of(args: argparse.Namespace) -> list[float | None]:
    given = [None if p == "free" else float(p) for p in args.peaks.split(",") if p]
    return given or PEAKS[args.model]


def provenance(device: torch.device) -> dict[str, str]:
    """When and with what a figure was measured."""
    cuda = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fuseops": fo.__version__,
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = [
        f"{'way':34}{'ms':>9}{'host':>9}{'ratio':>8}{'quartiles':>16}{'peak GiB':>10}{'moved':>8}"
    ]
    for way, row in found.items():
        ratio = f"{row['ratio']:8.4f}" if "ratio" in row else " " * 8
        spread = "{:.4f}-{:.4f}".format(*row["quartiles"]) if "quartiles" in row else ""
        moved = f"{row['moved_gib']:7.2f}" if "moved_gib" in row else ""
        lines.append(
            f"{way:28}{row['ms']:9.2f}{row['host_ms']:8.1f}{ratio}{spread:>15}"
            f"{row['peak_gib']:9.2f}{moved}"
        )
        if "gone_over_moved" in row:
            lines[-1] += f" {row['gone_over_moved']:.4f} {row['peak_over_moved']:.4f}"
        if "predicted" in row:
            guess = row["predicted"]
            lines[-1] += (
                f"  {guess['peak_gib']:.2f} GiB, {guess['ratio']:.4f}, "
                f"{guess['offload_gib']:.2f} moved, {guess['recomputed']} recomputed"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="from the start of the script")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", choices=sorted(SHAPES), default="dense")
    parser.add_argument("--blocks", type=int)
    parser.add_argument(
        "--ways", default="", help="only those that begin with one of these, by comma"
    )
    parser.add_argument("--peaks", default="", help="of the plans: GiB, or free, by comma")
    parser.add_argument("--plans", type=Path, help="follow the plans in this file")
    parser.add_argument("--dry", action="store_true", help="write it, from a dry run")
    parser.add_argument("--exact", action="store_true", help="compare gradients, time nothing")
    parser.add_argument("--once", action="store_true", help="save_on_cpu too: 11 s a step")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if args.dry:
        dry(args)
        return 0
    bench = bench_of(args, device)
    for way in [w for w in bench.ways if not w.startswith(("nothing", *args.ways.split(",")))]:
        del bench.ways[way]
    if args.exact:
        checked = {way: bench.exact(way) for way in bench.schedulers if way in bench.ways}
        print(json.dumps(checked))
        if args.out:
            args.out.write_text(json.dumps({**provenance(device), "exact": checked}) + "\n")
        return 0 if all(all(c.values()) for c in checked.values()) else 1
    found: dict[str, Any] = {}
    for found in bench.run(START + args.seconds):
        write(args, device, found)  # each time, so that a run that is cut off leaves something
    if args.once:
        pin = device.type == "cuda"
        scope = lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin)  # noqa: E731
        found |= bench.once("save_on_cpu", scope)
        write(args, device, found)
    print(table(found))
    return 0


def write(args: argparse.Namespace, device: torch.device, found: dict[str, Any]) -> None:
    if args.out:
        record = {**provenance(device), "small": args.small, args.model: found}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
