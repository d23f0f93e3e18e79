"""Reference of `fuseops.kernels.routing`."""

from __future__ import annotations

import torch
from torch import Tensor

from .precision import wide


def route(
    experts: Tensor, num_experts: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(offs (E,) int32, index (R,) int64, pos (T, K) int32, probs (R,) float32, or float64 of
    float64 weights, or empty), rows in order of expert, then token.   experts, weights (T, K), R = T * K
    """
    flat = experts.flatten()
    kept = (flat >= 0) & (flat < num_experts)
    flat = torch.where(kept, flat, num_experts)
    order = torch.argsort(flat, stable=True)
    edges = torch.arange(num_experts, device=flat.device, dtype=flat.dtype)
    offs = torch.searchsorted(flat[order], edges, right=True).to(torch.int32)
    row = torch.arange(flat.shape[0], device=flat.device)
    used = row < offs[-1]
    pos = torch.where(kept, torch.empty_like(order).index_put((order,), row), -1)
    index = torch.where(used, order // experts.shape[1], 0)
    if weights is None:
        probs = torch.empty(0, dtype=torch.float32, device=flat.device)
    else:
        probs = torch.where(used, wide(weights.flatten())[order], 0.0)
    return offs, index, pos.to(torch.int32).view(experts.shape), probs


def expert_counts(experts: Tensor, num_experts: int) -> Tensor:
    """counts (E,) int32: the copies of each expert.   experts (T, K) int"""
    every = torch.arange(num_experts, device=experts.device, dtype=experts.dtype)
    return (experts.flatten()[:, None] == every).sum(0).to(torch.int32)
