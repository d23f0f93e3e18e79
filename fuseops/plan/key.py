"""The key under which the plan of a call is cached, and the guard that checks a call against the last key."""

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
NO_ALIAS = Op.alias  # of the classes whose ops are none
flatten = chained.from_iterable
DICT = attrgetter("__dict__")
HOOKS = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# attributes of an op's instance that a plan depends on, beside hooks and buffers (an instance has two at least)
PLANNED_ATTRIBUTES = frozenset(
    {
        *("training", "_parameters", "forward", "fwd", "bwd", "_local", "_around"),
        *("reads", "writes", "delays", "accumulate_into_main_grad"),
    }
)


class CallFacts(NamedTuple):
    """`CallFacts` hold what a plan depends on besides its ops, as constants that traced code can hold."""

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
        """The dtype to which autocast casts x, None for no cast. Like torch, it leaves double alone."""
        return None if self.dtype is torch.float64 else self.autocast


def call_facts(
    outside: Iterable[str],
    x: Tensor,
    side: Mapping[str, Any],
    tokens: Tokens,
    live: tuple[str, ...],
    hooks: Iterable[Any] = GLOBAL_HOOKS,
) -> tuple[Any, ...]:
    """The fields of `CallFacts`.  outside: `Chain.outside`"""
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
    """What a plan depends on of a side input: name, dtype, on meta, needs a gradient."""
    return name, t.dtype, t.is_meta, grad and t.requires_grad


class OpFacts(NamedTuple):
    """`OpFacts` hold what a plan depends on of one op, besides its parameters."""

    kind: type
    training: bool
    alias: bool
    bare: bool  # no hooks on its forward or backward
    methods: bool  # fwd, bwd or forward is overridden on the instance
    local: bool  # it computes with other tensors than the registered ones


def op_facts(ops: Iterable[Op[Any]]) -> list[tuple[Any, ...]]:
    """The fields of the `OpFacts` of all ops, in one comprehension: this is a hot path."""
    return [
        (
            op.__class__ if not own["_modules"] else _registered_class(op),
            own["training"],
            op.__class__.alias is not NO_ALIAS and op.alias,
            not any(HOOKS(own)),
            "forward" in own or "fwd" in own or "bwd" in own,
            "_local" in own,
        )
        for op in ops
        for own in (op.__dict__,)
    ]


def _registered_class(op: Op[Any]) -> type:
    """The class of an op as it was written; torch makes a subclass for each registered parametrization."""
    kind: type = op.__class__
    return kind.__bases__[0] if "parametrizations" in op._modules else kind


class ParameterFacts(NamedTuple):
    """`ParameterFacts` hold what a plan depends on of a parameter."""

    needs: bool
    dtype: torch.dtype
    meta: bool
    kind: type

    @staticmethod
    def of(p: Tensor | None, grad: bool) -> ParameterFacts | None:
        """The facts of an optional parameter.  grad: the grad mode"""
        return None if p is None else ParameterFacts(*parameter_facts(p, grad))


def parameter_facts(p: Tensor, grad: bool) -> tuple[bool, torch.dtype, bool, type]:
    """The fields of `ParameterFacts`."""
    return grad and p.requires_grad, p.dtype, p.is_meta, type(p)


class PlanKey(NamedTuple):
    """A `PlanKey` holds all that a plan depends on, besides the results of conditions."""

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
    """The registered parameter of an op, or its `sample` of one that is not registered under this name."""
    registered = op.__dict__["_parameters"]
    found: Tensor | None = registered[name] if name in registered else op.sample(name)
    return found


def has_hooks(own: Mapping[str, Any]) -> bool:
    """Whether a module, given as its `__dict__`, has hooks on its forward or backward."""
    # read one by one: dynamo does not trace itemgetter
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    )


_own_hooks: list[Any] = []  # global module hooks, when they were last those of fuseops alone


def hooked() -> bool:
    """Whether there are global module hooks, other than those of fuseops."""
    global _own_hooks
    hooks = [*flatten(map(dict.values, GLOBAL_HOOKS))]
    if len(hooks) == len(_own_hooks) and all(map(is_, hooks, _own_hooks)):
        return False
    for hook in hooks:
        if not str(getattr(hook, "__module__", "")).startswith("fuseops."):
            return True
    _own_hooks = hooks
    return False


class KeyGuard:
    """A `KeyGuard` checks whether a call has the key of an earlier one, in a fifth of the time of making the key.

    Eager only. It compares the `CallFacts` of the call; the attributes of the ops, by identity, if one may have been
    written since the last check (`Runner.fits`); and the parameters, by torch's tensor guard, which covers each field
    of `ParameterFacts` under one grad mode. Loops over ops run in C.
    """

    def __init__(self, chain: Chain, key: PlanKey, read: Collection[int] = ()) -> None:
        """read: the ops whose own attributes conditions have read: sizes, options, kinds.

        Raises KeyError for tensors that are not registered, which it cannot check.
        """
        self.chain, self.key = chain, key
        self.classes, owns = [*map(type, chain.ops)], [*map(DICT, chain.ops)]
        self.attribute_names = [*map(frozenset, owns)]
        # the guarded attributes of the instances, read by one call each
        self.readers = [
            itemgetter(*_guarded_attributes(own, i in read)) for i, own in enumerate(owns)
        ]
        self.values = [*flatten(map(call, self.readers, owns))]
        self.has_hooks = [*map(any, map(HOOKS, owns))]
        # the versions of the instances when they last matched, and the hook dicts of all ops then
        self.versions: object = None
        self.hooks: list[Any] = []
        self.aliasing = [op for op in chain.ops if op.__class__.alias is not NO_ALIAS]
        self.aliases = [op.alias for op in self.aliasing]
        # (dict, name) of each distinct parameter or buffer that ops take, as the tensor guard needs them; of further
        # occurrences, with the number of the tensor; and of those that are None
        self.tensor_dicts: list[dict[str, Any]] = []
        self.tensor_names: list[str] = []
        self.duplicates: list[tuple[dict[str, Any], str, int]] = []
        self.absent: tuple[list[dict[str, Any]], list[str]] = [], []
        found: dict[int, int] = {}
        for own, names, facts in zip(owns, chain.parameters, key.ops, strict=True):
            if facts.local:
                raise KeyError(names)
            for name in names:
                tensor_dict = own["_parameters"] if name in own["_parameters"] else own["_buffers"]
                first = found.get(id(tensor_dict[name]))
                if tensor_dict[name] is None:
                    self.absent[0].append(tensor_dict)
                    self.absent[1].append(name)
                elif first is None:
                    found[id(tensor_dict[name])] = len(self.tensor_dicts)
                    self.tensor_dicts.append(tensor_dict)
                    self.tensor_names.append(name)
                else:
                    self.duplicates.append((tensor_dict, name, first))
        try:
            self.tensors_match = tensor_guard([*map(getitem, self.tensor_dicts, self.tensor_names)])
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
        """Whether `PlanKey.of` would give the same key, and the attributes that conditions have read are the same.

        versions: another object if an op may have been written since the last check; None: check in any case
        """
        if call_facts(self.chain.outside, x, side, tokens, live) != self.key.call:
            return False
        try:
            looked = versions is not None and versions is self.versions and not any(self.hooks)
            if not (looked or self._ops_match(versions)):
                return False
            tensors = [*map(getitem, self.tensor_dicts, self.tensor_names)]
            if not self.tensors_match(*tensors):
                return False
            if not all(map(is_, map(getitem, *self.absent), NONES)):
                return False
            return not self.duplicates or all(d[n] is tensors[k] for d, n, k in self.duplicates)
        except KeyError:  # a parameter was deleted
            return False

    def _ops_match(self, versions: object) -> bool:
        """Whether the classes and guarded attributes of the ops are the same.   versions: before this check"""
        owns = [*map(DICT, self.chain.ops)]
        if [*map(type, self.chain.ops)] != self.classes or [
            *map(frozenset, owns)
        ] != self.attribute_names:
            return False
        if not all(map(is_, flatten(map(call, self.readers, owns)), self.values)):
            return False
        if [*map(any, map(HOOKS, owns))] != self.has_hooks:
            return False
        if self.aliasing and [op.alias for op in self.aliasing] != self.aliases:
            return False
        self.versions, self.hooks = versions, [*flatten(map(HOOKS, owns))]
        return True


def _guarded_attributes(own: Mapping[str, Any], read: bool) -> list[str]:
    """The attributes of an instance (its `__dict__`) that a plan may depend on.  read: conditions read the instance"""
    names = PLANNED_ATTRIBUTES if not own["_buffers"] else PLANNED_ATTRIBUTES | {"_buffers"}
    return [n for n in own if n in names or (read and n not in NON_CONFIG_ATTRS)]


def autocast_of(x: Tensor) -> torch.dtype | None:
    """The autocast dtype of x's device, None where autocast is off. Torch raises for the meta device."""
    if not any_autocast():
        return None
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
