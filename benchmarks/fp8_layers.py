"""Expert MLPs and whole MoE layers in FP8 beside the same in bf16, ours and torch's.

    python benchmarks/fp8_layers.py --out benchmarks/results/fp8_layers_h200.json

`mlp/`: fc1, SwiGLU times probability, fc2 over rows sorted by expert, with splits that are uniform at random, by Zipf's
law, and with two empty groups. `layer/`: router, top-k softmax, gather, the experts and combine. `dense/`: RMSNorm,
fc1, SwiGLU, fc2 and the residual, of so many rows. All candidates share one set of parameters. "fp8" quantizes
weights in the step, where each is read; "fp8_kept" has them from the micro-batch before; "fp8_hidden" is "fp8_kept"
with h saved as codes; "current" and "delayed" have one scale a group or a weight, "current_kept" with weights from the
micro-batch before; "torch" is bf16 in eager torch, experts by `F.grouped_mm`; "torchao" is torchao's float8 training
of the dense MLP (rowwise scales, compiled), where it is installed.
Candidates run in turn, in balanced order, back to back for `--span` seconds to warm up and as long again in each round;
ratios are bf16's time over theirs, round by round. Bytes are those that a forward leaves beyond its inputs and its
output, and those that a step takes at most. `wrong` are relative errors of y and of the gradients beside bf16's.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
from functools import partial
from typing import Any

import dense_mlp
import grouped_mlp
import moe_layer
import torch
from common import layers, measure, runs
from common.grouped_problems import SPLITS, split

import fuseops as fo

Block = fo.recipes.Float8BlockScaling
RECIPES = {
    "fp8": Block(),
    "fp8_kept": Block(weights="step"),
    "fp8_hidden": Block(weights="step", hidden="float8"),
    "current": fo.recipes.Float8CurrentScaling(),
    "current_kept": fo.recipes.Float8CurrentScaling(weights="step"),
    "delayed": fo.recipes.DelayedScaling(),
}
LAYERS = {
    **moe_layer.SHAPES,
    "qwen3_8k": (8192, 2048, 768, 128, 8),
    "dsv3_ep8": (8192, 7168, 2048, 32, 8),
}
MLPS = ("mixtral", "dsv3_ep8", "qwen3_30b", "sonic_30b", "qwen3_30b_8k", "sonic_7b")
ORDER = ("mixtral", "dsv3_ep8", "qwen3_30b", "sonic_30b", "qwen3_8k", "sonic_7b")


DENSE = {
    f"dense/llama3_8b/{rows}": (rows, *dense_mlp.MODELS["llama3_8b"]) for rows in (8192, 16384)
}


LEAST = {
    "fp8": dict.fromkeys(DENSE, 1.4),
    "fp8_kept": {
        **dict.fromkeys(DENSE, 1.45),
        "layer/mixtral": 1.42,
        "layer/dsv3_ep8": 1.42,
        "layer/qwen3_30b": 1.27,
        "layer/sonic_30b": 1.3,
        "layer/qwen3_8k": 1.05,
    },
}
"""How many times our bf16's speed, forward and backward."""


def names() -> list[str]:
    """The cells: first those that the issue has bars for."""
    found = [*DENSE, *(f"layer/{shape}" for shape in ORDER)]
    found += [f"mlp/{shape}/uniform" for shape in MLPS]
    return found + [f"mlp/{shape}/{how}" for how in SPLITS[1:] for shape in MLPS]


def torchao(p: dense_mlp.Problem) -> Any:
    """torchao's float8 linears between torch's norm and SwiGLU, over the same parameters."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    linears = torch.nn.ModuleList(
        torch.nn.Linear(*size, bias=False, device="meta") for size in ((1, 1), (1, 1))
    )
    for linear, weight in zip(linears, p.leaves[2:], strict=True):
        linear.weight, (linear.out_features, linear.in_features) = weight, weight.shape
    config = Float8LinearConfig.from_recipe_name("rowwise")
    fc1, fc2 = convert_to_float8_training(linears, config=config)

    def mlp(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.rms_norm(x, gamma.shape, gamma, dense_mlp.EPS)
        gate, up = fc1(y).chunk(2, -1)
        return x + fc2(torch.nn.functional.silu(gate) * up)

    return partial(torch.compile(mlp, dynamic=False), *p.leaves[:2])


def in_precision(module: Any, recipe: Any) -> Any:
    """The module over the same parameters, under a recipe of its own."""
    same = copy.deepcopy(module, {id(p): p for p in module.parameters()})
    fo.configure(same, recipe=recipe)
    return same


class Cell:
    """One shape: forwards by candidate, what they differentiate, and their FLOPs."""

    def __init__(self, name: str) -> None:
        kind, shape, *how = name.split("/")
        if kind == "dense":
            self.p: Any = dense_mlp.Problem(*DENSE[name])
            self.module, self.given, self.args = self.p.mlp, (self.p.x,), (self.p.x,)
            plain = partial(dense_mlp.plain_mlp, dense_mlp.swiglu, *self.p.leaves)
        elif kind == "layer":
            self.p = moe_layer.Problem(*LAYERS[shape])
            self.module, self.given = self.p.moe, (self.p.x,)
            self.args = (self.p.x,)
            plain = partial(moe_layer.peer, *self.p.leaves, self.p.k)
        else:
            self.p = grouped_mlp.Problem(*grouped_mlp.SHAPES[shape])
            groups, rows, *_ = grouped_mlp.SHAPES[shape]
            self.p.offs.copy_(split(how[0], groups, rows))
            self.p.routing = fo.Routing(self.p.offs, self.p.probs)
            self.module, self.given = self.p.mlp, (self.p.x, self.p.probs, self.p.offs)
            self.args = (self.p.x, self.p.routing)
            leaves = self.p.leaves.values()
            plain = partial(grouped_mlp.peer, self.p.form.formula, self.p.offs, *leaves)
        named = isinstance(self.p.leaves, dict)
        self.leaves = [*(self.p.leaves.values() if named else self.p.leaves)]
        modules = {name: in_precision(self.module, recipe) for name, recipe in RECIPES.items()}
        modules = {"bf16": self.module, **modules}
        self.forwards = {
            **{name: partial(module, *self.args) for name, module in modules.items()},
            "torch": plain,
        }
        if kind == "dense" and importlib.util.find_spec("torchao"):
            built = functools.cache(partial(torchao, self.p))
            self.forwards["torchao"] = lambda: built()()

    def results(self, name: str) -> list[torch.Tensor]:
        return layers.results(self.forwards[name], self.p.dy, self.leaves)

    def errors(self, record: dict[str, Any]) -> dict[str, list[float]]:
        right, found = self.results("bf16"), {}
        for name in list(self.forwards):
            try:
                got = self.results(name)
                pairs = zip(got, right, strict=True)
                found[name] = [round(measure.relative_error(a, b), 5) for a, b in pairs]
            except Exception as error:  # reported, not hidden
                record["failed"][name] = f"{type(error).__name__}: {error}"[:500]
                del self.forwards[name]
            got = None
        return found


def cell(name: str, options: argparse.Namespace) -> dict[str, Any]:
    c = Cell(name)
    record: dict[str, Any] = {"failed": {}}
    record["errors"] = c.errors(record)
    forwards = {n: f for n, f in c.forwards.items() if n in ("bf16", *options.candidates)}
    steps = {n: layers.training_step(f, c.p.dy, c.leaves) for n, f in forwards.items()}
    record["saved_bytes"] = {n: layers.held_bytes(f) for n, f in forwards.items()}
    record["peak_bytes"] = {n: layers.peak_bytes(s, c.leaves) for n, s in steps.items()}
    record |= layers.times(forwards, steps, (), c.p.flops, ratios, options)
    if options.profile:
        record["kernels"] = {n: layers.kernels(s) for n, s in steps.items() if n != "torch"}
    return record


def ratios(us: measure.Rounds) -> dict[str, Any]:
    """bf16's time over that of every other candidate."""
    return {name: measure.paired(us[name], us["bf16"]) for name in us if name != "bf16"}


def summary(cells: dict[str, Any]) -> dict[str, Any]:
    """Of every cell the ratios of time, saved bytes and peaks to those of bf16."""
    found = {}
    for name, record in cells.items():
        if "ratios" not in record:
            continue
        for what, each in record["ratios"].items():
            found[f"{name}/{what}"] = each
        for what in ("saved_bytes", "peak_bytes"):
            of = record[what]
            found[f"{name}/{what}"] = {
                n: round(size / of["bf16"], 4) for n, size in of.items() if n != "bf16"
            }
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    runs.add_step_options(parser)
    every = ("bf16", *RECIPES, "torch", "torchao")
    parser.add_argument("--candidates", nargs="*", default=every, choices=every)


if __name__ == "__main__":
    runs.main(__doc__, names(), cell, summary, more=add_options)
