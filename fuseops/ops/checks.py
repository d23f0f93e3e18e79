"""These checks raise for inputs, side inputs and options that an op does not take.

None of them waits for the device. The values of `offs` are checked in `splits`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.arguments import check_flags, instance_of
from fuseops.errors import FuseOpsError, ShapeError
from fuseops.plain import PLAIN
from fuseops.recipes import Quantized

from .op import Op, Shape


def check_tensors(who: str, **given: Any) -> None:
    """Raise ShapeError for an argument that is no tensor."""
    for name, t in given.items():
        if not isinstance(t, Tensor):
            raise ShapeError(f"{who} expects {name} to be a tensor, got {type(t).__name__}.")


def check_width(op: nn.Module, shape: Shape, expected: int) -> None:
    """Raise ShapeError unless the last axis is `expected` wide."""
    if not shape or shape[-1] != expected:
        raise ShapeError(
            f"{type(op).__name__} expects x with {expected} features on the last axis, got shape {tuple(shape)}."
        )


def check_rows(op: Op[Any], x: Tensor | Quantized) -> None:
    """Raise ShapeError unless x has one axis of rows and one of features."""
    if x.dim() != 2:
        raise ShapeError(
            f"{type(op).__name__} expects x of two axes (rows, features), got shape {tuple(x.shape)}: "
            "flatten the others."
        )


def check_offs(offs: Tensor, groups: int) -> None:
    """Raise ShapeError for `offs` of another shape or dtype."""
    if offs.shape != (groups,) or offs.dtype is not torch.int32:
        raise ShapeError(
            f"offs must be int32 of shape ({groups},): the cumulative row end of every group, empty ones included; "
            f"got {offs.dtype} of shape {tuple(offs.shape)}. Routing.from_counts(tokens_per_expert) builds it."
        )


def check_probs(op: str, x: Tensor | Quantized, probs: Tensor) -> None:
    """Raise ShapeError unless probs has one number of a float dtype for each row of x."""
    if probs.shape != x.shape[:-1] or not probs.is_floating_point():
        raise ShapeError(
            f"{op} expects probs of shape {tuple(x.shape[:-1])}, one a row, of a float dtype, got {probs.dtype} of "
            f"shape {tuple(probs.shape)}."
        )


def check_experts(chosen: Tensor, count: int) -> None:
    """Raise ShapeError unless `chosen` has expert numbers below `count`; values are checked if `values_visible`."""
    if not is_integer(chosen):
        raise ShapeError(
            f"Router expects chosen of an int dtype, numbers of experts, got {chosen.dtype}."
        )
    if values_visible(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < count:
        raise ShapeError(
            f"Router expects chosen from 0 to {count - 1}, of its {count} experts, got {int(chosen.min())} to "
            f"{int(chosen.max())}."
        )


def check_chosen(who: str, experts: Tensor, weights: Tensor) -> None:
    """Raise ShapeError unless experts (T, k) are integers and weights (T, k) floats."""
    if experts.dim() != 2 or experts.shape != weights.shape:
        raise ShapeError(
            f"{who} expects experts and weights of one shape (tokens, k), got {tuple(experts.shape)} and "
            f"{tuple(weights.shape)}."
        )
    if not is_integer(experts) or not weights.is_floating_point():
        raise ShapeError(
            f"{who} expects experts of an int dtype and weights of a float dtype, got {experts.dtype} and "
            f"{weights.dtype}."
        )


def check_targets(op: str, targets: Tensor, classes: int, ignored: int) -> None:
    """Raise ShapeError for a target that is neither a class nor ignored; checked if `values_visible`."""
    if not values_visible(targets):
        return
    wrong = targets[((targets < 0) | (targets >= classes)) & (targets != ignored)]
    if wrong.numel():
        raise ShapeError(
            f"{op} expects targets from 0 to {classes - 1}, of its {classes} classes, or ignore_index = {ignored}, got "
            f"{int(wrong[0])}."
        )


def is_integer(t: Tensor) -> bool:
    """Whether a tensor is of an int dtype."""
    return not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)


def values_visible(values: Tensor) -> bool:
    """Whether a tensor has values that can be read without a synchronisation and without a guard in traced code."""
    if torch.compiler.is_compiling() or type(values) not in PLAIN or values.device.type != "cpu":
        return False
    return values.numel() > 0 and not torch_private.is_batched(values)


def check_pos(op: str, pos: Tensor, tokens: int | None) -> None:
    """Raise ShapeError unless pos is int32 with a row for each token; tokens: None for any number."""
    if pos.dim() != 2 or tokens not in (None, pos.shape[0]) or pos.dtype is not torch.int32:
        wanted = "tokens" if tokens is None else tokens
        raise ShapeError(
            f"{op} expects pos int32 of shape ({wanted}, k): the row of each copy of a token; got {pos.dtype} of shape "
            f"{tuple(pos.shape)}. Routing.from_topk(experts, weights) builds it."
        )


def check_state(caller: str, tensors: object) -> None:
    """Raise FuseOpsError for what are no tensors by name, as a state_dict has them."""
    expected = "tensors by name, as a state_dict"
    for name, t in instance_of(tensors, Mapping, f"{caller}(tensors)", expected).items():
        instance_of(name, str, f"{caller}(tensors)", expected)
        instance_of(t, Tensor, f"{caller}(tensors), of {name!r},", "a tensor")


def refuse_inplace(op: str, inplace: bool) -> None:
    """Raise FuseOpsError for `inplace=True`, which torch's modules of that name take."""
    check_flags(op, inplace=inplace)
    if inplace:
        raise FuseOpsError(
            f"{op}(inplace=True): an op never writes its input, which may be saved. Leave it out."
        )
