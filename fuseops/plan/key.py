"""What the plan of a call depends on: by key in a cache, or by a glance at what the last call had."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseops.ops.op import OF_EVERY_MODULE, Op
from fuseops.torch_private import GLOBAL_HOOKS, tensor_guard

from .chain import Chain

Tokens = tuple[int, int, int]  # process, model, scopes
FIXED = object()


class PlanKey(NamedTuple):
    """What a plan depends on, besides the outcome of conditions: constants, which traced code can hold."""

    ops: tuple[Any, ...]  # op_facts of every op
    sides: tuple[tuple[str, torch.dtype, bool, bool], ...]  # name, dtype, on meta, wants a gradient
    tokens: Tokens
    live: tuple[str, ...]  # side names read after the run, or returned
    dtype: torch.dtype
    device: torch.device
    x_needs: bool
    x_class: type
    autocast: torch.dtype | None
    hooked: bool
    compiling: bool


def op_facts(op: Op[Any], parameters: Sequence[str], grad: bool) -> Any:
    """What a plan depends on, of one op: class, mode, hooks, and of its parameters (need, dtype, on meta, class)."""
    own = op.__dict__
    registered = own["_parameters"]
    kind: type = op.__class__
    if "parametrizations" in own["_modules"]:
        kind = kind.__bases__[0]  # torch makes a class anew for every registration
    facts = [kind, own["training"], bool(op.alias)]
    if has_hooks(own):
        facts.append("hooks")
    if has_methods(own):
        facts.append("a method of its own")
    if op._local:
        facts.append("other tensors than those that are registered")
    for name in parameters:
        facts.append(
            parameter_facts(registered[name] if name in registered else op.sample(name), grad)
        )
    return tuple(facts)


def parameter_facts(p: Tensor | None, grad: bool) -> Any:
    """What a plan depends on, of a parameter: need, dtype, on meta, class."""
    return None if p is None else (grad and p.requires_grad, p.dtype, p.is_meta, p.__class__)


def has_methods(own: Mapping[str, Any]) -> bool:
    """Whether an op, given as its `__dict__`, has methods that its class does not."""
    return "forward" in own or "fwd" in own or "bwd" in own


def has_hooks(own: Mapping[str, Any]) -> bool:
    """Whether a module, given as its `__dict__`, has hooks on its forward or backward."""
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    )


def hooked() -> bool:
    """Whether there are hooks on all modules of the process, besides those with which fuseops watches them."""
    if not any(GLOBAL_HOOKS):
        return False
    found = (hook for hooks in GLOBAL_HOOKS for hook in hooks.values())
    return any(not str(getattr(hook, "__module__", "")).startswith("fuseops.") for hook in found)


def key_of(
    facts: tuple[Any, ...],
    outside: Iterable[str],
    x: Tensor,
    side: Mapping[str, Any],
    tokens: Tokens,
    live: tuple[str, ...],
) -> PlanKey:
    """The key of a call.  facts: `op_facts` of its ops; outside: as of their `Chain`"""
    grad = torch.is_grad_enabled()
    sides = [(name, side[name]) for name in outside]
    return PlanKey(
        facts,
        tuple([(n, t.dtype, t.is_meta, grad and t.requires_grad) for n, t in sides]),
        tokens,
        live,
        x.dtype,
        x.device,
        grad and x.requires_grad,
        type(x),
        _autocast(x),
        hooked(),
        torch.compiler.is_compiling(),
    )


class Glance:
    """Tells whether a call has the key of an earlier one, in half the time that the key takes. Eager only."""

    def __init__(self, chain: Chain, key: PlanKey) -> None:
        """Raises KeyError where a glance does not do: for hooks, and for tensors that are not registered."""
        self.key = key
        self.ops: list[tuple[Any, ...]] = []
        # where the parameters and buffers are that ops take, each tensor once (the guard wants them so); and the
        # other places of each, by its number, and those that are None, by -1
        self.homes: list[tuple[dict[str, Any], str]] = []
        self.again: list[tuple[dict[str, Any], str, int]] = []
        found: dict[int, int] = {id(None): -1}
        for op, names, facts in zip(chain.ops, chain.parameters, key.ops, strict=True):
            own = op.__dict__
            registered, buffers = own["_parameters"], own["_buffers"]
            if len(facts) != 3 + len(names):
                raise KeyError(op)
            for name in names:
                home = registered if name in registered else buffers
                known = found.get(id(home[name]))
                if known is None:
                    found[id(home[name])] = len(self.homes)
                    self.homes.append((home, name))
                else:
                    self.again.append((home, name, known))
            alias = FIXED if op.__class__.alias is Op.alias else facts[2]
            self.ops.append((op, own, registered, buffers, *facts[:2], alias))
        tensors = [home[name] for home, name in self.homes]
        self.grad = torch.is_grad_enabled()
        self.trains = any(t.requires_grad for t in tensors)  # the guard does not see the mode
        try:
            self.alike = tensor_guard(tensors)
        except RuntimeError as error:  # sparse ones have no strides
            raise KeyError from error

    def fits(
        self, x: Tensor, side: Mapping[str, Any], tokens: Tokens, live: tuple[str, ...]
    ) -> bool:
        """Whether `key_of` would give the key again."""
        key, grad = self.key, torch.is_grad_enabled()
        if (
            x.dtype is not key.dtype
            or x.device != key.device
            or (grad and x.requires_grad) is not key.x_needs
            or x.__class__ is not key.x_class
            or tokens != key.tokens
            or live != key.live
            or _autocast(x) is not key.autocast
            or hooked() is not key.hooked
            or (self.trains and grad is not self.grad)
        ):
            return False
        for name, dtype, meta, wanted in key.sides:
            t = side[name]
            if (
                t.dtype is not dtype
                or t.is_meta is not meta
                or (grad and t.requires_grad) is not wanted
            ):
                return False
        for op, own, registered, buffers, kind, training, alias in self.ops:
            if (
                op.__class__ is not kind
                or own["training"] is not training
                or own["_parameters"] is not registered
                or own["_buffers"] is not buffers
                or own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
                or "forward" in own
                or "fwd" in own
                or "bwd" in own
                or "_local" in own
                or (alias is not FIXED and op.alias is not alias)
            ):
                return False
        try:
            tensors = [home[name] for home, name in self.homes]
            if not self.alike(*tensors):
                return False
            tensors.append(None)
            return all(home[name] is tensors[k] for home, name, k in self.again)
        except KeyError:
            return False


class Attributes:
    """What the instances of some ops hold beside what every module holds: sizes, options, kinds."""

    def __init__(self, ops: Iterable[nn.Module]) -> None:
        self.found: list[tuple[dict[str, Any], int, Callable[[Any], Any], Any]] = []
        for op in ops:
            own = op.__dict__
            names = [name for name in own if name not in OF_EVERY_MODULE]
            read = itemgetter(*names, *names) if names else tuple  # twice: of one it gives no tuple
            self.found.append((own, len(own), read, read(own) if names else ()))

    def unchanged(self) -> bool:
        """Whether all of them are the same objects."""
        try:
            for own, count, read, values in self.found:
                if len(own) != count or (values and not all(map(is_, read(own), values))):
                    return False
        except KeyError:  # one went, another came
            return False
        return True


def _autocast(x: Tensor) -> torch.dtype | None:
    """By torch's own rule, double is not cast."""
    return None if x.dtype is torch.float64 else autocast_dtype(x.device.type)


def autocast_dtype(device: str) -> torch.dtype | None:
    """The autocast dtype of a device type, None where it is off. The meta device has none, and raises when asked."""
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
