"""FSDP2 with expert parallelism: two meshes in one model, where torch's utilities take one at a time.

    mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "ep"))
    every = mesh._flatten("every")                                  # all 8 ranks have tokens of their own
    parallelize_module(model, mesh["ep"], ExpertParallel())
    for module in (*model.blocks, model):
        fully_shard(module, mesh=every, shard_placement_fn=expert_placement(mesh["dp"]))
    optimizer = torch.optim.AdamW(param_groups(model), fused=True)
    clip_grad_norm_(model.parameters(), 1.0)

Gradients are means over all ranks: those of experts over "ep" in their layer (`ExpertParallel(average=True)`), then
over "dp" by FSDP2, as it divides them by the ranks that it shards them over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.arguments import check_flags, several, shown
from fuseops.errors import FuseOpsError
from fuseops.ops.paths import check_module

from .experts import expert_meshes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def expert_placement(mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """A `shard_placement_fn` of `fully_shard` that shards expert-parallel parameters over `mesh`, and others over the
    mesh that `fully_shard` is given.

    mesh: one dimension, the ranks that hold the same experts. Experts are sharded by the first axis that these ranks
        divide: that of the experts of one, else the second, else the third.
    Raises FuseOpsError for another mesh, and before torch 2.12, which has no mesh for a parameter.
    """
    from torch.distributed.tensor import Shard

    if not _is_line(mesh):
        raise FuseOpsError(
            "expert_placement(mesh) takes the mesh, of one dimension, of ranks that hold the same experts, got "
            f"{shown(mesh)}: slice it, mesh['dp']."
        )
    placement_on, info = torch_private.fsdp_shard_placement(mesh)
    if placement_on is None:
        raise FuseOpsError(
            f"experts beside FSDP2 need a mesh of their own, which `fully_shard` of torch {torch.__version__} does not "
            "know: it came with 2.12. Leave them to `ExpertParallel` alone: `fully_shard(..., ignored_params={...})`."
        )

    def place(parameter: nn.Parameter) -> Any:
        if not torch_private.is_dtensor(type(parameter)):
            return None
        spread: Any = parameter
        sizes = enumerate(spread.to_local().shape)
        shard = Shard(next((axis for axis, size in sizes if size % mesh.size() == 0), 0))
        # experts are on one rank: FSDP2 requires the mesh of the others
        if spread.device_mesh.size() == 1:
            return shard
        return placement_on(shard, info)

    return place


def _is_line(mesh: object) -> bool:
    """Whether a value is a mesh of one dimension. (So is a tensor of one, by `ndim` alone.)"""
    return getattr(mesh, "ndim", None) == 1 and hasattr(mesh, "get_group")


def param_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """The parameters of a model by their mesh, for an optimizer whose fused or foreach steps take one mesh at a time.

    options: of every group, such as weight_decay.
    Raises FuseOpsError where `fully_shard` left out ranks that experts are spread over: these have tokens of their own,
    and parameters would drift apart.
    """
    check_module("param_groups(model)", model)
    _check_reduced(model)
    wanted = [p for p in model.parameters() if p.requires_grad]
    return [{"params": found, **options} for found in group_by_mesh(wanted).values()]


def _check_reduced(model: nn.Module) -> None:
    """Raise FuseOpsError unless FSDP2 reduces gradients over all ranks of the experts' meshes."""
    from torch.distributed.fsdp import FSDPModule

    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        return
    for experts in expert_meshes(model):
        ranks = set(experts.mesh.flatten().tolist())
        for name, p in model.named_parameters():
            mesh = p.device_mesh if torch_private.is_dtensor(type(p)) else None  # type: ignore[attr-defined]
            if mesh is not None and not ranks <= set(mesh.mesh.flatten().tolist()):
                raise FuseOpsError(
                    f"{name} is sharded over {mesh}, without ranks that experts are spread over ({experts}): each of "
                    "these has tokens of its own, and nobody would reduce its gradient over them. "
                    "`fully_shard(module, mesh=every)` with every = mesh._flatten('every') of both dimensions."
                )


def group_by_mesh(tensors: Iterable[Any]) -> dict[Any, list[Any]]:
    """Tensors grouped by (mesh, placements); plain tensors under None."""
    found: dict[Any, list[Any]] = {}
    for t in tensors:
        key = (t.device_mesh, t.placements) if torch_private.is_dtensor(type(t)) else None
        found.setdefault(key, []).append(t)
    return found


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    over: DeviceMesh | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` over parameters of several meshes.   -> the norm of all gradients, ()

    over: a mesh of one dimension whose ranks have other parameters of the model, as those of a pipeline: the norm is of
        all of theirs.
    Raises FuseOpsError for another mesh, and RuntimeError for a norm that is not finite, if asked to, as torch does.
    """
    if over is not None and not _is_line(over):
        raise FuseOpsError(
            f"clip_grad_norm_(over=...) takes a mesh of one dimension, got {shown(over)}: slice it, mesh['pp']."
        )
    every = [parameters] if isinstance(parameters, Tensor) else parameters
    every = several(every, Tensor, "clip_grad_norm_(parameters)", "parameters of a model")
    on_device = isinstance(max_norm, Tensor) and max_norm.dim() == 0  # which is not waited for
    for name, value in (("max_norm", 0.0 if on_device else max_norm), ("norm_type", norm_type)):
        if not isinstance(value, Real) or math.isnan(value):  # infinity is one
            raise FuseOpsError(f"clip_grad_norm_: {name} is {shown(value)}, expected a number.")
    if not on_device and max_norm < 0:  # gradients would change their signs
        raise FuseOpsError(
            f"clip_grad_norm_: max_norm is {max_norm!r}, expected a number from 0 on."
        )
    check_flags("clip_grad_norm_", error_if_nonfinite=error_if_nonfinite)
    parameters = [p for p in every if p.grad is not None]
    utils, norms = torch.nn.utils, []
    for mine in group_by_mesh(p.grad for p in parameters).values():
        norm: Any = utils.get_total_norm(mine, norm_type)
        norms.append(norm.full_tensor() if torch_private.is_dtensor(type(norm)) else norm)
    if over is not None and over.size() > 1:
        norms = _gather_norms(norms, norm_type, over)
    if not norms:
        return torch.tensor(0.0)
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"the norm of the gradients is {float(total)}")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for p in parameters:
        p.grad.mul_(scale.to(p.grad.dtype))  # type: ignore[union-attr]
    return total


def _gather_norms(norms: list[Tensor], norm_type: float, mesh: DeviceMesh) -> list[Tensor]:
    """The norms of the gradients of every rank of a mesh; 0 for one without gradients."""
    mine = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
    mine = mine.to(mesh.device_type)
    found = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(found, mine, group=mesh.get_group())
    return found
