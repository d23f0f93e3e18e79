"""Level-1 ops: a `fwd` alone. They save their inputs, and their backward is autograd over `fwd`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.ops.op import Grads, Out

from .segment import Step


def autocast_of(call: Any, device: str) -> AbstractContextManager[Any]:
    """A level-1 op runs under the autocast that a plain module would see."""
    compute = call.precision.compute
    return nullcontext() if compute is None else torch.autocast(device, compute)


def running(step: Step, device: torch.device, checked: bool) -> AbstractContextManager[Any]:
    """Around the `fwd` of a level-1 op.  Unless `checked` before, raises FuseOpsError where it draws random numbers."""
    autocast = autocast_of(step.calls[0], device.type)
    if checked or torch_private.num_dispatch_modes():  # fake tensors have no random state
        return autocast
    return _drawing_nothing(step.target, device, autocast)


@contextmanager
def _drawing_nothing(
    op: Any, device: torch.device, autocast: AbstractContextManager[Any]
) -> Iterator[None]:
    before = _random_states(device)
    with autocast:
        yield
    if any(not torch.equal(a, b) for a, b in zip(before, _random_states(device), strict=True)):
        raise FuseOpsError(
            f"{type(op).__name__}.fwd draws random numbers, and has no bwd: the backward runs fwd again, with other "
            "numbers. Save a seed and write bwd, as Dropout does, or make it a plain nn.Module."
        )


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.get_rng_state(device))
    return states


def inputs_saved(step: Step, x: Any, keywords: dict[str, Any]) -> Any:
    """A level-1 op saves its inputs."""
    return (x, *(keywords.get(name) for name in step.target.signature.keywords))


def bwd_by_autograd(op: Any, saved: Any, dy: Any, dside: dict[str, Any], call: Any) -> Grads:
    """Backward of a level-1 op: autograd over its `fwd`."""
    fields = ("x", *op.signature.keywords)
    with torch.enable_grad():
        tensors = {
            name: value.detach().requires_grad_(name in call.needs)
            if isinstance(value, Tensor)
            else value
            for name, value in zip(fields, saved, strict=True)
        }
        keywords = {
            n: v
            for n, v in tensors.items()
            if n != "x" and (v is not None or n not in op.signature.optional)
        }
        if op.signature.fwd_call:
            keywords["call"] = call
        with autocast_of(call, tensors["x"].device.type):
            out = op.fwd(tensors["x"], **keywords)
        out = out if isinstance(out, Out) else Out(out)
        pairs = [(out.y, dy), *((t, dside.get(name)) for name, t in (out.side or {}).items())]
        pairs = [(y, d) for y, d in pairs if d is not None and y.requires_grad]
        wanted = {n: tensors[n] for n in fields if n in call.needs and tensors[n] is not None}
        found: Any = [None] * len(wanted)
        if pairs and wanted:
            found = torch.autograd.grad(
                [y for y, _ in pairs],
                list(wanted.values()),
                [d for _, d in pairs],
                allow_unused=True,
            )
    by_name = dict(zip(wanted, found, strict=True))
    return Grads(by_name.get("x"), by_name, by_name)
