"""The router: scores of all experts, the top k of them, their weights, and the gradient of it.

Maths (float32):
    s = softmax(logits) or sigmoid(logits);  experts = the k largest of logits, or of s + bias
    (a correction that balances the load, without a gradient);  the lower expert wins a tie
    weights = scale * s[experts], or scale * s[experts] / (sum of s[experts] + 1e-20) if normalize
    dlogits = s (ds - sum(ds s)) or ds s (1 - s);  ds is dweights at the chosen experts (through
    the normalization) plus dscores, the gradient of all scores, as a balancing loss has it.
Shapes: logits (T, E), bias (E,), weights and dweights (T, K) float32, experts (T, K) int32, scores
and dscores (T, E) float32, dlogits (T, E).
Layout: rows of logits may be strided. NaN ranks as +inf. Scores that nobody needs are empty.
Hardware: sm_80 and later. More than MAX_EXPERTS experts, or k beyond MAX_K, run the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuseops.kernels import reference
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.launch import device, launch
from fuseops.kernels.registry import kernel_op
from fuseops.kernels.tiles import as_rows, cdiv, pow2, require

SCORES = ("softmax", "sigmoid")
MAX_EXPERTS = 1 << 12
MAX_K = 64


def _candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    e = pow2(dims[0])
    if e <= 512:
        totals = (2048, 1024)
        return [{"BLOCK_R": min(total // e, 32), "num_warps": 4} for total in totals]
    return [{"BLOCK_R": 1, "num_warps": warps} for warps in (4, 8)]


def _bwd_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    e = pow2(dims[0])
    sizes = ((512, 4), (1024, 4), (2048, 4)) if e <= 512 else ((e, 4), (e, 8))
    return [{"BLOCK_R": min(max(total // e, 1), 16), "num_warps": w} for total, w in sizes]


FWD = Space("router_fwd", _candidates)
BWD = Space("router_bwd", _bwd_candidates)


def _cases(*, backward: bool) -> Iterator[tuple[Any, ...]]:
    f32, bf16 = torch.float32, torch.bfloat16
    forms = [(f32, 128, 8, "softmax", True), (f32, 64, 4, "softmax", False)]
    forms += [(f32, 256, 8, "sigmoid", True), (f32, 8, 2, "softmax", False)]
    forms += [(bf16, 128, 8, "softmax", True), (torch.float16, 128, 8, "softmax", True)]
    for dtype, experts, k, score, normalize in forms:
        logits = torch.empty(8192, experts, dtype=dtype, device="meta")
        weights, bias = torch.empty(8192, k, device="meta"), torch.empty(experts, device="meta")
        chosen = torch.empty(8192, k, dtype=torch.int32, device="meta")
        scores = torch.empty(8192, experts, device="meta")
        for extra in (False, True) if (dtype, experts) == (f32, 128) else (False,):
            if backward:
                dscores = scores if extra else None
                yield weights, logits, chosen, score, normalize, 1.5, dscores
            else:
                correction = bias if score == "sigmoid" else None
                yield logits, k, score, normalize, 1.5, correction, extra


@kernel_op(twin=reference.router_fwd, cases=lambda: _cases(backward=False))
def router_fwd(
    logits: Tensor, k: int, score: str = "softmax", normalize: bool = False, scale: float = 1.0,
    bias: Tensor | None = None, need_scores: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(weights (T, K), experts (T, K) int32, scores (T, E) or empty)."""
    _check(logits, k, score)
    tokens, experts = logits.shape
    if experts > MAX_EXPERTS or k > MAX_K:
        return reference.router_fwd(logits, k, score, normalize, scale, bias, need_scores)
    require(
        bias is None or bias.shape == (experts,),
        f"bias is {bias is not None and tuple(bias.shape)}, expected ({experts},).",
    )
    logits = as_rows(logits)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    scores = weights.new_empty((tokens, experts) if need_scores else 0)
    config = FWD.pick(tokens, (experts, k), logits)
    launch(
        device("router").router_fwd_kernel, (cdiv(tokens, config["BLOCK_R"]),),
        logits, logits if bias is None else bias.contiguous(), weights, chosen, scores,
        tokens, experts, logits.stride(0), float(scale), K=k, SOFTMAX=score == "softmax",
        NORMALIZE=normalize, BIASED=bias is not None, NEED_SCORES=need_scores,
        BLOCK_K=pow2(k), BLOCK_E=pow2(experts, least=4), **config,
    )  # fmt: skip
    return weights, chosen, scores


@kernel_op(twin=reference.router_bwd, cases=lambda: _cases(backward=True))
def router_bwd(
    dweights: Tensor, logits: Tensor, experts: Tensor, score: str = "softmax",
    normalize: bool = False, scale: float = 1.0, dscores: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """dlogits (T, E) of router_fwd; dscores (T, E) is the gradient of all scores, if there is one."""
    k = experts.shape[-1]
    _check(logits, k, score)
    tokens, num_experts = logits.shape
    for name, given, wanted in (
        ("experts", experts, (tokens, k)),
        ("dweights", dweights, (tokens, k)),
        ("dscores", dscores, (tokens, num_experts)),
    ):
        require(
            given is None or given.shape == wanted,
            f"{name} is {given is not None and tuple(given.shape)}, expected {wanted}.",
        )
    if num_experts > MAX_EXPERTS or k > MAX_K:
        return reference.router_bwd(dweights, logits, experts, score, normalize, scale, dscores)
    logits = as_rows(logits)
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    config = BWD.pick(tokens, (num_experts, k), logits)
    launch(
        device("router").router_bwd_kernel, (cdiv(tokens, config["BLOCK_R"]),),
        dweights.contiguous(), logits, experts.contiguous(),
        logits if dscores is None else dscores.contiguous(), dlogits,
        tokens, num_experts, logits.stride(0), float(scale), K=k, SOFTMAX=score == "softmax",
        NORMALIZE=normalize, HAS_DSCORES=dscores is not None, BLOCK_E=pow2(num_experts), **config,
    )  # fmt: skip
    return dlogits


def _check(logits: Tensor, k: int, score: str) -> None:
    require(logits.dim() == 2, f"logits is {tuple(logits.shape)}, expected (T, E).")
    require(score in SCORES, f"unknown score '{score}'. Known: {', '.join(SCORES)}.")
    require(1 <= k <= logits.shape[1], f"k is {k}, expected 1 to {logits.shape[1]}.")
