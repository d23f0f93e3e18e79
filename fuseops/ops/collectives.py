"""Collectives run between the ops of a Sequential: AllGather, ReduceScatter, AllReduce, over the ranks of one group.

    op               forward                         backward
    AllGather        the ranks' shards, in order     the sum over the ranks of the part that came from here
    ReduceScatter    this rank's part of the sum     the ranks' gradients, in order
    AllReduce        the sum                         the gradient itself: every rank has the same

A gradient is that of the sum of all ranks' losses where ranks compute different things with what they got, and of the
one loss where they compute the same, as DTensor's placements mean `Partial` and `Replicate`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.arguments import check_flags, check_integers, shown
from fuseops.errors import FuseOpsError, ShapeError

from .local import Ranks, with_backward
from .op import AcrossRanks, Grads, Op, Out, Shape


class CollectiveSaved(NamedTuple):
    """A `CollectiveSaved` holds the settings of a collective in its forward: no tensor, so it costs no memory."""

    ranks: Ranks
    dim: int = -2  # the axis
    sums: bool = True  # whether the backward sums the ranks' gradients


class Collective(Op[CollectiveSaved]):
    """A collective op runs one collective in its forward and the adjoint one in its backward; no-ops on one rank.

    group: a ProcessGroup, a DeviceMesh of one dimension, or None for one rank.
    """

    saves_for = {"x": CollectiveSaved._fields}

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self._ranks = Ranks(group)

    @property
    def group(self) -> Any:
        return self._ranks.group

    @property
    def across_ranks(self) -> AcrossRanks:  # type: ignore[override]
        group = self.group
        return AcrossRanks(group.get_group() if hasattr(group, "get_group") else group)

    @property
    def alias(self) -> bool:
        return self._ranks.size == 1

    def extra_repr(self) -> str:
        return repr(self._ranks)

    def settings(self) -> CollectiveSaved:
        """The settings of the collective in this call."""
        return CollectiveSaved(self._ranks)

    def all_ranks_fwd(self, x: Tensor, s: CollectiveSaved) -> Tensor:
        """The collective of the forward, over two ranks or more."""
        raise NotImplementedError

    def all_ranks_bwd(self, dy: Tensor, s: CollectiveSaved) -> Tensor:
        """The collective of the backward, over two ranks or more."""
        raise NotImplementedError

    def fwd(self, x: Tensor) -> Out:
        s = self.settings()
        if s.ranks.size == 1:
            return Out(x, s)
        if torch.is_grad_enabled() and x.requires_grad:
            bwd = lambda dy: self.all_ranks_bwd(dy, s)  # noqa: E731
            return Out(with_backward(x, lambda t: self.all_ranks_fwd(t, s), bwd), s)
        return Out(self.all_ranks_fwd(x, s), s)

    def bwd(self, saved: CollectiveSaved, dy: Tensor) -> Grads:
        return Grads(dy if saved.ranks.size == 1 else self.all_ranks_bwd(dy, saved))


class _AxisCollective(Collective):
    """An `_AxisCollective` is a collective that gathers or scatters along one axis of its tensor."""

    def __init__(self, group: Any = None, dim: int = -2) -> None:
        super().__init__(group)
        check_integers(type(self).__name__, dim=dim)
        self.dim = dim

    def extra_repr(self) -> str:
        return f"{self._ranks}, dim={self.dim}"

    def settings(self) -> CollectiveSaved:
        return CollectiveSaved(self._ranks, self.dim)

    def _resized(self, shape: Shape, grows: bool) -> Shape:
        """The shape with this axis multiplied, or divided, by the number of ranks."""
        size, axis = self._ranks.size, _axis(shape, self.dim)
        _check_divides(shape, axis, 1 if grows else size)
        resized = shape[axis] * size if grows else shape[axis] // size
        return (*shape[:axis], resized, *shape[axis + 1 :])


def _axis(shape: Shape, dim: int) -> int:
    """The axis of `dim`, from 0.  Raises ShapeError where the shape has none."""
    axis = dim + len(shape) if dim < 0 else dim
    if not 0 <= axis < len(shape):
        raise ShapeError(
            f"a collective along dim={dim} got x of shape {tuple(shape)}, which has no such axis."
        )
    return axis


def _check_divides(shape: Shape, axis: int, parts: int) -> None:
    if shape[axis] % parts:
        raise ShapeError(
            f"axis {axis} of x {tuple(shape)} is to go in parts to the ranks: {shape[axis]} does not divide by {parts} "
            "ranks. Pad it, or choose another axis."
        )


def _all_gather(x: Tensor, s: CollectiveSaved) -> Tensor:
    """The ranks' shards, concatenated in rank order."""
    return torch_private.all_gather(x.contiguous(), _axis(x.shape, s.dim), s.ranks.group)


def _reduce_scatter(x: Tensor, s: CollectiveSaved) -> Tensor:
    """This rank's shard of the sum."""
    axis = _axis(x.shape, s.dim)
    _check_divides(x.shape, axis, s.ranks.size)
    return torch_private.reduce_scatter(x.contiguous(), axis, s.ranks.group)


def _own_part(x: Tensor, s: CollectiveSaved) -> Tensor:
    """This rank's shard of a tensor that all ranks have."""
    return x.chunk(s.ranks.size, _axis(x.shape, s.dim))[s.ranks.rank].contiguous()


class AllGather(_AxisCollective):
    """y = the ranks' x one after the other along `dim`.   (..., n, ...) -> (..., ranks n, ...), ranks in order

    group: a ProcessGroup, a DeviceMesh of one dimension, or None for one rank.
    dim: the axis; of rows (T, D) and of (B, T, D) the tokens by default. Every rank has as many of it: pad where one
        has fewer, since torch's collectives do not ask.
    grad: "partial" where ranks compute different things with y: dx is the sum over the ranks of their gradients of this
        rank's part (a reduce-scatter). "replicate" where all compute the same: dx is the part itself, nothing is sent.
    Raises FuseOpsError for another grad, ShapeError for an axis that x has not.
    """

    def __init__(self, group: Any = None, dim: int = -2, *, grad: str = "partial") -> None:
        super().__init__(group, dim)
        if grad not in ("partial", "replicate"):
            raise FuseOpsError(
                f"AllGather: grad is {shown(grad)}, expected 'partial' or 'replicate'."
            )
        self.grad = grad

    def out_shape(self, shape: Shape) -> Shape:
        return self._resized(shape, grows=True)

    def settings(self) -> CollectiveSaved:
        return CollectiveSaved(self._ranks, self.dim, self.grad == "partial")

    def all_ranks_fwd(self, x: Tensor, s: CollectiveSaved) -> Tensor:
        return _all_gather(x, s)

    def all_ranks_bwd(self, dy: Tensor, s: CollectiveSaved) -> Tensor:
        return _reduce_scatter(dy, s) if s.sums else _own_part(dy, s)


class ReduceScatter(_AxisCollective):
    """y = this rank's part, along `dim`, of the sum of the ranks' x.   (..., ranks n, ...) -> (..., n, ...)

    dx is the ranks' gradients one after the other (an all-gather).
    group, dim: as of `AllGather`.  Raises ShapeError for an axis that x has not, or that does not divide by the ranks.
    """

    def out_shape(self, shape: Shape) -> Shape:
        return self._resized(shape, grows=False)

    def all_ranks_fwd(self, x: Tensor, s: CollectiveSaved) -> Tensor:
        return _reduce_scatter(x, s)

    def all_ranks_bwd(self, dy: Tensor, s: CollectiveSaved) -> Tensor:
        return _all_gather(dy, s)


class AllReduce(Collective):
    """y = the sum of the ranks' x, and dx = dy, which every rank has.   x of any shape

    forward=False, backward=True is the other way round: y = x, and dx is the sum of the ranks' dy. It stands where a
    tensor that every rank has goes into what each computes a part of.
    forward, backward: which of the two is summed; both where ranks compute different things with a sum.
    Raises FuseOpsError where it is neither.
    """

    def __init__(self, group: Any = None, *, forward: bool = True, backward: bool = False) -> None:
        super().__init__(group)
        check_flags("AllReduce", forward=forward, backward=backward)
        if not (forward or backward):
            raise FuseOpsError(
                "AllReduce(forward=False, backward=False) sums nothing: leave it out."
            )
        self.sums, self.sums_grad = forward, backward

    @property
    def alias(self) -> bool:
        return self._ranks.size == 1 or not self.sums

    def extra_repr(self) -> str:
        return f"{self._ranks}, forward={self.sums}, backward={self.sums_grad}"

    def settings(self) -> CollectiveSaved:
        return CollectiveSaved(self._ranks, sums=self.sums_grad)

    def all_ranks_fwd(self, x: Tensor, s: CollectiveSaved) -> Tensor:
        return torch_private.all_reduce(x, s.ranks.group) if self.sums else x.view_as(x)

    def all_ranks_bwd(self, dy: Tensor, s: CollectiveSaved) -> Tensor:
        return torch_private.all_reduce(dy, s.ranks.group) if s.sums else dy
