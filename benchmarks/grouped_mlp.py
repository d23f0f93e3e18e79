"""The expert MLP (fc1, an activation times probability, fc2) beside `torch.compile` over `F.grouped_mm`, in bf16.

    python benchmarks/grouped_mlp.py --profile --out benchmarks/results/grouped_mlp_h200.json

Rows are sorted by expert already. Candidates run in turn, in balanced order, back to back (hot), for `--span` seconds
to warm up and as long again in each round; ratios are those of each round, with `--graphs` of captured graphs too.
Outputs and all gradients are compared with float32 first, by expert. TFLOP/s are useful ones: 6 R D F forward, 4 R D F
of an activation without a gate. Biases come by index in the peer, and its gradients of them by a product with one-hot
rows, which is faster than what autograd makes of the index.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import layers, measure, runs
from common.measure import rnd
from torch import Tensor

import fuseops as fo


class Form(NamedTuple):
    """What an expert MLP computes beside its products."""

    act: Callable[[], fo.Op[Any]]
    formula: Callable[[Tensor], Tensor]  # of the pre-activation, in float32
    gated: bool = True
    bias: bool = False


def swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate.float()) * up


def clamped_swiglu(h: Tensor) -> Tensor:
    """Of gpt-oss, whose gate and up alternate."""
    gate, up = h.float().unflatten(-1, (-1, 2)).unbind(-1)
    gate = gate.clamp(max=7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up.clamp(-7.0, 7.0) + 1.0)


def srelu(h: Tensor) -> Tensor:
    return F.relu(h.float()).square()


SWIGLU = Form(fo.ops.ScaledSwiGLU, swiglu)
CLAMPED = Form(lambda: fo.ops.ScaledClampedSwiGLU(interleave=1), clamped_swiglu, bias=True)
SRELU = Form(fo.ops.ScaledSReLU, srelu, gated=False)
# name: experts, rows, model width D, expert width F, form
SHAPES = {
    "qwen3_30b": (128, 262144, 2048, 768, SWIGLU),
    "sonic_7b": (128, 196608, 1536, 256, SWIGLU),
    "mixtral": (8, 16384, 4096, 14336, SWIGLU),
    "qwen3_30b_8k": (128, 65536, 2048, 768, SWIGLU),
    "sonic_30b": (64, 131072, 4096, 1024, SWIGLU),
    "dsv3_ep8": (32, 65536, 7168, 2048, SWIGLU),
    "llama4_scout": (16, 32768, 5120, 8192, SWIGLU),
    "gpt_oss": (32, 65536, 2880, 2880, CLAMPED),
    "nemotron": (128, 98304, 2688, 1856, SRELU),
}
LEAST, MEAN = 1.03, 1.12  # the bars: no cell below, geometric mean at least
BARS = {"fwd": 1.06, "fwd+bwd": 1.12}  # those of the shapes below, which no mean counts
ALONE = ("llama4_scout", "gpt_oss", "nemotron")


class Problem:
    """One shape: tensors, and the two ways to compute the same."""

    def __init__(self, experts: int, rows: int, d: int, f: int, form: Form) -> None:
        self.form, wide = form, f * (1 + form.gated)
        g = torch.Generator().manual_seed(1)
        counts = torch.multinomial(torch.ones(experts), rows, True, generator=g)
        counts = counts.bincount(minlength=experts)
        self.offs = counts.cumsum(0).to(torch.int32).cuda()
        self.flops = 2 * rows * d * (wide + f)
        self.x = rnd(rows, d).requires_grad_()
        self.probs = torch.rand(rows, device="cuda").requires_grad_()
        self.dy = rnd(rows, d)
        options: dict[str, Any] = {"bias": form.bias, "device": "meta"}
        fc1 = fo.ops.GroupedLinear(experts, d, wide, **options)
        fc2 = fo.ops.GroupedLinear(experts, f, d, scale_bias=True, **options)
        fc1.weight = torch.nn.Parameter(rnd(experts, wide, d, scale=0.02))
        fc2.weight = torch.nn.Parameter(rnd(experts, d, f, scale=0.02))
        if form.bias:
            fc1.bias = torch.nn.Parameter(rnd(experts, wide))
            fc2.bias = torch.nn.Parameter(rnd(experts, d))
        self.mlp = fo.Sequential({"fc1": fc1, "act": form.act(), "fc2": fc2})
        self.leaves = {"x": self.x, "probs": self.probs, "fc1": fc1.weight, "fc2": fc2.weight}
        if form.bias:
            self.leaves |= {"bias1": fc1.bias, "bias2": fc2.bias}
        self.routing = fo.Routing(self.offs, self.probs)

    def forwards(self) -> dict[str, measure.Call]:
        compiled = torch.compile(peer, dynamic=False)
        return {
            "fuseops": lambda: self.mlp(self.x, self.routing),
            "compile": lambda: compiled(self.form.formula, self.offs, *self.leaves.values()),
        }


class RowsOf(torch.autograd.Function):
    """bias[expert], one row of it for every row."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, expert: Tensor) -> Tensor:
        ctx.save_for_backward(expert)
        ctx.groups = len(bias)
        return bias[expert]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (expert,) = ctx.saved_tensors
        one_hot = expert[:, None] == torch.arange(ctx.groups, device=dy.device)
        return one_hot.to(dy.dtype).t() @ dy, None


def peer(
    formula: Callable[[Tensor], Tensor], offs: Tensor, x: Tensor, probs: Tensor, w1: Tensor, w2: Tensor,
    *biases: Tensor,
) -> Tensor:  # fmt: skip
    h = F.grouped_mm(x, w1.transpose(1, 2), offs=offs)
    if biases:
        expert = torch.searchsorted(offs, torch.arange(len(x), device=x.device), right=True)
        b1, b2 = (RowsOf.apply(bias, expert) for bias in biases)
        h = h + b1
    a = (formula(h) * probs[:, None]).to(x.dtype)
    y = F.grouped_mm(a, w2.transpose(1, 2), offs=offs)
    return (y + b2 * probs[:, None]).to(x.dtype) if biases else y


def exact(p: Problem, e: int) -> tuple[slice, list[Tensor]]:
    """Rows of an expert, and y and the gradients of all leaves in float32."""
    ends = [0, *p.offs.tolist()]
    rows = slice(ends[e], ends[e + 1])
    leaves = [
        (t[rows] if name in ("x", "probs") else t[e]).detach().float().requires_grad_()
        for name, t in p.leaves.items()
    ]
    x, probs, w1, w2, *biases = leaves
    b1, b2 = biases or (0.0, 0.0)
    y = (p.form.formula(x @ w1.t() + b1) * probs[:, None]) @ w2.t() + b2 * probs[:, None]
    return rows, [y.detach(), *torch.autograd.grad(y, leaves, p.dy[rows].float())]


def errors(p: Problem, forward: measure.Call) -> dict[str, float]:
    """Worst relative error over some experts, of y and every gradient."""
    got = layers.results(forward, p.dy, p.leaves.values())
    found = dict(zip(("y", *p.leaves), got, strict=True))
    worst = dict.fromkeys(found, 0.0)
    for e in sorted({0, 1, len(p.offs) // 2, len(p.offs) - 1}):
        rows, right = exact(p, e)
        for (name, got), theirs in zip(found.items(), right, strict=True):
            mine = got[rows] if name in ("y", "x", "probs") else got[e]
            worst[name] = max(worst[name], measure.relative_error(mine, theirs))
    return worst


def cell(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One shape: errors, bytes, microseconds, TFLOP/s and ratios of every candidate."""
    p = Problem(*SHAPES[name])
    forwards, leaves = p.forwards(), list(p.leaves.values())
    record: dict[str, Any] = {"errors": {n: errors(p, f) for n, f in forwards.items()}}
    steps = {n: layers.training_step(f, p.dy, leaves) for n, f in forwards.items()}
    plan, given = p.mlp.plan(p.x, p.routing), (p.x, p.probs, p.offs)
    record |= layers.memory(plan, forwards, steps, leaves, given)
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
                together = [r for n, r in of.items() if n not in ALONE]
                mean = measure.geomean(together) if together else None
                below = {n: r for n, r in of.items() if r < (BARS[what] if n in ALONE else LEAST)}
                met = not below and (mean is None or mean >= MEAN)
                found[f"{what}/{how}"] = {"geomean": mean, "below": below, "met": met}
    for name, by_way in done.items():
        found |= {f"{name}/{what}": entry for what, entry in by_way.items()}
    return found


if __name__ == "__main__":
    runs.main(__doc__, SHAPES, cell, summary, more=runs.add_step_options)
