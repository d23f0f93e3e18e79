"""A layer of experts in plain torch: one token, one expert at a time. The judge of `fo.MoE`."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fuseops as fo

ACTS = {
    "swiglu": lambda g, u: F.silu(g) * u,
    "geglu": lambda g, u: F.gelu(g) * u,
    "reglu": lambda g, u: F.relu(g) * u,
    "sreglu": lambda g, u: F.relu(g) ** 2 * u,
    "clamped_swiglu": lambda g, u: (
        (h := g.clamp(max=7.0)) * torch.sigmoid(1.702 * h) * (u.clamp(-7.0, 7.0) + 1)
    ),
}


def act(name: str, h: Tensor) -> Tensor:
    return F.relu(h) ** 2 if name == "srelu" else ACTS[name](*h.chunk(2, -1))


def choose(router: fo.ops.Router, scores: Tensor) -> list[int]:
    """The experts of one token, best first.   scores (E,)"""
    key = scores.detach()
    if router.expert_bias is not None:
        key = key + router.expert_bias
    size = router.num_experts // router.groups
    groups = [key[g * size : (g + 1) * size] for g in range(router.groups)]
    worth = torch.stack([g.sort(descending=True).values[:2].sum() for g in groups])
    best = worth.sort(descending=True, stable=True).indices[: router.top_groups].tolist()
    ranked = key.sort(descending=True, stable=True).indices.tolist()
    return [e for e in ranked if e // size in best][: router.top_k]


def plain_moe(
    moe: fo.MoE, p: dict[str, Tensor], x: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """(y (T, D), router_loss ()) of a layer with these parameters; everything else is read from its ops."""
    router, dispatch = moe["router"], moe["dispatch"]
    tokens, experts = x.shape[0], router.num_experts
    logits = x @ p["router.weight"].t() + p.get("router.bias", 0)
    scores = logits.softmax(-1) if router.score == "softmax" else logits.sigmoid()
    room = [math.inf] * experts
    if dispatch.capacity_factor is not None:
        room = [math.ceil(dispatch.capacity_factor * tokens * router.top_k / experts)] * experts
    load = torch.zeros(experts, dtype=x.dtype)
    rows = []
    for t in range(tokens):
        chosen = choose(router, scores[t])
        weights = scores[t, chosen]
        weights = weights / weights.sum() if router.normalize else weights
        y = torch.zeros_like(x[t])
        for e, w in zip(chosen, weights * router.scale, strict=True):
            load[e] += 1
            if room[e] <= 0:
                continue
            room[e] -= 1
            h = p["fc1.weight"][e] @ x[t] + (p["fc1.bias"][e] if "fc1.bias" in p else 0)
            out = p["fc2.weight"][e] @ act(activation, h)
            y = y + w * (out + (p["fc2.bias"][e] if "fc2.bias" in p else 0))
        if "shared.fc1.weight" in p:
            h = F.linear(x[t], p["shared.fc1.weight"], p.get("shared.fc1.bias"))
            y = y + F.linear(act(activation, h), p["shared.fc2.weight"], p.get("shared.fc2.bias"))
        rows.append(y)
    y = torch.stack(rows) if rows else x * 0
    return y, loss_of(router, logits, scores, load)


def loss_of(router: Any, logits: Tensor, scores: Tensor, load: Tensor) -> Tensor:
    tokens, loss = max(len(logits), 1), logits.sum() * 0
    if router.balance_loss is not None:
        share = scores / scores.sum(-1, keepdim=True)
        even = (load / max(load.sum().item(), 1) * share.sum(0) / tokens).sum()
        loss = loss + router.balance_loss * router.num_experts * even
    if router.z_loss is not None:
        loss = loss + router.z_loss * logits.logsumexp(-1).square().sum() / tokens
    return loss
