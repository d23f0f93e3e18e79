"""Shards of `[gate | up]` weights for tensor parallelism.

fc1 of a gated MLP holds two halves. A contiguous shard would give the first rank gate rows only, and the activation
would multiply unrelated rows. Each rank needs its rows of both halves:

    rank r of W       [gate rows of r | up rows of r], itself a `[gate | up]` of an op W times narrower
    fc2               the same hidden units: a plain contiguous shard of its last axis; outputs of the ranks add up

These functions are for single tensors; `fuseops.distributed` shards whole models as DTensors. `dim` is the axis of the
two halves: -2 of a weight (2F, D) or (E, 2F, D), -1 of a bias (2F,) or (E, 2F).
Tensors may be weights, their gradients, or optimizer state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError


def gate_up_shard(full: Tensor, rank: int, world: int, dim: int = -2) -> Tensor:
    """A copy of the rows of one rank.   (..., 2F, D) -> (..., 2F / world, D)

    Raises FuseOpsError when the ranks do not divide the halves, or there is no such rank.
    """
    if not 0 <= rank < world:
        raise FuseOpsError(f"gate_up_shard: there is no rank {rank} among {world}.")
    gate, up = _halves(full, world, dim)
    return torch.cat([gate.chunk(world, dim)[rank], up.chunk(world, dim)[rank]], dim)


def gate_up_join(shards: Sequence[Tensor], dim: int = -2) -> Tensor:
    """`[gate | up]` from the shards of all ranks, in order: the inverse of `gate_up_shard`."""
    halves = [_halves(shard, 1, dim) for shard in shards]
    return torch.cat([*(gate for gate, _ in halves), *(up for _, up in halves)], dim)


def _halves(t: Tensor, parts: int, dim: int) -> tuple[Tensor, Tensor]:
    if t.shape[dim] % (2 * parts):
        raise FuseOpsError(
            f"[gate | up] of shape {tuple(t.shape)} has {t.shape[dim]} rows on axis {dim}: two halves for {parts} "
            f"ranks need a multiple of {2 * parts}."
        )
    gate, up = t.chunk(2, dim)
    return gate, up
