"""What the plan of a call depends on: by key in a cache, or by a glance at what the last call had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops.ops.op import Op
from fuseops.torch_private import GLOBAL_HOOKS

Tokens = tuple[int, int, int]  # process, model, scopes
FIXED, MISSING = object(), object()


class Asked(NamedTuple):
    """Whom a run of ops asks at each call."""

    ops: tuple[Op[Any], ...]
    parameters: tuple[tuple[str, ...], ...]  # names of every op's
    reads: tuple[str, ...]  # side inputs


class Key(NamedTuple):
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
    facts = [kind, own["training"], op.alias]
    if has_hooks(own):
        facts.append("hooks")
    if "forward" in own or "fwd" in own or "bwd" in own:
        facts.append("a method of its own")
    for name in parameters:
        p = registered[name] if name in registered else op.sample(name)
        known = None
        if p is not None:
            known = grad and p.requires_grad, p.dtype, p.is_meta, p.__class__
        facts.append(known)
    return tuple(facts)


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
    asked: Asked, x: Tensor, side: Mapping[str, Any], tokens: Tokens, live: tuple[str, ...]
) -> Key:
    """The key of a call."""
    grad, compiling = torch.is_grad_enabled(), torch.compiler.is_compiling()
    if compiling:  # dynamo guards on attributes that it reads, not on what is in a `__dict__`
        for op in asked.ops:
            _ = op.forward, op.fwd, op.bwd
    return Key(
        tuple(
            [
                op_facts(op, names, grad)
                for op, names in zip(asked.ops, asked.parameters, strict=True)
            ]
        ),
        tuple(
            [
                (n, t.dtype, t.is_meta, grad and t.requires_grad)
                for n, t in [(n, side[n]) for n in asked.reads]
            ]
        ),
        tokens,
        live,
        x.dtype,
        x.device,
        grad and x.requires_grad,
        x.__class__,
        _autocast(x),
        hooked(),
        compiling,
    )


class Glance:
    """Tells whether a call has the key of an earlier one, in half the time that the key takes. Eager only."""

    def __init__(self, asked: Asked, key: Key) -> None:
        """Raises KeyError where a glance does not do: for hooks, and for parameters that are not registered."""
        self.key = key
        self.ops: list[tuple[Any, ...]] = []
        for op, names, facts in zip(asked.ops, asked.parameters, key.ops, strict=True):
            own = op.__dict__
            registered = own["_parameters"]
            if len(facts) != 3 + len(names) or not registered.keys() >= {*names}:
                raise KeyError(op)
            missing = False, None, False, None.__class__
            parameters = [(name, *(facts[k] or missing)) for k, name in enumerate(names, 3)]
            alias = FIXED if op.__class__.alias is Op.alias else facts[2]
            self.ops.append((op, own, registered, *facts[:2], alias, parameters))

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
        for op, own, registered, kind, training, alias, parameters in self.ops:
            if (
                op.__class__ is not kind
                or own["training"] is not training
                or own["_parameters"] is not registered
                or own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
                or "forward" in own
                or "fwd" in own
                or "bwd" in own
                or (alias is not FIXED and op.alias is not alias)
            ):
                return False
            for name, wanted, dtype, meta, kind in parameters:
                p = registered.get(name, MISSING)
                if p.__class__ is not kind:
                    return False
                if p is not None and (
                    p.dtype is not dtype
                    or p.is_meta is not meta
                    or (grad and p.requires_grad) is not wanted
                ):
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
