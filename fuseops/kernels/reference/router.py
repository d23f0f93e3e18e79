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
    need_scores: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(weights (T, K), experts (T, K) int32, scores (T, E) or empty)."""
    scores = _scores(logits, score)
    key = wide(logits) if bias is None else scores + wide(bias)
    key = key.nan_to_num(float("inf"), float("inf"), -float("inf"))
    experts = key.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights * scale, experts.to(torch.int32), scores if need_scores else scores.new_empty(0)


def router_bwd(
    dweights: Tensor,
    logits: Tensor,
    experts: Tensor,
    score: str = "softmax",
    normalize: bool = False,
    scale: float = 1.0,
    dscores: Tensor | None = None,
) -> Tensor:
    """dlogits (T, E) of router_fwd; dscores (T, E) is the gradient of all scores, if there is one."""
    scores, experts = _scores(logits, score), experts.long()
    d = wide(dweights) * scale
    if normalize:
        chosen = scores.gather(-1, experts)
        total = chosen.sum(-1, keepdim=True) + TINY
        d = (d - (d * chosen).sum(-1, keepdim=True) / total) / total
    d = torch.zeros_like(scores).scatter_add(-1, experts, d.to(scores.dtype))
    d = d if dscores is None else d + wide(dscores)
    if score == "softmax":
        d = scores * (d - (d * scores).sum(-1, keepdim=True))
    else:
        d = d * scores * (1 - scores)
    return d.to(logits.dtype)


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
