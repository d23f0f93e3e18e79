"""What an op computes with in the place of what is registered: this rank's part of a DTensor, two halves as one tensor.

A parameter of a parallel model is a DTensor, so that optimizers, FSDP2, gradient clipping and distributed checkpoints
know what it is part of. Ops, rules and kernels take plain tensors. A style of `fuseops.distributed` says, by name, how
one becomes the other: `op._local`. The DTensor is unwrapped where the op's autograd node begins, by an alias that costs
no memory, and its gradient is wrapped again by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError


class Ranks:
    """`Ranks` are those of a group: a ProcessGroup, a DeviceMesh of one dimension, or None for this rank alone.

    Copies of a model share it.
    """

    def __init__(self, group: Any = None) -> None:
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


Map = Callable[[Tensor], Tensor]


class _ThereAndBack(torch.autograd.Function):
    """A `_ThereAndBack` is the autograd node of what ranks exchange, there and, of its gradient, back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(dy), None, None


def there_and_back(x: Tensor, there: Map, back: Map) -> Tensor:
    """y = there(x), whose gradient goes back(dy)."""
    y: Tensor = _ThereAndBack.apply(x, there, back)  # type: ignore[no-untyped-call]
    return y


def same(x: Tensor) -> Tensor:
    """The way of what goes nowhere."""
    return x.view_as(x)


def sum_of_gradients(x: Tensor, ranks: Ranks) -> Tensor:
    """x, which every rank has; its gradients are parts, which are added up over the ranks."""
    return there_and_back(x, same, lambda dy: torch_private.all_reduce(dy, ranks.group))


class Local(NamedTuple):
    """A `Local` turns one parameter or side input of an op, often a DTensor, into the tensor that it computes with.

    axis     of the two halves, counted from the last axis, where it is registered as two: (..., 2, F, D) for a
             `[gate | up]` (..., 2F, D)
    whole    "" for this rank's part. Where every rank has all of it: "sum" if the ranks' gradients are parts that add
             up, "first" if the first rank alone counts it
    ranks    of those two, or those that the experts of the op are spread over
    dims     of the mesh of the DTensor; FSDP2 makes it one of more
    mean_of  ranks whose tokens the gradient adds up, as that of an expert does: it is divided by them
    """

    axis: int = 0
    whole: str = ""
    ranks: Ranks = Ranks()
    dims: int = 1
    mean_of: int = 1

    def of(self, t: Any) -> Any:
        """The tensor to compute with. None stays None."""
        if t is None:
            return None
        if torch_private.is_dtensor(type(t)):
            t = t.to_local()
        if self.mean_of > 1:
            t = there_and_back(t, same, lambda dy: dy / self.mean_of)
        if self.whole == "sum" and self.ranks.size > 1:
            t = sum_of_gradients(t, self.ranks)
        elif self.whole and self.ranks.size > 1:
            t = there_and_back(t, torch.zeros_like if self.ranks.rank else same, same)
        return t.flatten(self.axis, self.axis + 1) if self.axis else t

    def gradient(self, parameter: Any, gradient: Tensor) -> Tensor:
        """The gradient of the registered parameter, from that of the tensor that was computed with: what autograd does
        of those that go through it.
        """
        if self.axis:
            gradient = halved(gradient, self.axis)
        if self.whole == "sum" and self.ranks.size > 1:
            gradient = torch_private.all_reduce(gradient, self.ranks.group)
        if self.mean_of > 1:
            gradient = gradient / self.mean_of
        return like(parameter, gradient)


def halved(t: Any, axis: int) -> Any:
    """(..., 2F, D) as (..., 2, F, D), the halves on `axis`, counted from the last."""
    return t.unflatten(axis + 1, (2, -1))


def like(parameter: Any, local: Tensor) -> Any:
    """A rank's part as a DTensor laid out as `parameter`, or itself where that is plain."""
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
    """An `InputLayout` says how what goes into an op is laid out over ranks: DTensor's placement."""

    placement: Any
    ranks: Ranks

    def over(self, x: Any) -> list[Any]:
        """The placements of a DTensor x, which stay over other dimensions of its mesh."""
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


def unwrapped(x: Any, layout: InputLayout | None) -> Tensor:
    """The local tensor of a DTensor at the border of a Sequential, laid out as its first parallel op takes it.

    Raises FuseOpsError where that is one rank's part of a sum.
    """
    if layout is not None:
        x = x.redistribute(placements=layout.over(x))
    if any(p.is_partial() for p in x.placements):
        raise FuseOpsError(
            f"x is a DTensor laid out as {x.placements} over {x.device_mesh}: a rank has a part of a sum. "
            "Add the parts up first: x.redistribute(placements=...) with Replicate() or Shard(dim) for Partial()."
        )
    found: Tensor = x.to_local()
    return found


# --- state dicts


def fit(given: Any, parameter: Any, axis: int) -> Any:
    """A tensor of a state dict in the shape and the layout of the parameter that it is loaded into, where one has two
    halves that the other has as one tensor.

    axis: of the halves in `parameter`, 0 where it may be `given` that has them.
    """
    if axis and given.dim() + 1 == parameter.dim() and given.shape[axis + 1] % 2 == 0:
        given = halved(given, axis)
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


def fit_all(op: Any, state_dict: dict[str, Any], prefix: str) -> None:
    """Fit what a state dict has for the parameters of an op."""
    local: Mapping[str, Local] = op._local
    for name, parameter in op._parameters.items():
        given = state_dict.get(prefix + name)
        if parameter is None or not isinstance(given, Tensor):
            continue
        if name in local or given.dim() == parameter.dim() + 1:
            axis = local[name].axis if name in local else 0
            state_dict[prefix + name] = fit(given, parameter, axis)


def spread_groups(op: Any, state_dict: dict[str, Any], prefix: str, names: Iterable[str]) -> None:
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


def own_groups(op: Any, state_dict: dict[str, Any], prefix: str, names: Iterable[str]) -> None:
    """Load what `spread_groups` has saved, or that of all ranks: the part of the experts here."""
    ranks = _ranks_of_experts(op)
    for key in (prefix + name for name in names):
        given: Any = state_dict.get(key)
        if torch_private.is_dtensor(type(given)):
            mine = ranks is not None and given.device_mesh == ranks.group
            state_dict[key] = given = given.to_local() if mine else given.full_tensor()
        if ranks is not None and given is not None and given.shape[-1] != op.num_groups:
            state_dict[key] = given.chunk(ranks.size, -1)[ranks.rank]


def _ranks_of_experts(op: Any) -> Ranks | None:
    local = op._local.get("weight")
    return local.ranks if local is not None and local.ranks.size > 1 and not local.whole else None
