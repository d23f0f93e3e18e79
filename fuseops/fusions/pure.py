"""Level-1 ops: a `fwd` alone. They save their inputs, and their backward is autograd over `fwd`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fuseops.ops.op import Grads, Out

from .segment import Step


def autocast_of(call: Any, device: str) -> AbstractContextManager[Any]:
    """A level-1 op runs under the autocast that a plain module would see."""
    compute = call.precision.compute
    return nullcontext() if compute is None else torch.autocast(device, compute)


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
