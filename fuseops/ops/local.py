"""A `Local` maps a registered parameter to the tensor that an op computes with: a DTensor's shard, two halves as one.

A parameter of a parallel model is a DTensor, so that optimizers, FSDP2, gradient clipping and distributed checkpoints
know what it is part of. Ops, rules and kernels take plain tensors. A style of `fuseops.distributed` sets the mapping by
parameter name in `op._local`. The DTensor is unwrapped where the op's autograd node begins, by an alias that costs no
memory, and autograd wraps its gradient again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.arguments import shown
from fuseops.errors import FuseOpsError


class Ranks:
    """`Ranks` are the ranks of a group: a ProcessGroup, a DeviceMesh of one dimension, or None for this rank alone.

    Copies of a model share one object.
    """

    def __init__(self, group: Any = None) -> None:
        if isinstance(group, Tensor) or not (group is None or hasattr(group, "size")):
            raise FuseOpsError(
                f"group is {shown(group)}, expected a ProcessGroup, a DeviceMesh of one dimension or None."
            )
        if getattr(group, "ndim", 1) != 1:
            raise FuseOpsError(
                f"a collective runs over one dimension of a mesh, got {group}: slice it, mesh['tp']."
            )
        self.group = group
        self.size = 1 if group is None else int(group.size())
        is_mesh = hasattr(group, "get_local_rank")
        self.rank = 0  # of this process among them
        if group is not None:
            self.rank = int(group.get_local_rank() if is_mesh else group.rank())

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self

    def __repr__(self) -> str:
        return f"{self.size} rank{'s' * (self.size != 1)}"


TensorMap = Callable[[Tensor], Tensor]


class _WithBackward(torch.autograd.Function):
    """A `_WithBackward` is the autograd node of a function with a given backward, such as a collective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fwd: TensorMap, bwd: TensorMap) -> Tensor:
        ctx.fwd, ctx.bwd = fwd, bwd
        return fwd(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        again = differentiates_again(dy)
        return with_backward(dy, ctx.bwd, ctx.fwd) if again else ctx.bwd(dy), None, None


def differentiates_again(*grads: Tensor | None) -> bool:
    """Whether a backward is differentiated itself (`create_graph=True`), in which torch sees no collective."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return any(grad is not None and grad.requires_grad for grad in grads)


def with_backward(x: Tensor, fwd: TensorMap, bwd: TensorMap) -> Tensor:
    """y = fwd(x), with the gradient dx = bwd(dy), whose own gradient is fwd: each is the adjoint of the other."""
    y: Tensor = _WithBackward.apply(x, fwd, bwd)  # type: ignore[no-untyped-call]
    return y


class _Divided(torch.autograd.Function):
    """A `_Divided` is x, with a gradient that is divided by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        return identity(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy / ctx.number, None


def identity(x: Tensor) -> Tensor:
    """An alias of x, as autograd functions return it."""
    return x.view_as(x)


def sum_gradients(x: Tensor, ranks: Ranks) -> Tensor:
    """x, replicated over the ranks, with the ranks' partial gradients summed in the backward."""
    return with_backward(x, identity, lambda dy: torch_private.all_reduce(dy, ranks.group))


class Local(NamedTuple):
    """A `Local` maps one parameter or side input of an op, often a DTensor, to the tensor that the op computes with.

    axis        the axis of the two halves, counted from the last, of a tensor that is registered as two:
                (..., 2, F, D) for a `[gate | up]` (..., 2F, D)
    replicated  "" for a shard. Of a tensor that every rank has: "sum" if the ranks' gradients are partial sums,
                "first" if only the first rank uses it
    ranks       the ranks of a replicated tensor, or those that the experts of the op are sharded over
    dims        dimensions of the DTensor's mesh; FSDP2 adds one
    mean_of     the gradient is divided by this number of ranks, whose tokens it sums, as that of an expert does
    """

    axis: int = 0
    replicated: str = ""
    ranks: Ranks = Ranks()
    dims: int = 1
    mean_of: int = 1

    def compute_tensor(self, t: Any) -> Any:
        """The tensor that the op computes with; None stays None."""
        if t is None:
            return None
        if torch_private.is_dtensor(type(t)):
            t = t.to_local()
        if self.mean_of > 1:
            t = _Divided.apply(t, self.mean_of)  # type: ignore[no-untyped-call]
        if self.replicated == "sum" and self.ranks.size > 1:
            t = sum_gradients(t, self.ranks)
        elif self.replicated and self.ranks.size > 1:
            t = with_backward(t, torch.zeros_like if self.ranks.rank else identity, identity)
        return t.flatten(self.axis, self.axis + 1) if self.axis else t

    def gradient(self, parameter: Any, gradient: Tensor) -> Tensor:
        """The gradient of the registered parameter from that of `compute_tensor`, as autograd computes it."""
        if self.axis:
            gradient = unflatten_halves(gradient, self.axis)
        if self.replicated == "sum" and self.ranks.size > 1:
            gradient = torch_private.all_reduce(gradient, self.ranks.group)
        if self.mean_of > 1:
            gradient = gradient / self.mean_of
        return wrap_like(parameter, gradient)


def unflatten_halves(t: Any, axis: int) -> Any:
    """(..., 2F, D) as (..., 2, F, D), the halves on `axis`, counted from the last."""
    return t.unflatten(axis + 1, (2, -1))


def wrap_like(parameter: Any, local: Tensor) -> Any:
    """A local tensor as a DTensor with the mesh and placements of `parameter`; itself where that is plain."""
    if not torch_private.is_dtensor(type(parameter)):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class InputLayout(NamedTuple):
    """An `InputLayout` is the DTensor placement that an op expects of its input, and the ranks that it is over."""

    placement: Any
    ranks: Ranks

    def placements_of(self, x: Any) -> list[Any]:
        """The placements for a DTensor x: this one over these ranks, its own over other dimensions of its mesh."""
        mesh, mine = x.device_mesh, 0
        if mesh.ndim > 1:
            names, (own,) = mesh.mesh_dim_names or (), self.ranks.group.mesh_dim_names or ("",)
            if own not in names:
                raise FuseOpsError(
                    f"x is a DTensor over {mesh}, of which the first op's ranks, {self.ranks.group}, are no dimension "
                    "by name: pass it over theirs, or x.to_local(), laid out as the op's style takes it."
                )
            mine = names.index(own)
        return [self.placement if k == mine else p for k, p in enumerate(x.placements)]


def to_local_input(x: Any, layout: InputLayout | None) -> Tensor:
    """The local tensor of a DTensor input of a Sequential, redistributed as its first parallel op expects it.

    Raises FuseOpsError where that is one rank's summand.
    """
    if layout is not None:
        x = x.redistribute(placements=layout.placements_of(x))
    if any(p.is_partial() for p in x.placements):
        raise FuseOpsError(
            f"x is a DTensor laid out as {x.placements} over {x.device_mesh}: a rank has a part of a sum. "
            "Add the parts up first: x.redistribute(placements=...) with Replicate() or Shard(dim) for Partial()."
        )
    found: Tensor = x.to_local()
    return found


# --- state dicts


def fit_to_parameter(given: Any, parameter: Any, axis: int) -> Any:
    """Reshape a tensor of a state dict, and shard it, to fit its parameter where one of them is split in two halves.

    axis: of the halves in `parameter`, 0 where only `given` may have them.
    """
    if axis and given.dim() + 1 == parameter.dim() and given.shape[axis + 1] % 2 == 0:
        given = unflatten_halves(given, axis)
    elif not axis and given.dim() == parameter.dim() + 1:
        axis = -3 if given.shape[-1:] == parameter.shape[-1:] else -2
        if given.dim() >= -axis and given.shape[axis] == 2:
            whole = given.flatten(axis, axis + 1)
            given = whole if whole.shape == parameter.shape else given
    if torch_private.is_dtensor(type(parameter)) and not torch_private.is_dtensor(type(given)):
        from torch.distributed.tensor import distribute_tensor

        if given.shape == parameter.shape:
            mesh, places = parameter.device_mesh, parameter.placements
            given = distribute_tensor(given.to(parameter.device), mesh, places, src_data_rank=None)
    return given


def fit_state_dict(op: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Fit the entries of a state dict to the parameters of an op, in place."""
    local: Mapping[str, Local] = op._local
    for name, parameter in op._parameters.items():
        given = state_dict.get(prefix + name)
        if parameter is None or not isinstance(given, Tensor):
            continue
        if name in local or given.dim() == parameter.dim() + 1:
            axis = local[name].axis if name in local else 0
            state_dict[prefix + name] = fit_to_parameter(given, parameter, axis)


def shard_groups(op: Any, state_dict: dict[str, Any], prefix: str, names: Iterable[str]) -> None:
    """Save a state with an axis of groups, the last, as DTensors where experts are spread over ranks: a distributed
    checkpoint would take that of one rank for all.
    """
    ranks = _ranks_of_experts(op)
    if ranks is None:
        return
    from torch.distributed.tensor import DTensor, Shard

    for key in (prefix + name for name in names):
        if key in state_dict:
            place = [Shard(state_dict[key].dim() - 1)]
            state_dict[key] = DTensor.from_local(
                state_dict[key], ranks.group, place, run_check=False
            )


def take_own_groups(op: Any, state_dict: dict[str, Any], prefix: str, names: Iterable[str]) -> None:
    """Load what `shard_groups` has saved, or that of all ranks: the part of the experts here."""
    ranks = _ranks_of_experts(op)
    for key in (prefix + name for name in names):
        given: Any = state_dict.get(key)
        if torch_private.is_dtensor(type(given)):
            mine = ranks is not None and given.device_mesh == ranks.group
            state_dict[key] = given = given.to_local() if mine else given.full_tensor()
        if ranks is not None and given is not None and given.shape[-1] != op.num_groups:
            state_dict[key] = given.chunk(ranks.size, -1)[ranks.rank]


def _ranks_of_experts(op: Any) -> Ranks | None:
    local: Local | None = op._local.get("weight")
    if local is None or local.replicated or local.ranks.size == 1:
        return None
    return local.ranks
