"""Level-1 ops, which have a `fwd` alone: they save their inputs, and their backward is autograd over `fwd`.

The backward runs `fwd` again, with the attributes and mode that the op had in the forward. What it could not reproduce
is an error in the forward: random numbers, and writes of `fwd` to a tensor of `self`.
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

from .generators import generators_of, rng_states, states_equal


class ModuleState(NamedTuple):
    """A `ModuleState` is a module's attributes and tensors, with their versions, kept to run its `fwd` again."""

    kind: type
    attributes: dict[str, Any]
    tensors: dict[str, tuple[Tensor, int]]  # buffers, and others that are no parameters
    children: dict[str, ModuleState | None]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
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
        """A module in this state. Reading a tensor of it that was modified since raises InPlaceError."""
        module: nn.Module = object.__new__(self.kind)
        owner = owner or self.kind.__name__
        own = module.__dict__
        own.update(self.attributes)
        for name in self.tensors:
            own.pop(name, None)  # read from _buffers, which checks versions
        if self.tensors:
            own["_buffers"] = _VersionedBuffers(owner, self)
        if self.children:
            own["_modules"] = {
                n: state and state.module(f"{owner}.{n}") for n, state in self.children.items()
            }
        return module

    def modified_tensor(self) -> str | None:
        """The name of a tensor that was modified since, or None."""
        for name, (t, version) in self.tensors.items():
            if torch_private.version(t) != version:
                return name
        inner = ((name, state.modified_tensor()) for name, state in self.children.items() if state)
        return next((f"{name}.{found}" for name, found in inner if found), None)


class _VersionedBuffers(dict[str, Any]):
    """A `_VersionedBuffers` holds the buffers of a `ModuleState`. Reading one that was modified raises InPlaceError."""

    def __init__(self, owner: str, state: ModuleState) -> None:
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


def save_states(ops: Sequence[Any], at: int, scratch: dict[Any, Any] | None) -> None:
    """Save the states of the level-1 ops among adjacent ops for their backward.

    at: position of the first in the Sequential.  scratch: of the call.
    """
    if scratch is not None:
        states = ((at + k, ModuleState.of(op)) for k, op in enumerate(ops) if op.pure)
        scratch.update({(ModuleState, place): state for place, state in states})


def run_fwd(
    step: Step, x: Any, keywords: dict[str, Any], reruns: bool, scratch: dict[Any, Any] | None
) -> Any:
    """Run the `fwd` of a level-1 op.

    reruns: the backward will run it again.  Raises FuseOpsError then, if it draws random numbers or writes to a tensor
    of `self`.
    """
    op, device = step.target, x.device
    if not reruns or scratch is None:
        with step.calls[0].precision.autocast(device.type):
            return op.fwd(x, **keywords)
    save_states((op,), step.at, scratch)
    state: ModuleState = scratch[ModuleState, step.at]
    fake = torch_private.num_dispatch_modes()  # fake tensors have no random state
    generators = [] if fake else generators_of(op, state.attributes, device)
    before = rng_states(generators)
    with step.calls[0].precision.autocast(device.type):
        out = op.fwd(x, **keywords)
    if not states_equal(before, rng_states(generators)):
        raise FuseOpsError(
            f"{type(op).__name__}.fwd draws random numbers, and has no bwd: the backward runs fwd again, with other "
            "numbers. Save a seed and write bwd, as Dropout does, or make it a plain nn.Module."
        )
    if (name := state.modified_tensor()) is not None:
        raise FuseOpsError(
            f"{type(op).__name__}.fwd writes in place to its {name!r}, and has no bwd: the backward runs fwd again, "
            "and would write twice. Write bwd, update it outside of fwd, or make the op a plain nn.Module."
        )
    return out


def saved_inputs(step: Step, x: Any, keywords: dict[str, Any]) -> Any:
    """The inputs of a level-1 op, which are all that it saves."""
    return (x, *(keywords.get(name) for name in step.target.signature.keywords))


def _rerun_fwd(op: Any, saved: Any, call: Any) -> tuple[dict[str, Any], Out]:
    """Run the `fwd` of a level-1 op again, on leaves.   -> the leaves by name, its results"""
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
    """Raise FuseOpsError where results depend on leaves other than these, which would get no gradient."""
    known = {*map(id, leaves)}
    for leaf in torch_private.leaves_behind(results):
        if id(leaf) not in known:
            raise FuseOpsError(
                f"{type(op).__name__}.fwd reads a tensor of shape {tuple(leaf.shape)} that wants a gradient and does "
                "not come by keyword: it would get none. Register it as a parameter, or name it in `reads`, and add "
                "it to fwd(self, x, *, ...)."
            )


def _check_deterministic(op: Any, saved: Any, call: Any, out: Out) -> None:
    """Raise FuseOpsError where `fwd` gives other results with gradients off, as in the forward, than `out`, with them
    on: the backward would be that of another function. On CPUs only, since the comparison reads values.
    """
    if torch_private.num_dispatch_modes() or not out.y.is_cpu:
        return
    with torch.no_grad():
        _, off = _rerun_fwd(op, saved, call)
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
    """Whether two results are equal up to the rounding of another order of sums, or another kernel."""
    if a.shape != b.shape:
        return False
    largest = float(a.nan_to_num(0, 0, 0).abs().amax())
    return torch.allclose(a, b, rtol=2**-6, atol=largest * 2**-6, equal_nan=True)


def bwd_by_autograd(
    step: Step,
    saved: Any,
    dy: Any,
    dside: dict[str, Any],
    first: bool,
    scratch: dict[Any, Any] | None,
) -> Grads:
    """The backward of a level-1 op: autograd over its `fwd`.

    first: also check that `fwd` is deterministic and reads no tensor that needs a gradient but its keywords; raises
    FuseOpsError.
    """
    state = (scratch or {}).get((ModuleState, step.at))
    op, call = step.target if state is None else state.module(), step.calls[0]
    with torch.enable_grad():
        tensors, out = _rerun_fwd(op, saved, call)
        if first:
            _check_leaves(op, (out.y, *(out.side or {}).values()), tensors.values())
            _check_deterministic(step.target if state is None else state.module(), saved, call, out)
        pairs = [(out.y, dy), *((t, dside.get(name)) for name, t in (out.side or {}).items())]
        pairs = [(y, d) for y, d in pairs if d is not None and y.requires_grad]
        wanted_tensors = {n: t for n, t in tensors.items() if n in call.needs and t is not None}
        found: Any = [None] * len(wanted_tensors)
        if pairs and wanted_tensors:
            found = torch.autograd.grad(
                [y for y, _ in pairs],
                list(wanted_tensors.values()),
                [d for _, d in pairs],
                allow_unused=True,
            )
    by_name = dict(zip(wanted_tensors, found, strict=True))
    return Grads(by_name.get("x"), by_name, by_name)
