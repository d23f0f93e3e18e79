"""Loss curves of training in bf16, from three seeds, and in FP8, on the standard library's text.

    python benchmarks/fp8_curves.py --out benchmarks/results/fp8_curves_h200.json

Two byte models of `fuseops.demo`: the demo's own (`demo`), and one of 12 layers and 155 million parameters (`moe12`).
FP8 is `Float8BlockScaling` with the weight gradients of squares, of columns quantized directly, and in bf16; it starts
from the parameters of bf16's first seed and sees the same text in the same order, and every GEMM is quantized, also
where that is no faster. On CUDA a step is one graph, which is replayed, so that Python takes no part in it. `train` has
the nats a byte of every step, `held_out` those of text that nobody trained on, at the end. A run that is cut off leaves
the runs that are done; with `--resume` the next one makes the others.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from common import measure
from torch import Tensor

import fuseops as fo
from fuseops.demo.data import read_corpus, windows
from fuseops.demo.model import ByteModel, Config, nats, objective
from fuseops.demo.train import LearningRate, evaluate

Block = fo.recipes.Float8BlockScaling
RUNS: dict[str, tuple[int, Any]] = {  # seed and recipe
    "bf16": (0, None),
    "fp8_square": (0, Block()),
    "fp8_block": (0, Block(wgrad="block")),
    "fp8_bf16_wgrad": (0, Block(wgrad="bf16")),
    "bf16_seed1": (1, None),
    "bf16_seed2": (2, None),
}
MODELS = {
    "moe12": Config(
        dim=512, heads=8, layers=12, ffn=1536, experts=16, expert_ffn=512, context=512, byte_dim=64
    ),
    "demo": Config(),
}
PEAK = {"moe12": 1e-3, "demo": 4e-3}  # of the learning rate
TOLERANCE = 0.005  # of the end loss, or the spread of the seeds
LAST = 100  # steps whose mean is the end loss of training


class Training:
    """A model, its optimizer, and a step of both, whose text and learning rates lie on the device."""

    def __init__(
        self, config: Config, schedule: LearningRate, recipe: Any, seed: int, text: Tensor
    ) -> None:
        self.recipe, self.schedule, self.text = recipe, schedule, text
        device, cuda = text.device, text.is_cuda
        torch.manual_seed(seed)
        self.model = ByteModel(config).to(device)
        generator = torch.Generator().manual_seed(seed)
        places = len(text) - config.context - 1
        starts = torch.randint(places, (schedule.steps, schedule.batch, 1), generator=generator)
        rates = torch.tensor([schedule.lr_at(step) for step in range(schedule.steps)])
        self.starts, self.rates = starts.to(device), rates.to(device)
        self.losses = torch.zeros(schedule.steps, device=device)
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self.offsets = torch.arange(config.context + 1, device=device)
        self.rate = torch.zeros((), device=device) if cuda else 0.0
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.rate, betas=(0.9, 0.95), weight_decay=0.1,
            fused=cuda or None, capturable=cuda,
        )  # fmt: skip

    def precision(self) -> Any:
        """Every GEMM in the recipe's formats."""
        return nullcontext() if self.recipe is None else fo.recipe(self.recipe, strict=True)

    def step(self) -> None:
        """One step, at the place that `number` says, which it moves on."""
        rate = self.rates[self.number].squeeze()
        if isinstance(self.rate, Tensor):
            self.rate.copy_(rate)
        else:
            self.optimizer.param_groups[0]["lr"] = rate.item()
        seen = self.text[self.starts[self.number][0] + self.offsets].long()
        self.optimizer.zero_grad(set_to_none=True)
        with self.precision():
            out = self.model(seen[:, :-1])
        objective(out, seen, self.model.config.balance).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.schedule.clip)
        self.optimizer.step()
        self.losses.index_copy_(0, self.number, nats(out, seen).detach()[None])
        self.number += 1

    def run(self) -> list[float]:
        """The losses of all steps."""
        step = self.captured() if self.text.is_cuda else self.step
        for _ in range(self.schedule.steps):
            step()
        return self.losses.tolist()

    def captured(self) -> measure.Call:
        """The step as a graph; what the steps that warm up change is put back."""
        before = [p.detach().clone() for p in self.model.parameters()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        with torch.no_grad():
            for p, old in zip(self.model.parameters(), before, strict=True):
                p.copy_(old)
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()
            self.number.zero_()
        return graph.replay

    def held_out(self, judged: Tensor) -> float:
        with self.precision():
            return evaluate(self.model, judged)


def trained(name: str, which: str, options: argparse.Namespace, corpus: Any) -> dict[str, Any]:
    """One run."""
    (seed, recipe), config = RUNS[which], MODELS[name]
    if options.tiny:
        sizes = {"dim": 32, "heads": 2, "layers": 2, "ffn": 64, "experts": 4, "expert_ffn": 32}
        config = Config(**{**vars(config), **sizes, "context": 32})
    schedule = LearningRate(options.steps, options.batch, PEAK[name], min(100, options.steps))
    begun = time.perf_counter()
    training = Training(config, schedule, recipe, seed, corpus.train.to(options.device))
    losses = training.run()
    seconds = time.perf_counter() - begun
    judged = windows(corpus.held_out, config.context)
    return {
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "seconds": round(seconds, 1),
        "end": round(statistics.fmean(losses[-LAST:]), 5),
        "held_out": round(training.held_out(judged), 5),
        "train": [round(loss, 4) for loss in losses],
    }


def verdict(runs: dict[str, Any]) -> dict[str, Any]:
    """How far the end losses of each FP8 run are from bf16's of the same seed, and how far they may be."""
    found: dict[str, Any] = {}
    for what in ("end", "held_out"):
        seeds = [runs[name][what] for name in RUNS if name.startswith("bf16") and name in runs]
        if "bf16" not in runs or len(seeds) < 3:
            continue
        right = runs["bf16"][what]
        allowed = max(TOLERANCE, (max(seeds) - min(seeds)) / right)
        off = {n: round(runs[n][what] / right - 1, 5) for n in runs if n.startswith("fp8")}
        met = all(share <= allowed for share in off.values())
        found[what] = {"bf16": right, "allowed": round(allowed, 5), "off": off, "met": met}
    return found


def written(report: dict[str, Any]) -> dict[str, Any]:
    """A report with its table: the end of every run beside bf16's of the same seed."""
    curves = {}
    for name, model in report["models"].items():
        for which, run in model["runs"].items():
            row = {"end": run["end"], "held out": run["held_out"], "seconds": run["seconds"]}
            if which.startswith("fp8") and "bf16" in model["runs"]:
                right = model["runs"]["bf16"]
                row["end over bf16, %"] = round(100 * (run["end"] / right["end"] - 1), 2)
                row["held out, %"] = round(100 * (run["held_out"] / right["held_out"] - 1), 2)
            curves[f"{name} {which}"] = row
    return {**report, "curves": curves}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=RUNS)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--resume", action="store_true", help="make the runs that --out lacks")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; no new run after it")
    options = parser.parse_args()
    report: dict[str, Any] = measure.environment() | {"models": {}}
    if options.resume and options.out.exists():
        report["models"] = json.loads(options.out.read_text())["models"]
    corpus, begun = read_corpus(), time.perf_counter()
    for name in options.models:
        found = report["models"].setdefault(name, {"runs": {}})
        for which in options.runs:
            if which in found["runs"] or time.perf_counter() - begun > options.budget:
                continue
            found["runs"][which] = trained(name, which, options, corpus)
            found["verdict"] = verdict(found["runs"])
            shown = {k: v for k, v in found["runs"][which].items() if k != "train"}
            print(
                f"{time.perf_counter() - begun:.0f} s", name, which, json.dumps(shown), flush=True
            )
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(written(report)) + "\n")
        print(name, json.dumps(found.get("verdict")), flush=True)


if __name__ == "__main__":
    main()
