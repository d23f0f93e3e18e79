"""Routing: which rows go to which expert, built once and passed to every Sequential of a layer."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError, ShapeError


class Routing(NamedTuple):
    """Rows sorted by expert. A NamedTuple, so it is a pytree; fields are side inputs by name.

    offs   (E,) int32: cumulative row end of each expert, on the device of the rows
    probs  (R,) float32, or float64 in a float64 model: routing probability of each row, or None
    index  (R,) int64: the token that each row is a copy of, or None
    """

    offs: Tensor
    probs: Tensor | None = None
    index: Tensor | None = None  # type: ignore[assignment]  # hides tuple.index, which nobody needs

    @classmethod
    def from_counts(
        cls,
        tokens_per_expert: Any,
        probs: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> "Routing":
        """From rows per expert: a tensor of any int dtype, or a list of ints (which is copied to `device`).

        Raises ShapeError when the counts are not a 1-d sequence of integers, or are negative (checked on the CPU only,
        in eager mode: a look at device memory would synchronise, and one in traced code would be a guard).
        """
        counts = torch.as_tensor(tokens_per_expert)
        if (
            counts.dim() != 1
            or counts.is_floating_point()
            or counts.is_complex()
            or counts.dtype is torch.bool
        ):
            raise ShapeError(
                f"from_counts expects the rows of each expert as a 1-d sequence of ints, got {counts.dtype} of shape "
                f"{tuple(counts.shape)}."
            )
        checkable = counts.device.type == "cpu" and not torch.compiler.is_compiling()
        if checkable and counts.numel() and int(counts.min()) < 0:
            raise ShapeError(
                f"from_counts: expert {int(counts.argmin())} has {int(counts.min())} rows."
            )
        return cls(counts.cumsum(0).to(device=device or counts.device, dtype=torch.int32), probs)

    @classmethod
    def from_topk(
        cls, experts: Tensor, weights: Tensor, *, num_experts: int | None = None
    ) -> "Routing":
        """From the chosen experts of each token.   experts (T, K) int, weights (T, K) -> R = T * K rows.

        Rows of one expert keep the order of their tokens (a stable sort), so the result is deterministic.
        num_experts: E. None takes the largest chosen expert for the last one, which synchronises a CUDA device.
        Raises ShapeError for an expert that is not there (checked on the CPU only: it would synchronise).
        """
        if experts.dim() != 2 or experts.shape != weights.shape:
            raise ShapeError(
                f"from_topk expects experts and weights of one shape (tokens, k), got {tuple(experts.shape)} and "
                f"{tuple(weights.shape)}."
            )
        flat = experts.reshape(-1)
        if num_experts is None:
            num_experts = int(flat.max()) + 1 if flat.numel() else 0
        if flat.device.type == "cpu" and flat.numel() and not torch.compiler.is_compiling():
            for expert in (int(flat.min()), int(flat.max())):
                if not 0 <= expert < num_experts:
                    raise ShapeError(f"from_topk: there is no expert {expert} among {num_experts}.")
        order = torch.argsort(flat, stable=True)
        edges = torch.arange(num_experts, device=flat.device, dtype=flat.dtype)
        offs = torch.searchsorted(flat[order], edges, right=True).to(torch.int32)
        return cls(offs, _wide(weights.reshape(-1)[order]), order // experts.shape[1])

    @classmethod
    def from_multihot(cls, chosen: Tensor, probs: Tensor, *, rows: int | None = None) -> "Routing":
        """From a map of chosen experts.   chosen (T, E) bool, probs (T, E) -> one row for each true entry.

        rows: how many rows to make room for (tokens times top-k); the unused ones are padding. None counts them, which
        synchronises a CUDA device.  Raises FuseOpsError when `chosen` is not boolean.
        """
        if chosen.dtype is not torch.bool or chosen.shape != probs.shape or chosen.dim() != 2:
            raise FuseOpsError(
                f"from_multihot expects chosen (tokens, experts) bool and probs of that shape, got {chosen.dtype} "
                f"{tuple(chosen.shape)} and {tuple(probs.shape)}."
            )
        by_expert = chosen.t()
        offs = by_expert.sum(1).cumsum(0).to(torch.int32)
        size = int(chosen.sum()) if rows is None else rows
        if chosen.device.type == "cpu" and size < int(chosen.sum()):
            raise ShapeError(f"from_multihot: {int(chosen.sum())} rows are chosen, rows={size}.")
        where = torch.nonzero_static(by_expert, size=size, fill_value=0)
        expert, token = where.unbind(1)
        return cls(offs, _wide(probs[token, expert]), token)


def check_offs(offs: Tensor, groups: int) -> None:
    """Raise unless `offs` is what can be checked without a host synchronisation."""
    if offs.shape != (groups,) or offs.dtype is not torch.int32:
        raise ShapeError(
            f"offs must be int32 of shape ({groups},): the cumulative row end of every group, empty ones included; "
            f"got {offs.dtype} of shape {tuple(offs.shape)}. Routing.from_counts(tokens_per_expert) builds it."
        )


def check_probs(op: str, x: Tensor, probs: Tensor) -> None:
    """Raise ShapeError unless there is one probability a row of x."""
    if probs.shape != x.shape[:-1]:
        raise ShapeError(
            f"{op} expects probs of shape {tuple(x.shape[:-1])}, one a row, got {tuple(probs.shape)}."
        )


def _wide(probs: Tensor) -> Tensor:
    """Probabilities in float32, wherever the router works in half; float64 is not rounded."""
    return probs.to(torch.promote_types(probs.dtype, torch.float32))
