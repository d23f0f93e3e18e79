"""Grouped GEMMs beside `F.grouped_mm`, dense cuBLAS of equal flops and a loop over experts, in bf16.

    python benchmarks/grouped_gemm.py --out benchmarks/results/grouped_gemm_h200.json
    python benchmarks/grouped_gemm.py --out sweep.json --sweep      # every configuration beside the peers

A cell is one GEMM of one shape and one split. Its candidates run in turn, in rotated order, back to
back (hot: the GPU is at its power limit, as in training), and the median of the rounds counts; the
tile table is made inside every timed call. Correctness is checked before against float32 by group.
TFLOP/s count the rows inside groups. Host time is that of a call that waits for nothing, with the
tile table made before, as in a layer.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops.kernels import configs, grouped, grouped_launch

Call = Callable[[], Any]

# name: groups, rows, model width D, expert width F
SHAPES = {
    "mixtral": (8, 16384, 4096, 14336),
    "deepseek_v3": (32, 65536, 7168, 2048),
    "qwen3_30b": (128, 262144, 2048, 768),
    "qwen3_8k": (128, 65536, 2048, 768),
    "sonic_7b": (128, 196608, 1536, 256),
    "sonic_30b": (64, 131072, 4096, 1024),
}
SPLITS = ("uniform", "zipf", "two_empty")
EDGES = {"n_1856": (1856, 2048), "n_2048": (2048, 2048), "k_1856": (2048, 1856),
         "n_2880": (2880, 3072), "n_3072": (3072, 3072), "k_2880": (3072, 2880)}  # fmt: skip
NEXT = {"n_1856": "n_2048", "k_1856": "n_2048", "n_2880": "n_3072", "k_2880": "n_3072"}


def split(kind: str, groups: int, rows: int) -> Tensor:
    """Row ends of random groups: every row chooses at random, evenly or by Zipf's law."""
    g = torch.Generator().manual_seed(1)
    weights = torch.ones(groups)
    if kind == "zipf":
        weights = 1 / torch.arange(1, groups + 1)[torch.randperm(groups, generator=g)]
    if kind == "two_empty":
        weights[torch.randperm(groups, generator=g)[:2]] = 0
    chosen = torch.multinomial(weights, rows, replacement=True, generator=g)
    return chosen.bincount(minlength=groups).cumsum(0).to(torch.int32).cuda()


def rnd(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(scale)


def operands(groups: int, rows: int, n: int, k: int, offs: Tensor) -> dict[str, Tensor]:
    return {"x": rnd(rows, k), "w": rnd(groups, n, k, scale=0.02), "dy": rnd(rows, n), "offs": offs}


def ours(kind: str, t: dict[str, Tensor]) -> Call:
    x, w, dy, offs = t["x"], t["w"], t["dy"], t["offs"]
    table = lambda: grouped.group_tiles(offs, len(x))  # noqa: E731
    if kind == "fwd":
        return lambda: grouped.grouped_mm(x, w, offs, table())
    if kind == "dgrad":
        return lambda: grouped.grouped_mm(dy, w.transpose(1, 2), offs, table())
    if kind == "wgrad":
        return lambda: grouped.grouped_wgrad(dy, x, offs, table())
    main = torch.zeros(w.shape, device="cuda")
    return lambda: grouped.grouped_wgrad_into(main, dy, x, offs, table())


def peers(kind: str, t: dict[str, Tensor], loop: bool) -> dict[str, Call]:
    x, w, dy, offs = t["x"], t["w"], t["dy"], t["offs"]
    main = torch.zeros(w.shape, device="cuda") if kind == "wgrad_into" else None
    if kind == "fwd":
        found = {
            "torch": lambda: F.grouped_mm(x, w.transpose(1, 2), offs=offs),
            "dense": lambda: x @ w[0].t(),
        }
    elif kind == "dgrad":
        found = {"torch": lambda: F.grouped_mm(dy, w, offs=offs), "dense": lambda: dy @ w[0]}
    elif kind == "wgrad":
        found = {"torch": lambda: F.grouped_mm(dy.t(), x, offs=offs), "dense": lambda: dy.t() @ x}
    else:
        found = {"torch": lambda: main.add_(F.grouped_mm(dy.t(), x, offs=offs))}
    if loop and kind == "fwd":
        ends = [0, *offs.tolist()]
        y = torch.empty_like(dy)
        pairs = list(itertools.pairwise(ends))
        found["loop"] = lambda: [
            torch.mm(x[a:b], w[e].t(), out=y[a:b]) for e, (a, b) in enumerate(pairs)
        ]
    return found


def wrong(kind: str, t: dict[str, Tensor]) -> str | None:
    """Why a result may not be timed: relative error by group against float32, and padding."""
    x, w, dy = t["x"], t["w"], t["dy"]
    offs = (
        t["offs"] - torch.arange(len(w), device="cuda").flip(0).int().clamp(max=3) // 3
    )  # odd ends
    offs = torch.minimum(offs.clamp(min=0), torch.tensor(len(x) - 5, device="cuda")).int()
    bounds = list(zip([0, *offs.tolist()], offs.tolist(), strict=False))
    call = ours(kind, {**t, "offs": offs})
    torch.full(
        (1 << 28,), float("nan"), device="cuda"
    )  # what the allocator hands out next is poisoned
    first = call()
    if kind in ("fwd", "dgrad"):
        a = x if kind == "fwd" else dy
        if first[int(offs[-1]) :].any():
            return "padding rows are not zero"
        want = lambda e, i, j: a[i:j].float() @ (w[e].t() if kind == "fwd" else w[e]).float()  # noqa: E731
        got = lambda e, i, j: first[i:j]  # noqa: E731
    else:
        if kind == "wgrad_into":
            main = torch.ones(w.shape, device="cuda")
            grouped.grouped_wgrad_into(main, dy, x, offs)
            grouped.grouped_wgrad_into(main, dy, x, offs)
            first = (main - 1) / 2
        want = lambda e, i, j: dy[i:j].t().float() @ x[i:j].float()  # noqa: E731
        got = lambda e, i, j: first[e]  # noqa: E731
    worst = 0.0
    for e in sorted({*range(min(len(bounds), 6)), len(bounds) - 1}):
        i, j = bounds[e]
        right, left = want(e, i, j), got(e, i, j).float()
        if left.numel():
            scale = right.norm().clamp(min=1e-20)
            error = ((left - right).norm() / scale).item() if j > i else left.abs().max().item()
            worst = max(worst, error if error == error else math.inf)
    if worst > 4e-3:
        return f"relative error {worst:.2g}"
    if kind != "wgrad_into" and not torch.equal(first, call()):
        return "two runs differ"
    return None


def elapsed_us(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def round_robin(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median microseconds of each, one a round, in rotated order, queued back to back."""
    names, spans = list(calls), {name: [] for name in calls}
    for call in calls.values():
        call()
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            calls[name]()
            end.record()
            spans[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(a.elapsed_time(b) * 1e3 for a, b in pairs)
        for name, pairs in spans.items()
    }


def candidates(kind: str, t: dict[str, Tensor], sweep: bool) -> Iterator[tuple[str, Call]]:
    """Our call; in a sweep one for every configuration of every path that can take the operands."""
    call = ours(kind, t)
    if not sweep:
        yield "fuseops", call
        return
    n, k = (t["w"].shape[1:]) if kind != "dgrad" else t["w"].shape[:0:-1]
    spaces = (
        {"pingpong": grouped_launch.MM_PINGPONG, "tma": grouped_launch.MM_TMA}
        if kind in ("fwd", "dgrad")
        else {"tma": grouped_launch.WGRAD_TMA}
    )
    for path, space in spaces.items():
        for number, config in enumerate(space.candidates((len(t["w"]), n, k), 2)):

            def run(space: Any = space, config: Any = config, path: str = path) -> Any:
                original = grouped_launch.mm_path
                if kind in ("fwd", "dgrad"):
                    grouped_launch.mm_path = lambda *_: path
                try:
                    with configs.forced(space, config):
                        return call()
                finally:
                    grouped_launch.mm_path = original

            yield f"{path}{number}", run


def cell(kind: str, groups: int, rows: int, n: int, k: int, offs: Tensor, rounds: int,
         sweep: bool = False, loop: bool = False) -> dict[str, Any]:  # fmt: skip
    """One GEMM: microseconds and TFLOP/s of every candidate."""
    t = operands(groups, rows, n, k, offs)
    calls, failed = {}, {}
    for name, call in [*candidates(kind, t, sweep), *peers(kind, t, loop).items()]:
        try:
            call()
            torch.cuda.synchronize()
            calls[name] = call
        except Exception as error:  # reported, not hidden
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
    problem = wrong(kind, t)
    us = round_robin(calls, rounds)
    flops = 2 * int(offs[-1]) * n * k
    path = (
        grouped_launch.mm_path(t["x"], t["w"])
        if kind in ("fwd", "dgrad")
        else grouped_launch.wgrad_path(t["dy"], t["x"])
    )
    return {
        "wrong": problem,
        "path": path,
        "us": {name: round(v, 1) for name, v in us.items()},
        "tflops": {name: round(flops / v / 1e6, 1) for name, v in us.items()},
        "failed": failed,
    }


KINDS = ("fwd", "dgrad", "wgrad", "wgrad_into")


def cells(sweep: bool) -> Iterator[tuple[str, str, str, str, tuple[int, ...]]]:
    """(name, shape, split, kind, (groups, rows, N, K)), uniform splits first."""
    for kind_of_split in SPLITS[:1] if sweep else SPLITS:
        for shape, (groups, rows, d, f) in SHAPES.items():
            for layer, n, k in (("fc1", 2 * f, d), ("fc2", d, f)):
                for kind in KINDS:
                    name = f"{shape}/{layer}/{kind}/{kind_of_split}"
                    yield name, shape, kind_of_split, kind, (groups, rows, n, k)


def small_groups(rounds: int) -> dict[str, Any]:
    """1024 groups of 64 rows against a copy of the same bytes, and 64 groups of 1024 rows."""
    found: dict[str, Any] = {}
    for groups, size in ((1024, 64), (64, 1024)):
        offs = (torch.arange(1, groups + 1, device="cuda") * size).int()
        t = operands(groups, groups * size, 1536, 2048, offs)
        nbytes = sum(t[name].numel() * 2 for name in ("x", "w", "dy"))
        source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda").random_()
        calls = dict(candidates("fwd", t, sweep=True)) | {"fuseops": ours("fwd", t)}
        calls |= {"copy": source.clone}
        if groups < 1024:  # F.grouped_mm refuses 1024 groups
            calls |= peers("fwd", t, False)
        us = round_robin(calls, rounds)
        found[f"{groups}x{size}"] = {
            "us": us,
            "share_of_copy": us["copy"] / us["fuseops"],
            "tflops": {name: 2 * groups * size * 1536 * 2048 / v / 1e6 for name, v in us.items()},
        }
    return found


def host(rounds: int = 200) -> dict[str, Any]:
    """Microseconds a call on the host, and in graph replay: 8 groups, 64 rows, 512 x 512."""
    offs = torch.full((8,), 8, device="cuda").cumsum(0).int()
    t = operands(8, 64, 512, 512, offs)
    x, w, dy = t["x"], t["w"], t["dy"]
    tiles = grouped.group_tiles(offs, 64)
    calls: dict[str, Call] = {
        "table": lambda: grouped.group_tiles(offs, 64),
        "fwd": lambda: grouped.grouped_mm(x, w, offs, tiles),
        "dgrad": lambda: grouped.grouped_mm(dy, w.transpose(1, 2), offs, tiles),
        "wgrad": lambda: grouped.grouped_wgrad(dy, x, offs, tiles),
        "torch_fwd": lambda: F.grouped_mm(x, w.transpose(1, 2), offs=offs),
        "table_and_fwd": ours("fwd", t),
    }
    record: dict[str, Any] = {"host_us": {}, "graph_us": {}}
    for name, call in calls.items():
        for _ in range(10):
            call()
        spans = []
        for _ in range(7):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(rounds):
                call()
            spans.append((time.perf_counter() - start) / rounds * 1e6)
        record["host_us"][name] = statistics.median(spans)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                call()
        graph.replay()
        record["graph_us"][name] = statistics.median(
            elapsed_us(graph.replay) / 20 for _ in range(9)
        )
    return record


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Ratios over `F.grouped_mm` and dense by kind: least and geometric mean."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        chosen = {n: c["us"] for n, c in report["cells"].items() if f"/{kind}/" in n}
        for peer in ("torch", "dense"):
            ratios = {
                name: us[peer] / us["fuseops"]
                for name, us in chosen.items()
                if peer in us and "fuseops" in us
            }
            if ratios:
                mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
                least = min(ratios, key=lambda name: ratios[name])
                found[f"{kind}/{peer}"] = {
                    "geomean": round(mean, 3),
                    "least": [least, round(ratios[least], 3)],
                    "below_1": {n: round(r, 3) for n, r in ratios.items() if r < 1},
                }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="cells whose name contains this; edges: none")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--budget", type=float, default=200.0, help="seconds for the cells")
    parser.add_argument("--sweep", action="store_true", help="time every configuration")
    options = parser.parse_args()
    begun = time.perf_counter()
    device = torch.cuda.get_device_properties(0)
    report: dict[str, Any] = {
        "environment": {
            "date": datetime.date.today().isoformat(),
            **configs.versions(),
            "gpu": device.name,
            "sms": device.multi_processor_count,
        },
        "cells": {},
        "edges": {},
        "skipped": [],
    }
    torch.manual_seed(0)

    def note(place: str, name: str, make: Callable[..., Any], *args: Any) -> None:
        if time.perf_counter() - begun > options.budget:
            report["skipped"].append(name)
            return
        try:
            report[place][name] = make(*args)
        except Exception as error:
            torch.cuda.synchronize()
            report[place][name] = {"wrong": f"{type(error).__name__}: {error}"[:500], "us": {}}
        record = report[place][name]
        print(
            name,
            record.get("wrong") or "",
            record.get("tflops"),
            record.get("failed") or "",
            flush=True,
        )

    report["host"] = host()
    print(json.dumps(report["host"]), flush=True)
    for name, shape, kind_of_split, kind, sizes in cells(options.sweep):
        if options.only in name:
            offs = split(kind_of_split, *sizes[:2])
            loop = shape == "qwen3_30b"
            note("cells", name, cell, kind, *sizes, offs, options.rounds, options.sweep, loop)
    if options.only in ("", "edges"):
        for name, (n, k) in EDGES.items():
            for kind in KINDS[:3]:
                offs = split("uniform", 32, 65536)
                sizes = (32, 65536, n, k)
                note(
                    "edges",
                    f"{name}/{kind}",
                    cell,
                    kind,
                    *sizes,
                    offs,
                    options.rounds,
                    options.sweep,
                )
        report["small_groups"] = small_groups(options.rounds)
        print(json.dumps(report["small_groups"]), flush=True)
    report["summary"] = summary(report)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["summary"]))


if __name__ == "__main__":
    main()
