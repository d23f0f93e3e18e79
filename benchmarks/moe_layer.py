"""A whole MoE layer beside `torch.compile` and, where it is installed, SonicMoE, in bf16.

    python benchmarks/moe_layer.py --peers compile sonic sonic_tuned --profile --span 0.2 \\
        --out benchmarks/results/moe_layer_h200.json

The layer is router, top-k softmax, gather, SwiGLU experts and combine over one set of weights. Candidates run in turn,
in balanced order, back to back (hot), for `--span` seconds to warm up and as long again in each round; ratios are
those of each round, to the peer whose median is least. SonicMoE runs with its default and with autotuned tiles
(README.md: how to keep what it tunes). Outputs and all gradients are compared with float32 first; the peers round the
router's logits to bf16, so that they choose other experts for some tokens, and differ by that. Saved bytes are what a
forward leaves allocated beyond its inputs and its output, measured the same way for all. TFLOP/s are useful ones:
6 T K n d forward.

    python benchmarks/moe_layer.py --short --peers compile sonic --span 0.1 \\
        --out benchmarks/results/moe_layer_short_h200.json

The layers of SHORT have so few tokens that reading the weights is most of their work. Captured graphs run in turn,
whose kernels are all that counts, beside a copy of as many bytes as a forward reads of the weights, and as a step reads
(twice) and writes of their gradients.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from common import layers, measure, runs
from common.measure import rnd
from torch import Tensor

import fuseops as fo

# name: tokens T, model width d, expert width n, experts E, chosen K
SHAPES = {
    "sonic_7b": (24576, 1536, 256, 128, 8),
    "qwen3_30b": (32768, 2048, 768, 128, 8),
    "sonic_30b": (32768, 4096, 1024, 64, 4),
    "mixtral": (8192, 4096, 14336, 8, 2),
}
LEAST = {
    "fwd": dict.fromkeys(SHAPES, 0.9),
    "fwd+bwd": {**dict.fromkeys(SHAPES, 1.0), "sonic_7b": 0.95},
}
# short steps: few rows an expert, so that reading the weights is most of the work
SHORT = {
    f"{name}/{tokens}": (tokens, *sizes)
    for name, sizes in {"qwen3_30b": SHAPES["qwen3_30b"][1:], "olmoe": (2048, 1024, 64, 8)}.items()
    for tokens in (64, 256, 1024, 4096)
}
SAVED = 1.02  # of SonicMoE's bytes
PEERS = ("compile", "sonic", "sonic_tuned")


class Problem:
    """One shape: the weights, our layer over them, and the peers."""

    def __init__(self, tokens: int, d: int, n: int, experts: int, k: int) -> None:
        self.k, self.flops = k, 6 * tokens * k * n * d
        self.x = rnd(tokens, d).requires_grad_()
        self.dy = rnd(tokens, d)
        self.moe = fo.MoE(d, n, experts, k, device="meta", dtype=torch.bfloat16)
        for op, weight in (
            ("router", rnd(experts, d, scale=0.02)),
            ("fc1", rnd(experts, 2 * n, d, scale=0.02)),
            ("fc2", rnd(experts, d, n, scale=0.02)),
        ):
            self.moe[op].weight = torch.nn.Parameter(weight)
        self.leaves = (self.x, *(self.moe[op].weight for op in ("router", "fc1", "fc2")))

    def forwards(self, peers: list[str]) -> dict[str, measure.Call]:
        found: dict[str, measure.Call] = {"fuseops": lambda: self.moe(self.x)}
        if "compile" in peers:
            compiled = torch.compile(peer, dynamic=False)
            found["compile"] = lambda: compiled(*self.leaves, self.k)
        if "sonic" in peers:
            found["sonic"] = sonic(self, tuned=False)
        if "sonic_tuned" in peers:
            found["sonic_tuned"] = sonic(self, tuned=True)
        return found


def peer(x: Tensor, wr: Tensor, w1: Tensor, w2: Tensor, k: int) -> Tensor:
    experts = wr.shape[0]
    scores, chosen = (x @ wr.t()).topk(k, -1)
    probs, flat = scores.float().softmax(-1), chosen.flatten()
    order = flat.argsort(stable=True)
    offs = torch.histc(flat.float(), experts, 0, experts - 1).cumsum(0).to(torch.int32)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=x.device)
    gate, up = F.grouped_mm(x[order // k], w1.transpose(1, 2), offs=offs).chunk(2, -1)
    a = (F.silu(gate.float()) * up * probs.flatten()[order][:, None]).to(x.dtype)
    y = F.grouped_mm(a, w2.transpose(1, 2), offs=offs)
    return y[back].view(x.shape[0], k, -1).sum(1)


def sonic(p: Problem, tuned: bool) -> measure.Call:
    """SonicMoE's layer over the same weights."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_TC_softmax_topk_layer as layer

    use = _tiles()
    x, wr, w1, w2 = p.leaves

    def forward() -> Tensor:
        use(tuned)
        stream = torch.cuda.current_stream().cuda_stream
        weights = wr.permute(0, 1), w1.permute(1, 2, 0), None, w2.permute(1, 2, 0), None
        options = {"concat_layout": True}
        return layer(x, *weights, p.k, stream, ActivationType.SWIGLU, False, **options)[0]

    return forward


@functools.cache
def _tiles() -> Any:
    """A function that sets whether SonicMoE's GEMMs are autotuned."""
    interface = importlib.import_module("quack.gemm_interface")
    names = ("gemm", "gemm_gated", "gemm_dgated")
    real = {name: getattr(interface, name) for name in names}
    modules = [
        importlib.import_module(f"sonicmoe.functional{part}")
        for part in ("", ".forward", ".backward")
    ]

    def use(tuned: bool) -> None:
        for module in modules:
            for name, function in real.items():
                if hasattr(module, name):
                    setattr(module, name, functools.partial(function, tuned=tuned))

    return use


def exact(p: Problem) -> list[Tensor]:
    """y and the gradients of x and the weights, expert by expert in float32."""
    leaves = [t.detach().float().requires_grad_() for t in p.leaves]
    x, wr, w1, w2 = leaves
    scores, chosen = (x @ wr.t()).topk(p.k, -1)
    probs, y = scores.softmax(-1), torch.zeros_like(x)
    for e in range(len(wr)):
        token, place = (chosen == e).nonzero(as_tuple=True)
        gate, up = (x[token] @ w1[e].t()).chunk(2, -1)
        a = F.silu(gate) * up * probs[token, place][:, None]
        y = y.index_add(0, token, a @ w2[e].t())
    return [y.detach(), *torch.autograd.grad(y, leaves, p.dy.float())]


def errors(p: Problem, forward: measure.Call, right: list[Tensor]) -> dict[str, float]:
    """Relative errors of y and every gradient."""
    names = ("y", "x", "router", "fc1", "fc2")
    pairs = zip(names, layers.results(forward, p.dy, p.leaves), right, strict=True)
    return {name: measure.relative_error(mine, theirs) for name, mine, theirs in pairs}


def ready(p: Problem, peers: list[str]) -> tuple[dict[str, measure.Call], dict[str, Any]]:
    """The candidates that run here, with their errors, those that failed, and the seconds of a first step."""
    record: dict[str, Any] = {"failed": {}, "errors": {}, "warm_s": {}}
    forwards, right = p.forwards(peers), exact(p)
    for name in list(forwards):
        begun = time.perf_counter()
        try:
            record["errors"][name] = errors(p, forwards[name], right)
            with torch.no_grad():
                forwards[name]()
            torch.cuda.synchronize()
        except Exception as error:  # reported, not hidden
            record["failed"][name] = f"{type(error).__name__}: {error}"[:500]
            del forwards[name]
        record["warm_s"][name] = round(time.perf_counter() - begun, 1)
    return forwards, record


def cell(sizes: tuple[int, ...], options: argparse.Namespace) -> dict[str, Any]:
    """One shape: errors, bytes, microseconds, TFLOP/s and kernels of every candidate."""
    p = Problem(*sizes)
    forwards, record = ready(p, options.peers)
    steps = {n: layers.training_step(f, p.dy, p.leaves) for n, f in forwards.items()}
    record |= layers.memory(p.moe.plan(p.x), forwards, steps, p.leaves, (p.x,))
    if not options.warm:
        record |= layers.times(forwards, steps, ("fuseops",), p.flops, ratios, options)
        if options.profile:
            profiled = {n: step for n, step in steps.items() if n != "compile"}
            record["kernels"] = {n: layers.kernels(step) for n, step in profiled.items()}
    return record


def short(sizes: tuple[int, ...], options: argparse.Namespace) -> dict[str, Any]:
    """A layer of few tokens: errors, and of captured graphs microseconds and ratios; kernels of the steps."""
    p = Problem(*sizes)
    forwards, record = ready(p, options.peers)
    steps = {n: layers.training_step(f, p.dy, p.leaves) for n, f in forwards.items()}
    if options.warm:
        return record
    record |= {"us": {}, "ratios": {}}
    timed = {"fwd": {n: layers.inference(f) for n, f in forwards.items()}, "fwd+bwd": steps}
    for what in options.what:
        calls = {n: layers.captured(call) for n, call in timed[what].items()}
        moved = sum(leaf.nbytes for leaf in p.leaves[2:]) * (1 if what == "fwd" else 3)
        here, there = torch.empty(2, moved // 2, dtype=torch.uint8, device="cuda")
        calls["copy"] = functools.partial(there.copy_, here)
        us = measure.in_turn(calls, options.rounds, options.span)
        record["us"][what] = measure.medians(us)
        mine = us.pop("fuseops")
        record["ratios"][what] = {n: measure.paired(mine, theirs) for n, theirs in us.items()}
        del calls  # and the memory of its graphs
    if options.profile:
        record["kernels"] = {n: layers.kernels(step, least=0.0) for n, step in steps.items()}
    return record


def short_summary(cells: dict[str, Any]) -> dict[str, Any]:
    """A line a layer and what was timed: microseconds, and how many times as fast as the peer and as the copy."""
    return {
        f"{name}/{what}": {**record["us"][what], **{f"over {n}": r for n, r in found.items()}}
        for name, record in cells.items()
        for what, found in record.get("ratios", {}).items()
    }


def ratios(us: measure.Rounds) -> dict[str, Any]:
    """The fastest peer's time over ours, eager and as a captured graph; nothing without a peer."""
    peers = [name for name in us if not name.startswith("fuseops")]
    if not peers:
        return {}
    best = min(peers, key=lambda name: statistics.median(us[name]))
    mine = (name for name in us if name not in peers)
    return {"best_peer": best, **{name: measure.paired(us[name], us[best]) for name in mine}}


def summary(cells: dict[str, Any]) -> dict[str, Any]:
    """Ratios to the fastest peer, and of saved bytes to SonicMoE's, beside their bars."""
    found: dict[str, Any] = {}
    for name, record in cells.items():
        for what, entry in record.get("ratios", {}).items():
            if entry:
                found[f"{name}/{what}"] = {"bar": LEAST[what][name], **entry}
        saved = record.get("saved_bytes", {})
        if "sonic" in saved:
            ratio = round(saved["fuseops"] / saved["sonic"], 4)
            found[f"{name}/saved"] = {"of_sonic": ratio, "bar": SAVED}
    return found


def main() -> None:
    parser = runs.parser_of(__doc__)
    runs.add_options(parser, SHAPES)
    runs.add_step_options(parser)
    parser.add_argument("--peers", nargs="*", default=["compile"], choices=PEERS)
    parser.add_argument(
        "--short", nargs="*", choices=SHORT, help="these layers of few tokens, or all"
    )
    options = parser.parse_args()
    packages = ("sonic-moe", "quack-kernels", "nvidia-cutlass-dsl")
    run = runs.Run(options, *packages)
    if options.short is None:
        run.summary = lambda report: summary(report["cells"])
        run.each(lambda name: cell(SHAPES[name], options), options.only)
    else:
        run.summary = lambda report: short_summary(report["cells"])
        run.each(lambda name: short(SHORT[name], options), options.short or SHORT)


if __name__ == "__main__":
    main()
