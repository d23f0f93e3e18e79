"""Delayed weight gradients under DistributedDataParallel: its reduction is over before they are there, so they are
reduced when they are computed.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.ops.op import Op

# of an op that delays gradients: the wrapper that a forward of it ran in
_wrappers: weakref.WeakKeyDictionary[Op[Any], weakref.ref[Any]] = weakref.WeakKeyDictionary()


def note(op: Op[Any]) -> None:
    """Remember the DistributedDataParallel whose forward runs, if one does."""
    found = torch_private.active_ddp()
    if found is not None:
        _wrappers[op] = weakref.ref(found)


def _wrapper(op: Op[Any]) -> Any:
    known = _wrappers.get(op)
    return None if known is None else known()


def check(op: Op[Any]) -> None:
    """Raise FuseOpsError for a delayed gradient that could not be reduced as its wrapper reduces the others."""
    wrapper = _wrapper(op)
    if wrapper is not None and wrapper._comm_hooks:
        raise FuseOpsError(
            f"{type(op).__name__} delays the gradients of {list(op.delays)} under DistributedDataParallel with a "
            "communication hook, which sees a bucket only in the backward: leave delay_wgrad off, or the hook."
        )


def reduced(op: Op[Any], gradient: Tensor) -> Tensor:
    """The mean of a delayed gradient over the ranks of the op's DistributedDataParallel; itself under `no_sync()`, and
    where there is none.
    """
    wrapper = _wrapper(op)
    if wrapper is None or not wrapper.require_backward_grad_sync:
        return gradient
    import torch.distributed as dist

    group = wrapper.process_group
    gradient = gradient.contiguous() / dist.get_world_size(group)
    dist.all_reduce(gradient, group=group)
    return gradient
