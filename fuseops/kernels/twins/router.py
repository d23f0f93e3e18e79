"""Twins of fuseops.kernels.router: float32 inside."""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-20


def scores_of(logits: Tensor, score: str) -> Tensor:
    """Scores of all experts, float32."""
    logits = logits.float()
    return torch.softmax(logits, -1) if score == "softmax" else torch.sigmoid(logits)


def router_fwd(
    logits, k, score="softmax", normalize=False, scale=1.0, bias=None, need_scores=False
):
    """(weights (T, K), experts (T, K) int32, scores (T, E) or empty)."""
    scores = scores_of(logits, score)
    key = logits.float() if bias is None else scores + bias.float()
    key = key.nan_to_num(float("inf"), float("inf"), -float("inf"))
    experts = key.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    scores = scores if need_scores else scores.new_empty(0)
    return weights * scale, experts.to(torch.int32), scores


def router_bwd(
    dweights, logits, experts, score="softmax", normalize=False, scale=1.0, dscores=None
):
    """dlogits (T, E) of router_fwd; dscores (T, E) is the gradient of all scores, if there is one."""
    scores, experts = scores_of(logits, score), experts.long()
    d = dweights.float() * scale
    if normalize:
        chosen = scores.gather(-1, experts)
        total = chosen.sum(-1, keepdim=True) + TINY
        d = (d - (d * chosen).sum(-1, keepdim=True) / total) / total
    d = torch.zeros_like(scores).scatter_add(-1, experts, d.to(scores.dtype))
    d = d if dscores is None else d + dscores.float()
    if score == "softmax":
        d = scores * (d - (d * scores).sum(-1, keepdim=True))
    else:
        d = d * scores * (1 - scores)
    return d.to(logits.dtype)
