"""Expert parallelism of a user: rows travel to the rank of their expert and back, in uneven splits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

import fuseops as fo


class Exchange:
    """Who gets how many rows of whom, for one micro-batch, among all ranks."""

    def __init__(self, counts: Tensor) -> None:
        """counts (E,) int64: this rank's rows of every expert."""
        self.group, world = dist.group.WORLD, dist.get_world_size()
        local = len(counts) // world
        received = torch.empty_like(counts)  # of every rank: rows of the experts that live here
        dist.all_to_all_single(received, counts)
        self.sent = counts.view(world, local).sum(1).tolist()
        self.received = received.view(world, local).sum(1).tolist()
        self.counts = received.view(world, local).sum(0)  # (E / world,): rows of the experts here
        expert = torch.arange(local, device=counts.device).repeat(world)
        self.order = torch.argsort(expert.repeat_interleave(received), stable=True)
        self.back = torch.argsort(self.order)

    def there(self, rows: Tensor) -> Tensor:
        """Rows by expert on the rank of their token -> rows by expert on the rank of their expert."""
        return all_to_all_single_autograd(rows, self.received, self.sent, self.group)[self.order]

    def home(self, rows: Tensor) -> Tensor:
        """The way back."""
        rows = rows[self.back]
        return all_to_all_single_autograd(rows, self.sent, self.received, self.group)


class ExpertParallel(fo.Sequential):
    """This rank's experts.   x (T, D), chosen (T, K) of all experts, weights (T, K) -> (T, D)"""

    experts: int  # of all ranks

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        routing = fo.Routing.from_topk(chosen, weights, num_experts=self.experts)
        counts = routing.offs.diff(prepend=routing.offs.new_zeros(1)).long()
        exchange = Exchange(counts)
        probs = exchange.there(routing.probs[:, None]).squeeze(1)
        here = fo.Routing.from_counts(exchange.counts, probs)
        y = exchange.home(super().forward(exchange.there(x[routing.index]), here))
        by_token = chosen.flatten().argsort(stable=True).argsort()  # where each token's rows went
        return y[by_token].view(*chosen.shape, -1).sum(1).to(x.dtype)


def split(experts: fo.Sequential) -> ExpertParallel:
    """The part of all experts that lives on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    children = dict(experts.named_children())
    for name, op in children.items():
        if isinstance(op, fo.ops.GroupedLinear):
            total, count = op.num_groups, op.num_groups // world
            mine = op.weight.detach()[rank * count : (rank + 1) * count].clone()
            children[name] = fo.ops.GroupedLinear(
                count, op.in_features, op.out_features, bias=False, device=mine.device
            )
            children[name].weight = nn.Parameter(mine, requires_grad=op.weight.requires_grad)
    made = ExpertParallel(children)
    made.experts = total
    return made


def expert_parallel(model: nn.Module) -> nn.Module:
    """Every run of experts of a model, split over all ranks."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            grouped = isinstance(child, fo.Sequential) and any(
                isinstance(op, fo.ops.GroupedLinear) for op in child
            )
            if grouped:
                setattr(parent, name, split(child))
    return model


def split_experts(model: nn.Module) -> dict[str, ExpertParallel]:
    """The experts of which every rank has a part of its own."""
    return {n: m for n, m in model.named_modules() if isinstance(m, ExpertParallel)}


def split_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Their parameters."""
    found = split_experts(model).items()
    return {f"{path}.{n}": p for path, experts in found for n, p in experts.named_parameters()}
