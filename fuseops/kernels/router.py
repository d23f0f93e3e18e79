"""The router: scores of all experts, the top k of them, their weights, and the gradient of it.

Maths (float32):
    s = softmax(logits) or sigmoid(logits);  experts = the k largest of logits, or of s + bias
    (a correction that balances the load, without a gradient);  the lower expert wins a tie
    with groups: among the experts of the top_groups groups whose two best s + bias sum to most
    weights = scale * s[experts], or scale * s[experts] / (sum of s[experts] + 1e-20) if normalize
    dlogits = s (ds - sum(ds s)) or ds s (1 - s);  ds is dweights at the chosen experts (through
    the normalization). It depends on the logits of the chosen alone, unless a softmax is not
    normalized or its choice is biased.
Shapes: logits (T, E), bias (E,), weights and dweights (T, K) float32, experts (T, K) int32, logits
of the chosen (T, K) float32, dlogits (T, E).
Layout: rows of logits may be strided. NaN ranks as +inf.
Hardware: sm_80 and later. More than MAX_EXPERTS experts, or k beyond MAX_K, run the twin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops.kernels.configs import Config, Space
from fuseops.kernels.launch import device, launch
from fuseops.kernels.registry import Cases, floats, ints, kernel_op, on_meta
from fuseops.kernels.tiles import (
    as_rows,
    cdiv,
    check_shape,
    check_spec,
    pointers,
    pow2,
    require,
    upcast,
)

TINY = 1e-20  # scores that are all zero give weights of zero


def _router_fwd(
    logits: Tensor,
    k: int,
    score: str = "softmax",
    normalize: bool = False,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    scores, full = scores_of(logits, score), upcast(logits)
    keys = full if bias is None and groups == 1 else scores
    keys = keys if bias is None else keys + upcast(bias)
    keys = keys.nan_to_num(float("inf"), float("inf"), -float("inf"))
    if groups > 1:
        keys = _mask_to_top_groups(keys, groups, top_groups)
    experts = _top_k(keys, k)
    weights = weights_of(scores, experts, normalize, scale)
    return weights, experts.to(torch.int32), full.gather(-1, experts)


def _top_k(keys: Tensor, k: int) -> Tensor:
    """The indices of the k largest keys, the lower index first among equals."""
    return keys.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _mask_to_top_groups(keys: Tensor, groups: int, top_groups: int) -> Tensor:
    """Keys (T, E), -inf outside of the groups whose two best have the largest sums."""
    grouped = keys.unflatten(-1, (groups, -1))
    group_scores = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    mask = torch.zeros_like(group_scores, dtype=torch.bool)
    mask = mask.scatter(-1, _top_k(group_scores, top_groups), True)
    return grouped.masked_fill(~mask.unsqueeze(-1), -float("inf")).flatten(-2)


def _router_bwd(
    dweights: Tensor,
    logits: Tensor,
    experts: Tensor,
    score: str = "softmax",
    normalize: bool = False,
    scale: float = 1.0,
    num_experts: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    scores, experts = scores_of(logits, score), experts.long()
    width = num_experts or logits.shape[1]
    chosen = scores if num_experts else scores.gather(-1, experts)
    ds = upcast(dweights) * scale
    if normalize:
        score_sum = chosen.sum(-1, keepdim=True) + TINY
        ds = (ds - (ds * chosen).sum(-1, keepdim=True) / score_sum) / score_sum
    ds = ds.to(scores.dtype)
    if num_experts and score == "softmax":
        ds = chosen * (ds - (ds * chosen).sum(-1, keepdim=True))
    elif num_experts:
        ds = ds * chosen * (1 - chosen)
    ds = scores.new_zeros(scores.shape[0], width).scatter_add(-1, experts, ds)
    if not num_experts and score == "softmax":
        ds = scores * (ds - (ds * scores).sum(-1, keepdim=True))
    elif not num_experts:
        ds = ds * scores * (1 - scores)
    return ds.to(dtype or logits.dtype)


def scores_of(logits: Tensor, score: str) -> Tensor:
    """Scores of all experts, in the accumulator's dtype."""
    return (
        torch.softmax(upcast(logits), -1) if score == "softmax" else torch.sigmoid(upcast(logits))
    )


def weights_of(scores: Tensor, experts: Tensor, normalize: bool, scale: float) -> Tensor:
    """The weights of chosen experts, of the scores of all.   (T, E), (T, K) -> (T, K)"""
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights * scale


SCORES = ("softmax", "sigmoid")
MAX_EXPERTS = 1 << 12
MAX_K = 64


def _candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """With pieces, a lane holds 32 experts of a token (8 to 128 of few or many), in pieces of four, or
    lanes read whole rows, and a token's best quads come to one of them; without (BLOCK_P = 0), a program
    holds whole rows.
    """
    (experts, k, groups, biased), e = dims, pow2(dims[0], least=4)
    lanes = min(max(e // 32, 1), 32)
    if k > 16 or (groups > 1 and experts // groups % (4 * lanes)):
        return [{"BLOCK_R": max(1024 // e, 1), "BLOCK_P": 0, "num_warps": 4 if e <= 1024 else 8}]
    shared = [
        {"BLOCK_R": 32 * warps // lanes, "BLOCK_P": 4 * lanes, "num_warps": warps}
        for warps in (1, 2)
    ]
    if groups > 1 or biased or not 8 * pow2(k) <= e <= 128:
        return shared
    return [{"BLOCK_R": 32, "BLOCK_P": e, "num_warps": 1}, shared[0]]


def _bwd_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """A lane of a token has one of its chosen, and every so many times four of its logits."""
    e, k = pow2(dims[0]), pow2(dims[1])
    if e > 1024:
        return [{"BLOCK_R": 1, "BLOCK_P": e, "num_warps": warps} for warps in (4, 8)]
    lanes = min(max(k, e // 64), 32)
    return [
        {"BLOCK_R": 32 * warps // lanes, "BLOCK_P": min(4 * lanes, e), "num_warps": warps}
        for warps in (2, 4)
    ]


def _chosen_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Where the logits of the chosen are given, little is read, and a lane takes four tokens."""
    config = _bwd_candidates(dims, itemsize)[0]
    return [config | {"BLOCK_R": 4 * config["BLOCK_R"]}]


FWD = Space("router_fwd", _candidates, dims=("experts", "chosen", "groups", "biased"))
BWD = Space("router_bwd", _bwd_candidates, dims=("experts", "chosen"))
CHOSEN_BWD = Space("router_bwd_chosen", _chosen_candidates, dims=("experts", "chosen"))


def _cases(*, backward: bool) -> Cases:
    f32, bf16 = torch.float32, torch.bfloat16
    forms = [(f32, 128, 8, "softmax", True), (f32, 64, 4, "softmax", False)]
    forms += [(f32, 256, 8, "sigmoid", True), (f32, 8, 2, "softmax", False)]
    forms += [(bf16, 128, 8, "softmax", True), (torch.float16, 128, 8, "softmax", True)]
    for dtype, experts, k, score, normalize in forms:
        logits = on_meta(8192, experts, dtype=dtype)
        weights, bias = floats(8192, k), floats(experts)
        chosen = ints(8192, k)
        if not backward:
            correction = bias if score == "sigmoid" else None
            yield logits, k, score, normalize, 1.5, correction
            if score == "sigmoid":
                yield logits, k, score, normalize, 1.5, correction, 8, 4
            continue
        yield weights, logits, chosen, score, normalize, 1.5
        if normalize and dtype is f32:
            yield weights, weights, chosen, score, normalize, 1.5, experts, bf16


@kernel_op(twin=_router_fwd, cases=lambda: _cases(backward=False))
def router_fwd(
    logits: Tensor, k: int, score: str = "softmax", normalize: bool = False, scale: float = 1.0,
    bias: Tensor | None = None, groups: int = 1, top_groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(weights (T, K), experts (T, K) int32, logits of the chosen (T, K))."""
    _check(logits, k, score)
    tokens, num_experts = logits.shape
    if num_experts > MAX_EXPERTS or k > MAX_K:
        return _router_fwd(logits, k, score, normalize, scale, bias, groups, top_groups)
    check_shape("bias", bias, (num_experts,))
    require(
        num_experts % groups == 0 and 1 <= top_groups <= groups,
        f"there are {top_groups} of {groups} groups of {num_experts} experts.",
    )
    logits = as_rows(logits)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    chosen = torch.empty_like(weights)
    config = FWD.pick(tokens, (num_experts, k, groups, int(bias is not None)), logits)
    stride = logits.stride(0)
    # stride // divisor is 1 for rows that lie side by side, which is compiled in: their distance is a constant
    divisor = num_experts if stride == num_experts else 1 if stride % 4 else 4
    launch(
        device("router").router_fwd_kernel, (cdiv(tokens, config["BLOCK_R"]),),
        logits, *pointers(logits, bias), weights, experts, chosen,
        tokens, stride // divisor, float(scale), K=k, SOFTMAX=score == "softmax", NORMALIZE=normalize,
        BIASED=bias is not None, GROUPS=groups, TOP_GROUPS=top_groups, E=num_experts, WIDE=divisor,
        BLOCK_K=pow2(k), BLOCK_E=pow2(num_experts, least=4), **config,
    )  # fmt: skip
    return weights, experts, chosen


@kernel_op(twin=_router_bwd, cases=lambda: _cases(backward=True))
def router_bwd(
    dweights: Tensor, logits: Tensor, experts: Tensor, score: str = "softmax",
    normalize: bool = False, scale: float = 1.0, num_experts: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """dlogits (T, E) of router_fwd, in the dtype of logits or in `dtype`.

    num_experts: E, where logits are those of the chosen (T, K); 0 where they are all (T, E).
    """
    k = experts.shape[-1]
    _check(logits, k, score)
    tokens, columns = logits.shape
    width = num_experts or columns
    check_shape("experts", experts, (tokens, k))
    check_shape("dweights", dweights, (tokens, k))
    check_shape("logits", logits, (tokens, k if num_experts else columns))
    require(
        not num_experts or normalize or score == "sigmoid",
        "the logits of the chosen do not tell the gradient of a softmax that is not normalized.",
    )
    if width > MAX_EXPERTS or k > MAX_K:
        return _router_bwd(dweights, logits, experts, score, normalize, scale, num_experts, dtype)
    dlogits = torch.empty(tokens, width, dtype=dtype or logits.dtype, device=logits.device)
    space = CHOSEN_BWD if num_experts else BWD
    config, logits = space.pick(tokens, (width, k), logits), as_rows(logits)
    launch(
        device("router_bwd").router_bwd_kernel, (cdiv(tokens, config["BLOCK_R"]),),
        dweights.contiguous(), logits if not num_experts else logits.contiguous(),
        experts.contiguous(), dlogits, tokens, logits.stride(0), float(scale), K=k,
        SOFTMAX=score == "softmax", NORMALIZE=normalize, ALL_LOGITS=not num_experts, E=width,
        BLOCK_K=pow2(k), BLOCK_E=pow2(width), **config,
        enable_fp_fusion=False,  # a score of 1 has a gradient of 0: d - sum(d s) rounds both products
    )  # fmt: skip
    return dlogits


def _check(logits: Tensor, k: int, score: str) -> None:
    check_spec({"logits": logits}, "logits (T, E)")
    require(score in SCORES, f"unknown score '{score}'. Known: {', '.join(SCORES)}.")
    require(1 <= k <= logits.shape[1], f"k is {k}, expected 1 to {logits.shape[1]}.")
