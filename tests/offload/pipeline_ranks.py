"""Two ranks of a pipeline, for test_offload_pipeline.py: each trains its stages with a scheduler and
without, and compares gradients to the bit.
"""

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

import fuseops as fo
from fuseops import offload

D, ROWS, MICROBATCHES, WORLD = 8, 4, 6, 2


def block() -> nn.Module:
    return fo.Sequential(
        fo.Residual(fo.ops.RMSNorm(D), fo.ops.Linear(D, 2 * D), fo.ops.SwiGLU()), nn.Linear(D, D)
    )


def stages(kind: str, rank: int) -> nn.ModuleList:
    """What this rank runs: one stage of four layers, or two of two."""
    torch.manual_seed(rank)
    count = 1 if kind == "1f1b" else 2
    return nn.ModuleList(nn.Sequential(*(block() for _ in range(4 // count))) for _ in range(count))


def schedule(kind: str, model: nn.ModuleList, rank: int) -> Any:
    loss = lambda y, target: (y - target).square().sum()  # noqa: E731
    made = [
        PipelineStage(module, rank + WORLD * k, WORLD * len(model), torch.device("cpu"))
        for k, module in enumerate(model)
    ]
    if kind == "1f1b":
        return Schedule1F1B(made[0], MICROBATCHES, loss_fn=loss)
    make = ScheduleInterleaved1F1B if kind == "interleaved" else ScheduleInterleavedZeroBubble
    return make(made, MICROBATCHES, loss_fn=loss)


def train(kind: str, model: nn.ModuleList, rank: int, steps: int) -> list[list[Tensor]]:
    run, found = schedule(kind, model, rank), []
    for step in range(steps):
        torch.manual_seed(100 + step)
        x, target = torch.randn(2, MICROBATCHES * ROWS, D).unbind()
        if rank == 0:
            run.step(x)
        else:
            run.step(target=target)
        found.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    return found


def main(rank: int, store: str, kinds: Sequence[str], out: Any) -> None:
    """Answers for every kind of schedule."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for kind in kinds:
        out.put((kind, rank, *compared(kind, rank)))
    dist.barrier()
    dist.destroy_process_group()


def compared(kind: str, rank: int) -> tuple[bool, dict[str, Any], list[int]]:
    """Trains both: whether they are equal, and what the scheduler did."""
    model = stages(kind, rank)
    plain = copy.deepcopy(model)
    expected = train(kind, plain, rank, 4)
    policy = offload.Policy(min_bytes=1)
    with offload.Scheduler(model, "*.*", policy=policy, lag=1) as scheduler:
        found = train(kind, model, rank, 4)
    equal = all(
        torch.equal(a, b)
        for mine, other in zip(found, expected, strict=True)
        for a, b in zip(mine, other, strict=True)
    )
    facts = dict(scheduler.report().schedule)
    ordinals = {key.ordinal for _, key in scheduler._scope.mover.schedule.order.recorded}
    return equal, facts, sorted(ordinals)
