"""What `grouped_gemm.py` times: one GEMM hot or cool, with gathered rows, small groups, on the host."""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import layers
import measure
import torch
from grouped_problems import SHAPES, operands, ours, peers, split
from torch import Tensor

from fuseops import ops
from fuseops.kernels import grouped, grouped_paths, permute

Operands = dict[str, Tensor]


def entry(us: measure.Rounds, flops: float) -> dict[str, Any]:
    """One GEMM: microseconds and TFLOP/s of every candidate, and how many times as fast as each peer we are."""
    medians = measure.medians(us)
    return {
        "us": medians,
        "tflops": {name: round(flops / t / 1e6, 1) for name, t in medians.items()},
        "ratios": {
            name: measure.paired(us["fuseops"], t) for name, t in us.items() if name != "fuseops"
        },
    }


def flops_of(t: Operands) -> int:
    return 2 * int(t["offs"][-1]) * t["w"].shape[1] * t["w"].shape[2]


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
        grouped_paths.mm_path(t["x"], t["w"])
        if kind in ("fwd", "dgrad")
        else grouped_paths.wgrad_path(t["dy"], t["x"])
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
