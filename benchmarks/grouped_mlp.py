"""The expert MLP (fc1, SwiGLU times probability, fc2) beside `torch.compile` over `F.grouped_mm`, in bf16.

    python benchmarks/grouped_mlp.py --profile --out benchmarks/results/grouped_mlp_h200.json

Rows are sorted by expert already. Candidates run in turn, in balanced order, back to back (hot), for `--span` seconds
to warm up and as long again in each round; ratios are those of each round, with `--graphs` of captured graphs too.
Outputs and all gradients are compared with float32 first, by expert. TFLOP/s are useful ones: 6 R D F forward.
"""

from __future__ import annotations

import argparse
from typing import Any

import layers
import measure
import torch
import torch.nn.functional as F
from measure import rnd
from torch import Tensor

import fuseops as fo

# name: experts, rows, model width D, expert width F
SHAPES = {
    "qwen3_30b": (128, 262144, 2048, 768),
    "sonic_7b": (128, 196608, 1536, 256),
    "mixtral": (8, 16384, 4096, 14336),
    "qwen3_30b_8k": (128, 65536, 2048, 768),
    "sonic_30b": (64, 131072, 4096, 1024),
    "dsv3_ep8": (32, 65536, 7168, 2048),
}
LEAST, MEAN = 1.03, 1.12  # the bars: no cell below, geometric mean at least


class Problem:
    """One shape: tensors, and the two ways to compute the same."""

    def __init__(self, experts: int, rows: int, d: int, f: int) -> None:
        g = torch.Generator().manual_seed(1)
        counts = torch.multinomial(torch.ones(experts), rows, True, generator=g)
        counts = counts.bincount(minlength=experts)
        self.offs = counts.cumsum(0).to(torch.int32).cuda()
        self.flops = 6 * rows * d * f
        self.x = rnd(rows, d).requires_grad_()
        self.probs = torch.rand(rows, device="cuda").requires_grad_()
        self.dy = rnd(rows, d)
        fc1 = fo.ops.GroupedLinear(experts, d, 2 * f, bias=False, device="meta")
        fc2 = fo.ops.GroupedLinear(experts, f, d, bias=False, device="meta")
        fc1.weight = torch.nn.Parameter(rnd(experts, 2 * f, d, scale=0.02))
        fc2.weight = torch.nn.Parameter(rnd(experts, d, f, scale=0.02))
        self.mlp = fo.Sequential({"fc1": fc1, "act": fo.ops.ScaledSwiGLU(), "fc2": fc2})
        self.leaves = (self.x, self.probs, fc1.weight, fc2.weight)
        self.routing = fo.Routing(self.offs, self.probs)

    def forwards(self) -> dict[str, measure.Call]:
        compiled = torch.compile(peer, dynamic=False)
        return {
            "fuseops": lambda: self.mlp(self.x, self.routing),
            "compile": lambda: compiled(*self.leaves, self.offs),
        }


def peer(x: Tensor, probs: Tensor, w1: Tensor, w2: Tensor, offs: Tensor) -> Tensor:
    h = F.grouped_mm(x, w1.transpose(1, 2), offs=offs)
    gate, up = h.chunk(2, -1)
    a = (F.silu(gate.float()) * up * probs[:, None]).to(x.dtype)
    return F.grouped_mm(a, w2.transpose(1, 2), offs=offs)


def exact(p: Problem, e: int) -> tuple[slice, list[Tensor]]:
    """Rows of an expert, and y and the gradients of x, probs, fc1, fc2 in float32."""
    ends = [0, *p.offs.tolist()]
    rows = slice(ends[e], ends[e + 1])
    x, probs, w1, w2 = (
        t.detach().float().requires_grad_()
        for t in (p.x[rows], p.probs[rows], p.leaves[2][e], p.leaves[3][e])
    )
    gate, up = (x @ w1.t()).chunk(2, -1)
    y = (F.silu(gate) * up * probs[:, None]) @ w2.t()
    return rows, [y.detach(), *torch.autograd.grad(y, (x, probs, w1, w2), p.dy[rows].float())]


def errors(p: Problem, forward: measure.Call) -> dict[str, float]:
    """Worst relative error over some experts, of y and every gradient."""
    layers.training_step(forward, p.dy, p.leaves)()
    y, grads = forward().detach(), [leaf.grad for leaf in p.leaves]
    worst = dict.fromkeys(("y", "x", "probs", "fc1", "fc2"), 0.0)
    for e in sorted({0, 1, len(p.offs) // 2, len(p.offs) - 1}):
        rows, right = exact(p, e)
        got = [y[rows], grads[0][rows], grads[1][rows], grads[2][e], grads[3][e]]
        for name, mine, theirs in zip(worst, got, right, strict=True):
            worst[name] = max(worst[name], measure.relative_error(mine, theirs))
    for leaf in p.leaves:
        leaf.grad = None
    return worst


def cell(sizes: tuple[int, ...], options: argparse.Namespace) -> dict[str, Any]:
    """One shape: errors, bytes, microseconds, TFLOP/s and ratios of every candidate."""
    p = Problem(*sizes)
    forwards = p.forwards()
    record: dict[str, Any] = {"errors": {n: errors(p, f) for n, f in forwards.items()}}
    steps = {n: layers.training_step(f, p.dy, p.leaves) for n, f in forwards.items()}
    plan, given = p.mlp.plan(p.x, p.routing), (p.x, p.probs, p.offs)
    record |= layers.memory(plan, forwards, steps, p.leaves, given)
    if not options.warm:
        record |= layers.times(forwards, steps, tuple(forwards), p.flops, ratios, options)
        if options.profile:
            record["kernels"] = {n: layers.kernels(step) for n, step in steps.items()}
    return record


def ratios(us: measure.Rounds) -> dict[str, Any]:
    """The compiled one's time over ours, eager by eager and graph by graph."""
    pairs = {"eager": ("fuseops", "compile"), "graph": ("fuseops_graph", "compile_graph")}
    return {
        how: measure.paired(us[mine], us[peer]) for how, (mine, peer) in pairs.items() if mine in us
    }


def summary(cells: dict[str, Any]) -> dict[str, Any]:
    """Geometric mean of the ratios over the shapes, and what is below its bar; then the ratios of every shape."""
    done = {name: c["ratios"] for name, c in cells.items() if c.get("ratios")}
    found: dict[str, Any] = {}
    for what in ("fwd", "fwd+bwd"):
        for how in ("eager", "graph"):
            of = {n: r[what][how]["ratio"] for n, r in done.items() if how in r.get(what, {})}
            if of:
                mean = measure.geomean(of.values())
                below = {n: r for n, r in of.items() if r < LEAST}
                met = mean >= MEAN and not below
                found[f"{what}/{how}"] = {"geomean": mean, "below": below, "met": met}
    for name, by_way in done.items():
        found |= {f"{name}/{what}": entry for what, entry in by_way.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    layers.add_options(parser, SHAPES)
    layers.add_step_options(parser)
    options = parser.parse_args()
    report = layers.begin(options)
    layers.run_cells(options, report, lambda name: cell(SHAPES[name], options), summary)


if __name__ == "__main__":
    main()
