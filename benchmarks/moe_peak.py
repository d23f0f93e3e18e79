"""The peak of a MoE layer's training step in bf16 by what is preferred, and what that takes in time.

    python benchmarks/moe_peak.py --span 0.2 --rounds 5 --out benchmarks/results/moe_peak_h200.json

A peak is `torch.cuda.max_memory_allocated` of forward and backward beyond what was allocated before: x, dy and the
weights are there, y and the gradients of x and of all weights are made. `plan` says the same of fake tensors, and x.
SonicMoE's three peaks were taken so on an H200, beside 3.91 GB of ours for olmoe: that is `before`, where dh has a
tensor of its own instead of the place of h, and rows of dy are copied from 512 hidden units of an expert on. Candidates
run in turn as in `moe_layer.py`; a ratio is the time of `before` over theirs, round by round. The gradients of all are
compared bit for bit.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any
from unittest import mock

import moe_layer
import torch
from common import layers, measure, runs

import fuseops as fo
from fuseops.kernels import configs
from fuseops.rules.fused import grouped_mlp, routed_mlp

# name: tokens T, model width d, expert width n, experts E, chosen K
SHAPES = {
    "olmoe": (32768, 2048, 1024, 64, 8),
    "40_experts": (32768, 1536, 512, 40, 8),
    "16_experts": (16384, 4096, 1536, 16, 8),
    **moe_layer.SHAPES,
}
GIB = 2**30
SONIC = {"olmoe": 3.23e9 / GIB, "40_experts": 1.62, "16_experts": 2.57}  # GiB
PREFERENCES = ("speed", "memory")


def preferring(p: moe_layer.Problem, what: str) -> fo.MoE:
    """The layer over the same parameters, so configured."""
    layer = copy.deepcopy(p.moe, {id(q): q for q in p.moe.parameters()})
    fo.configure(layer, prefer=what)
    return layer


def before(step: measure.Call, hidden: int) -> measure.Call:
    """The step where nothing is written over, and rows of dy are copied as they were."""
    copies = {"COPY": int(hidden >= 512)}

    def run() -> None:
        apart = mock.patch.object(grouped_mlp, "held_once", lambda held: False)
        with apart, configs.forced(routed_mlp.FC2_DSWIGLU, copies):
            step()

    return run


def gradients(step: measure.Call, p: moe_layer.Problem) -> list[torch.Tensor]:
    step()
    return [leaf.grad.clone() for leaf in p.leaves]


def cell(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One shape: peaks, planned and allocated, whether bits are equal, microseconds and ratios."""
    p = moe_layer.Problem(*SHAPES[name])
    models = {what: preferring(p, what) for what in PREFERENCES}
    steps = {
        what: layers.training_step(lambda moe=moe: moe(p.x), p.dy, p.leaves)
        for what, moe in models.items()
    }
    steps["before"] = before(steps["speed"], SHAPES[name][2])
    for step in steps.values():  # compiles, and sees that nothing is released late
        step()
        step()
    right = gradients(steps["before"], p)
    same = {what: all(map(torch.equal, gradients(steps[what], p), right)) for what in PREFERENCES}
    del right
    record: dict[str, Any] = {
        "same_bits": same,
        "peak_bytes": {what: layers.peak_bytes(step, p.leaves) for what, step in steps.items()},
        "plan_peak_bytes": {
            what: moe.plan(p.x).peak_bytes - p.x.nbytes for what, moe in models.items()
        },
    }
    if not options.warm:
        us = measure.in_turn(steps, options.rounds, options.span)
        record["us"] = measure.medians(us)
        record["ratios"] = {what: measure.paired(us[what], us["before"]) for what in PREFERENCES}
    return record


def summary(cells: dict[str, Any]) -> dict[str, Any]:
    """A row for each shape and preference."""
    found: dict[str, Any] = {}
    for name, record in cells.items():
        for what in PREFERENCES if "peak_bytes" in record else ():
            peak = record["peak_bytes"][what]
            found[f"{name}/{what}"] = {
                "peak GiB": round(peak / GIB, 3),
                "before GiB": round(record["peak_bytes"]["before"] / GIB, 3),
                "SonicMoE GiB": SONIC.get(name) and round(SONIC[name], 3),
                "planned over peak": round(record["plan_peak_bytes"][what] / peak, 4),
                "time of before over it": record.get("ratios", {}).get(what),
                "same bits": record["same_bits"][what],
            }
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--warm", action="store_true", help="peaks alone, no times")


if __name__ == "__main__":
    runs.main(__doc__, SHAPES, cell, summary, more=add_options)
