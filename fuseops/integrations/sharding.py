"""Shards of `[gate | up]` weights for tensor parallelism.

fc1 of a gated MLP holds two halves, so the first rank of a contiguous shard would have gate rows only, and the
activation would multiply what does not belong together. Every rank needs its rows of both:

    rank r of W       [gate rows of r | up rows of r], itself a `[gate | up]` of an op W times narrower
    fc2               the same hidden units: a plain contiguous shard of its last axis; outputs of the ranks add up

`dim` is the axis of the two halves: -2 of a weight (2F, D) or (E, 2F, D), -1 of a bias (2F,) or (E, 2F).
Tensors may be weights, their gradients, or optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.ops.halves import for_checkpoint

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def gate_up_shard(full: Tensor, rank: int, world: int, dim: int = -2) -> Tensor:
    """The rows of one rank, a copy.   (..., 2F, D) -> (..., 2F / world, D)

    Raises FuseOpsError when the two halves do not divide by the ranks.
    """
    if not 0 <= rank < world:
        raise FuseOpsError(f"gate_up_shard: there is no rank {rank} among {world}.")
    gate, up = _halves(full, world, dim)
    return torch.cat([gate.chunk(world, dim)[rank], up.chunk(world, dim)[rank]], dim)


def gate_up_join(shards: Sequence[Tensor], dim: int = -2) -> Tensor:
    """`[gate | up]` from the shards of all ranks, in order: the inverse of `gate_up_shard`."""
    halves = [_halves(shard, 1, dim) for shard in shards]
    return torch.cat([*(gate for gate, _ in halves), *(up for _, up in halves)], dim)


def distribute_gate_up(full: Tensor, mesh: DeviceMesh, dim: int = -2) -> DTensor:
    """A DTensor over a 1-d mesh whose local tensor is this rank's `gate_up_shard`.

    Its placement is torch's `_StridedShard` with two pieces, which says just that: `full_tensor()` has the rows in
    order, optimizer states are laid out alike, and the state_dict of the op that holds it saves and loads by
    `torch.distributed.checkpoint` whole, or on any number of ranks (an optimizer's does through
    `checkpointable`). As `distribute_tensor`, it takes the values of the first rank.
    """
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    world, axis = mesh.size(), dim % full.dim()
    by_rank = torch.cat([gate_up_shard(full, r, world, dim) for r in range(world)], dim)
    local = distribute_tensor(by_rank, mesh, [Shard(axis)]).to_local()
    placements = [torch_private.halved_shard(axis)]
    shape, stride = full.shape, full.contiguous().stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def gather_gate_up(sharded: DTensor, dim: int = -2) -> Tensor:
    """`[gate | up]` whole, on every rank: the inverse of `distribute_gate_up`."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = sharded.device_mesh
    axis = dim % sharded.dim()
    by_rank = DTensor.from_local(sharded.to_local(), mesh, [Shard(axis)], run_check=False)
    return gate_up_join(by_rank.full_tensor().chunk(mesh.size(), dim), dim)


def checkpointable(tree: Any) -> Any:
    """`tree` (nested dicts and lists, say of `get_optimizer_state_dict`), in which `torch.distributed.checkpoint` finds
    the rows of what `distribute_gate_up` has sharded. The tensors are the same.
    """
    if isinstance(tree, Mapping):
        return {key: checkpointable(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(checkpointable, tree))
    return for_checkpoint(tree)


def _halves(t: Tensor, parts: int, dim: int) -> tuple[Tensor, Tensor]:
    if t.shape[dim] % (2 * parts):
        raise FuseOpsError(
            f"[gate | up] of shape {tuple(t.shape)} has {t.shape[dim]} rows on axis {dim}: two halves for {parts} "
            f"ranks need a multiple of {2 * parts}."
        )
    gate, up = t.chunk(2, dim)
    return gate, up
