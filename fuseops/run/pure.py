"""Level-1 ops: a `fwd` alone. They save their inputs, and their backward is autograd over `fwd`.

It runs on the op as it was in the forward, its attributes and mode: an op is pure, but its module may have changed.
What cannot be had again is refused in the call that did it: random numbers, and a tensor of `self` that `fwd` writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.errors import FuseOpsError, InPlaceError
from fuseops.ops.op import Grads, Out
from fuseops.plan.segment import Step

from .draws import generators_of, same, states


class State(NamedTuple):
    """A state is what a module holds, to run its `fwd` again: its attributes, and its tensors with their versions."""

    kind: type
    attributes: dict[str, Any]
    tensors: dict[str, tuple[Tensor, int]]  # buffers, and others that are no parameters
    children: dict[str, State | None]

    @classmethod
    def of(cls, module: nn.Module) -> State:
        own = module.__dict__
        attributes = dict(own)
        tensors = {
            n: (t, torch_private.version(t)) for n, t in own.items() if isinstance(t, Tensor)
        }
        for name, t in own["_buffers"].items():
            if t is not None:
                tensors[name] = t, torch_private.version(t)
        children = {n: None if m is None else cls.of(m) for n, m in own["_modules"].items()}
        return cls(module.__class__, attributes, tensors, children)

    def module(self, owner: str = "") -> Any:
        """A module in this state.  What reads a tensor of it that was written since gets an InPlaceError."""
        module: nn.Module = object.__new__(self.kind)
        owner = owner or self.kind.__name__
        own = module.__dict__
        own.update(self.attributes)
        for name in self.tensors:
            own.pop(name, None)  # found among the buffers
        if self.tensors:
            own["_buffers"] = _Unwritten(owner, self)
        if self.children:
            own["_modules"] = {
                n: state and state.module(f"{owner}.{n}") for n, state in self.children.items()
            }
        return module

    def written(self) -> str | None:
        """The name of a tensor that was written since."""
        for name, (t, version) in self.tensors.items():
            if torch_private.version(t) != version:
                return name
        inner = ((name, state.written()) for name, state in self.children.items() if state)
        return next((f"{name}.{found}" for name, found in inner if found), None)


class _Unwritten(dict[str, Any]):
    """An `_Unwritten` gives the buffers of a module in a state: each must be what it was when it is read."""

    def __init__(self, owner: str, state: State) -> None:
        super().__init__(state.attributes["_buffers"])
        self.update({name: t for name, (t, _) in state.tensors.items()})
        self.owner, self.state = owner, state

    def __getitem__(self, name: str) -> Any:
        t, version = self.state.tensors.get(name, (None, 0))
        if t is not None and torch_private.version(t) != version:
            raise InPlaceError(
                f"{name!r} of {self.owner} was modified in place between the forward and the backward, which runs "
                "fwd again and reads it. Assign a new tensor instead of writing to this one, or take it by keyword "
                "and write bwd."
            )
        return super().__getitem__(name)


def keep_states(ops: Sequence[Any], at: int, scratch: dict[Any, Any] | None) -> None:
    """Note the states of those of some adjacent ops that are level 1, for their backward.

    at: the position of the first in the Sequential.  scratch: of the call.
    """
    if scratch is not None:
        states = ((at + k, State.of(op)) for k, op in enumerate(ops) if op.pure)
        scratch.update({(State, place): state for place, state in states})


def run_fwd(
    step: Step, x: Any, keywords: dict[str, Any], again: bool, scratch: dict[Any, Any] | None
) -> Any:
    """What the `fwd` of a level-1 op returns.

    again: a backward will run it once more.  Raises FuseOpsError then, where it draws random numbers or writes to a
    tensor of `self`.
    """
    op, device = step.target, x.device
    if not again or scratch is None:
        with step.calls[0].precision.autocast(device.type):
            return op.fwd(x, **keywords)
    keep_states((op,), step.at, scratch)
    state: State = scratch[State, step.at]
    fake = torch_private.num_dispatch_modes()  # fake tensors have no random state
    generators = [] if fake else generators_of(op, state.attributes, device)
    before = states(generators)
    with step.calls[0].precision.autocast(device.type):
        out = op.fwd(x, **keywords)
    if not same(before, states(generators)):
        raise FuseOpsError(
            f"{type(op).__name__}.fwd draws random numbers, and has no bwd: the backward runs fwd again, with other "
            "numbers. Save a seed and write bwd, as Dropout does, or make it a plain nn.Module."
        )
    if (name := state.written()) is not None:
        raise FuseOpsError(
            f"{type(op).__name__}.fwd writes in place to its {name!r}, and has no bwd: the backward runs fwd again, "
            "and would write twice. Write bwd, update it outside of fwd, or make the op a plain nn.Module."
        )
    return out


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
    with call.precision.autocast(tensors["x"].device.type):
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


def _check_alike(op: Any, saved: Any, call: Any, out: Out) -> None:
    """Raise FuseOpsError where `fwd` gave other results in the forward, with gradients off, than `out`, with them on:
    the backward would be that of another function. On CPUs alone: elsewhere the host would wait for the values.
    """
    if torch_private.num_dispatch_modes() or not out.y.is_cpu:
        return
    with torch.no_grad():
        _, off = _again(op, saved, call)
        pairs = [("y", off.y, out.y)]
        pairs += [(n, (off.side or {})[n], t) for n, t in (out.side or {}).items()]
        for name, before, now in pairs:
            if before.numel() and before.dtype.itemsize > 1 and not _close(before, now):
                raise FuseOpsError(
                    f"{type(op).__name__}.fwd gives another {name} with gradients on, as in the backward, which runs "
                    "it again, than in the forward, where they are off: it asks whether they are, or what changes "
                    "from call to call. Write bwd, or make it a plain nn.Module."
                )


def _close(a: Tensor, b: Tensor) -> bool:
    """Whether two results are alike but for another order of sums, or another kernel."""
    if a.shape != b.shape:
        return False
    most = float(a.nan_to_num(0, 0, 0).abs().amax())
    return torch.allclose(a, b, rtol=2**-6, atol=most * 2**-6, equal_nan=True)


def bwd_by_autograd(
    step: Step,
    saved: Any,
    dy: Any,
    dside: dict[str, Any],
    first: bool,
    scratch: dict[Any, Any] | None,
) -> Grads:
    """Backward of a level-1 op: autograd over its `fwd`.

    Raises FuseOpsError, the `first` time, where `fwd` reads a tensor that wants a gradient and came by no keyword.
    """
    state = (scratch or {}).get((State, step.at))
    op, call = step.target if state is None else state.module(), step.calls[0]
    with torch.enable_grad():
        tensors, out = _again(op, saved, call)
        if first:
            _check_leaves(op, (out.y, *(out.side or {}).values()), tensors.values())
            _check_alike(step.target if state is None else state.module(), saved, call, out)
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
