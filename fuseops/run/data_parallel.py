"""Delayed weight gradients under DistributedDataParallel, whose own reduction ends before they are computed: they are
reduced here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.ops.op import Op

# by op that delays gradients: the wrapper that its last forward ran in
_wrappers: weakref.WeakKeyDictionary[Op[Any], weakref.ref[Any]] = weakref.WeakKeyDictionary()


def remember_wrappers(ops: Iterable[Op[Any]]) -> None:
    """Record the DistributedDataParallel, if any, in whose forward those of these ops run that delay gradients."""
    for op in ops:
        if op.delays and (found := torch_private.active_ddp()) is not None:
            _wrappers[op] = weakref.ref(found)


def _wrapper(op: Op[Any]) -> Any:
    known = _wrappers.get(op)
    return None if known is None else known()


def check_comm_hooks(op: Op[Any]) -> None:
    """Raise FuseOpsError for a wrapper with communication hooks, which delayed gradients would bypass."""
    wrapper = _wrapper(op)
    if wrapper is not None and wrapper._comm_hooks:
        raise FuseOpsError(
            f"{type(op).__name__} delays the gradients of {list(op.delays)} under DistributedDataParallel with a "
            "communication hook, which sees a bucket only in the backward: leave delay_wgrad off, or the hook."
        )


def mean_over_ranks(op: Op[Any], gradient: Tensor) -> Tensor:
    """The mean of a delayed gradient over the ranks of the op's DistributedDataParallel.

    Without one, and under `no_sync()`, it is the gradient itself.
    """
    wrapper = _wrapper(op)
    if wrapper is None or not wrapper.require_backward_grad_sync:
        return gradient
    import torch.distributed as dist

    group = wrapper.process_group
    gradient = gradient.contiguous() / dist.get_world_size(group)
    dist.all_reduce(gradient, group=group)
    return gradient
