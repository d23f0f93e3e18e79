"""Saved bytes and the planned peak of a step, of a MoE layer and of a dense block under every recipe.

    python benchmarks/recipe_memory.py --step --out benchmarks/results/recipe_memory.json

Nothing runs: plans are of models on the meta device, as on a Hopper GPU, so any machine gives the same figures. With
`--step` the step of `hf_step.py` too, four layers of Qwen3-30B-A3B by transformers after `hf.apply`, 16384 tokens:
forward, loss and backward. Under every recipe alike, attention is what transformers makes of fake tensors on a CPU,
with masks that a GPU needs not.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from common.measure import environment

import fuseops as fo
from fuseops.kernels.registry import as_if_on

D, F, E, K, T = 1024, 2048, 8, 2, 4096
DTYPE = torch.bfloat16
MIB = 2**20
R = fo.recipes
RECIPES: dict[str, Any] = {
    "bf16": None,
    "Float8BlockScaling()": R.Float8BlockScaling(),
    'Float8BlockScaling(hidden="float8")': R.Float8BlockScaling(hidden="float8"),
    'Float8BlockScaling(weights="step")': R.Float8BlockScaling(weights="step"),
    "Float8CurrentScaling()": R.Float8CurrentScaling(),
    "DelayedScaling()": R.DelayedScaling(),
    "MXFP8BlockScaling()": R.MXFP8BlockScaling(),
    "NVFP4BlockScaling()": R.NVFP4BlockScaling(),
}


def moe() -> Any:
    return fo.MoE(D, F, E, K, dtype=DTYPE)


def dense() -> Any:
    return fo.Residual(
        fo.ops.RMSNorm(D, dtype=DTYPE),
        fo.ops.Linear(D, 4 * F, bias=False, dtype=DTYPE),
        fo.ops.SwiGLU(),
        fo.ops.Linear(2 * F, D, bias=False, dtype=DTYPE),
    )


def linear() -> Any:
    return fo.Sequential(fo.ops.Linear(D, D, bias=False, dtype=DTYPE))


MODELS = {"MoE layer": moe, "dense block": dense, "one Linear": linear}


@cache
def made(name: str) -> Any:
    with torch.device("meta"):
        return MODELS[name]()


@cache
def planned(name: str, recipe: Any) -> dict[str, float]:
    """MiB of one step of a model over T tokens."""
    model, x = made(name), torch.empty(T, D, dtype=DTYPE, device="meta", requires_grad=True)
    with as_if_on(90), fo.recipe(recipe, strict=recipe is not None):
        plan = model.plan(x)
    own = x.nbytes if any(t.name.endswith(".x") and t.nbytes == x.nbytes for t in plan.saved) else 0
    sizes = plan.saved_bytes, plan.saved_bytes - own, plan.peak_bytes, plan.kept_bytes
    names = ("saved", "saved beyond the input", "peak of a step", "kept weights")
    return {name: round(size / MIB, 1) for name, size in zip(names, sizes, strict=True)}


def step_peaks() -> dict[str, dict[str, float]]:
    """Planned MiB of the step of a transformers model, by recipe."""
    from hf_step import SIZES
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from fuseops.integrations import hf
    from fuseops.observe.rehearse import peak_of_step

    config = CONFIG_MAPPING["qwen3_moe"](**SIZES["qwen3_moe"], use_cache=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    model.to_empty(device="cpu").train()  # of memory that nobody touches
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("gate.weight"):  # what `hf.apply` runs
            torch.nn.init.normal_(parameter)
    model.model.rotary_emb.inv_freq.fill_(1.0)
    hf.apply(model)
    tokens, found = torch.zeros(4, 4096, dtype=torch.int64), {}
    for label, recipe in RECIPES.items():
        fo.configure(model, recipe=recipe)
        with as_if_on(90):
            peak = peak_of_step(model, (tokens,), {"labels": tokens})
        assert peak is not None, label
        found[label] = {"peak of a step": round(peak / MIB, 1)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step", action="store_true", help="the step of transformers' Qwen3-MoE")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--recipes", nargs="+", default=RECIPES, choices=RECIPES)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    found: dict[str, Any] = {
        **environment(),
        "sizes": f"{T} tokens, D {D}, F {F}, {E} experts, {K} a token, bfloat16",
    }
    found["memory"] = {
        name: {label: planned(name, RECIPES[label]) for label in given.recipes}
        for name in given.models
    }
    if given.step:
        found["memory"]["Qwen3-MoE of transformers"] = step_peaks()
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found["memory"], indent=1))


if __name__ == "__main__":
    main()
