"""Level-1 ops, which have a `fwd` alone: they save their inputs, and their backward is autograd over `fwd`.

The backward runs `fwd` again, with the attributes and mode that the op had in the forward. What it could not reproduce
is an error in the forward: random numbers, and writes of `fwd` to a tensor of `self`; or in the backward: a tensor or
another attribute that it reads was modified since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.errors import FuseOpsError, InPlaceError
from fuseops.ops.contents import IRRELEVANT, Contents, may_change
from fuseops.ops.op import Grads, Out
from fuseops.plan.segment import Step
from fuseops.torch_private import dict_version

from .generators import generators_of, rng_states, states_equal

MAX_KNOWN = 1024  # of a dict that changed nobody asks again
_watched_names: dict[object, tuple[tuple[str, ...], tuple[str, ...]]] = {}  # by version of a dict


def watched_names(own: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of a module's attributes that are tensors, and of others that may change, from its dict."""
    version = dict_version(own)
    found = _watched_names.get(version)
    if found is None:
        if len(_watched_names) >= MAX_KNOWN:
            _watched_names.clear()
        others = [(n, v) for n, v in own.items() if n not in IRRELEVANT]
        tensors = tuple([n for n, v in others if isinstance(v, Tensor)])
        changing = [n for n, v in others if n not in tensors and may_change(v)]
        found = _watched_names[version] = tensors, tuple(changing)
    return found


class ModuleState(NamedTuple):
    """A `ModuleState` is a module's attributes, and what may change in them, kept to run its `fwd` again."""

    kind: type
    attributes: dict[str, Any]
    tensors: dict[str, tuple[Tensor, int]]  # buffers, and others that are no parameters; versions
    changing: tuple[str, ...]  # names of attributes that hold others
    contents: dict[str, Contents]  # of these, once they are noted
    children: dict[str, ModuleState | None]

    @classmethod
    def of(cls, module: nn.Module) -> ModuleState:
        own = module.__dict__
        names, changing = watched_names(own)
        found = [(n, own[n]) for n in names]
        found += [(n, t) for n, t in own["_buffers"].items() if t is not None]
        tensors = {n: (t, torch_private.version(t)) for n, t in found}
        children = {n: None if m is None else cls.of(m) for n, m in own["_modules"].items()}
        return cls(module.__class__, dict(own), tensors, changing, {}, children)

    def note_contents(self) -> None:
        """Note what attributes hold: after `fwd` ran, which may keep in them what it computed."""
        for name in self.changing:
            self.contents[name] = Contents.of(self.attributes[name])
        for state in self.children.values():
            if state is not None:
                state.note_contents()

    def module(self, owner: str = "") -> Any:
        """A module in this state. Reading an attribute of it that was modified since raises InPlaceError."""
        module: nn.Module = object.__new__(self.kind)
        owner = owner or self.kind.__name__
        own = module.__dict__
        own.update(self.attributes)
        if self.tensors or self.changing:
            watched = own["_buffers"] = _Watched(owner, self)
            for name in own.keys() & watched.keys():
                del own[name]  # read from _buffers, which asks whether it was modified
                if hasattr(self.kind, name):  # the default of a class would be found before it
                    own[name] = watched[name]
        if self.children:
            own["_modules"] = {
                n: state and state.module(f"{owner}.{n}") for n, state in self.children.items()
            }
        return module

    def is_modified(self, name: str) -> bool:
        """Whether the tensor, or what the attribute holds, was modified since."""
        if name in self.tensors:
            t, version = self.tensors[name]
            return torch_private.version(t) != version
        known = self.contents.get(name)
        return known is not None and not known.equals(Contents.of(self.attributes[name]))

    def wants_gradient(self) -> bool:
        """Whether a tensor that it holds, and that is no parameter, wants a gradient."""
        if not (self.tensors or self.changing or self.children):
            return False  # most
        held = [t for t, _ in self.tensors.values()]
        held += [t for contents in self.contents.values() for t in contents.objects]
        return any(isinstance(t, Tensor) and t.requires_grad for t in held) or any(
            state.wants_gradient() for state in self.children.values() if state is not None
        )

    def modified_tensor(self) -> str | None:
        """The name of a tensor that was modified since, or None."""
        for name in self.tensors:
            if self.is_modified(name):
                return name
        inner = ((name, state.modified_tensor()) for name, state in self.children.items() if state)
        return next((f"{name}.{found}" for name, found in inner if found), None)


class _Watched(dict[str, Any]):
    """A `_Watched` holds the buffers of a `ModuleState`, its other tensors and what may change. Reading one that was
    modified raises InPlaceError.
    """

    def __init__(self, owner: str, state: ModuleState) -> None:
        super().__init__(state.attributes["_buffers"])
        self.update({name: t for name, (t, _) in state.tensors.items()})
        self.update({name: state.attributes[name] for name in state.changing})
        self.owner, self.state = owner, state

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if self.state.is_modified(name):
            raise InPlaceError(
                f"{name!r} of {self.owner} was modified in place since the forward, and the backward, which runs "
                f"fwd again, reads it. Assign a new {type(value).__name__} instead of writing to this one, or write "
                "bwd and save what it reads."
            )
        return value


def save_states(ops: Sequence[Any], at: int, scratch: dict[Any, Any] | None) -> None:
    """Save the states of the level-1 ops among adjacent ops for their backward.

    at: position of the first in the Sequential.  scratch: of the call.
    """
    if scratch is not None:
        for k, op in enumerate(ops):
            if op.pure:
                state = scratch[ModuleState, at + k] = ModuleState.of(op)
                state.note_contents()


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
    state = scratch[ModuleState, step.at] = ModuleState.of(op)
    fake = torch_private.num_dispatch_modes()  # fake tensors have no random state
    generators = [] if fake else generators_of(op, state.attributes, device)
    before = rng_states(generators)
    with step.calls[0].precision.autocast(device.type):
        out = op.fwd(x, **keywords)
    state.note_contents()
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

    first: also check that `fwd` is deterministic.  Raises FuseOpsError for one that is not, or that reads a tensor that
    wants a gradient and is no keyword, which is asked again while `self` holds such a tensor.
    """
    state = (scratch or {}).get((ModuleState, step.at))
    op, call = step.target if state is None else state.module(), step.calls[0]
    with torch.enable_grad():
        tensors, out = _rerun_fwd(op, saved, call)
        if first or (state is not None and state.wants_gradient()):
            _check_leaves(op, (out.y, *(out.side or {}).values()), tensors.values())
        if first:
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
