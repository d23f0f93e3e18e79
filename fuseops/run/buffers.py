"""Buffers of the caller that outputs and gradients of inputs are written to: `out={"fc2.y": ..., "fc1.dx": ...}`.

An op that finds its buffer in `call.out` may write there itself; what another one gives is copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError, ShapeError

Buffers = Mapping[str, Tensor]  # "y", "dx"


def by_op(module: str, out: Any, names: tuple[str, ...]) -> dict[str, Buffers]:
    """The buffers of every op in `names`, of one alone "".   {"fc2.y": t} -> {"fc2": {"y": t}}

    Raises FuseOpsError for what is no mapping, or names something else.
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
                f"{module}: there is no output {key!r} to write to a buffer, expected some of {known}."
            )
        op, _, what = key.rpartition(".")
        found.setdefault(op, {})[what] = buffer
    return {**found}


def check(
    op: str, out: Mapping[str, Any], x: Tensor, y_shape: tuple[int, ...], others: list[Any]
) -> None:
    """Raise ShapeError for a buffer that cannot take what belongs there, or lies over `others` or another one."""
    shapes = {"y": y_shape, "dx": tuple(x.shape)}
    taken = [("x", x), *(("an input of it", t) for t in others if t is not None)]
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
        for other, t in taken:
            if overlap(buffer, t):
                raise ShapeError(f"{name} lies over memory of {other}, which is still read.")
        taken.append((f"the buffer for {what}", buffer))


def put(what: str, buffer: Tensor, result: Tensor) -> Tensor:
    """Copies a result into its buffer, unless it lies there.   -> the buffer

    Whoever saved what was in it before finds it changed, as after any write in place.
    """
    if result is buffer:
        torch.autograd.graph.increment_version(buffer)
    elif buffer.dtype is not result.dtype:
        raise ShapeError(f"the buffer for {what} is {buffer.dtype}, expected {result.dtype}.")
    else:
        buffer.copy_(result)
    return buffer


def check_dy(out: Buffers | None, dy: Any) -> None:
    """Raise ShapeError for a buffer for dx that lies over dy, which other gradients read after it is written."""
    if out is not None and "dx" in out and isinstance(dy, Tensor) and overlap(out["dx"], dy):
        raise ShapeError("the buffer for dx lies over memory of dy, which is still read.")


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have bytes in common, taking each from its first byte to its last."""
    if torch_private.storage_id(a) != torch_private.storage_id(b) or not (a.numel() and b.numel()):
        return False
    (first, last), (begin, end) = _bytes(a), _bytes(b)
    return first < end and begin < last


def _bytes(t: Tensor) -> tuple[int, int]:
    span = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    first = int(t.storage_offset()) * t.itemsize
    return first, first + (int(span) + 1) * t.itemsize
