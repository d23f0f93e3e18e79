"""Expert parallelism: the style for `parallelize_module`.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "ep"))
    parallelize_module(model, mesh["ep"], ExpertParallel())

Weights of experts become DTensors, sharded on their first axis, which checkpoints and optimizers support. The ops read
the local shard, so rules fuse as on one GPU.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ParallelStyle

from fuseops import ops
from fuseops.arguments import check_flags, shown
from fuseops.errors import FuseOpsError
from fuseops.ops.local import Local, Ranks
from fuseops.ops.paths import SHARD_EXPERTS, path_of
from fuseops.run.composed import Composed

from .dispatch import ExpertArrive, ExpertCollect, ExpertDispatch
from .dispatch.bounded import check_limits
from .dispatch.choose import DispatcherChoice, check_choice, choose
from .dispatch.dispatcher import check_mesh
from .tensor import check_undistributed, distribute_parameter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


Sharded = dict[Any, Any]
"""Ops and parameters that one call has sharded -> their new form: layers may share them (`MoE.with_given_experts`)."""


class ExpertParallel(ParallelStyle):
    """`ExpertParallel` shards the experts of every layer in a module over the ranks of a mesh of one dimension.

    It applies to each Sequential with a local `ops.Dispatch` (`fo.MoE`, or one of your own), and to experts that
    `hf.apply` runs. Weights of experts become DTensors, `Shard(0)`; `ExpertDispatch` replaces Dispatch, and
    `ExpertCollect` follows Combine. All ranks get the weights of the first one, as with `distribute_tensor`; on the
    meta device nothing is sent. Router losses and `expert_bias` are then over the tokens of all ranks.

    dispatcher: how tokens travel (docs/expert_parallel.md): "host_counts", "fixed_capacity", "device_counts",
        "peer_memory", None for the faster of the first and the last that all ranks support, by a vote, or a function
        of (mesh, experts of all ranks, top_k), called for each layer, that returns a `dispatch.Dispatcher`.
    capacity, tokens: of all dispatchers but the first: buffer sizes as a multiple of even routing's, and the most
        tokens of a rank, by default as many as in the first forward.
    sums: the dtype in which partial sums of tokens, and of their gradients, travel and are added: torch.float32 rounds
        once in all, None once per rank.
    average: whether gradients of experts, which are sums over the tokens of all ranks, are divided by the number of
        ranks, as data parallelism does with all other gradients.
    Raises FuseOpsError for an invalid option, a module without experts or with experts that are sharded already, and
        experts that the ranks do not divide.
    """

    def __init__(
        self,
        *,
        dispatcher: DispatcherChoice | None = None,
        sums: torch.dtype | None = None,
        average: bool = True,
        capacity: float = 1.5,
        tokens: int = 0,
    ) -> None:
        super().__init__()
        if sums is not None and not (isinstance(sums, torch.dtype) and sums.is_floating_point):
            raise FuseOpsError(
                f"ExpertParallel: sums is {shown(sums)}, expected a float dtype or None."
            )
        check_choice(dispatcher)
        check_flags("ExpertParallel", average=average)
        check_limits(capacity, tokens)
        self.dispatcher, self.sums, self.average = dispatcher, sums, average
        self.limits: dict[str, Any] = {"capacity": capacity, "tokens": tokens}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        found = False
        sharded: Sharded = {}
        for inner in list(module.modules()):
            if isinstance(inner, Composed) and isinstance(_dispatch_of(inner), ops.Dispatch):
                self._shard_layer(inner, device_mesh, sharded)
                found = True
            elif is_transformers_experts(inner):
                self._shard_transformers(inner, device_mesh, sharded)
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

    def _shard_layer(
        self, layer: Composed, mesh: DeviceMesh, sharded: Sharded | None = None
    ) -> None:
        sharded = {} if sharded is None else sharded
        children: dict[str, Any] = dict(layer._modules)
        dispatch = children["dispatch"]
        combine = [name for name, op in children.items() if isinstance(op, ops.Combine)]
        if len(combine) != 1 or "collect" in children:
            raise FuseOpsError(
                f"ExpertParallel: {path_of(layer) or type(layer).__name__} has children {[*children]}, expected one "
                "Combine behind 'dispatch', and no 'collect' of its own."
            )
        for child in children.values():
            if isinstance(child, ops.GroupedLinear) and child not in sharded:
                _check_unsharded(child)
        top_k: Any = children[combine[0]].top_k
        dispatcher = choose(self.dispatcher, mesh, dispatch.num_experts, top_k, **self.limits)
        dispatcher.sums = self.sums
        arrive = ExpertArrive() if "shared" in children else None
        if arrive is not None:
            children = _move_shared(children, arrive)
        layer._modules.clear()
        for name, child in children.items():
            if isinstance(child, ops.GroupedLinear):
                self._shard_op(child, mesh, sharded)
            elif isinstance(child, ops.Router):
                child.over = mesh
            elif isinstance(child, ops.Combine):
                child.sums = self.sums
            elif name == "dispatch":
                child = ExpertDispatch(dispatcher, dispatch.capacity_factor, arrive)
            layer.add_module(name, child)
            if name == combine[0]:
                layer.add_module("collect", ExpertCollect(dispatcher))

    def _shard_op(self, op: ops.GroupedLinear, mesh: DeviceMesh, sharded: Sharded) -> None:
        if op in sharded:
            return
        sharded[op] = op
        _shard_parameters(op, mesh, sharded)
        op.num_groups //= mesh.size()
        local = Local(ranks=Ranks(mesh), mean_of=mesh.size() if self.average else 1)
        op._local = dict.fromkeys(("weight", "bias", "down", "up"), local)

    def _shard_transformers(self, experts: Any, mesh: DeviceMesh, sharded: Sharded) -> None:
        check_mesh(mesh, experts.num_experts)
        check_undistributed("ExpertParallel", experts)
        _shard_parameters(experts, mesh, sharded)
        experts.__dict__[SHARD_EXPERTS] = partial(self._shard_layer, mesh=mesh)


def _check_unsharded(op: ops.GroupedLinear) -> None:
    """Raise FuseOpsError if the experts of a layer are sharded already, or cannot be."""
    if op._local:
        raise FuseOpsError(
            f"ExpertParallel: {path_of(op) or 'a GroupedLinear'} is spread over a mesh already, by its hidden "
            "units: one of the two."
        )
    check_undistributed("ExpertParallel", op)


def _shard_parameters(module: nn.Module, mesh: DeviceMesh, sharded: Sharded) -> None:
    """Make every parameter a DTensor that is sharded on its first axis."""
    for name, p in module._parameters.items():
        if p is not None:
            if p not in sharded:
                sharded[p] = distribute_parameter(p, p.detach(), mesh, Shard(0))
            module._parameters[name] = sharded[p]


def _move_shared(children: dict[str, Any], arrive: ExpertArrive) -> dict[str, Any]:
    """The children with `shared` between `dispatch` and `arrive`, so that it is computed while tokens travel."""
    shared, _ = children.pop("shared"), children.pop("swap")
    found = {}
    for name, child in children.items():
        found[name] = child
        if name == "dispatch":
            found["away"] = ops.Swap("tokens", "arrived")
            found |= {"shared": shared, "swap": ops.Swap("arrived", "shared"), "arrive": arrive}
    return found


def _dispatch_of(layer: Composed) -> Any:
    return layer._modules.get("dispatch")


def expert_meshes(model: nn.Module) -> set[DeviceMesh]:
    """The meshes over which experts of a model are sharded."""
    partials = (vars(m).get(SHARD_EXPERTS) for m in model.modules())
    own = {m.dispatcher.mesh for m in model.modules() if isinstance(m, ExpertDispatch)}
    return own | {spread.keywords["mesh"] for spread in partials if spread is not None}


def is_transformers_experts(module: nn.Module) -> bool:
    """Whether a module implements the experts interface of transformers."""
    return {"has_gate", "is_transposed", "num_experts"} <= vars(module).keys()
