"""`check_halves` checks that a sharded `[gate | up]` weight of a gated MLP gives every rank rows of both halves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.kernels import GATES


def is_gate(act: Any) -> bool:
    """Whether an op is a gated activation of two contiguous halves, not of interleaved blocks."""
    return getattr(act, "kind", None) in GATES and not any(act.options[:1])


def check_halves(ops: Sequence[Any], names: Sequence[str]) -> None:
    """Raise FuseOpsError for a weight before a gated activation that is sharded in contiguous rows."""
    for i, act in enumerate(ops):
        if not is_gate(act):
            continue
        before = next((k for k in range(i - 1, -1, -1) if "weight" in ops[k]._parameters), None)
        if before is None or not _gives_local_shards(ops[before]):
            continue
        weight: Any = ops[before]._parameters["weight"]
        if weight.dim() > 1 and torch_private.is_dtensor(type(weight)) and _contiguous(weight):
            raise FuseOpsError(
                f"{names[before]}.weight {tuple(weight.shape)} is [gate | up] for {names[i]!r} "
                f"({type(act).__name__}), and sharded as {weight.placements}: the first ranks would have gate rows "
                "only. Give every rank its rows of both, by the style fuseops.distributed.ColwiseParallel("
                "gate_up=True), or the whole plan by fuseops.distributed.tp_plan(model)."
            )


def _gives_local_shards(op: Any) -> bool:
    """Whether a style of `parallelize_module` turns the op's output into plain local tensors."""
    if "weight" in op._local:
        return not op._local["weight"].axis
    functions = [
        cell.cell_contents
        for hook in _styles(op)
        for cell in hook.__closure__ or ()
        if isinstance(cell.cell_contents, partial)
    ]
    return any(f.args[-1:] != (False,) for f in functions)  # use_local_output


def _styles(op: nn.Module) -> list[Any]:
    """The hooks of `parallelize_module` on an op's output."""
    hooks: list[Any] = [*op.__dict__["_forward_hooks"].values()]
    return [h for h in hooks if "distribute_module" in getattr(h, "__qualname__", "")]


def _contiguous(weight: Any) -> bool:
    rows = weight.dim() - 2
    return any(
        p.is_shard(rows) and weight.device_mesh.size(k) > 1 for k, p in enumerate(weight.placements)
    )
