"""Expert parallelism of a user: a dispatcher whose rows travel to the rank of their expert and back, unevenly split."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

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
        self.expert = torch.arange(local, device=counts.device).repeat(world)
        arriving = sum(self.received)
        self.expert = self.expert.repeat_interleave(received, output_size=arriving)  # of every row

    def there(self, rows: Tensor) -> Tensor:
        """Rows by expert on the rank of their token -> rows by rank on the rank of their expert."""
        return all_to_all_single_autograd(rows, self.received, self.sent, self.group)

    def home(self, rows: Tensor) -> Tensor:
        """The way back."""
        return all_to_all_single_autograd(rows, self.sent, self.received, self.group)


@cache
def everybody() -> DeviceMesh:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device, (dist.get_world_size(),))


class Leave(fo.Op):
    """The dispatch op: every copy of a token goes to its expert's rank, where it is a token of one expert."""

    reads = ("experts", "weights")
    writes = ("offs", "probs", "index", "pos", "counts", "back")
    integers = frozenset({"offs", "index", "pos", "counts", "back"})

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts  # of all ranks
        self.num_experts = experts // dist.get_world_size()  # here

    @property
    def mesh(self) -> DeviceMesh:
        """Over whose ranks the experts are spread: `MoE.state_dict` says so to checkpoints."""
        return everybody()

    def fwd(self, x: Tensor, *, experts: Tensor, weights: Tensor) -> fo.Out:
        rows = fo.Routing.from_topk(experts, weights, num_experts=self.experts)
        counts = rows.offs.diff(prepend=rows.offs.new_zeros(1)).long()
        exchange = Exchange(counts)
        probs = exchange.there(rows.probs[:, None])
        here = fo.Routing.from_topk(exchange.expert[:, None], probs, num_experts=self.num_experts)
        side = {**here._asdict(), "counts": counts, "back": rows.pos}
        return fo.Out(exchange.there(x[rows.index]), side=side)


class Return(fo.Op):
    """The collect op: sums the copies of each token where it came from."""

    reads = ("counts", "back")

    def fwd(self, x: Tensor, *, counts: Tensor, back: Tensor) -> Tensor:
        return Exchange(counts).home(x)[back].sum(1)


def split(experts: fo.Sequential) -> fo.Sequential:
    """The same layer, with the part of its experts that lives on this rank."""
    children = dict(experts.named_children())
    for name in ("fc1", "fc2"):
        children[name] = part(children[name])
    children |= {
        "dispatch": Leave(children["dispatch"].num_experts),
        "permute": fo.ops.Permute(1),
        "combine": fo.ops.Combine(1),
        "collect": Return(),
    }
    return experts._like(children.items())


def part(op: fo.ops.GroupedLinear) -> LocalExperts:
    """This rank's groups."""
    rank, world = dist.get_rank(), dist.get_world_size()
    count = op.num_groups // world
    mine = op.weight.detach()[rank * count : (rank + 1) * count].clone()
    made = LocalExperts(count, op.in_features, op.out_features, bias=False, device=mine.device)
    made.weight = nn.Parameter(mine, requires_grad=op.weight.requires_grad)
    return made


class LocalExperts(fo.ops.GroupedLinear):
    """Groups of which every rank has others."""


def expert_parallel(model: nn.Module) -> nn.Module:
    """Every layer of experts of a model, split over all ranks."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, fo.Sequential) and "dispatch" in child._modules:
                setattr(parent, name, split(child))
    return model


def split_experts(model: nn.Module) -> dict[str, LocalExperts]:
    """The experts of which every rank has a part of its own."""
    return {n: m for n, m in model.named_modules() if isinstance(m, LocalExperts)}


def split_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Their parameters."""
    found = split_experts(model).items()
    return {f"{path}.{n}": p for path, experts in found for n, p in experts.named_parameters()}
