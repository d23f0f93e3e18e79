"""Experts over ranks: the style for `parallelize_module`.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "ep"))
    parallelize_module(model, mesh["ep"], ExpertParallel())

Weights of experts become DTensors, shards of their first axis, which checkpoints and optimizers take as they are; the
ops read this rank's part, so the rules fuse as on one GPU.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from fuseops import ops
from fuseops.errors import FuseOpsError
from fuseops.ops.checks import check_flags
from fuseops.ops.local import Local
from fuseops.ops.paths import SHARD_EXPERTS, path_of
from fuseops.run.composed import Composed

from .dispatch import ExpertArrive, ExpertCollect, ExpertDispatch
from .dispatch.bounded import check_limits
from .dispatch.choose import Way, check_way, choose
from .dispatch.exchange import check_mesh
from .tensor import check_whole, placed

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Done = dict[Any, Any]
"""What one call has spread, by what it was: layers may share ops (`MoE.replaying`) and parameters."""


class ExpertParallel(ParallelStyle):
    """Spreads the experts of every layer in a module over the ranks of a mesh of one dimension.

    Of each Sequential with a local `ops.Dispatch` (`fo.MoE`, or one of your own), and of experts that `hf.apply` runs:
    the weights of experts become DTensors, `Shard(0)`; Dispatch gives way to `ExpertDispatch`, and `ExpertCollect`
    comes behind Combine. On the meta device nothing is sent; otherwise all ranks get the weights of the first one, as
    with `distribute_tensor`. Router losses and `expert_bias` are from then on over the tokens of all ranks.

    way: how tokens travel (docs/expert_parallel.md): "host_counts", "fixed_capacity", "device_counts", "peer_memory",
        None for the fastest of the first and the last that all ranks can take, which they vote on, or one of your own,
        called with the mesh, the experts of all ranks and top_k of every layer: it gives a `dispatch.Exchange`.
    capacity, tokens: with all but the first, how many times the mean there is room for, and the most tokens of a rank,
        by default those of the first forward.
    sums: the dtype in which partial sums of tokens, and of their gradients, travel and are added up: torch.float32 for
        one rounding of all, None for one a rank.
    average: whether gradients of experts are divided by the ranks, as data parallelism does with all others, whose sum
        an expert's is: it sees the tokens of all ranks.
    Raises FuseOpsError for an option that is none of these, a module without experts or with experts that are spread
        already, and experts that the ranks do not divide.
    """

    def __init__(
        self,
        *,
        way: Way | None = None,
        sums: torch.dtype | None = None,
        average: bool = True,
        capacity: float = 1.5,
        tokens: int = 0,
    ) -> None:
        super().__init__()
        if sums is not None and not (isinstance(sums, torch.dtype) and sums.is_floating_point):
            raise FuseOpsError(f"ExpertParallel: sums is {sums!r}, expected a float dtype or None.")
        check_way(way)
        check_flags("ExpertParallel", average=average)
        check_limits(capacity, tokens)
        self.way, self.sums, self.average = way, sums, average
        self.limits: dict[str, Any] = {"capacity": capacity, "tokens": tokens}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        found = False
        done: Done = {}
        for inner in list(module.modules()):
            if isinstance(inner, Composed) and isinstance(_dispatch(inner), ops.Dispatch):
                self._spread(inner, device_mesh, done)
                found = True
            elif of_transformers(inner):
                self._spread_lent(inner, device_mesh, done)
                found = True
        if not found:
            spread = any(isinstance(inner, ExpertDispatch) for inner in module.modules())
            raise FuseOpsError(
                f"ExpertParallel: the experts of {type(module).__name__} are spread over ranks already: once is enough."
                if spread
                else f"ExpertParallel: {type(module).__name__} has no experts to spread: no Sequential in it has a "
                "child 'dispatch' that is an ops.Dispatch."
            )
        return module

    def _spread(self, layer: Composed, mesh: DeviceMesh, done: Done | None = None) -> None:
        done = {} if done is None else done
        children: dict[str, Any] = dict(layer._modules)
        dispatch = children["dispatch"]
        combine = [name for name, op in children.items() if isinstance(op, ops.Combine)]
        if len(combine) != 1 or "collect" in children:
            raise FuseOpsError(
                f"ExpertParallel: {path_of(layer) or type(layer).__name__} has children {[*children]}, expected one "
                "Combine behind 'dispatch', and no 'collect' of its own."
            )
        for child in children.values():
            if isinstance(child, ops.GroupedLinear) and child not in done:
                _check(child)
        top_k: Any = children[combine[0]].top_k
        exchange = choose(self.way, mesh, dispatch.num_experts, top_k, **self.limits)
        exchange.sums = self.sums
        arrive = ExpertArrive() if "shared" in children else None
        if arrive is not None:
            children = _ahead_of_shared(children, arrive)
        layer._modules.clear()
        for name, child in children.items():
            if isinstance(child, ops.GroupedLinear):
                self._shard(child, mesh, done)
            elif isinstance(child, ops.Router):
                child.over = mesh
            elif isinstance(child, ops.Combine):
                child.sums = self.sums
            elif name == "dispatch":
                child = ExpertDispatch(exchange, dispatch.capacity_factor, arrive)
            layer.add_module(name, child)
            if name == combine[0]:
                layer.add_module("collect", ExpertCollect(exchange))

    def _shard(self, op: ops.GroupedLinear, mesh: DeviceMesh, done: Done) -> None:
        if op in done:
            return
        done[op] = op
        _shard_first(op, mesh, done)
        op.num_groups //= mesh.size()
        local = Local(mean_of=mesh.size() if self.average else 1)
        op._local = dict.fromkeys(("weight", "bias", "down", "up"), local)

    def _spread_lent(self, experts: Any, mesh: DeviceMesh, done: Done) -> None:
        check_mesh(mesh, experts.num_experts)
        check_whole("ExpertParallel", experts)
        _shard_first(experts, mesh, done)
        experts.__dict__[SHARD_EXPERTS] = partial(self._spread, mesh=mesh)


def _check(op: ops.GroupedLinear) -> None:
    """Raise FuseOpsError unless the experts of a layer can be spread."""
    if op._local:
        raise FuseOpsError(
            f"ExpertParallel: {path_of(op) or 'a GroupedLinear'} is spread over a mesh already, by its hidden "
            "units: one of the two."
        )
    check_whole("ExpertParallel", op)


def _shard_first(module: nn.Module, mesh: DeviceMesh, done: Done) -> None:
    """Make every parameter a DTensor, sharded by its first axis."""
    for name, p in module._parameters.items():
        if p is not None:
            if p not in done:
                done[p] = placed(p, p.detach(), mesh, Shard(0))
            module._parameters[name] = done[p]


def _ahead_of_shared(children: dict[str, Any], arrive: ExpertArrive) -> dict[str, Any]:
    """The children with `shared` behind `dispatch`, so that it is computed while tokens travel."""
    shared, _ = children.pop("shared"), children.pop("swap")
    found = {}
    for name, child in children.items():
        found[name] = child
        if name == "dispatch":
            found["away"] = ops.Swap("tokens", "arrived")
            found |= {"shared": shared, "swap": ops.Swap("arrived", "shared"), "arrive": arrive}
    return found


def _dispatch(layer: Composed) -> Any:
    return layer._modules.get("dispatch")


def expert_meshes(model: nn.Module) -> set[DeviceMesh]:
    """What the experts of a model are spread over."""
    lent = (vars(m).get(SHARD_EXPERTS) for m in model.modules())
    own = {m.exchange.mesh for m in model.modules() if isinstance(m, ExpertDispatch)}
    return own | {spread.keywords["mesh"] for spread in lent if spread is not None}


def of_transformers(module: nn.Module) -> bool:
    """Whether it is a module of experts as transformers writes them."""
    return {"has_gate", "is_transposed", "num_experts"} <= vars(module).keys()
