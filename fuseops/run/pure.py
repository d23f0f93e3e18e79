"""Level-1 ops: a `fwd` alone. They save their inputs, and their backward is autograd over `fwd`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.ops.op import Grads, Out
from fuseops.plan.segment import Step


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


def _again(op: Any, saved: Any, call: Any) -> tuple[dict[str, Any], Out]:
    """The `fwd` of a level-1 op once more, on leaves.   -> the leaves by name, its results"""
    tensors = {
        name: value.detach().requires_grad_(name in call.needs)
        if isinstance(value, Tensor)
        else value
        for name, value in zip(("x", *op.signature.keywords), saved, strict=True)
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
    return tensors, out if isinstance(out, Out) else Out(out)


def _check_leaves(op: Any, results: Iterable[Tensor], leaves: Iterable[Any]) -> None:
    """Raise FuseOpsError where results depend on other leaves than these: those would get no gradient."""
    known = {*map(id, leaves)}
    nodes = [t.grad_fn for t in results]
    seen = set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise FuseOpsError(
                f"{type(op).__name__}.fwd reads a tensor of shape {tuple(leaf.shape)} that wants a gradient and does "
                "not come by keyword: it would get none. Register it as a parameter, or name it in `reads`, and add "
                "it to fwd(self, x, *, ...)."
            )
        nodes += [behind for behind, _ in node.next_functions]


def bwd_by_autograd(step: Step, saved: Any, dy: Any, dside: dict[str, Any], first: bool) -> Grads:
    """Backward of a level-1 op: autograd over its `fwd`.

    Raises FuseOpsError, the `first` time, where `fwd` reads a tensor that wants a gradient and came by no keyword.
    """
    op, call = step.target, step.calls[0]
    with torch.enable_grad():
        tensors, out = _again(op, saved, call)
        if first:
            _check_leaves(op, (out.y, *(out.side or {}).values()), tensors.values())
        pairs = [(out.y, dy), *((t, dside.get(name)) for name, t in (out.side or {}).items())]
        pairs = [(y, d) for y, d in pairs if d is not None and y.requires_grad]
        wanted = {n: t for n, t in tensors.items() if n in call.needs and t is not None}
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
