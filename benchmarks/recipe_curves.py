"""Training under every recipe beside bf16: the demo's model, some seeds, held-out loss on the way.

    python benchmarks/recipe_curves.py --out FILE [--steps 1000] [--seeds 3] [--jobs 8] [--only mxfp8 ...]

Every run is a process of its own; one that is in the file already is not run again, so a run that was cut short goes on
where it stopped. Stem and head stay in high precision, as is usual. On a GPU GEMMs are in bf16 under autocast, and the
recipe quantizes their operands however small they are; on a CPU the rest is in float32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from common import measure

import fuseops as fo
from fuseops.demo.data import read_corpus, windows
from fuseops.demo.model import ByteModel, Config
from fuseops.demo.train import LearningRate, evaluate, train
from fuseops.ops import scopes

KEPT = {"stem.**": None, "head.**": None}
RECIPES: dict[str, Any] = {  # the slow ones first
    "nvfp4": fo.recipes.NVFP4BlockScaling(),
    "bf16": None,
    "float8_block": fo.recipes.Float8BlockScaling(),
    "float8_current": fo.recipes.Float8CurrentScaling(),
    "float8_delayed": fo.recipes.DelayedScaling(amax_history_len=16),
    "mxfp8": fo.recipes.MXFP8BlockScaling(),
}


def run(name: str, seed: int, steps: int) -> dict[str, Any]:
    """One training run: held-out losses on the way, and at the end over all windows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    corpus, config = read_corpus(), Config()
    judged = windows(corpus.held_out, config.context)
    torch.manual_seed(seed)
    model = ByteModel(config).to(device)
    recipe = RECIPES[name]
    if recipe is not None:
        fo.configure(model, recipe={**KEPT, "**": recipe})
    start = time.perf_counter()
    with strict(recipe):
        schedule = LearningRate(steps, glances=20)
        history = train(model, corpus.train, judged[:64], schedule, seed, lambda step, seen: None)
        end = evaluate(model, judged)
    seconds = round(time.perf_counter() - start, 1)
    return {"held_out": history.held_out, "end": end, "seconds": seconds}


def strict(recipe: Any) -> Any:
    """Quantize small layers too, which a recipe leaves alone where FP8 does not pay."""
    return scopes.scope((("strict_recipe", recipe is not None),))


def ends(runs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Of every recipe, the mean of the held-out losses at the end, in nats a byte, and what it is over that of bf16."""
    found: dict[str, list[float]] = {}
    for key, result in runs.items():
        found.setdefault(key.split("/")[0], []).append(result["end"])
    means = {name: sum(values) / len(values) for name, values in found.items()}
    return {
        name: {
            "end": round(means[name], 4),
            "spread": round(max(found[name]) - min(found[name]), 4),
            "seeds": len(found[name]),
            "over bf16, %": round(100 * (means[name] / means.get("bf16", means[name]) - 1), 2),
        }
        for name in RECIPES
        if name in found
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run(given.one[0], int(given.one[1]), given.steps)))
        return
    found = json.loads(given.out.read_text()) if given.out.exists() else measure.environment()
    found |= {"steps": given.steps, "runs": found.get("runs", {})}
    todo = [f"{name}/{seed}" for seed in range(given.seeds) for name in given.only]
    with ThreadPoolExecutor(given.jobs) as pool:
        jobs = {pool.submit(alone, key, given): key for key in todo if key not in found["runs"]}
        for job in as_completed(jobs):
            key = jobs[job]
            try:
                found["runs"][key] = job.result()
            except subprocess.CalledProcessError:
                print(f"{key} failed", file=sys.stderr)
                continue
            found["curves"] = ends(found["runs"])
            given.out.write_text(json.dumps(found, indent=1) + "\n")
            said = found["runs"][key]
            print(key, f"{said['end']:.4f}", f"{said['seconds']} s", flush=True)


def alone(key: str, given: argparse.Namespace) -> dict[str, Any]:
    """A run in a process of its own."""
    command = [sys.executable, __file__, "--out", str(given.out), "--steps", str(given.steps)]
    command += ["--one", *key.split("/")]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
