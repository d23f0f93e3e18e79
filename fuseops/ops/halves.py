"""Packed halves `[gate | up]` that are DTensors: how their rows lie over ranks, and where a checkpoint finds them.

A rank's local rows are its share of both halves, so that it computes with them as one alone does. DTensor's placement
for that is `_StridedShard(dim, split_factor=2)`: the axis in two pieces, each sharded. It tells `full_tensor()`, the
optimizer and FSDP2 what the rows are. Distributed checkpoints write one block a rank, and these are two: they are told
by the methods that torch asks a tensor for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.kernels import GATES


def is_halved(placement: Any) -> bool:
    """Whether a placement gives every rank its share of two halves."""
    return type(placement).__name__ == "_StridedShard" and int(placement.split_factor) == 2


def check_halves(ops: Sequence[Any], names: Sequence[str]) -> None:
    """Raise FuseOpsError for a weight whose rows are the input of a gated activation, sharded as they lie."""
    for i, act in enumerate(ops):
        if getattr(act, "kind", None) not in GATES or any(act.options[:1]):
            continue
        before = next((k for k in range(i - 1, -1, -1) if "weight" in ops[k]._parameters), None)
        if before is None or not _gives_local_shards(ops[before]):
            continue
        weight: Any = ops[before]._parameters["weight"]
        if weight.dim() > 1 and torch_private.is_dtensor(type(weight)) and _contiguous(weight):
            raise FuseOpsError(
                f"{names[before]}.weight {tuple(weight.shape)} is [gate | up] for {names[i]!r} "
                f"({type(act).__name__}), and sharded as {weight.placements}: the first ranks would have gate rows "
                "only. Give every rank its rows of both: behind parallelize_module(..., ColwiseParallel()) put "
                "nn.Parameter(fuseops.integrations.sharding.distribute_gate_up(full_weight, mesh)) in its place."
            )


def _gives_local_shards(op: nn.Module) -> bool:
    """Whether a style of `parallelize_module` makes plain tensors of what an op gives."""
    functions = [
        cell.cell_contents
        for hook in _styles(op)
        for cell in hook.__closure__ or ()
        if isinstance(cell.cell_contents, partial)
    ]
    return any(f.args[-1:] != (False,) for f in functions)  # use_local_output


def _styles(op: nn.Module) -> list[Any]:
    """Hooks by which `parallelize_module` lays out what an op gives."""
    hooks: list[Any] = [*op.__dict__["_forward_hooks"].values()]
    return [h for h in hooks if "distribute_module" in getattr(h, "__qualname__", "")]


def _contiguous(weight: Any) -> bool:
    rows = weight.dim() - 2
    return any(
        p.is_shard(rows) and not is_halved(p) and weight.device_mesh.size(k) > 1
        for k, p in enumerate(weight.placements)
    )


def in_rank_order(y: Any, op: nn.Module) -> Any:
    """The output of an op whose output layout `parallelize_module` set to a plain shard: each rank keeps what it has
    computed, its share of both halves, which a redistribution would tear apart.
    """
    if not _gives_local_shards(op) or not any(map(is_halved, y.placements)):
        return y
    from torch.distributed.tensor import DTensor, Shard

    placements = [Shard(p.dim) if is_halved(p) else p for p in y.placements]
    return DTensor.from_local(
        y.to_local(), y.device_mesh, placements, run_check=False, shape=y.shape, stride=y.stride()
    )


# --- checkpoints


def for_checkpoint(t: Any) -> Any:
    """The same tensor; a checkpoint finds both blocks of its rows where it is a DTensor of packed halves."""
    if torch_private.is_dtensor(type(t)) and t.device_mesh.ndim == 1 and is_halved(t.placements[0]):
        t.__create_write_items__ = partial(_write_items, t)
        t.__create_chunk_list__ = partial(_chunks, t)
        t.__get_tensor_shard__ = partial(_block, t)
    return t


def _blocks(t: Any) -> list[tuple[tuple[int, ...], Tensor]]:
    """Where each half of the local rows begins in the whole, and the rows."""
    dim, world = t.placements[0].dim, t.device_mesh.size()
    first = t.shape[dim] // 2 // world * t.device_mesh.get_local_rank()
    begins = (first, t.shape[dim] // 2 + first)
    halves = t.to_local().detach().chunk(2, dim)
    return [
        (tuple(begin if k == dim else 0 for k in range(t.dim())), half)
        for begin, half in zip(begins, halves, strict=True)
    ]


def _chunks(t: Any) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(offsets=torch.Size(begin), sizes=half.shape)
        for begin, half in _blocks(t)
    ]


def _write_items(t: Any, name: str, _: Any) -> list[Any]:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(t.to_local())
    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=t.size()),
        )
        for chunk in _chunks(t)
    ]


def _block(t: Any, index: Any) -> Tensor:
    """The local rows that a checkpoint's index stands for."""
    found = dict(_blocks(t))
    if index.offset is None or tuple(index.offset) not in found:
        raise FuseOpsError(
            f"{index.fqn}: rank {t.device_mesh.get_local_rank()} has no rows at {index.offset}, but at {[*found]}."
        )
    return found[tuple(index.offset)]
