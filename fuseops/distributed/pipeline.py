"""Stages of torch.distributed.pipelining whose weight gradients wait for the schedule.

    stage = PipelineStage(module, index, count, device, dw_builder=dw_builder(module))
    schedule = ScheduleInterleavedZeroBubble([stage, ...], micro_batches, loss_fn=loss)

A zero-bubble schedule runs a backward in two halves. Without a `dw_builder` torch walks the autograd graph twice, and a
node of several ops computes all that it has in both. With it the first half computes every gradient but those of the
weights of products, which the second computes by `backward_dw`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fuseops import ops
from fuseops.errors import FuseOpsError
from fuseops.run import weight_grads


def delay_weight_gradients(module: nn.Module) -> int:
    """Have every Linear and GroupedLinear in a module put the gradient of its weight off until `backward_dw`.

    -> how many there are
    """
    products = [m for m in module.modules() if isinstance(m, ops.Linear | ops.GroupedLinear)]
    for op in products:
        op.delays = ("weight",)
    return len(products)


def dw_builder(module: nn.Module) -> Callable[[], Callable[[], Any]]:
    """The `dw_builder` of the PipelineStage of a module, whose Linear and GroupedLinear delay their weight gradients
    from now on. Of every micro-batch it takes what its backward has put off, so that the second halves may come in any
    order; gradients are added in the order in which they are computed.

    For schedules that run the halves apart: others, which run them one after the other, hold more for it.
    Raises FuseOpsError for a module without such ops, and under DistributedDataParallel: torch's schedules never let it
    reduce the other gradients of a backward that comes in halves. FSDP2 is reduced by the schedule.
    """
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
