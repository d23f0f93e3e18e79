"""The dense pre-norm MLP (RMSNorm, fc1, SwiGLU or squared ReLU, fc2, residual) beside torch.compile and Liger, bf16.

    python benchmarks/dense_mlp.py --profile --out benchmarks/results/dense_mlp_h200.json

Sizes of Llama-3.1-8B, Qwen3-8B and Nemotron-H-8B, the gate and up projections as one weight in all candidates. Peers:
eager torch, `torch.compile`, the same with `mode="max-autotune-no-cudagraphs"`, and Liger's kernels between torch's
GEMMs (`liger`) or its fused MLP (`liger_mlp`, for SwiGLU). `gemms` are the two or six products alone, by cuBLAS, and
no peer: `gemms_alone` is the ratio that they would have to the best one. Candidates run in turn, in balanced order,
back to back, for `--span` seconds to warm up and as long again in each round; ratios are those of each round. Outputs
and gradients are compared with float32 first. TFLOP/s are those of the GEMMs. `--ways` times the candidates of the two
choices that the fused op makes by shape (`mlp_swiglu`, `mlp_dswiglu`) instead of the peers.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from common import layers, measure, runs
from common.measure import rnd
from torch import Tensor

import fuseops as fo
from fuseops.kernels import configs

# name: model width D, MLP width F, gated
MODELS = {
    "llama3_8b": (4096, 14336, True),
    "qwen3_8b": (4096, 12288, True),
    "nemotron_h_8b": (4096, 21504, False),
}
ROWS = (8192, 16384, 512)
SHAPES = {f"{name}/{rows}": (rows, *sizes) for rows in ROWS for name, sizes in MODELS.items()}
PEERS = ("eager", "compile", "max_autotune", "liger", "liger_mlp")
COMPILED = ("compile", "max_autotune")
EPS = 1e-5
LEAST, SAVED = 1.03, 0.72  # the bars: over the best peer, and of compile's bytes


class Problem:
    """One shape: tensors, and the ways to compute the same."""

    def __init__(self, rows: int, d: int, f: int, gated: bool) -> None:
        self.gated, halves = gated, 1 + gated
        self.flops = 2 * rows * d * f * (1 + halves)
        self.x, self.dy = rnd(rows, d).requires_grad_(), rnd(rows, d)
        norm = fo.ops.RMSNorm(d, eps=EPS, device="cuda", dtype=torch.bfloat16)
        fc1 = fo.ops.Linear(d, halves * f, bias=False, device="meta")
        fc2 = fo.ops.Linear(f, d, bias=False, device="meta")
        fc1.weight = torch.nn.Parameter(rnd(halves * f, d, scale=0.02))
        fc2.weight = torch.nn.Parameter(rnd(d, f, scale=0.02))
        act = fo.ops.SwiGLU() if gated else fo.ops.SReLU()
        self.mlp = fo.Residual(norm, fc1, act, fc2)
        self.leaves = (self.x, norm.weight, fc1.weight, fc2.weight)

    def forwards(self, peers: list[str]) -> dict[str, measure.Call]:
        found: dict[str, measure.Call] = {"fuseops": lambda: self.mlp(self.x)}
        for name in peers:
            call = self.peer(name)
            if call is not None:
                found[name] = partial(call, *self.leaves)
        return found

    @torch.no_grad()
    def gemms(self) -> dict[str, measure.Call]:
        """The products of a forward and of a training step, of the operands that they have there."""
        x, gamma, w1, w2 = (t.detach() for t in self.leaves)
        y = F.rms_norm(x, gamma.shape, gamma, EPS)
        h, da = y @ w1.t(), self.dy @ w2
        a, dh = act_and_grad(h, da, self.gated)
        del h, da

        def fwd() -> None:
            torch.mm(y, w1.t())
            torch.mm(a, w2.t())

        def step() -> None:
            fwd()
            torch.mm(self.dy, w2)
            torch.mm(self.dy.t(), a)
            torch.mm(dh, w1)
            torch.mm(dh.t(), y)

        return {"fwd": fwd, "fwd+bwd": step}

    def peer(self, name: str) -> Any:
        plain = partial(plain_mlp, swiglu if self.gated else srelu)
        if name == "eager":
            return plain
        if name == "compile":
            return torch.compile(plain, dynamic=False)
        if name == "max_autotune":
            return torch.compile(plain, dynamic=False, mode="max-autotune-no-cudagraphs")
        if name == "liger":
            return liger(self.gated)
        return liger_mlp() if self.gated else None


def swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def srelu(h: Tensor) -> Tensor:
    return F.relu(h).square()


def plain_mlp(act: Any, x: Tensor, gamma: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return x + F.linear(act(F.linear(F.rms_norm(x, gamma.shape, gamma, EPS), w1)), w2)


def act_and_grad(h: Tensor, da: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """The activation of h, and the gradient of h."""
    with torch.enable_grad():
        a = (swiglu if gated else srelu)(h.requires_grad_())
    return a.detach(), torch.autograd.grad(a, h, da)[0]


def liger(gated: bool) -> Any:
    from liger_kernel.ops.relu_squared import LigerReLUSquaredFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    act = LigerFusedGateUpSiLUMulFunction if gated else LigerReLUSquaredFunction

    def mlp(x: Tensor, gamma: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        y = LigerRMSNormFunction.apply(x, gamma, EPS, 0.0, "llama", False)
        return x + F.linear(act.apply(F.linear(y, w1)), w2)

    return mlp


def liger_mlp() -> Any:
    from liger_kernel.ops.mlp import LigerMLPFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def mlp(x: Tensor, gamma: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        y = LigerRMSNormFunction.apply(x, gamma, EPS, 0.0, "llama", False)
        gate, up = w1.chunk(2)
        return x + LigerMLPFunction.apply(y[None], gate, up, w2)[0]

    return mlp


def exact(p: Problem) -> list[Tensor]:
    """y and the gradients in float32."""
    plain = partial(plain_mlp, swiglu if p.gated else srelu)
    leaves = [t.detach().float().requires_grad_() for t in p.leaves]
    y = plain(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, p.dy.float())]


def errors(p: Problem, forward: measure.Call, right: list[Tensor]) -> dict[str, float]:
    names = ("y", "x", "norm", "fc1", "fc2")
    pairs = zip(names, layers.results(forward, p.dy, p.leaves), right, strict=True)
    return {name: round(measure.relative_error(mine, theirs), 5) for name, mine, theirs in pairs}


def cell(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One shape: errors, bytes, microseconds, TFLOP/s and ratios of every candidate."""
    p = Problem(*SHAPES[name])
    if options.ways:
        return ways(p, options)
    forwards = p.forwards(options.peers)
    right = exact(p)
    record: dict[str, Any] = {"errors": {n: errors(p, f, right) for n, f in forwards.items()}}
    del right
    steps = {n: layers.training_step(f, p.dy, p.leaves) for n, f in forwards.items()}
    record |= layers.memory(p.mlp.plan(p.x), forwards, steps, p.leaves, (p.x,))
    record["explain"] = list(p.mlp.plan(p.x).notes)
    if not options.warm:
        alone = p.gemms()
        timed = {**forwards, "gemms": alone["fwd"]}, {**steps, "gemms": alone["fwd+bwd"]}
        record |= layers.times(*timed, tuple(forwards), p.flops, ratios, options)
        if options.profile:
            record["kernels"] = {n: layers.kernels(step) for n, step in steps.items()}
    return record


def ratios(us: measure.Rounds) -> dict[str, Any]:
    """Every peer's time over ours, and that of the products alone."""
    return {n: measure.paired(us["fuseops"], t) for n, t in us.items() if n != "fuseops"}


def ways(p: Problem, options: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of the step with each activation in the epilogue of its GEMM, or apart: "01" is fc1's apart."""
    spaces = [configs.SPACES[name] for name in ("mlp_swiglu", "mlp_dswiglu")]
    steps = {}
    for choice in itertools.product((0, 1), repeat=2):
        forced = [(s, {"EPILOGUE": on}) for s, on in zip(spaces, choice, strict=True)]
        steps["".join(map(str, choice))] = partial(way, p, forced)
    for step in steps.values():
        step()
    if options.warm:
        return {}
    us = measure.in_turn(steps, options.rounds, options.span)
    over = {n: measure.paired(t, us["00"]) for n, t in us.items() if n != "00"}
    return {"us": {"fwd+bwd": measure.medians(us)}, "over_apart": over}


def way(p: Problem, forced: list[tuple[configs.Space, dict[str, int]]]) -> None:
    with ExitStack() as stack:
        for space, config in forced:
            stack.enter_context(configs.forced(space, config))
        layers.training_step(lambda: p.mlp(p.x), p.dy, p.leaves)()


def summary(cells: dict[str, Any]) -> dict[str, Any]:
    """Over the fastest peer of each shape, and bytes over torch.compile's, with what is below its bar."""
    found: dict[str, Any] = {}
    for what in ("fwd", "fwd+bwd"):
        best = {name: fastest(c, what) for name, c in cells.items() if what in c.get("ratios", {})}
        large = {n: r for n, (_, r) in best.items() if not n.endswith("/512")}
        if large:
            mean = measure.geomean(large.values())
            below = {n: r for n, r in large.items() if r < (LEAST if "bwd" in what else 1.0)}
            found[what] = {"geomean": mean, "below": below, "met": not below}
        for name, (peer, r) in best.items():
            us = cells[name]["us"][what]
            alone = {"gemms_alone": round(us[peer] / us["gemms"], 4)} if "gemms" in us else {}
            found[f"{name}/{what} over {peer}"] = {"ratio": r, **alone}
    bytes_ = {
        n: over_compiled(c) for n, c in cells.items() if "compile" in c.get("saved_bytes", {})
    }
    if bytes_:
        worst = max(bytes_.values())
        found["saved"] = {
            "mean": statistics.fmean(bytes_.values()),
            "worst": worst,
            "met": worst <= SAVED,
        }
    return found


def fastest(record: dict[str, Any], what: str) -> tuple[str, float]:
    """The peer that is nearest to us, or before us, and its ratio."""
    ratios = record["ratios"][what].items()
    by_peer = {peer: entry["ratio"] for peer, entry in ratios if peer != "gemms"}
    peer = min(by_peer, key=lambda name: by_peer[name])
    return peer, by_peer[peer]


def over_compiled(record: dict[str, Any]) -> float:
    saved = record["saved_bytes"]
    return round(saved["fuseops"] / min(saved[name] for name in COMPILED if name in saved), 4)


def add_options(parser: argparse.ArgumentParser) -> None:
    runs.add_step_options(parser)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--ways", action="store_true", help="time the choices of the fused op")


if __name__ == "__main__":
    runs.main(__doc__, SHAPES, cell, summary, ["liger-kernel"], add_options)
