"""Grouped GEMMs beside `F.grouped_mm`, dense cuBLAS of equal flops and a loop over experts, in bf16.

    python benchmarks/grouped_gemm.py --out benchmarks/results/grouped_gemm_h200.json
    python benchmarks/grouped_gemm.py --out sweep.json --sweep      # every configuration beside the peers
    python benchmarks/grouped_gemm.py --out checks.json --check     # no times; then --checked checks.json

A cell is one GEMM of one shape and one split. Its candidates run in turn, in balanced order, back to
back, for `--span` seconds and as long to warm up (hot: the GPU is at its power limit, as in training),
and the median of the rounds counts; cool shots, of fc1 with uniform splits, follow 40 ms of idling and one
launch. The tile table is made inside every timed call. Three groups are compared
with float32 before, with odd ends, once for all splits. TFLOP/s count the rows inside groups. Gathered
cells read the rows by index, each token K times, beside a copy of the rows and the plain GEMM. Host
time is that of a call that waits for nothing, with the tile table made before, as in a layer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import measure
import torch
from grouped_problems import EDGES, SHAPES, SPLITS, Call, bar, operands, ours, peers, split, wrong
from torch import Tensor

from fuseops import ops
from fuseops.kernels import configs, grouped, grouped_paths, permute


def elapsed_us(call: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def cool(calls: dict[str, Call], shots: int) -> dict[str, float]:
    """Median microseconds of single launches, each after 40 ms of idling and one launch to warm up."""

    def shot(call: Call) -> float:
        torch.cuda.synchronize()
        time.sleep(0.04)
        call()
        return elapsed_us(call)

    us = measure.in_rounds({name: partial(shot, call) for name, call in calls.items()}, shots, 0)
    return measure.medians(us)


def candidates(kind: str, t: dict[str, Tensor], sweep: bool) -> Iterator[tuple[str, Call]]:
    """Our call; in a sweep one for every configuration of every path that can take the operands."""
    call = ours(kind, t)
    if not sweep:
        yield "fuseops", call
        return
    n, k = (t["w"].shape[1:]) if kind != "dgrad" else t["w"].shape[:0:-1]
    products = kind in ("fwd", "dgrad")
    spaces = grouped_paths.MM_SPACES if products else grouped_paths.WGRAD_SPACES
    for path in ("pingpong", "tma"):
        for number, config in enumerate(spaces[path].candidates((len(t["w"]), n, k), 2)):

            def run(space: Any = spaces[path], config: Any = config, path: str = path) -> Any:
                with grouped_paths.on_path(path), configs.forced(space, config):
                    return call()

            yield f"{path}{number}", run


def cell(kind: str, t: dict[str, Tensor], span: float, problem: str | None,
         sweep: bool = False, loop: bool = False) -> dict[str, Any]:  # fmt: skip
    """One GEMM: microseconds and TFLOP/s of every candidate; problem: why they may not be believed."""
    calls, failed = {}, {}
    for name, call in [*candidates(kind, t, sweep), *peers(kind, t, loop).items()]:
        try:
            call()
            torch.cuda.synchronize()
            calls[name] = call
        except Exception as error:  # reported, not hidden
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
    us = measure.hot(calls, span)
    flops = 2 * int(t["offs"][-1]) * t["w"].shape[1] * t["w"].shape[2]
    path = (
        grouped_paths.mm_path(t["x"], t["w"])
        if kind in ("fwd", "dgrad")
        else grouped_paths.wgrad_path(t["dy"], t["x"])
    )
    return {
        "wrong": problem,
        "path": path,
        "us": {name: round(v, 1) for name, v in us.items()},
        "tflops": {name: round(flops / v / 1e6, 1) for name, v in us.items()},
        "failed": failed,
    }


def gathered(shape: str, span: float) -> dict[str, Any]:
    """The four GEMMs of an expert MLP that read tokens by index: hot microseconds with the gather
    inside, after a copy of the rows, and of the plain GEMM on rows copied before.
    """
    groups, rows, d, f, k = SHAPES[shape]
    offs, tokens = split("uniform", groups, rows), rows // k
    tiles = grouped.group_tiles(offs, rows)
    index = torch.arange(tokens, device="cuda").repeat(k)[torch.randperm(rows, device="cuda")].int()
    x, w1, w2 = (
        measure.rnd(tokens, d),
        measure.rnd(groups, 2 * f, d, scale=0.02),
        measure.rnd(groups, d, f, scale=0.02),
    )
    copied, dh, a = x[index], measure.rnd(rows, 2 * f), measure.rnd(rows, f)
    back = w2.transpose(1, 2)
    mm, wgrad = grouped.grouped_mm, grouped.grouped_wgrad
    copy = lambda: permute.gather_rows(x, index, offs)  # noqa: E731
    found: dict[str, Any] = {}
    for name, width, plain, inside in (
        ("fc1/fwd", 2 * f, lambda x: mm(x, w1, offs, tiles),
         lambda: mm(x, w1, offs, tiles, None, index)),
        ("fc2/dgrad", f, lambda x: mm(x, back, offs, tiles),
         lambda: mm(x, back, offs, tiles, None, index)),
        ("fc1/wgrad", 2 * f, lambda x: wgrad(dh, x, offs, tiles),
         lambda: wgrad(dh, x, offs, tiles, None, index)),
        ("fc2/wgrad", f, lambda x: wgrad(x, a, offs, tiles),
         lambda: wgrad(x, a, offs, tiles, index)),
    ):  # fmt: skip
        calls = {
            "fuseops": inside,
            "copy_and_plain": lambda plain=plain: plain(copy()),
            "plain": lambda plain=plain: plain(copied),
        }
        error = (inside().float() - plain(copied).float()).norm() / plain(copied).float().norm()
        us = measure.hot(calls, span)
        found[name] = {
            "error_against_plain": error.item(),
            "us": {n: round(v, 1) for n, v in us.items()},
            "tflops": {n: round(2 * rows * d * width / v / 1e6, 1) for n, v in us.items()},
        }
    return found


KINDS = ("fwd", "dgrad", "wgrad", "wgrad_into")


def layers() -> Iterator[tuple[str, int, int, int, int]]:
    """(shape/layer, groups, rows, N, K)"""
    for shape, (groups, rows, d, f, _) in SHAPES.items():
        yield f"{shape}/fc1", groups, rows, 2 * f, d
        yield f"{shape}/fc2", groups, rows, d, f


def small_groups(span: float) -> dict[str, Any]:
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
        us = measure.hot(calls, span)
        found[f"{groups}x{size}"] = {
            "us": us,
            "share_of_copy": us["copy"] / us["fuseops"],
            "tflops": {name: 2 * groups * size * 1536 * 2048 / v / 1e6 for name, v in us.items()},
        }
    return found


def host(rounds: int = 21, repeat: int = 100) -> dict[str, Any]:
    """Microseconds a call on the host, and in graph replay: 8 groups, 64 rows, 512 x 512.

    layer: the table and the six GEMMs of an expert MLP, by GEMM; module: GroupedLinear, whose forward and
    backward are the table and three GEMMs.
    """
    offs = torch.full((8,), 8, device="cuda").cumsum(0).int()
    t = operands(8, 64, 512, 512, offs)
    x, w, dy = t["x"], t["w"], t["dy"]
    tiles = grouped.group_tiles(offs, 64)
    module = ops.GroupedLinear(8, 512, 512, bias=False, device="cuda", dtype=x.dtype)
    wanted = x.clone().requires_grad_()

    def fwd() -> Tensor:
        return grouped.grouped_mm(x, w, offs, tiles)

    def dgrad() -> Tensor:
        return grouped.grouped_mm(dy, w.transpose(1, 2), offs, tiles)

    def wgrad() -> Tensor:
        return grouped.grouped_wgrad(dy, x, offs, tiles)

    def table() -> Tensor:
        return grouped.group_tiles(offs, 64)

    def layer() -> None:
        table(), fwd(), fwd(), dgrad(), wgrad(), dgrad(), wgrad()

    calls: dict[str, Call] = {
        **{"table": table, "fwd": fwd, "dgrad": dgrad, "wgrad": wgrad, "layer": layer},
        "torch_fwd": peers("fwd", t, False)["torch"],
        "table_and_fwd": ours("fwd", t),
        "module_fwd": measure.inference(lambda: module(x, offs=offs)),
        "module_step": measure.training_step(
            lambda: module(wanted, offs=offs), dy, [wanted, module.weight]
        ),
    }

    def waiting_for_nothing(call: Call) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        return (time.perf_counter() - start) / repeat * 1e6

    timers = {name: partial(waiting_for_nothing, call) for name, call in calls.items()}
    spans = measure.in_rounds(timers, rounds, heat=1)  # the first round compiles
    record: dict[str, Any] = {
        "host_us": {name: round(statistics.median(us), 2) for name, us in spans.items()},
        "host_least_us": {name: round(min(us), 2) for name, us in spans.items()},
        "graph_us": {},
    }
    for us in (record["host_us"], record["host_least_us"]):
        us["layer"] = round(us["layer"] / 6, 2)
    for name in ("table", "fwd", "dgrad", "wgrad", "torch_fwd", "table_and_fwd"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                calls[name]()
        graph.replay()
        record["graph_us"][name] = round(
            statistics.median(elapsed_us(graph.replay) / 20 for _ in range(9)), 2
        )
    return record


def summary(report: dict[str, Any]) -> dict[str, Any]:
    """Ratios over `F.grouped_mm` and dense by kind, hot and cool: geometric mean, least, those below
    their bar.
    """
    found: dict[str, Any] = {}
    kinds = {**{kind: (kind,) for kind in KINDS}, "products": ("fwd", "dgrad")}
    for kind, peer, state in itertools.product(kinds, ("torch", "dense"), ("cells", "cool")):
        ratios = {
            name: record["us"][peer] / record["us"]["fuseops"]
            for name, record in report[state].items()
            if name.split("/")[2] in kinds[kind] and {peer, "fuseops"} <= record["us"].keys()
        }
        if ratios:
            least = min(ratios, key=lambda name: ratios[name])
            found[f"{kind}/{peer}{'' if state == 'cells' else '/cool'}"] = {
                "geomean": measure.geomean(ratios.values()),
                "least": [least, round(ratios[least], 3)],
                "below": {n: round(r, 3) for n, r in ratios.items() if r < bar(n, kind, peer)},
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--only", default="", help="layers whose name contains this; or edges, gathered, host"
    )
    parser.add_argument("--span", type=float, default=0.1, help="seconds a cell is timed")
    parser.add_argument("--shots", type=int, default=5, help="cool shots of uniform cells")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds for the cells")
    parser.add_argument("--check", action="store_true", help="compare with float32, time nothing")
    parser.add_argument(
        "--checked", type=Path, nargs="+", help="what --check wrote: compare the rest"
    )
    parser.add_argument("--sweep", action="store_true", help="time every configuration")
    options = parser.parse_args()
    begun = time.perf_counter()
    report: dict[str, Any] = {
        "environment": measure.environment(),
        "checks": {},
        "cells": {},
        "gathered": {},
        "edges": {},
        "cool": {},
        "skipped": [],
    }
    torch.manual_seed(0)

    def late() -> bool:
        return time.perf_counter() - begun > options.budget

    def note(place: str, name: str, make: Callable[..., Any], *args: Any) -> None:
        if late():
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
            record.get("tflops") or record,
            record.get("failed") or "",
            flush=True,
        )

    checks: dict[str, str | None] = report["checks"]
    for path in options.checked or ():
        if path.exists():
            checks |= json.loads(path.read_text())["checks"]

    def one(key: str, kind: str, t: dict[str, Tensor], *flags: bool) -> dict[str, Any]:
        """A cell; its operands are compared once for all splits, with ends of groups at odd rows."""
        if key not in checks:
            checks[key] = wrong(kind, t)
        problem = checks[key]
        if options.check:
            return {"wrong": problem}
        return cell(kind, t, options.span, problem, options.sweep, *flags)

    if not options.check:
        report["host"] = host()
        print(json.dumps(report["host"]), flush=True)
    chosen = [layer for layer in layers() if options.only in layer[0]]
    for layer, *sizes in chosen:
        if late():
            report["skipped"].append(layer)
            continue
        t = operands(*sizes, split("uniform", *sizes[:2]))
        for kind_of_split, kind in itertools.product(
            SPLITS[:1] if options.sweep or options.check else SPLITS, KINDS
        ):
            t["offs"] = split(kind_of_split, *sizes[:2])
            name = f"{layer}/{kind}/{kind_of_split}"
            note("cells", name, one, f"{layer}/{kind}", kind, t, layer.startswith("qwen3_30b"))
    if options.only in ("", "edges"):
        for name, (n, k) in EDGES.items():
            t = operands(32, 65536, n, k, split("uniform", 32, 65536))
            for kind in KINDS[:3]:
                note("edges", f"{name}/{kind}", one, f"{name}/{kind}", kind, t)
    if options.check:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        print("wrong:", {key: why for key, why in checks.items() if why}, "of", len(checks))
        return
    if options.only in ("", "gathered"):
        for shape in SHAPES:
            note("gathered", shape, gathered, shape, options.span)
    if options.only in ("", "edges"):
        report["small_groups"] = small_groups(options.span)
        print(json.dumps(report["small_groups"]), flush=True)
    for layer, *sizes in chosen:
        if "fc2" in layer or late():
            continue
        t = operands(*sizes, split("uniform", *sizes[:2]))
        for kind in KINDS[:3]:
            calls = {"fuseops": ours(kind, t), **peers(kind, t, False)}
            note("cool", f"{layer}/{kind}", lambda calls=calls: {"us": cool(calls, options.shots)})
    report["summary"] = summary(report)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["summary"]))


if __name__ == "__main__":
    main()
