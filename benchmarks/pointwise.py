"""A level-1 op of five lines, behind a scale and before an activation: op by op, by the rule `pointwise`, compiled.

    python benchmarks/pointwise.py --out benchmarks/results/pointwise_h200.json

Forward and backward in bf16, hot. `floor` reads and writes what one kernel each way has to: x and y forward, x, dy and
dx backward. `torch.compile` compiles the same functions as plain torch, for one number of rows.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from common import layers, measure, runs
from torch import Tensor, nn

import fuseops as fo

SHAPES = {f"{rows}x{width}": (rows, width) for rows, width in ((8192, 4096), (65536, 2048))}


class ScaledSwish(fo.Op):
    reads = ("probs",)

    def __init__(self, width: int) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(width))

    def fwd(self, x: Tensor, *, beta: Tensor, probs: Tensor) -> Tensor:
        return (x * torch.sigmoid(beta * x) * probs[:, None]).to(x.dtype)


def plain(x: Tensor, beta: Tensor, probs: Tensor) -> Tensor:
    y = (0.5 * x) * torch.sigmoid(beta * (0.5 * x)) * probs[:, None]
    return nn.functional.gelu(y.to(x.dtype), approximate="tanh")


def cell(name: str, options: argparse.Namespace) -> dict[str, Any]:
    rows, width = SHAPES[name]
    x, dy = measure.rnd(rows, width).requires_grad_(), measure.rnd(rows, width)
    probs = torch.rand(rows, device="cuda", requires_grad=True)
    model = fo.Sequential(fo.ops.ConstantScale(0.5), ScaledSwish(width), fo.ops.GELU("tanh"))
    model = model.to("cuda", torch.bfloat16)
    fused = fo.Sequential(*model)
    fo.configure(fused, rules=["pointwise"])
    beta, compiled = model[1].beta, torch.compile(plain, dynamic=False)
    leaves = (x, probs, beta)
    steps = {
        "fuseops": layers.training_step(lambda: fused(x, probs=probs), dy, leaves),
        "op_by_op": layers.training_step(lambda: model(x, probs=probs), dy, leaves),
        "compile": layers.training_step(lambda: compiled(x, beta, probs), dy, leaves),
    }
    errors = {}
    for way, step in steps.items():
        step()
        exact = plain(x.double(), beta.double(), probs.double())
        want = torch.autograd.grad(exact, leaves, dy.double())
        pairs = zip(leaves, want, strict=True)
        errors[way] = [round(measure.relative_error(leaf.grad, t), 5) for leaf, t in pairs]
    copies = [x.detach().clone() for _ in range(2)]
    steps["floor"] = lambda: (copies[0].copy_(copies[1]), torch.add(dy, copies[1], out=copies[0]))
    us = measure.in_turn(steps, options.rounds, options.span)
    over = {n: measure.paired(us["fuseops"], t) for n, t in us.items() if n != "fuseops"}
    plan = fused.plan(x, probs=probs)
    return {
        "us": measure.medians(us),
        "over": over,
        "errors": errors,
        "saved_bytes": {"fuseops": plan.saved_bytes, "op_by_op": model.plan(x, probs=probs).saved_bytes},
        "explain": [f"{s.rule}: {' '.join(s.ops)}" for s in plan.forward],
    }  # fmt: skip


if __name__ == "__main__":
    runs.main(__doc__, SHAPES, cell)
