"""Delayed weight gradients for the stages of torch.distributed.pipelining.

    stage = PipelineStage(module, index, count, device, dw_builder=dw_builder(module))
    schedule = ScheduleInterleavedZeroBubble([stage, ...], micro_batches, loss_fn=loss)

A zero-bubble schedule runs a backward in two halves. Without a `dw_builder` torch walks the autograd graph twice, and a
node of several ops computes all of its gradients in both. With it the first half computes all gradients except those
of the weights of Linear and GroupedLinear, which `backward_dw` computes in the second.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fuseops import ops
from fuseops.errors import FuseOpsError
from fuseops.ops.paths import check_module
from fuseops.run import weight_grads


def delay_weight_gradients(module: nn.Module) -> int:
    """Have every Linear and GroupedLinear in a module delay its weight gradient until `backward_dw`.

    -> the number of these ops
    """
    check_module("delay_weight_gradients(module)", module)
    products = [m for m in module.modules() if isinstance(m, ops.Linear | ops.GroupedLinear)]
    for op in products:
        op.delays = ("weight",)
    return len(products)


def dw_builder(module: nn.Module) -> Callable[[], Callable[[], Any]]:
    """The `dw_builder` for the PipelineStage of a module; its Linear and GroupedLinear delay weight gradients from now
    on. Each micro-batch keeps its own delayed gradients, so that the second halves may come in any order; gradients are
    accumulated in the order in which they are computed.

    It is for schedules that separate the halves: in others it only costs memory.
    Raises FuseOpsError for a module without such ops, and under DistributedDataParallel, whose other gradients torch's
    schedules do not reduce when a backward comes in halves. (They do reduce FSDP2's.)
    """
    check_module("dw_builder(module)", module)
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise FuseOpsError(
            "dw_builder(DistributedDataParallel): in a backward that comes in two halves torch's schedules have it "
            "reduce nothing, so ranks would drift apart. Shard the stage by fully_shard, or leave dw_builder out."
        )
    if not delay_weight_gradients(module):
        raise FuseOpsError(
            f"dw_builder({type(module).__name__}): no Linear or GroupedLinear of fuseops is in it, so nothing would "
            "wait. Leave dw_builder out, and torch splits the backward itself."
        )
    return partial(weight_grads.take_delayed, module)
