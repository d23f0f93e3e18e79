"""The gradient of an expert MLP from dy to dh: one kernel beside the GEMM and a pass over h, in bf16, hot.

    python benchmarks/grouped_dswiglu.py --out benchmarks/results/grouped_dswiglu_h200.json

Both ways write dh, the activation and dprobs, for rows in order and for tokens by index. Timed in turn, as in
grouped_gemm.py; `gemm` is the product alone. `takes` is what experts of this shape do.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure
import torch
from grouped_problems import SHAPES, Call, split
from torch import Tensor

from fuseops.fusions.fused.dswiglu import EPILOGUE
from fuseops.kernels import activation, configs, grouped, grouped_glu_bwd, grouped_paths


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


def calls(t: dict[str, Tensor], gathers: bool, sweep: bool) -> Iterator[tuple[str, Call]]:
    """The two ways, and in a sweep every configuration of the one kernel."""
    dy, index = (t["tokens"], t["index"]) if gathers else (t["dy"], None)
    weight, offs, tiles = t["weight"], t["offs"], t["tiles"]

    def gemm() -> Tensor:
        return grouped.grouped_mm(dy, weight, offs, tiles, None, index)

    def two() -> tuple[Tensor, ...]:
        dh, dprobs, a = activation.scaled_act_bwd(gemm(), t["h"], t["probs"], "swiglu", True, True)
        return dh, a, dprobs

    def one() -> tuple[Tensor, ...]:
        return grouped_glu_bwd.grouped_dswiglu(dy, weight, t["h"], offs, tiles, t["probs"], index)

    yield from {"gemm": gemm, "two_kernels": two, "one_kernel": one}.items()
    space = grouped_paths.SWIGLU_BWD_SPACES["gather" if gathers else "pingpong"]
    for config in space.candidates((len(weight), *weight.shape[1:]), 2) if sweep else ():

        def forced(config: configs.Config = config) -> tuple[Tensor, ...]:
            with configs.forced(space, config):
                return one()

        yield " ".join(f"{name}={value}" for name, value in config.items()), forced


def cell(shape: str, gathers: bool, span: float, sweep: bool) -> dict[str, Any]:
    t = operands(shape)
    found = dict(calls(t, gathers, sweep))
    errors = [
        ((a.float() - b.float()).norm() / b.float().norm()).item()
        for a, b in zip(found["one_kernel"](), found["two_kernels"](), strict=True)
    ]
    us = measure.hot(found, span)
    dims = (*t["weight"].shape, gathers)
    return {
        "error_of_dh_a_dprobs": errors,
        "takes": "one_kernel" if EPILOGUE.pick(len(t["h"]), dims, t["h"])["EPILOGUE"] else "two_kernels",
        "us": {name: round(value, 1) for name, value in us.items()},
        "gain": round(us["two_kernels"] / us["one_kernel"], 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(SHAPES), help="shapes")
    parser.add_argument("--span", type=float, default=0.3, help="seconds a cell is timed")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for all cells")
    parser.add_argument("--sweep", action="store_true", help="time every configuration")
    options = parser.parse_args()
    begun = time.perf_counter()
    report: dict[str, Any] = {"environment": measure.environment(), "cells": {}, "skipped": []}
    torch.manual_seed(0)
    for shape in options.only:
        for gathers in (False, True):
            name = f"{shape}/{'by_index' if gathers else 'in_order'}"
            if time.perf_counter() - begun > options.budget:
                report["skipped"].append(name)
                continue
            report["cells"][name] = cell(shape, gathers, options.span, options.sweep)
            print(name, report["cells"][name], flush=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    gains = [c["gain"] for c in report["cells"].values()]
    report["summary"] = {"gain_geomean": measure.geomean(gains)}
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
