"""The compatibility matrix's cells for two GPUs: FSDP2, EP=2, checkpoint, compile and offload, alone and in pairs.

Each is compared with the stock model's step, as tests/ports does over gloo on the CPU, in float64.
Run it: python benchmarks/ports_nccl.py --out results.json        (two CUDA devices; --backend gloo needs none)
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from common import measure

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "ports"))

NAMES = ("checkpoint", "checkpoint, configured", "compile", "offload to host", "EP=2", "FSDP2")


def outcome(both: Any, port: str, titles: tuple[str, ...]) -> dict[str, Any]:
    """One cell on both ranks."""
    import features

    by_name = {f.name: f for f in features.FEATURES}
    refused = features.refusal(port, tuple(by_name[title] for title in titles))
    start = time.perf_counter()
    results = both.run(port, titles)
    failed = next((r for r in results if r.error is not None), None)
    worst = max(r.worst for r in results)
    row: dict[str, Any] = {
        "port": port,
        "cell": " + ".join(titles),
        "seconds": round(time.perf_counter() - start, 1),
        "largest_error": None if math.isnan(worst) else worst,
    }
    if failed is not None and refused is not None and refused.error.__name__ in failed.kinds:
        return row | {"outcome": "refused", "because": refused.because}
    if failed is not None:
        return row | {"outcome": "failed", "because": str(failed.error)[:400]}
    found = [d for r in results for d in r.differences]
    return row | ({"outcome": "differs", "because": found[:4]} if found else {"outcome": "equal"})


def environment(backend: str) -> dict[str, Any]:
    return {
        **measure.environment(),
        "gpus": torch.cuda.device_count(),
        "backend": backend,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if backend == "nccl" else None,
        "error": "largest distance of an element, over the mean magnitude of its tensor",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    parser.add_argument("--ports", nargs="+", default=["moe_block", "qwen3_moe"])
    parser.add_argument("--limit", type=float, default=200, help="seconds after which none starts")
    args = parser.parse_args()
    from ranks import Ranks

    both, start = Ranks(args.backend), time.perf_counter()
    cells = [(name,) for name in NAMES] + list(itertools.combinations(NAMES, 2))
    cells.remove(NAMES[:2])  # one way to checkpoint at a time
    cells.sort(key=lambda cell: "compile" in cell)
    result: dict[str, Any] = {"environment": environment(args.backend), "cells": []}
    for cell, port in itertools.product(cells, args.ports):
        if time.perf_counter() - start > args.limit:
            row = {"port": port, "cell": " + ".join(cell), "outcome": "not run, out of time"}
        else:
            row = outcome(both, port, cell)
        result["cells"].append(row)
        if args.out is not None:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
        error = row.get("largest_error")
        print(
            f"{port:10} {row['cell']:32} {row['outcome']:8} {'' if error is None else f'{error:.1e}'}"
            f" {row.get('because', '')}",
            flush=True,
        )
    both.stop()
    print(json.dumps(result["environment"]))


if __name__ == "__main__":
    main()
