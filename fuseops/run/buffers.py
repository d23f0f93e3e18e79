"""The caller's buffers for outputs and input gradients: `out={"fc2.y": ..., "fc1.dx": ...}`.

An op may write to its buffer in `call.out` itself; otherwise its result is copied there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError, ShapeError

Buffers = Mapping[str, Tensor]  # "y", "dx"


def by_op(module: str, out: Any, names: tuple[str, ...]) -> dict[str, Buffers]:
    """Group buffers by op.   {"fc2.y": t} -> {"fc2": {"y": t}}

    names: of the ops, "" for one that is called alone.  Raises FuseOpsError for an `out` that is no mapping, or has
    other keys, ShapeError where two share memory.
    """
    if not isinstance(out, Mapping):
        raise FuseOpsError(
            f"{module}: out is {type(out).__name__}, expected buffers by their names."
        )
    found: dict[str, dict[str, Any]] = {}
    known = [f"{op}.{what}".lstrip(".") for op in names for what in ("y", "dx")]
    for key, buffer in out.items():
        if key not in known:
            raise FuseOpsError(
                f"{module}: there is no output {key!r} to write to a buffer of out, expected some of {known}."
            )
        op, _, what = key.rpartition(".")
        found.setdefault(op, {})[what] = buffer
    _check_apart(module, [(key, t) for key, t in out.items() if _has_memory(t)])
    return {**found}


def _has_memory(buffer: object) -> bool:
    """Whether a value is a tensor with strides. `check_buffers` refuses others."""
    return isinstance(buffer, Tensor) and buffer.layout is torch.strided


def _check_apart(module: str, given: list[tuple[str, Tensor]]) -> None:
    """Raise ShapeError for two buffers over one memory: after the call, one would hold what the other's name says."""
    for (one, a), (other, b) in itertools.combinations(given, 2):
        if overlap(a, b):
            raise ShapeError(
                f"{module}: in out, the buffer for {other} lies over memory of the buffer for {one}, and both are "
                "written to: give each memory of its own."
            )


def check_buffers(
    op: str, out: Mapping[str, Any], x: Tensor, y_shape: tuple[int, ...], others: list[Any]
) -> None:
    """Raise ShapeError for a buffer that cannot hold its result, or overlaps x or `others`."""
    shapes = {"y": y_shape, "dx": tuple(x.shape)}
    occupied = [("x", x), *(("an input of it", t) for t in others if t is not None)]
    for what, buffer in out.items():
        name = f"the buffer for {what} of {op}"
        if not isinstance(buffer, Tensor):
            raise ShapeError(f"{name} is {type(buffer).__name__}, expected a tensor.")
        if buffer.shape != shapes[what] or buffer.device != x.device or not buffer.is_contiguous():
            kind = "" if buffer.is_contiguous() else "non-contiguous, "
            raise ShapeError(
                f"{name} is {kind}{tuple(buffer.shape)} on {buffer.device}, expected contiguous {shapes[what]} on "
                f"{x.device}."
            )
        if what == "dx" and buffer.dtype is not x.dtype:
            raise ShapeError(f"{name} is {buffer.dtype}, expected {x.dtype}, the dtype of x.")
        if buffer.requires_grad:
            raise ShapeError(f"{name} requires a gradient: it is written to, so pass it detached.")
        for other, t in occupied:
            if overlap(buffer, t):
                raise ShapeError(f"{name} lies over memory of {other}, which is still read.")


def write_result(what: str, buffer: Tensor, result: Tensor) -> Tensor:
    """Copy a result into its buffer, unless the op has written it there.   -> the buffer

    Either way the version of the buffer increases, as by any write in place.
    """
    if result is buffer:
        torch.autograd.graph.increment_version(buffer)
    elif buffer.dtype is not result.dtype:
        raise ShapeError(f"the buffer for {what} is {buffer.dtype}, expected {result.dtype}.")
    else:
        buffer.copy_(result)
    return buffer


def check_dy(out: Buffers | None, dy: Any) -> None:
    """Raise ShapeError for a buffer for dx that overlaps dy, which other gradients read after dx is written."""
    if out is not None and "dx" in out and isinstance(dy, Tensor) and overlap(out["dx"], dy):
        raise ShapeError("the buffer for dx lies over memory of dy, which is still read.")


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the byte ranges of two tensors, first to last byte, overlap in one storage."""
    if torch_private.storage_id(a) != torch_private.storage_id(b) or not (a.numel() and b.numel()):
        return False
    (first, last), (start, end) = _bytes(a), _bytes(b)
    return first < end and start < last


def _bytes(t: Tensor) -> tuple[int, int]:
    span = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    first = int(t.storage_offset()) * t.itemsize
    return first, first + (int(span) + 1) * t.itemsize
