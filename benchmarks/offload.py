"""Training steps with saved tensors kept, recomputed and moved: time and peak memory, side by side.

    python benchmarks/offload.py [--seconds 90] [--out FILE] [--small]

The model: dense transformer blocks of fuseops ops (D 4096, F 14336, 32 heads, 8192 tokens, bf16, 12
blocks). Ways take turns, two steps a visit, of which the second counts; the medians of their ratio to
the plain step of the same round are printed with quartiles. Peaks are active bytes (allocated bytes
hide what `record_stream` keeps from being used again), above what is there before a step, gradients included
(they are set to None before each).
--small: a few rows on any device, to try the script.
"""

import argparse
import contextlib
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload
from fuseops.offload.plan import Limits, plan_profile

GIB = 1 << 30


class Attention(nn.Module):
    """Causal attention over one packed buffer of queries, keys and values."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, qkv: Tensor) -> Tensor:
        rows, width = qkv.shape
        q, k, v = qkv.view(1, rows, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(rows, width // 3)


def block(d: int, f: int, heads: int) -> fo.Sequential:
    linear = lambda i, o: fo.ops.Linear(i, o, bias=False)  # noqa: E731
    return fo.Sequential(
        {
            "attn": fo.Residual(
                fo.ops.RMSNorm(d), linear(d, 3 * d), Attention(heads), linear(d, d)
            ),
            "mlp": fo.Residual(fo.ops.RMSNorm(d), linear(d, 2 * f), fo.ops.SwiGLU(), linear(f, d)),
        }
    )


class Dense(nn.Module):
    """A stack of blocks; `recompute` checkpoints each."""

    def __init__(self, blocks: int, d: int, f: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(d, f, heads) for _ in range(blocks))
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

    def __init__(self, model: nn.Module, batch: Callable[[], Tensor], device: torch.device) -> None:
        self.model, self.batch, self.device = model, batch, device
        self.cuda = device.type == "cuda"
        self.ways: dict[str, Callable[[], Any]] = {"nothing": contextlib.nullcontext}
        self.schedulers: dict[str, offload.Scheduler] = {}
        self.predicted: dict[str, dict[str, Any]] = {}

    def add_scheduler(self, name: str, **options: Any) -> None:
        scheduler = offload.Scheduler(self.model, "blocks.*", **options)
        self.schedulers[name] = scheduler
        self.ways[name] = lambda: scheduler

    def add_plans(self, peaks: list[float], **options: Any) -> None:
        """A way for each peak, in GiB above what is there before a step, by a step recorded once."""
        self.step()
        for p in self.model.parameters():
            p.grad = None
        base = self.active("current")
        hardware = offload.Hardware.measure() if self.cuda else offload.Hardware.h200()
        first = offload.plan(
            self.model, self.batch(), layers="blocks.*", record=True, hardware=hardware, **options
        )
        for peak in peaks:
            limits = Limits(base + int(peak * GIB), None)
            plan = plan_profile(first.profile, hardware, limits, layers=("blocks.*",))
            name = f"plan, {peak} GiB"
            self.add_scheduler(name, plan=plan)
            self.predicted[name] = {
                "predicted_peak_gib": (plan.after.peak - base) / GIB,
                "predicted_ratio": plan.after.seconds / plan.before.seconds,
                "recomputed": list(plan.recomputed),
                "warnings": list(plan.warnings),
            }

    @contextlib.contextmanager
    def recomputed(self) -> Iterator[None]:
        self.model.recompute = True
        try:
            yield
        finally:
            self.model.recompute = False

    def step(self) -> Tensor:
        for p in self.model.parameters():
            p.grad = None
        y = self.model(self.batch())
        y.backward(torch.ones_like(y))
        return y.detach()

    def visit(self, way: str, steps: int = 2) -> dict[str, float]:
        """Milliseconds of the last of some steps, on the device and on the host, and its peak."""
        scheduler = self.schedulers.get(way)
        with self.ways[way]():
            for _ in range(steps - 1):
                self.step()
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

    def run(self, seconds: float) -> dict[str, Any]:
        """Rounds of all ways until the time is up."""
        stop = time.perf_counter() + seconds
        for way in list(self.ways):
            try:
                self.visit(way, steps=3)
            except Exception as error:  # a way that fails takes the others' time, not their figures
                print(f"{way} failed: {type(error).__name__}: {error}", flush=True)
                del self.ways[way]
        rounds: dict[str, list[dict[str, float]]] = {way: [] for way in self.ways}
        while time.perf_counter() < stop or len(rounds["nothing"]) < 3:
            for way in self.ways:
                rounds[way].append(self.visit(way))
        return {way: self.summary(way, rounds) for way in rounds}

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
        }
        scheduler = self.schedulers.get(way)
        if scheduler is not None:
            found["moved_gib"] = mine[-1]["moved_gib"]
            found |= self.predicted.get(way, {})
            found["schedule"] = dict(scheduler.report().schedule)
        return found


def dense(small: bool, blocks: int, device: torch.device) -> Bench:
    d, f, heads, tokens = (64, 128, 2, 64) if small else (4096, 14336, 32, 8192)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = Dense(blocks, d, f, heads).to(dtype)
        rows = torch.randn(tokens, d, dtype=dtype)
    bench = Bench(model, lambda: rows.clone().requires_grad_(), device)
    bench.ways["checkpoint"] = bench.recomputed
    if device.type == "cuda":
        bench.ways["async hooks"] = AsyncHooks(device)
    scale = 16 << 10 if small else 64 << 20  # one activation of the width of the model
    least = 1 if small else 1 << 20
    for units in (2, 4, 6, 8):
        policy = offload.Policy(layer_bytes=units * scale, min_bytes=least)
        bench.add_scheduler(f"scheduler, {units} units a layer", policy=policy)
    try:
        bench.add_plans([12.8, 11.0, 9.0, 7.0], min_bytes=least)
    except Exception as error:  # the other ways are worth their time without
        print(f"plans failed: {type(error).__name__}: {error}", flush=True)
    everything = offload.Policy(min_bytes=least)
    bench.add_scheduler("scheduler, everything", policy=everything)
    bench.add_scheduler("scheduler, nothing moves", policy=offload.Policy(fraction=0.0))
    return bench


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
        if "predicted_peak_gib" in row:
            lines[-1] += (
                f"  {row['predicted_peak_gib']:.2f} GiB, {row['predicted_ratio']:.4f}, "
                f"{len(row['recomputed'])} recomputed"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    bench = dense(args.small, args.blocks, device)
    pin = device.type == "cuda"
    found = bench.run(args.seconds)
    for last in (False, True):
        if last:
            found |= bench.once(
                "save_on_cpu", lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin)
            )
        print(table(found), flush=True)
        if args.out:
            record = {**provenance(device), "small": args.small, "dense": found}
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
