"""Microseconds that the host takes for small steps, where the GPU waits for Python, in bf16.

    python benchmarks/host.py --out benchmarks/results/host_h200.json

Every step runs as fuseops and as plain torch over the same weights, eager and compiled, in turn; medians of rounds, and
ratios of each round: eager over eager torch, compiled over torch.compile of the plain module. `graph` is fuseops under
torch.compile(mode="reduce-overhead"). The forward keeps its graph; the backward makes all gradients anew.
`--one-thread` runs backwards in the thread that calls them, as `torch.autograd.set_multithreading_enabled(False)` does.
`--recipes` times the steps under recipes instead, every GEMM quantized (`strict=True`), with ratios over fuseops in
bf16; `chosen` are those of recipes that leave what cannot gain in bf16, as they do without being told.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import layers, measure
from moe_layer import peer as plain_moe
from torch import Tensor, nn

import fuseops as fo
from fuseops.recipes import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

CALLS = 20  # few enough that no launch waits for a place in the queue
RATIOS = ("eager", "compiled")  # what ours is a ratio of
RECIPES = {
    "block": Float8BlockScaling(),
    "block_kept": Float8BlockScaling(weights="step"),
    "block_hidden": Float8BlockScaling(weights="step", hidden="float8"),
    "current": Float8CurrentScaling(),
    "current_kept": Float8CurrentScaling(weights="step"),
    "delayed": DelayedScaling(),
}
CHOSEN = ("block", "current")  # of those, what runs as users set it too


class SwiGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class Block(nn.Sequential):
    """x + f(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class PlainMoE(nn.Module):
    """The router, the experts and the sum as plain torch, around a grouped GEMM."""

    def __init__(self, like: fo.MoE, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        for name in ("router", "fc1", "fc2"):
            self.register_parameter(name, like[name].weight)

    def forward(self, x: Tensor) -> Tensor:
        return plain_moe(x, self.router, self.fc1, self.fc2, self.top_k)


class Step(NamedTuple):
    ours: nn.Module
    plain: nn.Module
    x: Tensor


def mlp(device: str, rows: int, width: int, hidden: int) -> Step:
    where: Any = {"device": device, "dtype": torch.bfloat16}

    def children(ops: Any, act: nn.Module) -> list[nn.Module]:
        return [
            ops.RMSNorm(width, **where),
            ops.Linear(width, 2 * hidden, bias=False, **where),
            act,
            ops.Linear(hidden, width, bias=False, **where),
        ]

    ours, plain = fo.Residual(*children(fo.ops, fo.ops.SwiGLU())), Block(*children(nn, SwiGLU()))
    return _step(ours, plain, rows, width)


def linears(device: str) -> Step:
    where: Any = {"device": device, "dtype": torch.bfloat16}
    ours = fo.Sequential(*(fo.ops.Linear(512, 512, **where) for _ in range(8)))
    plain = nn.Sequential(*(nn.Linear(512, 512, **where) for _ in range(8)))
    return _step(ours, plain, 64, 512)


def moe(device: str, width: int = 1024, hidden: int = 512, experts: int = 32) -> Step:
    ours = fo.MoE(width, hidden, experts, 4, device=device, dtype=torch.bfloat16)
    return _step(ours, PlainMoE(ours, 4), 64, width)


def _step(ours: nn.Module, plain: nn.Module, rows: int, width: int) -> Step:
    """Both over the same weights."""
    if not isinstance(plain, PlainMoE):
        plain.load_state_dict(ours.state_dict())
    weight = next(ours.parameters())
    x = torch.randn(rows, width, device=weight.device, dtype=weight.dtype, requires_grad=True)
    return Step(ours, plain, x)


STEPS: dict[str, Callable[[str], Step]] = {
    "mlp 64x512": partial(mlp, rows=64, width=512, hidden=2048),
    "mlp 512x1024": partial(mlp, rows=512, width=1024, hidden=3072),
    "eight linears": linears,
    "moe": moe,
}


def candidates(step: Step, compiled: bool) -> dict[str, nn.Module]:
    """By name: what runs the step."""
    torch._dynamo.reset()
    found = {"fuseops": step.ours, "eager": step.plain}
    if compiled:
        found["compile"] = torch.compile(step.plain, dynamic=False)
        found["fuseops compiled"] = torch.compile(step.ours, dynamic=False)
        found["graph"] = torch.compile(step.ours, dynamic=False, mode="reduce-overhead")
    return found


def call_of(model: nn.Module, step: Step, backward: bool) -> Callable[[], Any]:
    leaves = [step.x, *model.parameters()]
    forward = partial(model, step.x)
    return layers.training_step(forward, torch.ones_like(step.x), leaves) if backward else forward


def under_recipes(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of one step in bf16 and under every recipe, and how many times as long each takes."""
    step = STEPS[name](options.device)

    def quantized(recipe: Any, strict: bool, x: Tensor) -> Tensor:
        with fo.recipe(recipe, strict=strict):
            return step.ours(x)

    leaves = [step.x, *step.ours.parameters()]
    forwards = {"bf16": step.ours, **{n: partial(quantized, r, True) for n, r in RECIPES.items()}}
    forwards |= {f"{n}, chosen": partial(quantized, RECIPES[n], False) for n in CHOSEN}
    timers = {}
    for key, forward in forwards.items():
        call = layers.training_step(partial(forward, step.x), torch.ones_like(step.x), leaves)
        for _ in range(6):
            call()
        timers[key] = partial(measure.host_us, call, CALLS)
    us = measure.in_rounds(timers, options.rounds, heat=1)
    over = {n: measure.paired(us["bf16"], us[n]) for n in us if n != "bf16"}
    return {"us": measure.medians(us), "over_bf16": over}


def row(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Medians and ratios of one step, forward and backward, and its forward alone."""
    step = STEPS[name](options.device)
    found: dict[str, Any] = {}
    models = candidates(step, options.compiled)
    for what in ("fwd+bwd", "fwd"):
        calls = {}
        for key, model in models.items():
            if what == "fwd" and key == "graph":
                continue  # no replay while a backward is to come
            calls[key] = call_of(model, step, what == "fwd+bwd")
            for _ in range(4):
                calls[key]()
        timers = {key: partial(measure.host_us, call, CALLS) for key, call in calls.items()}
        us = measure.in_rounds(timers, options.rounds, heat=1)
        found[what] = {"us": measure.medians(us), **_ratios(us)}
    return found


def _ratios(us: measure.Rounds) -> dict[str, Any]:
    """How many times as long as its peer each of ours takes."""
    pairs = {"eager": ("fuseops", "eager"), "compiled": ("fuseops compiled", "compile")}
    return {
        name: measure.paired(us[peer], us[ours])
        for name, (ours, peer) in pairs.items()
        if ours in us
    }


def python_calls(call: Callable[[], Any]) -> int:
    """Python functions and builtins that a step calls, its backward in this thread too."""
    count = 0

    def see(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(see)
        call()
        sys.setprofile(None)
    return count - 1


def profiled(call: Callable[[], Any], steps: int = 200) -> str:
    """Where the host is in a step, its backward in this thread too."""
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False), profile:
        for _ in range(steps):
            call()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(40)
    return text.getvalue()


def said(entry: dict[str, Any]) -> dict[str, Any]:
    """The cells of a row: microseconds, Python calls where they were counted, ratios."""
    counted = {f"{key}, calls": count for key, count in entry.get("calls", {}).items()}
    return {**entry["us"], **counted, **{f"{k} ratio": entry[k] for k in RATIOS if k in entry}}


def summary(rows: dict[str, Any]) -> Iterable[str]:
    for name, found in rows.items():
        us = "  ".join(f"{key} {value}" for key, value in found.items() if type(value) is not dict)
        ratios = "  ".join(f"{key} {v['ratio']:.3f}" for key, v in found.items() if type(v) is dict)
        yield f"{name:24} {us}  |  {ratios}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", nargs="*", default=list(STEPS), choices=STEPS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", dest="compiled", action="store_false", help="no torch.compile")
    parser.add_argument("--calls", action="store_true", help="count Python calls")
    parser.add_argument("--one-thread", action="store_true", help="backwards in the calling thread")
    parser.add_argument("--profile", action="store_true", help="print where the host is")
    parser.add_argument("--recipes", action="store_true", help="steps under recipes instead")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with torch.autograd.set_multithreading_enabled(not options.one_thread):
        run(options)


def run(options: argparse.Namespace) -> None:
    if options.recipes:
        found = {name: under_recipes(name, options) for name in options.steps}
        report = {**measure.environment(), "recipes": found}
        for name, entry in found.items():
            ratios = {n: r["ratio"] for n, r in entry["over_bf16"].items()}
            print(name, entry["us"], ratios)
        if options.out:
            options.out.write_text(json.dumps(report, indent=2) + "\n")
        return
    rows: dict[str, Any] = {}
    for name in options.steps:
        rows[name] = row(name, options)
        if options.calls or options.profile:
            step = STEPS[name](options.device)
            for key, model in candidates(step, compiled=False).items():
                call = call_of(model, step, backward=True)
                for _ in range(8):  # until a step repeats an earlier one
                    call()
                if options.calls:
                    rows[name]["fwd+bwd"].setdefault("calls", {})[key] = python_calls(call)
                if options.profile:
                    print(name, key, profiled(call))
    steps = {f"{n}, {what}": said(e) for n, found in rows.items() for what, e in found.items()}
    report = {**measure.environment(), "small_steps": steps}
    print("\n".join(summary(steps)))
    if options.out:
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
