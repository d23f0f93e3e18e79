"""The plan of a call is found by its key in a cache, or by a glance at what the last call had."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import chain as chained
from itertools import repeat, starmap
from operator import attrgetter, call, getitem, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops.ops.op import NON_CONFIG_ATTRS, Op
from fuseops.torch_private import GLOBAL_HOOKS, any_autocast, tensor_guard

from .chain import Chain

Tokens = tuple[int, int, int]  # process, model, scopes
NONES = repeat(None)
NEVER = Op.alias  # of the classes whose ops are none
joined = chained.from_iterable
DICT = attrgetter("__dict__")
HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# what an instance of any op may hold that a plan depends on, beside hooks and buffers; two at least
OF_OPS = frozenset(
    {
        *("training", "_parameters", "forward", "fwd", "bwd", "_local", "_around"),
        *("reads", "writes", "delays", "accumulate_into_main_grad"),
    }
)


class CallFacts(NamedTuple):
    """`CallFacts` are what a plan depends on beside its ops: constants, which traced code can hold."""

    tokens: Tokens
    live: tuple[str, ...]  # side names read after the run, or returned
    sides: tuple[tuple[str, torch.dtype, bool, bool], ...]  # name, dtype, on meta, wants a gradient
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    grad: bool  # the mode
    x_needs: bool
    x_class: type
    autocast: torch.dtype | None  # None: it is off
    hooked: bool
    compiling: bool

    @property
    def compute(self) -> torch.dtype | None:
        """The dtype that autocast gives x. By torch's own rule double is not cast, though autocast is on."""
        return None if self.dtype is torch.float64 else self.autocast


def call_facts(
    outside: Iterable[str],
    x: Tensor,
    side: Mapping[str, Any],
    tokens: Tokens,
    live: tuple[str, ...],
    hooks: Iterable[Any] = GLOBAL_HOOKS,
) -> tuple[Any, ...]:
    """The fields of `CallFacts`.  outside: as of the `Chain`"""
    grad = torch.is_grad_enabled()
    return (
        tokens,
        live,
        tuple([side_facts(name, side[name], grad) for name in outside]) if outside else (),
        x.dtype,
        x.device,
        x.layout,
        grad,
        grad and x.requires_grad,
        x.__class__,
        autocast_of(x),
        any(hooks) and hooked(),
        torch.compiler.is_compiling(),
    )


def side_facts(name: str, t: Tensor, grad: bool) -> tuple[str, torch.dtype, bool, bool]:
    """What a plan depends on, of a side input: name, dtype, on meta, wants a gradient."""
    return name, t.dtype, t.is_meta, grad and t.requires_grad


class OpFacts(NamedTuple):
    """`OpFacts` are what a plan depends on, of one op beside its parameters."""

    kind: type
    training: bool
    alias: bool
    bare: bool  # no hooks on its forward or backward
    methods: bool  # of its own, that its class does not have
    local: bool  # it takes other tensors than those that are registered


def op_facts(ops: Iterable[Op[Any]]) -> list[tuple[Any, ...]]:
    """The fields of the `OpFacts` of every op, in one go: a repeated call waits for it."""
    return [
        (
            op.__class__ if not own["_modules"] else _written(op),
            own["training"],
            op.__class__.alias is not NEVER and op.alias,
            not any(HOOKS(own)),
            "forward" in own or "fwd" in own or "bwd" in own,
            "_local" in own,
        )
        for op in ops
        for own in (op.__dict__,)
    ]


def _written(op: Op[Any]) -> type:
    """The class of an op, which torch makes anew for every registration of a parametrization, without those."""
    kind: type = op.__class__
    return kind.__bases__[0] if "parametrizations" in op._modules else kind


class ParameterFacts(NamedTuple):
    """`ParameterFacts` are what a plan depends on, of a parameter."""

    needs: bool
    dtype: torch.dtype
    meta: bool
    kind: type

    @staticmethod
    def of(p: Tensor | None, grad: bool) -> ParameterFacts | None:
        """Those of a parameter that an op may be without.  grad: the mode"""
        return None if p is None else ParameterFacts(*parameter_facts(p, grad))


def parameter_facts(p: Tensor, grad: bool) -> tuple[bool, torch.dtype, bool, type]:
    """The fields of `ParameterFacts`."""
    return grad and p.requires_grad, p.dtype, p.is_meta, p.__class__


class PlanKey(NamedTuple):
    """A `PlanKey` holds all that a plan depends on, besides the outcome of conditions."""

    ops: tuple[OpFacts, ...]
    parameters: tuple[tuple[ParameterFacts | None, ...], ...]  # of every op
    call: CallFacts

    @staticmethod
    def of(
        chain: Chain, x: Tensor, side: Mapping[str, Any], tokens: Tokens, live: tuple[str, ...]
    ) -> PlanKey:
        """The key of an eager call."""
        call = CallFacts(*call_facts(chain.outside, x, side, tokens, live))
        parameters = [
            tuple([ParameterFacts.of(parameter_of(op, name), call.grad) for name in names])
            for op, names in zip(chain.ops, chain.parameters, strict=True)
        ]
        return PlanKey(tuple(starmap(OpFacts, op_facts(chain.ops))), tuple(parameters), call)


def parameter_of(op: Op[Any], name: str) -> Tensor | None:
    """The registered parameter of an op, or what stands for one that it does not have under this name."""
    registered = op.__dict__["_parameters"]
    found: Tensor | None = registered[name] if name in registered else op.sample(name)
    return found


def has_hooks(own: Mapping[str, Any]) -> bool:
    """Whether a module, given as its `__dict__`, has hooks on its forward or backward."""
    # read one by one: dynamo knows no itemgetter
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    )


def hooked() -> bool:
    """Whether there are hooks on all modules of the process, besides those with which fuseops watches them."""
    for hooks in GLOBAL_HOOKS:
        for hook in hooks.values():
            if not str(getattr(hook, "__module__", "")).startswith("fuseops."):
                return True
    return False


class Glance:
    """Tells whether a call has the key of an earlier one, in a fifth of the time that the key takes. Eager only.

    What it compares of the call are the fields of the key; of ops what their instances hold, object by object, where
    somebody may have written to one since the last look, as `Runner.fits` tells; for parameters torch's guard sees each
    field of `ParameterFacts`, while the mode is as it was. Loops over ops are C's.
    """

    def __init__(self, chain: Chain, key: PlanKey, read: Collection[int] = ()) -> None:
        """read: the ops whose own attributes conditions have read: sizes, options, kinds.

        Raises KeyError where a glance does not do: for tensors that are not registered.
        """
        self.chain, self.key = chain, key
        self.kinds, owns = [*map(type, chain.ops)], [*map(DICT, chain.ops)]
        self.held = [*map(frozenset, owns)]
        # what the instances hold, read in one go
        self.readers = [itemgetter(*_depends_on(own, i in read)) for i, own in enumerate(owns)]
        self.values = [*joined(map(call, self.readers, owns))]
        self.hooked = [*map(any, map(HOOKS, owns))]
        # what the instances had been written when they were last found alike
        self.versions: object = None
        self.hooks: list[Any] = []  # of all ops, then
        self.aliasing = [op for op in chain.ops if op.__class__.alias is not NEVER]
        self.aliases = [op.alias for op in self.aliasing]
        # where the parameters and buffers are that ops take, each tensor once (the guard wants them so); the other
        # places of each, by its number; and the places of those that are None
        self.homes: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.again: list[tuple[dict[str, Any], str, int]] = []
        self.absent: tuple[list[dict[str, Any]], list[str]] = [], []
        found: dict[int, int] = {}
        for own, names, facts in zip(owns, chain.parameters, key.ops, strict=True):
            if facts.local:
                raise KeyError(names)
            for name in names:
                home = own["_parameters"] if name in own["_parameters"] else own["_buffers"]
                known = found.get(id(home[name]))
                if home[name] is None:
                    self.absent[0].append(home)
                    self.absent[1].append(name)
                elif known is None:
                    found[id(home[name])] = len(self.homes)
                    self.homes.append(home)
                    self.names.append(name)
                else:
                    self.again.append((home, name, known))
        try:
            self.alike = tensor_guard([*map(getitem, self.homes, self.names)])
        except RuntimeError as error:  # sparse ones have no strides
            raise KeyError from error

    def fits(
        self,
        x: Tensor,
        side: Mapping[str, Any],
        tokens: Tokens,
        live: tuple[str, ...],
        versions: object = None,
    ) -> bool:
        """Whether `PlanKey.of` would give the key again, and what conditions have read is the same.

        versions: another object where somebody may have written to an op since; None: look in any case
        """
        if call_facts(self.chain.outside, x, side, tokens, live) != self.key.call:
            return False
        try:
            looked = versions is not None and versions is self.versions and not any(self.hooks)
            if not (looked or self._alike(versions)):
                return False
            tensors = [*map(getitem, self.homes, self.names)]
            if not (self.alike(*tensors) and all(map(is_, map(getitem, *self.absent), NONES))):
                return False
            return not self.again or all(h[name] is tensors[k] for h, name, k in self.again)
        except KeyError:  # one went, another came
            return False

    def _alike(self, versions: object) -> bool:
        """Whether the ops are of the kinds that they were, and hold what they held.   versions: before this look"""
        owns = [*map(DICT, self.chain.ops)]
        if [*map(type, self.chain.ops)] != self.kinds or [*map(frozenset, owns)] != self.held:
            return False
        if not all(map(is_, joined(map(call, self.readers, owns)), self.values)):
            return False
        if [*map(any, map(HOOKS, owns))] != self.hooked:
            return False
        if self.aliasing and [op.alias for op in self.aliasing] != self.aliases:
            return False
        self.versions, self.hooks = versions, [*joined(map(HOOKS, owns))]
        return True


def _depends_on(own: Mapping[str, Any], read: bool) -> list[str]:
    """What an instance, given as its `__dict__`, holds that a plan may depend on.  read: by conditions"""
    known = OF_OPS if not own["_buffers"] else OF_OPS | {"_buffers"}
    return [n for n in own if n in known or (read and n not in NON_CONFIG_ATTRS)]


def autocast_of(x: Tensor) -> torch.dtype | None:
    """The dtype of autocast where x is, None where it is off. The meta device has none, and raises when asked."""
    if not any_autocast():
        return None
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
