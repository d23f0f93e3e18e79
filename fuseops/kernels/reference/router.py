"""Reference of `fuseops.kernels.router`."""

from __future__ import annotations

import torch
from torch import Tensor

from .precision import wide

TINY = 1e-20


def router_fwd(
    logits: Tensor,
    k: int,
    score: str = "softmax",
    normalize: bool = False,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights (T, K), experts (T, K) int32, logits of the chosen (T, K))."""
    scores, full = _scores(logits, score), wide(logits)
    key = full if bias is None and groups == 1 else scores
    key = key if bias is None else key + wide(bias)
    key = key.nan_to_num(float("inf"), float("inf"), -float("inf"))
    if groups > 1:
        key = _in_best_groups(key, groups, top_groups)
    experts = _first(key, k)
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights * scale, experts.to(torch.int32), full.gather(-1, experts)


def _first(key: Tensor, k: int) -> Tensor:
    """Where the k largest are, the first of equal ones first."""
    return key.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _in_best_groups(key: Tensor, groups: int, top_groups: int) -> Tensor:
    """key (T, E), -inf outside of the groups whose two best sum to most."""
    grouped = key.unflatten(-1, (groups, -1))
    worth = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    allowed = torch.zeros_like(worth, dtype=torch.bool)
    allowed = allowed.scatter(-1, _first(worth, top_groups), True)
    return grouped.masked_fill(~allowed.unsqueeze(-1), -float("inf")).flatten(-2)


def router_bwd(
    dweights: Tensor,
    logits: Tensor,
    experts: Tensor,
    score: str = "softmax",
    normalize: bool = False,
    scale: float = 1.0,
    num_experts: int = 0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """dlogits (T, E) of router_fwd; with num_experts, from the logits of the chosen (T, K)."""
    scores, experts = _scores(logits, score), experts.long()
    width = num_experts or logits.shape[1]
    chosen = scores if num_experts else scores.gather(-1, experts)
    d = wide(dweights) * scale
    if normalize:
        total = chosen.sum(-1, keepdim=True) + TINY
        d = (d - (d * chosen).sum(-1, keepdim=True) / total) / total
    d = d.to(scores.dtype)
    if num_experts and score == "softmax":
        d = chosen * (d - (d * chosen).sum(-1, keepdim=True))
    elif num_experts:
        d = d * chosen * (1 - chosen)
    d = scores.new_zeros(scores.shape[0], width).scatter_add(-1, experts, d)
    if not num_experts and score == "softmax":
        d = scores * (d - (d * scores).sum(-1, keepdim=True))
    elif not num_experts:
        d = d * scores * (1 - scores)
    return d.to(dtype or logits.dtype)


def router_loss(
    logits: Tensor,
    counts: Tensor | None,
    k: int,
    score: str = "softmax",
    balance: float = 0.0,
    z: float = 0.0,
) -> Tensor:
    """The loss of a router, ().   logits (T, E), counts (E,) copies of each expert"""
    tokens, experts = max(logits.shape[0], 1), logits.shape[1]
    loss = z * wide(logits).logsumexp(-1).square().sum() / tokens
    if counts is not None:
        mean = _shares(logits, score).sum(0) / tokens
        loss = loss + balance * experts * (counts.to(mean.dtype) / (tokens * k) * mean).sum()
    return loss


def router_loss_bwd(
    dlogits: Tensor,
    logits: Tensor,
    counts: Tensor | None,
    dloss: Tensor,
    k: int,
    score: str = "softmax",
    balance: float = 0.0,
    z: float = 0.0,
) -> Tensor:
    """dlogits (T, E), plus the gradient of the logits from that of the loss, ()."""
    tokens, experts, full = max(logits.shape[0], 1), logits.shape[1], wide(logits)
    d = 2 * z / tokens * full.logsumexp(-1, keepdim=True) * full.softmax(-1)
    if counts is not None:
        shares, scores = _shares(logits, score), _scores(logits, score)
        slope = balance * experts / (tokens * k * tokens) * counts.to(full.dtype)
        d_shares = shares * (slope - (slope * shares).sum(-1, keepdim=True))
        d = d + (d_shares if score == "softmax" else d_shares * (1 - scores))
    return dlogits + dloss.to(dlogits.dtype) * d.to(dlogits.dtype)


def _shares(logits: Tensor, score: str) -> Tensor:
    """Scores that sum to one."""
    scores = _scores(logits, score)
    return scores if score == "softmax" else scores / (scores.sum(-1, keepdim=True) + TINY)


def _scores(logits: Tensor, score: str) -> Tensor:
    """Scores of all experts, in the accumulator's dtype."""
    return torch.softmax(wide(logits), -1) if score == "softmax" else torch.sigmoid(wide(logits))
