"""A Routing says which rows go to which expert; it is built once and passed to every Sequential of a layer."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.arguments import check_integers, shown
from fuseops.errors import ShapeError
from fuseops.kernels.tiles import upcast

from .checks import check_chosen, check_tensors, is_integer, values_visible


class Routing(NamedTuple):
    """A `Routing` describes rows sorted by expert. A NamedTuple, so it is a pytree; fields are side inputs by name.

    offs   (E,) int32: cumulative row end of each expert, on the device of the rows
    probs  (R,) float32, or float64 in a float64 model: routing probability of each row, or None
    index  (R,) int64: the token that each row is a copy of, or None
    pos    (T, K) int32: the row of each copy of each token, -1 for a copy that was dropped, or None.
           The inverse of `index`: Permute and Combine read it.
    """

    offs: Tensor
    probs: Tensor | None = None
    index: Tensor | None = None  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    pos: Tensor | None = None

    @classmethod
    def from_counts(
        cls,
        tokens_per_expert: Any,
        probs: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> "Routing":
        """From rows per expert: a tensor of any int dtype, or a list of ints (which is copied to `device`).

        The rows are sorted already, so index and pos are None.
        Raises ShapeError when the counts are not a 1-d sequence of integers; and when one is negative, or their sum
        exceeds int32 or the size of `probs` (checked on the CPU only, in eager mode: reading device memory would
        synchronise, and reading in traced code would be a guard).
        """
        counts = _as_counts(tokens_per_expert)
        if probs is not None:
            check_tensors("from_counts", probs=probs)
        ends = counts.cumsum(0, dtype=torch.int64)
        if values_visible(counts):
            _check_counts(counts.long(), int(ends[-1]), probs)
        return cls(
            ends.to(device=counts.device if device is None else device, dtype=torch.int32), probs
        )

    @classmethod
    def from_topk(
        cls, experts: Tensor, weights: Tensor, *, num_experts: int | None = None
    ) -> "Routing":
        """From the chosen experts of each token.   experts (T, K) int, weights (T, K) -> R = T * K rows.

        Rows of one expert keep the order of their tokens, so the result is deterministic. An expert of -1 is a copy
        that was dropped: as many rows behind offs[-1] are padding.
        num_experts: E. None takes the largest chosen expert as the last one, which synchronises a CUDA device.
        Raises ShapeError for an expert out of range (checked on the CPU only: it would synchronise).
        """
        check_tensors("from_topk", experts=experts, weights=weights)
        check_chosen("from_topk", experts, weights)
        if num_experts is not None:
            check_integers("from_topk", 1, num_experts=num_experts)
        else:
            num_experts = int(experts.max()) + 1 if experts.numel() else 0
            if num_experts == 0:
                raise ShapeError("from_topk: no copy has an expert, so pass num_experts.")
        if values_visible(experts):
            for expert in (int(experts.min()), int(experts.max())):
                if not -1 <= expert < num_experts:
                    raise ShapeError(f"from_topk: there is no expert {expert} among {num_experts}.")
        if not (torch.is_grad_enabled() and weights.requires_grad):
            offs, index, pos, probs = K.route(experts, num_experts, weights)
            return cls(offs, probs, index, pos)
        offs, index, pos, _ = K.route(experts, num_experts)  # a kernel has no derivative
        return cls(offs, _of_rows(weights, pos, index), index, pos)

    @classmethod
    def from_multihot(cls, chosen: Tensor, probs: Tensor, *, rows: int | None = None) -> "Routing":
        """From a map of chosen experts.   chosen (T, E) bool, probs (T, E) -> one row for each true entry.

        rows: the number of rows to allocate (tokens times top-k); unused ones are padding. None counts them, which
        synchronises a CUDA device. `pos` is (T, E), -1 where an expert was not chosen.
        Raises ShapeError when `chosen` is not boolean, `probs` has another shape or no float dtype, or `rows` are too
        few (checked on the CPU only: it would synchronise).
        """
        check_tensors("from_multihot", chosen=chosen, probs=probs)
        wrong = chosen.dtype is not torch.bool or not probs.is_floating_point()
        if wrong or chosen.shape != probs.shape or chosen.dim() != 2:
            raise ShapeError(
                "from_multihot expects chosen (tokens, experts) bool and probs of that shape and a float dtype, got "
                f"{chosen.dtype} {tuple(chosen.shape)} and {probs.dtype} {tuple(probs.shape)}."
            )
        if rows is not None:
            check_integers("from_multihot", 0, rows=rows)
        by_expert = chosen.t()
        size = int(chosen.sum()) if rows is None else rows
        if values_visible(chosen) and size < int(chosen.sum()):
            raise ShapeError(f"from_multihot: {int(chosen.sum())} rows are chosen, rows={size}.")
        place = by_expert.flatten().cumsum(0).view_as(by_expert)  # 1 for the first row
        offs = place[:, -1] if place.numel() else place.new_zeros(len(by_expert))
        index = torch.nonzero_static(by_expert, size=size, fill_value=0)[:, 1]
        pos = torch.where(chosen, place.t() - 1, -1).to(torch.int32)
        return cls(offs.to(torch.int32), _of_rows(probs, pos, index), index, pos)


def _as_counts(given: Any) -> Tensor:
    """The rows of each expert as a tensor.  Raises ShapeError for what is no 1-d sequence of integers."""
    expected = "from_counts expects tokens_per_expert, rows of each, as a 1-d sequence of ints, got"
    empty = isinstance(given, list | tuple) and not given  # of which torch makes floats
    try:
        counts = torch.as_tensor(given, dtype=torch.int64 if empty else None)
    except (TypeError, ValueError, RuntimeError):
        raise ShapeError(f"{expected} {type(given).__name__}: {shown(given)}.") from None
    if counts.dim() != 1 or not is_integer(counts):
        raise ShapeError(f"{expected} {counts.dtype} of shape {tuple(counts.shape)}.")
    return counts


def _check_counts(counts: Tensor, total: int, probs: Tensor | None) -> None:
    if int(counts.min()) < 0:
        raise ShapeError(
            f"from_counts: expert {int(counts.argmin())} has {int(counts.min())} rows."
        )
    if total > torch.iinfo(torch.int32).max:
        raise ShapeError(f"from_counts: {total} rows in all, more than offs, an int32, can say.")
    if probs is not None and probs.numel() < total:
        raise ShapeError(
            f"from_counts: the experts have {total} rows, probs is of shape {tuple(probs.shape)}: one a row."
        )


def _of_rows(weights: Tensor, pos: Tensor, index: Tensor) -> Tensor:
    """The weight of every row, differentiable.   weights and pos (T, K), index (R,) -> (R,)"""
    rows = index.shape[0]
    flat = upcast(weights).flatten()
    row = torch.where(pos < 0, rows, pos).flatten().long()  # dropped copies go to an extra row
    return flat.new_zeros(rows + 1).scatter(0, row, flat)[:rows]
