"""What makes FP8 operands, at the sizes of MoE layers: its share of the speed of a copy of as many bytes.

    python benchmarks/fp8_passes.py --out benchmarks/results/fp8_passes_h200.json

Tokens are quantized, their codes permuted to rows by expert (as rows, as columns, as both), SwiGLU and its backward
write operands from h in bf16 or as codes, and weights are quantized in both layouts. The copy moves the same number of
bytes, by the driver's copy of memory, which of some sizes is a third slower than of others, and by two kernels; the
fastest counts. All run as captured graphs: tokens of mixtral are quantized in less time than Python takes to launch it.
They run in turn, in balanced order, back to back for `--span` seconds to warm up and as long again in each round;
shares are round by round. Results are compared with the plain torch twins first: codes times scales.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch
from common import floors, layers, measure, runs
from common.measure import rnd
from torch import Tensor

from fuseops.kernels import operands, routing

E4M3 = torch.float8_e4m3fn
# name: tokens, model width D, expert width F, experts, experts of a token
SHAPES = {
    "mixtral": (8192, 4096, 14336, 8, 2),
    "dsv3_ep8": (8192, 7168, 2048, 32, 8),
    "qwen3_30b": (32768, 2048, 768, 128, 8),
    "sonic_30b": (32768, 4096, 1024, 64, 4),
}
BARS = {
    "quantize": 0.88, "permute_both": 0.85, "swiglu": 0.88, "dswiglu": 0.88, "weight": 0.9,
}  # fmt: skip
Case = tuple[Any, tuple[Any, ...], int]  # the op, its arguments, the bytes that it has to move


def cases(tokens: int, d: int, f: int, experts: int, k: int) -> dict[str, Case]:
    o, weights = operands, 1 << 28
    chosen = torch.rand(tokens, experts, device="cuda").topk(k).indices.to(torch.int32)
    scores = torch.rand(tokens, k, device="cuda")
    offs, index, _, probs = routing.route(chosen, experts, scores)
    rows = len(index)
    x, h, da = rnd(tokens, d), rnd(rows, 2 * f), rnd(rows, f)
    codes, scale = o.quantize_operand(x, None, E4M3)[:2]
    wide, by = o.quantize_operand(h, None, E4M3)[:2]
    w = rnd(max(weights // (2 * f * d), 1), 2 * f, d, scale=0.02)
    by_index = codes, scale, index, offs
    back = (None, E4M3, True, False)
    return {
        "quantize": (o.quantize_operand, (x, None, E4M3), 4 * x.numel()),
        "permute_rows": (o.permute_operand, (*by_index, True, False), d * (tokens + rows)),
        "permute_columns": (o.permute_operand, (*by_index, False, True), d * (tokens + rows)),
        "permute_both": (o.permute_operand, (*by_index, True, True), d * (tokens + 2 * rows)),
        "swiglu": (o.swiglu_operand, (h, probs, *back), 5 * rows * f),
        "swiglu_of_codes": (o.swiglu_operand, (wide, probs, *back, by), 3 * rows * f),
        "dswiglu": (o.dswiglu_operand, (da, h, probs, offs, E4M3, E4M3), 11 * rows * f),
        "dswiglu_of_codes": (
            o.dswiglu_operand,
            (da, wide, probs, offs, E4M3, E4M3, True, True, True, by),
            9 * rows * f,
        ),
        "weight": (o.quantize_weight, (w, E4M3), 4 * w.numel()),
    }


def error(case: Case) -> float:
    """The largest relative error of codes times scales, of rows and of columns."""
    op, args, _ = case
    got, want = op(*args), op.twin(*args)
    worst = 0.0
    for at in range(0, len(want) // 2 * 2, 2):
        if want[at].numel():
            mine, theirs = (values(t[at], t[at + 1]) for t in (got, want))
            worst = max(worst, measure.relative_error(mine, theirs))
    return worst


def values(codes: Tensor, scale: Tensor) -> Tensor:
    """Rows (R, K) with scales (K/128, R), and columns and weights with squares."""
    if scale.shape[-1] == codes.shape[0] and codes.dim() == 2:
        spread = scale.t().repeat_interleave(128, 1)
    else:
        spread = scale.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return codes.to(torch.bfloat16) * spread.to(torch.bfloat16)


def cell(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"errors": {}, "us": {}, "share": {}}
    for name, case in cases(*SHAPES[shape]).items():
        op, args, nbytes = case
        found["errors"][name] = round(error(case), 6)
        calls = {**copies(nbytes // 2), "pass": partial(op, *args)}
        graphs = {kind: layers.captured(call) for kind, call in calls.items()}
        us = measure.in_turn(graphs, options.rounds, options.span)
        mine = us.pop("pass")
        fastest = min(us, key=lambda copy: statistics.median(us[copy]))
        found["us"][name] = measure.medians({**us, "pass": mine})
        found["share"][name] = {"of": fastest, **measure.paired(mine, us[fastest])}
    return found


def copies(nbytes: int) -> dict[str, Any]:
    """Ways to copy so many bytes, to within 16."""
    source = torch.zeros(nbytes // 16, 2, dtype=torch.int64, device="cuda")
    return {
        "driver": source.clone,
        "torch": partial(torch.bitwise_not, source),
        "triton": partial(floors.mixed(source.nbytes, source.nbytes), source),
    }


def summary(cells: dict[str, Any]) -> dict[str, Any]:
    rows = {name: c["share"] for name, c in cells.items() if "share" in c}
    return {"bar": BARS, **rows}


if __name__ == "__main__":
    runs.main(__doc__, SHAPES, cell, summary)
