"""What the benchmark of grouped GEMMs computes: shapes, splits, operands, peers, and whether it is right."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops.kernels import grouped

from .measure import Call, Rounds, medians, paired, rnd

# name: groups, rows, model width D, expert width F, experts of a token
Operands = dict[str, Tensor]
SHAPES = {
    "mixtral": (8, 16384, 4096, 14336, 2),
    "deepseek_v3": (32, 65536, 7168, 2048, 8),
    "qwen3_30b": (128, 262144, 2048, 768, 8),
    "qwen3_8k": (128, 65536, 2048, 768, 8),
    "sonic_7b": (128, 196608, 1536, 256, 8),
    "sonic_30b": (64, 131072, 4096, 1024, 4),
}
SPLITS = ("uniform", "zipf", "two_empty")
# widths N, K that no tile divides, and the next that one does
EDGES = {"n_1856": (1856, 2048), "n_2048": (2048, 2048), "k_1856": (2048, 1856),
         "n_2880": (2880, 3072), "n_3072": (3072, 3072), "k_2880": (3072, 2880)}  # fmt: skip
NEXT = {"n_1856": "n_2048", "k_1856": "n_2048", "n_2880": "n_3072", "k_2880": "n_3072"}


def split(kind: str, groups: int, rows: int) -> Tensor:
    """Row ends of random groups: every row chooses at random, evenly or by Zipf's law."""
    g = torch.Generator().manual_seed(1)
    weights = torch.ones(groups)
    if kind == "zipf":
        weights = 1 / torch.arange(1, groups + 1)[torch.randperm(groups, generator=g)]
    if kind == "two_empty":
        weights[torch.randperm(groups, generator=g)[:2]] = 0
    chosen = torch.multinomial(weights, rows, replacement=True, generator=g)
    return chosen.bincount(minlength=groups).cumsum(0).to(torch.int32).cuda()


def operands(groups: int, rows: int, n: int, k: int, offs: Tensor) -> dict[str, Tensor]:
    return {"x": rnd(rows, k), "w": rnd(groups, n, k, scale=0.02), "dy": rnd(rows, n), "offs": offs}


def ours(kind: str, t: dict[str, Tensor]) -> Call:
    x, w, dy, offs = t["x"], t["w"], t["dy"], t["offs"]
    table = lambda: grouped.group_tiles(offs, len(x))  # noqa: E731
    if kind == "fwd":
        return lambda: grouped.grouped_mm(x, w, offs, table())
    if kind == "dgrad":
        return lambda: grouped.grouped_mm(dy, w.transpose(1, 2), offs, table())
    if kind == "wgrad":
        return lambda: grouped.grouped_wgrad(dy, x, offs, table())
    main = torch.zeros(w.shape, device="cuda")
    return lambda: grouped.grouped_wgrad_into(main, dy, x, offs, table())


def peers(kind: str, t: dict[str, Tensor], loop: bool) -> dict[str, Call]:
    x, w, dy, offs = t["x"], t["w"], t["dy"], t["offs"]
    main = torch.zeros(w.shape, device="cuda") if kind == "wgrad_into" else None
    if kind == "fwd":
        found = {
            "torch": lambda: F.grouped_mm(x, w.transpose(1, 2), offs=offs),
            "dense": lambda: x @ w[0].t(),
        }
    elif kind == "dgrad":
        found = {"torch": lambda: F.grouped_mm(dy, w, offs=offs), "dense": lambda: dy @ w[0]}
    elif kind == "wgrad":
        found = {"torch": lambda: F.grouped_mm(dy.t(), x, offs=offs), "dense": lambda: dy.t() @ x}
    else:
        found = {"torch": lambda: main.add_(F.grouped_mm(dy.t(), x, offs=offs))}
    if loop and kind == "fwd":
        ends = [0, *offs.tolist()]
        y = torch.empty_like(dy)
        pairs = list(itertools.pairwise(ends))
        found["loop"] = lambda: [
            torch.mm(x[a:b], w[e].t(), out=y[a:b]) for e, (a, b) in enumerate(pairs)
        ]
    return found


def bar(name: str, peer: str) -> float:
    """What the ratio of shape/layer/kind/split has to reach: 1.3 for float32 sums over `F.grouped_mm`, 0.97 of
    dense (0.88 with Zipf's law) for products of groups of 1024 rows or more on average, 1 otherwise.
    """
    shape, _, kind, kind_of_split = name.split("/")
    groups, rows, *_ = SHAPES[shape]
    if peer == "torch":
        return 1.3 if kind == "wgrad_into" else 1.0
    if kind.startswith("wgrad") or rows < 1024 * groups:
        return 0.0
    return 0.88 if kind_of_split == "zipf" else 0.97


def wrong(kind: str, t: dict[str, Tensor]) -> str | None:
    """Why a result may not be timed: relative error by group against float32, and padding."""
    x, w, dy = t["x"], t["w"], t["dy"]
    # odd ends
    offs = t["offs"] - torch.arange(len(w), device="cuda").flip(0).int().clamp(max=3) // 3
    offs = torch.minimum(offs.clamp(min=0), torch.tensor(len(x) - 5, device="cuda")).int()
    bounds = list(zip([0, *offs.tolist()], offs.tolist(), strict=False))
    call = ours(kind, {**t, "offs": offs})
    # what the allocator hands out next is poisoned
    torch.full((1 << 28,), float("nan"), device="cuda")
    first = call()
    if kind in ("fwd", "dgrad"):
        a = x if kind == "fwd" else dy
        if first[int(offs[-1]) :].any():
            return "padding rows are not zero"
        want = lambda e, i, j: a[i:j].float() @ (w[e].t() if kind == "fwd" else w[e]).float()  # noqa: E731
        got = lambda e, i, j: first[i:j]  # noqa: E731
    else:
        if kind == "wgrad_into":
            main = torch.ones(w.shape, device="cuda")
            grouped.grouped_wgrad_into(main, dy, x, offs)
            grouped.grouped_wgrad_into(main, dy, x, offs)
            first = (main - 1) / 2
        want = lambda e, i, j: dy[i:j].t().float() @ x[i:j].float()  # noqa: E731
        got = lambda e, i, j: first[e]  # noqa: E731
    worst = 0.0
    for e in sorted({0, len(bounds) // 2, len(bounds) - 1}):
        i, j = bounds[e]
        right, left = want(e, i, j), got(e, i, j).float()
        if left.numel():
            scale = right.norm().clamp(min=1e-20)
            error = ((left - right).norm() / scale).item() if j > i else left.abs().max().item()
            worst = max(worst, error if error == error else math.inf)
    if worst > 4e-3:
        return f"relative error {worst:.2g}"
    if kind != "wgrad_into" and not torch.equal(first, call()):
        return "two runs differ"
    return None


def entry(us: Rounds, flops: float) -> dict[str, Any]:
    """One GEMM: microseconds and TFLOP/s of every candidate, and how many times as fast as each peer we are."""
    found = medians(us)
    return {
        "us": found,
        "tflops": {name: round(flops / t / 1e6, 1) for name, t in found.items()},
        "ratios": {name: paired(us["fuseops"], t) for name, t in us.items() if name != "fuseops"},
    }


def flops_of(t: Operands) -> int:
    return 2 * int(t["offs"][-1]) * t["w"].shape[1] * t["w"].shape[2]
