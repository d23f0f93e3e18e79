"""Where a parameter's gradient goes besides autograd: a `main_grad` buffer, or a queue that `backward_dw()` works off.

Both are read from the live Parameter when the backward runs: a saved weight that went through a pack hook has lost its
attributes. The autograd node returns None for such a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.ops.op import Call, Grads, Op
from fuseops.ops.scopes import DELAYED


def split(
    ops: Sequence[Op[Any]], calls: tuple[Call, ...]
) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """The calls of a backward step without what its ops delay, and the calls for `backward_dw` (empty: nothing is)."""
    delayed = [call.needs.intersection(op.delays) for op, call in zip(ops, calls, strict=True)]
    if not any(delayed):
        return calls, ()
    return (
        tuple(c._replace(needs=c.needs - d) for c, d in zip(calls, delayed, strict=True)),
        tuple(c._replace(needs=d) for c, d in zip(calls, delayed, strict=True)),
    )


# --- main_grad


def buffer_of(op: Op[Any], name: str) -> Tensor:
    """The main_grad of a parameter.  Raises FuseOpsError when there is none, or it cannot hold the gradient."""
    parameter: Any = getattr(op, name)
    # Megatron's FSDP hands the buffer out on demand
    get = getattr(parameter, "get_main_grad", None)
    buffer = getattr(parameter, "main_grad", None) if get is None else get()
    what = f"{type(op).__name__} accumulates the gradient of {name!r} into {name}.main_grad"
    if not isinstance(buffer, Tensor):
        raise FuseOpsError(
            f"{what}, which is {type(buffer).__name__}: set it to a float32 tensor of shape {tuple(parameter.shape)}, "
            "or build the op with accumulate_into_main_grad=False."
        )
    fits = buffer.shape == parameter.shape and buffer.device == parameter.device
    if (
        not fits
        or not buffer.is_contiguous()
        or buffer.dtype not in (torch.float32, parameter.dtype)
    ):
        raise FuseOpsError(
            f"{what}, a {'' if buffer.is_contiguous() else 'non-contiguous '}{buffer.dtype} of shape "
            f"{tuple(buffer.shape)} on {buffer.device}: expected a contiguous {torch.float32} or {parameter.dtype} "
            f"of shape {tuple(parameter.shape)} on {parameter.device}."
        )
    return buffer


def accept(op: Op[Any], name: str, buffer: Tensor, gradient: Tensor | None) -> None:
    """Add the gradient that an op gave to its buffer, unless the op has written it there itself (None)."""
    parameter: Any = getattr(op, name)
    if gradient is not None:
        if getattr(parameter, "overwrite_main_grad", False):
            buffer.copy_(gradient)
        else:
            buffer.add_(gradient)
    if hasattr(parameter, "grad_added_to_main_grad"):  # data-parallel wrappers look here
        parameter.grad_added_to_main_grad = True


# --- delayed


def delay(op: Op[Any], bwd: Callable[[], Grads], names: frozenset[str]) -> None:
    """Put the gradients of these parameters off until `backward_dw`."""
    op.__dict__.setdefault(DELAYED, []).append((bwd, names))


def run_delayed(module: nn.Module) -> int:
    """Compute what backwards have put off in every op of `module`, oldest first, and add it to `.grad` or main_grad.

    -> how many gradients.  Raises FuseOpsError for a parameter that has been sharded since.
    """
    done = 0
    for path, op in reversed(list(module.named_modules())):
        queue = op.__dict__.get(DELAYED, [])
        while queue:
            bwd, names = queue.pop(0)
            with torch.no_grad():
                _accumulate(op, path, bwd().params or {}, names)
            done += len(names)
    return done


def _accumulate(
    op: Any, path: str, gradients: Mapping[str, Tensor | None], names: frozenset[str]
) -> None:
    for name in sorted(names):
        parameter, gradient = getattr(op, name), gradients[name]
        if torch_private.is_dtensor(type(parameter)):
            raise FuseOpsError(
                f"backward_dw: {path or type(op).__name__}.{name} is sharded by now (FSDP2 has reduced its gradients "
                "at the end of the backward): a delayed weight gradient does not go with it. Leave delay_wgrad off."
            )
        if op.accumulate_into_main_grad:
            accept(op, name, buffer_of(op, name), gradient)
        elif gradient is not None:
            gradient = gradient.to(parameter.dtype)
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
