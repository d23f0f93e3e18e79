"""A layer of experts in plain torch: one token, one expert at a time. The judge of `fo.MoE`, and how one is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor

import fuseops as fo

D, F, E = 6, 5, 8
Grads = dict[str, Tensor]
ACTS = {
    "swiglu": lambda g, u: functional.silu(g) * u,
    "geglu": lambda g, u: functional.gelu(g) * u,
    "reglu": lambda g, u: functional.relu(g) * u,
    "sreglu": lambda g, u: functional.relu(g) ** 2 * u,
    "clamped_swiglu": lambda g, u: (
        (h := g.clamp(max=7.0)) * torch.sigmoid(1.702 * h) * (u.clamp(-7.0, 7.0) + 1)
    ),
}


def act(name: str, h: Tensor) -> Tensor:
    return functional.relu(h) ** 2 if name == "srelu" else ACTS[name](*h.chunk(2, -1))


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
        weights = weights / (weights.sum() + 1e-20) if router.normalize else weights
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
            h = functional.linear(x[t], p["shared.fc1.weight"], p.get("shared.fc1.bias"))
            y = y + functional.linear(
                act(activation, h), p["shared.fc2.weight"], p.get("shared.fc2.bias")
            )
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


# --- a layer to judge, and both of them after one step


def options(choose: Callable[..., Any]) -> dict[str, Any]:
    """Anything that a layer can be built with.   choose(a, b, c) -> one of them"""
    groups = choose((1, 1), (1, 1), (4, 2), (2, 1))
    return dict(
        activation=choose("swiglu", *ACTS, "srelu"),
        score=choose("softmax", "sigmoid"),
        normalize=choose(True, False),
        scale=choose(1.0, 2.5),
        groups=groups[0],
        top_groups=groups[1],
        bias=choose(False, True),
        expert_bias=choose(False, True),
        shared_experts=choose(0, 0, 2),
        capacity_factor=choose(None, None, 0.5, 1.0),
        balance_loss=choose(None, 0.5),
        z_loss=choose(None, 0.25),
    )


def built(kind: str, top_k: int, **kwargs: Any) -> fo.MoE:
    """A layer in float64 whose router sends tokens this way."""
    moe = fo.MoE(D, F, E, top_k, router_bias=True, **kwargs).double()
    rank = torch.arange(E, dtype=torch.float64)
    with torch.no_grad():
        moe["router"].weight.mul_(3)
        if kind == "zipf":
            moe["router"].bias.copy_(-2 * (rank + 1).log())
        elif kind == "one expert":  # the first top_k take all, the others none
            moe["router"].bias.copy_(torch.where(rank < top_k, 0.0, -12.0))
        if moe["router"].expert_bias is not None:
            moe["router"].expert_bias.copy_(0.3 * torch.randn(E, dtype=torch.float64))
    return moe


def losing(moe: fo.MoE) -> bool:
    return "router_loss" in moe["router"].writes


def outputs(moe: fo.MoE, x: Tensor, returned: bool = True) -> tuple[Tensor, Tensor]:
    """y, and the router loss, or 0 where there is none or it is not to be returned."""
    if returned and losing(moe):
        return moe(x, returns=("router_loss",))
    return moe(x), x.new_zeros(())


def step(moe: fo.MoE, x: Tensor, returned: bool = True) -> tuple[Tensor, Tensor, Grads]:
    """(y, router_loss, gradients) of a layer; the loss counts twice where it is returned."""
    x = x.detach().requires_grad_()
    moe.zero_grad()
    y, loss = outputs(moe, x, returned)
    objective(y, loss).backward()
    grads = {n: p.grad for n, p in moe.named_parameters() if p.grad is not None}
    return y.detach(), loss.detach(), {"x": x.grad, **grads}


def objective(y: Tensor, loss: Tensor) -> Tensor:
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).sin().view_as(y)
    return (y * dy).sum() + 2 * loss


def judged(moe: fo.MoE, x: Tensor, activation: str) -> tuple[Tensor, Tensor, Grads]:
    x = x.detach().requires_grad_()
    p = {n: t.detach().requires_grad_() for n, t in moe.named_parameters()}
    y, loss = plain_moe(moe, p, x, activation)
    objective(y, loss).backward()
    grads = {n: torch.zeros_like(t) if t.grad is None else t.grad for n, t in {"x": x, **p}.items()}
    return y.detach(), loss.detach(), grads
