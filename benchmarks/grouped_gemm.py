"""Grouped GEMMs beside `F.grouped_mm`, dense cuBLAS of equal flops and a loop over experts, in bf16.

    python benchmarks/grouped_gemm.py --out benchmarks/results/grouped_gemm_h200.json
    python benchmarks/grouped_gemm.py --out checks.json --check     # no times; then --checked checks.json

`settled`: with rows split evenly at random, each candidate makes the GEMMs of a training step of an expert MLP one
after another and over again, for `--settle` seconds to warm up and as long again, in turn. So each runs at the clock
that the power of its own kernels leaves it, as in training. `cells`: other splits and shapes, and widths that no tile
divides (`edges`), one GEMM at a time for `--span` seconds a candidate and round: too short for that, so the clock is
that of all candidates together, which flatters the one that takes most power. `cool`: single calls after 40 ms of
idling and one call. Ratios are a peer's time over ours, round by round.

The tile table is made inside every timed call. Three groups are compared with float32 before, with odd ends, once for
all splits. TFLOP/s count the rows inside groups. `gathered` reads the rows by index, each token K times, beside a copy
of the rows and the plain GEMM. Host time is that of a call that waits for nothing, with the tile table made
before, as in a layer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import layers, measure, runs
from common.grouped_problems import (
    EDGES,
    NEXT,
    SHAPES,
    SPLITS,
    Operands,
    bar,
    entry,
    flops_of,
    operands,
    ours,
    peers,
    split,
    wrong,
)
from torch import Tensor

from fuseops import ops
from fuseops.kernels import grouped, grouped_paths, permute

KINDS = ("fwd", "dgrad", "wgrad", "wgrad_into")
SETTLED = ("mixtral", "deepseek_v3", "qwen3_30b", "sonic_30b")  # whose ratios are nearest to 1
Sizes = tuple[int, int, int, int]  # groups, rows, N, K
PARTS = ("host", "settled", "cells", "edges", "gathered", "small_groups", "cool")


def summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios to the peers by kind and state: geometric mean, least, those below their bar; then the rate of widths
    that no tile divides over that of the next that one does, and of small groups over a copy of the same bytes.
    """
    found: dict[str, Any] = {}
    kinds = {**{kind: (kind,) for kind in KINDS}, "products": ("fwd", "dgrad")}
    for state, kind, peer in itertools.product(
        ("settled", "cells", "cool"), kinds, ("torch", "dense")
    ):
        found[f"{kind}/{peer}/{state}"] = {
            name: (record["ratios"][peer]["ratio"], bar(name, peer))
            for name, record in report[state].items()
            if name.split("/")[2] in kinds[kind] and peer in record.get("ratios", ())
        }
    rates = {n: r["tflops"]["fuseops"] for n, r in report["edges"].items() if "tflops" in r}
    pairs = {n: "/".join([NEXT.get(n.split("/")[0], ""), n.split("/")[1]]) for n in rates}
    found["edges/next"] = {n: (rates[n] / rates[m], 0.97) for n, m in pairs.items() if m in rates}
    few = {n: r["ratios"]["copy"]["ratio"] for n, r in report["small_groups"].items() if "us" in r}
    found["small/copy"] = {n: (ratio, 0.85) for n, ratio in few.items() if n == "1024x64"}
    rows = {name: row(ratios) for name, ratios in found.items() if ratios}
    wrong = {name: why for name, why in report["checks"].items() if why}
    return rows | ({"wrong, not timed": {"below": wrong}} if wrong else {})


def row(ratios: dict[str, tuple[float, float]]) -> dict[str, Any]:
    least = min(ratios, key=lambda name: ratios[name][0])
    return {
        "geomean": measure.geomean(ratio for ratio, _ in ratios.values()),
        "least": [least, round(ratios[least][0], 3)],
        "below": {name: round(ratio, 3) for name, (ratio, bar) in ratios.items() if ratio < bar},
    }


class GEMMRun(runs.Run):
    """The parts, each with its own GEMMs."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options, summary={}, checks={}, **{part: {} for part in PARTS})
        self.summary = summary
        for path in filter(Path.exists, options.checked):
            self.report["checks"] |= json.loads(path.read_text())["checks"]

    def right(self, name: str, kind: str, t: Operands) -> bool:
        """Whether this GEMM may be timed: compared once, whatever the split."""
        key, checks = f"{name}/{kind}", self.report["checks"]
        if key not in checks:
            checks[key] = wrong(kind, t)
        return checks[key] is None

    def layers(self) -> Iterator[tuple[str, Sizes]]:
        """shape/layer and (groups, rows, N, K) of what was asked for."""
        for shape, (groups, rows, d, f, _) in SHAPES.items():
            if self.options.only in shape:
                yield f"{shape}/fc1", (groups, rows, 2 * f, d)
                yield f"{shape}/fc2", (groups, rows, d, f)

    def edge_widths(self) -> Iterator[tuple[str, Sizes]]:
        for name, (n, k) in EDGES.items() if self.options.only in ("", "edges") else ():
            yield name, (32, 65536, n, k)

    # --- the parts

    def check(self) -> None:
        """Compare everything with float32."""
        for name, sizes in itertools.chain(self.layers(), self.edge_widths()):
            if self.late(f"check {name}"):
                continue
            t = operands(*sizes, split("uniform", *sizes[:2]))
            for kind in KINDS:
                self.right(name, kind, t)
            self.write()
        checks = self.report["checks"]
        print("wrong:", {key: why for key, why in checks.items() if why}, "of", len(checks))

    def host(self) -> None:
        self.note("host", "", host)

    def settled(self) -> None:
        by_shape = itertools.groupby(self.layers(), lambda layer: layer[0].split("/")[0])
        for shape, of_shape in by_shape:
            if shape in SETTLED:
                self.note("settled", "", partial(self.mixed, dict(of_shape)))

    def mixed(self, sizes: dict[str, Sizes]) -> dict[str, dict[str, Any]]:
        """The GEMMs of a training step of these layers, then of one that adds weight gradients to float32 ones."""
        t = {name: operands(*each, split("uniform", *each[:2])) for name, each in sizes.items()}
        found = {}
        for last in ("wgrad", "wgrad_into"):
            mixes: dict[str, dict[str, measure.Call]] = {}
            for layer, kind in itertools.product(sizes, ("fwd", "dgrad", last)):
                if self.right(layer, kind, t[layer]):
                    calls = candidates(kind, t[layer])
                    for candidate in calls if last == "wgrad" else ("fuseops", "torch"):
                        mix = mixes.setdefault(candidate, {})
                        mix[f"{layer}/{kind}/uniform"] = calls[candidate]
            us = measure.mixes_in_turn(mixes, self.options.rounds, self.options.settle)
            for name, each in us.items():
                flops = flops_of(t[name.rsplit("/", 2)[0]])
                found.setdefault(name, entry(each, flops))
        return found

    def cells(self) -> None:
        """What does not settle: uneven splits, and the other shapes, whose float32 sums stand for all."""
        for layer, sizes in self.layers():
            t = operands(*sizes, split("uniform", *sizes[:2]))
            splits, kinds = SPLITS, KINDS
            if layer.split("/")[0] in SETTLED:
                splits, kinds = SPLITS[1:], KINDS[:3]
            kinds = tuple(kind for kind in kinds if self.right(layer, kind, t))
            for kind_of_split, kind in itertools.product(splits, kinds):
                t["offs"] = split(kind_of_split, *sizes[:2])
                make = partial(cell, kind, t, self.options, layer.startswith("qwen3_30b"))
                self.note("cells", f"{layer}/{kind}/{kind_of_split}", make)

    def edges(self) -> None:
        for name, sizes in self.edge_widths():
            t = operands(*sizes, split("uniform", *sizes[:2]))
            for kind in (kind for kind in KINDS[:3] if self.right(name, kind, t)):
                self.note("edges", f"{name}/{kind}", partial(cell, kind, t, self.options))

    def gathered(self) -> None:
        for shape in (shape for shape in SHAPES if self.options.only in shape):
            self.note("gathered", shape, partial(gathered, shape, self.options))

    def small_groups(self) -> None:
        self.note("small_groups", "", partial(small_groups, self.options))

    def cool(self) -> None:
        for layer, sizes in self.layers():
            if layer.endswith("fc1"):
                t = operands(*sizes, split("uniform", *sizes[:2]))
                for kind in KINDS[:3]:
                    make = partial(cool, kind, t, self.options)
                    self.note("cool", f"{layer}/{kind}/uniform", make)


# --- one GEMM hot or cool, with gathered rows, small groups, on the host


def candidates(kind: str, t: Operands, loop: bool = False) -> dict[str, measure.Call]:
    return {"fuseops": ours(kind, t), **peers(kind, t, loop)}


def cell(kind: str, t: Operands, options: argparse.Namespace, loop: bool = False) -> dict[str, Any]:
    """One GEMM by itself."""
    calls, failed = {}, {}
    for name, call in candidates(kind, t, loop).items():
        try:
            call()
            torch.cuda.synchronize()
            calls[name] = call
        except Exception as error:  # reported, not hidden
            failed[name] = f"{type(error).__name__}: {str(error)[:300]}"
    path = (
        grouped_paths.mm_choice(t["x"], t["w"]).path
        if kind in ("fwd", "dgrad")
        else grouped_paths.wgrad_choice(t["dy"], t["x"]).path
    )
    us = measure.in_turn(calls, options.rounds, options.span)
    return {"path": path, **entry(us, flops_of(t)), "failed": failed}


def cool(kind: str, t: Operands, options: argparse.Namespace) -> dict[str, Any]:
    """Single launches, each after 40 ms of idling and one launch to warm up."""

    def shot(call: measure.Call) -> float:
        torch.cuda.synchronize()
        time.sleep(0.04)
        call()
        return measure.elapsed_us(call)

    timers = {name: partial(shot, call) for name, call in candidates(kind, t).items()}
    return entry(measure.in_rounds(timers, options.shots, heat=0), flops_of(t))


def gathered(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """The four GEMMs of an expert MLP that read tokens by index: with the gather inside, after a copy of
    the rows, and the plain GEMM on rows copied before.
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
        error = measure.relative_error(inside(), plain(copied).float())
        us = measure.in_turn(calls, options.rounds, options.span)
        found[name] = {"error_against_plain": error, **entry(us, 2 * rows * d * width)}
    return found


def small_groups(options: argparse.Namespace) -> dict[str, Any]:
    """1024 groups of 64 rows against a copy of the same bytes, and 64 groups of 1024 rows."""
    found: dict[str, Any] = {}
    for groups, size in ((1024, 64), (64, 1024)):
        offs = (torch.arange(1, groups + 1, device="cuda") * size).int()
        t = operands(groups, groups * size, 1536, 2048, offs)
        nbytes = sum(t[name].nbytes for name in ("x", "w", "dy"))
        source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda").random_()
        calls = {"fuseops": ours("fwd", t), "copy": source.clone}
        if groups < 1024:  # F.grouped_mm refuses 1024 groups
            calls |= peers("fwd", t, False)
        us = measure.in_turn(calls, options.rounds, options.span)
        found[f"{groups}x{size}"] = entry(us, flops_of(t))
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

    calls: dict[str, measure.Call] = {
        **{"table": table, "fwd": fwd, "dgrad": dgrad, "wgrad": wgrad, "layer": layer},
        "torch_fwd": peers("fwd", t, False)["torch"],
        "table_and_fwd": ours("fwd", t),
        "module_fwd": layers.inference(lambda: module(x, offs=offs)),
        "module_step": layers.training_step(
            lambda: module(wanted, offs=offs), dy, [wanted, module.weight]
        ),
    }
    timers = {name: partial(measure.host_us, call, repeat) for name, call in calls.items()}
    spans = measure.in_rounds(timers, rounds, heat=1)  # the first round compiles
    spans["layer"] = [us / 6 for us in spans["layer"]]
    graphs = {}
    for name in ("table", "fwd", "dgrad", "wgrad", "torch_fwd", "table_and_fwd"):
        replay = layers.captured(partial(again, calls[name], 20))
        graphs[name] = lambda replay=replay: measure.elapsed_us(replay) / 20
    return {
        "host_us": measure.medians(spans, 2),
        "host_least_us": {name: round(min(us), 2) for name, us in spans.items()},
        "graph_us": measure.medians(measure.in_rounds(graphs, 9, heat=1), 2),
    }


def again(call: measure.Call, times: int) -> None:
    for _ in range(times):
        call()


def main() -> None:
    parser = runs.parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="shapes whose name contains this, or edges")
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--settle", type=float, default=0.15, help="seconds of a mix in a round")
    parser.add_argument("--span", type=float, default=0.006, help="seconds of a GEMM in a round")
    parser.add_argument("--shots", type=int, default=2, help="cool calls of uniform splits")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds; no new cell after it")
    parser.add_argument("--check", action="store_true", help="compare with float32, time nothing")
    parser.add_argument(
        "--checked", type=Path, nargs="*", default=(), help="what --check wrote: not compared again"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    run = GEMMRun(options)
    for part in ("check",) if options.check else options.parts:
        getattr(run, part)()
    run.write()
    print(json.dumps(run.report["summary"]))


if __name__ == "__main__":
    main()
