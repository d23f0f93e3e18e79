"""The loss of a language model's head, forward and backward: chunks of logits beside whole ones, in bf16, hot.

    python benchmarks/cross_entropy.py --out benchmarks/results/cross_entropy_h200.json

`forward` and `backward` say where fuseops makes the gradients (6 and 8 N D V operations); `gemms` are the three
products of whole logits alone, by cuBLAS, which is the floor; `compile` is torch.compile of
`cross_entropy(linear(x, w))`; `liger` is Liger-Kernel's fused linear cross entropy, whose sum of dW is bf16 by default.
Memory is active bytes at the peak of a step beyond what was there, dX and dW.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import layers, measure, runs
from torch import Tensor

import fuseops as fo

D = 4096
VOCABS = (32000, 128256, 151936)
TOKENS = (8192, 32768)
NAMES = {f"{tokens}/{vocab}": (tokens, vocab) for tokens in TOKENS for vocab in VOCABS}
MIB = 1 << 20
OURS = ("forward_512", "forward_1024", "backward_256")
LARGE = [name for name, (_, vocab) in NAMES.items() if vocab >= 128000]
BARS = {  # (ours, peer): the least ratio, of which cells
    ("forward_512", "gemms"): (0.88, list(NAMES)),
    ("forward_512", "compile"): (1 / 1.08, list(NAMES)),
    ("forward_1024", "compile"): (1 / 1.05, list(NAMES)),
    ("forward_512", "liger"): (1.5, LARGE),
}


def head(vocab: int, weight: Tensor, gradients: str, chunk: int) -> fo.ops.LinearCrossEntropy:
    made = fo.ops.LinearCrossEntropy(
        D, vocab, gradients=gradients, chunk_bytes=chunk, device="meta"
    )
    made.weight = torch.nn.Parameter(weight, requires_grad=True)
    return made


def whole(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), targets)


def liger() -> Callable[..., Tensor] | None:
    with contextlib.suppress(ImportError):
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        return lambda x, weight, targets: LigerFusedLinearCrossEntropyFunction.apply(
            x, weight, targets
        )[0]
    return None


def steps(x: Tensor, weight: Tensor, targets: Tensor, peers: list[str]) -> dict[str, measure.Call]:
    """Forward and backward of each candidate; gradients are returned and dropped."""
    vocab = len(weight)
    leaf = torch.nn.Parameter(weight)

    def step(loss: Callable[[], Tensor], owner: Tensor) -> measure.Call:
        return lambda: torch.autograd.grad(loss(), (x, owner))

    def ours(gradients: str, chunk: int) -> measure.Call:
        made = head(vocab, weight, gradients, chunk)
        return step(lambda: made(x, targets=targets), made.weight)

    def gemms() -> None:
        logits = x.detach() @ weight.t()
        logits @ weight
        logits.t() @ x.detach()

    found = {
        "forward_512": ours("forward", 512 * MIB),
        "forward_1024": ours("forward", 1024 * MIB),
        "backward_256": ours("backward", 256 * MIB),
        "gemms": gemms,
    }
    if "compile" in peers:
        compiled = torch.compile(whole)
        found["compile"] = step(lambda: compiled(x, leaf, targets), leaf)
    if "liger" in peers and (fused := liger()) is not None:
        found["liger"] = step(lambda: fused(x, leaf, targets), leaf)
    return found


def beyond(call: measure.Call, *given: Tensor) -> float:
    """MiB at the peak of a step beyond what was there and the gradients of `given`."""
    call()
    return round((layers.active_bytes(call) - sum(t.nbytes for t in given)) / MIB, 1)


def into_main_grad(x: Tensor, weight: Tensor, targets: Tensor, gradients: str, mib: int) -> float:
    """MiB at the peak of a step beyond what was there and dX, where a float32 `main_grad` takes dW."""
    made = head(len(weight), weight, gradients, mib * MIB)
    made.accumulate_into_main_grad = True
    made.weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)  # type: ignore[attr-defined]

    def step() -> None:
        made(x, targets=targets).backward()
        x.grad = None

    return beyond(step, x)


def errors() -> dict[str, Any]:
    """Of dX and dW at logits of 30, against float64: chunks, and whole bf16 logits."""
    tokens, vocab = 512, 32000
    x = measure.rnd(tokens, D).requires_grad_()
    weight = measure.rnd(vocab, D, scale=30 / D**0.5)
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    want = torch.autograd.grad(F.cross_entropy(exact[0] @ exact[1].t(), targets), exact)
    del exact
    found: dict[str, Any] = {}
    calls = steps(x, weight, targets, [])
    leaf = torch.nn.Parameter(weight)
    calls["whole"] = lambda: torch.autograd.grad(whole(x, leaf, targets), (x, leaf))
    for name, call in calls.items():
        if name != "gemms":
            got = call()
            found[name] = [measure.relative_error(g, w) for g, w in zip(got, want, strict=True)]
    return found


def cell(name: str, options: argparse.Namespace) -> dict[str, Any]:
    tokens, vocab = NAMES[name]
    x = measure.rnd(tokens, D).requires_grad_()
    weight = measure.rnd(vocab, D, scale=2 / D**0.5)
    targets = torch.randint(0, vocab, (tokens,), device="cuda")
    calls = steps(x, weight, targets, options.peers)
    memory = {n: beyond(call, x, weight) for n, call in calls.items() if n != "gemms"}
    for way, mib in (("forward", 512), ("backward", 256)):
        memory[f"{way}_{mib} into main_grad"] = into_main_grad(x, weight, targets, way, mib)
    us = measure.in_turn(calls, options.rounds, options.span)
    peers = [n for n in calls if n not in OURS]
    fastest = measure.medians(us)["forward_512"]
    return {
        "us": measure.medians(us),
        "mib_beyond": memory,
        "tflops_of_6NDV": round(6 * tokens * vocab * D / fastest / 1e6, 1),
    } | {f"{n}_over": {peer: measure.paired(us[n], us[peer]) for peer in peers} for n in OURS}


def summary(cells: dict[str, Any]) -> dict[str, Any]:
    """The worst ratio of each bar, the cells that are below it, and where the three products alone would be."""
    found: dict[str, Any] = {}
    for (ours, peer), (least, names) in BARS.items():
        of_peer = {n: c[f"{ours}_over"].get(peer) for n, c in cells.items() if n in names}
        ratios = {n: paired["ratio"] for n, paired in of_peer.items() if paired is not None}
        if ratios:
            below = {n: r for n, r in ratios.items() if r < least}
            found[f"{ours} over {peer}"] = {
                "worst": min(ratios.values()),
                "below": below,
                "met": not below,
                "gemms_alone": min(
                    round(of["us"][peer] / of["us"]["gemms"], 4)
                    for of in (cells[n] for n in ratios)
                ),
            }
    return found


def main() -> None:
    parser = runs.parser_of(__doc__)
    runs.add_options(parser, NAMES)
    parser.add_argument("--peers", nargs="*", default=["compile", "liger"])
    options = parser.parse_args()
    run = runs.Run(options, "liger-kernel")
    run.summary = lambda report: summary(report["cells"])
    if "errors_of_dx_dw_at_logits_of_30" not in run.report:
        run.report["errors_of_dx_dw_at_logits_of_30"] = errors()
    run.each(lambda name: cell(name, options), options.only)


if __name__ == "__main__":
    main()
