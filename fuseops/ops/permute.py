"""Dispatch, Permute and Combine turn tokens into rows sorted by expert, and back.

    Dispatch   experts, weights (T, K) -> offs, probs, index, pos: which row every copy of a token takes
    Permute    x (T, D) -> (R, D): row r is token index[r]
    Combine    x (R, D) -> (T, D): the sum of the rows of each token, pos[t], in the order of k

The probability of a row is applied once, by the scaled activation between the two. R = T * K; rows at or beyond
offs[-1] are padding and zero. Nothing here waits for the device, and nothing is added up in a changing order.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.arguments import check_integers, check_positive
from fuseops.errors import ShapeError

from .checks import check_chosen, check_pos, check_rows, is_integer
from .op import Call, Grads, Op, Out, S, Shape, numel
from .splits import check_splits

ON_DX = "on_dx"
"""Key of `call.scratch` for the `OnDx` of a dispatch op."""


class OnDx(NamedTuple):
    """An `OnDx` is the callback by which a dispatch op sends dx and dprobs back before weight gradients are computed.

    send: called (scratch, dx, dprobs, sums). sums: dx in the `sums` of Combine.
    overlaps: whether the transfer overlaps with weight gradients, so that as many as possible are to follow it.
    """

    send: Callable[..., None]
    overlaps: bool


DISPATCHED = "sent"
"""Key of `call.scratch` for the `DispatchRecord` of a dispatch op. The op that saves the received tokens pops it."""


class DispatchRecord(NamedTuple):
    """A `DispatchRecord` holds what a second dispatch in the backward needs, instead of saving the received tokens."""

    received: Any  # the output of the dispatch op: a Tensor or a Quantized
    tokens: Tensor  # its input
    slots: Tensor
    arrivals: Tensor


REDISPATCH = "again"
"""Key of `call.scratch` for the `Redispatch` of a dispatch op: (tokens, slots, arrivals, count, roles) -> a function
that waits for the `count` received tokens and returns them. Every rank of the group calls it."""

Redispatch = Callable[..., Callable[[], Any]]


class RowsSaved(NamedTuple):
    pos: Tensor | None  # (T, K) int32
    offs: Tensor | None  # (E,) int32


class CombineSaved(NamedTuple):
    pos: Tensor | None  # (T, K) int32
    offs: Tensor | None  # (E,) int32
    rows: int | None  # R
    dtype: torch.dtype | None  # of x


class Dispatch(Op[RowsSaved]):
    """y = x: every expert is on this rank. Publishes the rows of the experts, the fields of a `Routing`.

    A dispatch op for expert parallelism replaces it, which reads `experts` (T, K) int32 and `weights` (T, K), sends
    tokens to the ranks of their experts, returns the received tokens, and publishes `offs`, `probs`, `index` and `pos`
    over them and over its own `num_experts`; and a second op after Combine that sends the sums back.
    `MoE(dispatch=..., collect=...)` takes the two.

    capacity_factor: None drops nothing. Otherwise an expert takes ceil(capacity_factor * T * K / E) copies, in the
    order of their tokens; the others are dropped, which makes their pos -1.
    """

    reads = ("experts", "weights")
    writes = ("offs", "probs", "index", "pos")
    integers = frozenset({"offs", "index", "pos"})
    saves_for = {"x": (), "weights": ("pos", "offs")}
    takes_quantized = True

    def __init__(self, num_experts: int, capacity_factor: float | None = None) -> None:
        super().__init__()
        check_integers("Dispatch", 1, num_experts=num_experts)
        if capacity_factor is not None:
            check_positive("Dispatch", capacity_factor=capacity_factor)
        self.num_experts, self.capacity_factor = num_experts, capacity_factor

    def extra_repr(self) -> str:
        limit = (
            "" if self.capacity_factor is None else f", capacity_factor={self.capacity_factor:g}"
        )
        return f"{self.num_experts}{limit}"

    def fwd(self, x: Tensor, *, experts: Tensor, weights: Tensor) -> Out:
        check_chosen("Dispatch", experts, weights)
        if self.capacity_factor is not None:
            capacity = math.ceil(self.capacity_factor * experts.numel() / self.num_experts)
            experts = within_capacity(experts, self.num_experts, capacity)
        offs, index, pos, probs = K.route(experts, self.num_experts, weights)
        side = {"offs": offs, "probs": probs, "index": index, "pos": pos}
        return Out(x, RowsSaved(pos, offs), side)

    def bwd(
        self,
        saved: RowsSaved,
        dy: Tensor | None,
        *,
        dside: dict[str, Tensor | None],
        call: Call,
    ) -> Grads:
        pos, dprobs = saved.pos, dside["probs"]
        if "weights" not in call.needs or dprobs is None:
            return Grads(dy, side={"weights": None})
        dweights = K.values_of_copies(dprobs, pos, saved.offs)  # type: ignore[arg-type]
        return Grads(dy, side={"weights": dweights})


def within_capacity(experts: Tensor, num_experts: int, capacity: int) -> Tensor:
    """`experts` with -1 for every copy beyond the first `capacity` of its expert, in the order of tokens.   (T, K)"""
    offs, _, pos, _ = K.route(experts, num_experts)
    first = torch.cat([offs.new_zeros(1), offs])[experts.long()]  # of -1 too: its pos is negative
    return torch.where((pos >= 0) & (pos - first < capacity), experts, -1)


class _Copies(Op[S]):
    """A `_Copies` maps between tokens and rows, the `top_k` copies of each token."""

    def __init__(self, top_k: int) -> None:
        super().__init__()
        check_integers(type(self).__name__, 1, top_k=top_k)
        self.top_k = top_k

    def extra_repr(self) -> str:
        return f"{self.top_k}"


class Permute(_Copies[RowsSaved]):
    """y[r] = x[index[r]]: one row for each copy of a token.   x (T, D) -> (R, D), R = T * top_k

    Reads the Routing of the rows. Padding rows are zero. dx[t] is the sum of the rows of t, in the order of k.
    """

    reads = ("index", "pos", "offs")
    saves_for = {"x": ("pos", "offs")}
    autocast = True  # T rows are cast, not R

    def out_shape(self, shape: Shape) -> Shape:
        return (numel(shape[:-1]) * self.top_k, *shape[-1:])

    def fwd(self, x: Tensor, *, index: Tensor, pos: Tensor, offs: Tensor) -> Out:
        check_rows(self, x)
        check_pos("Permute", pos, x.shape[0])
        if index.dim() != 1 or not is_integer(index):
            raise ShapeError(
                f"Permute expects index (rows,) of an int dtype, got {index.dtype} of shape {tuple(index.shape)}."
            )
        check_splits(offs, index.shape[0], x.device)
        return Out(K.scatter_rows(x, pos, offs, index.shape[0]), RowsSaved(pos, offs))

    def bwd(self, saved: RowsSaved, dy: Tensor) -> Grads:
        return Grads(K.combine_fwd(dy, saved.pos, saved.offs))  # type: ignore[arg-type]


class Combine(_Copies[CombineSaved]):
    """y[t] = sum over k of x[pos[t, k]]: the sum of the rows of each token.   x (R, D) -> (T, D), T = R / top_k

    In float32 in the order of k with one rounding, so it repeats bit for bit. A copy that was dropped adds nothing, and
    padding rows are not read.
    """

    reads = ("pos", "offs")
    saves_for = {"x": ("pos", "offs", "rows", "dtype")}
    floats = True
    sums: torch.dtype | None = None  # of y, where others are added to it: None for that of x

    def out_shape(self, shape: Shape) -> Shape:
        return (numel(shape[:-1]) // self.top_k, *shape[-1:])

    def fwd(self, x: Tensor, *, pos: Tensor, offs: Tensor) -> Out:
        check_rows(self, x)
        check_pos("Combine", pos, None)
        check_splits(offs, x.shape[0], x.device)
        y = K.combine_fwd(x, pos, offs, None, self.sums)
        return Out(y, CombineSaved(pos, offs, x.shape[0], x.dtype))

    def bwd(self, saved: CombineSaved, dy: Tensor) -> Grads:
        dy = dy.to(saved.dtype)
        return Grads(K.scatter_rows(dy, saved.pos, saved.offs, saved.rows))  # type: ignore[arg-type]
