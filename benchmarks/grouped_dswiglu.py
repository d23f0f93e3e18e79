"""The gradient of an expert MLP from dy to dh: one kernel beside the GEMM and a pass over h, in bf16, hot.

    python benchmarks/grouped_dswiglu.py --out benchmarks/results/grouped_dswiglu_h200.json

Both ways write dh, the activation and dprobs, for rows in order and for tokens by index. They run in turn, for
`--span` seconds to warm up and as long again in each round; `gemm` is the product alone. `takes` is what experts of
this shape do; where they take two kernels by index, they may copy the rows and take the one for rows in order.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import measure, runs
from common.grouped_problems import SHAPES, split
from torch import Tensor

from fuseops.kernels import activation, grouped, grouped_glu_bwd
from fuseops.rules.fused.dswiglu import EPILOGUE


def operands(shape: str) -> dict[str, Tensor]:
    groups, rows, d, f, k = SHAPES[shape]
    offs = split("uniform", groups, rows)
    order = torch.randperm(rows, device="cuda")
    index = torch.arange(rows // k, device="cuda").repeat(k)[order].int()
    tokens = measure.rnd(rows // k, d)
    return {
        **{"offs": offs, "tiles": grouped.group_tiles(offs, rows), "index": index},
        **{"tokens": tokens, "dy": tokens[index], "h": measure.rnd(rows, 2 * f)},
        "weight": measure.rnd(groups, d, f, scale=0.02).transpose(1, 2),
        "probs": torch.rand(rows, device="cuda"),
    }


def calls(t: dict[str, Tensor], gathers: bool) -> dict[str, measure.Call]:
    """The two ways, and the product alone."""
    dy, index = (t["tokens"], t["index"]) if gathers else (t["dy"], None)
    weight, offs, tiles = t["weight"], t["offs"], t["tiles"]

    def gemm() -> Tensor:
        return grouped.grouped_mm(dy, weight, offs, tiles, None, index)

    def two() -> tuple[Tensor, ...]:
        dh, dprobs, a = activation.scaled_act_bwd(gemm(), t["h"], t["probs"], "swiglu", True, True)
        return dh, a, dprobs

    def one() -> tuple[Tensor, ...]:
        return grouped_glu_bwd.grouped_dswiglu(t["h"], dy, weight, offs, tiles, t["probs"], index)

    return {"gemm": gemm, "two_kernels": two, "one_kernel": one}


def cell(name: str, options: argparse.Namespace) -> dict[str, Any]:
    shape, way = name.split("/")
    t, gathers = operands(shape), way == "by_index"
    found = calls(t, gathers)
    errors = [
        measure.relative_error(one, two.float())
        for one, two in zip(found["one_kernel"](), found["two_kernels"](), strict=True)
    ]
    us = measure.in_turn(found, options.rounds, options.span)
    dims = (*t["weight"].shape, gathers)
    return {
        "error_of_dh_a_dprobs": errors,
        "takes": "one_kernel" if EPILOGUE.enabled(len(t["h"]), dims, t["h"]) else "two_kernels",
        "us": measure.medians(us),
        "gain": measure.paired(us["one_kernel"], us["two_kernels"]),
    }  # fmt: skip


def summary(cells: dict[str, Any]) -> dict[str, Any]:
    """What one kernel gains where it is taken, and where it is not."""
    found: dict[str, Any] = {}
    for way in ("one_kernel", "two_kernels"):
        gains = {n: c["gain"]["ratio"] for n, c in cells.items() if c.get("takes") == way}
        if gains:
            least, most = min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)
            found[f"experts take {way}"] = {
                "cells": len(gains),
                "geomean": measure.geomean(gains.values()),
                "least": [least, gains[least]],
                "most": [most, gains[most]],
            }
    return found


if __name__ == "__main__":
    runs.main(
        __doc__, [f"{s}/{way}" for s in SHAPES for way in ("in_order", "by_index")], cell, summary
    )
