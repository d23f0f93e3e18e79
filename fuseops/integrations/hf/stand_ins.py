"""A stand-in is an op that runs instead of a module's forward and reads the parameters of that module at each call.

Nothing is copied or cached: a change by a reload, an optimizer, FSDP, an adapter or a parametrization takes effect in
the next call. The module (the owner) keeps its parameters, their names, layouts and state_dict keys. The stand-in is
built once and attached to the owner's `__dict__`, so that it is not a child.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from fuseops.ops.object_table import object_at
from fuseops.ops.op import NON_CONFIG_ATTRS, Op
from fuseops.ops.paths import PARAMETER_SOURCE, STAND_IN
from fuseops.plan.key import has_hooks
from fuseops.torch_private import assume_constant_result, is_dtensor
from fuseops.words import dtype_name

Source = str | Callable[[Any], Tensor | None]  # an attribute or a function of the owner
C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
CONSTANT_TYPES = (int, float, str, type(None))
log = logging.getLogger("fuseops.fusion")
_warned: set[str] = set()  # names of the classes that `warn_changed` has logged


class ParameterSource(NamedTuple):
    """A `ParameterSource` maps an op's parameter names to attributes of the module that owns the parameters."""

    owner: nn.Module
    sources: Mapping[str, Source]

    def get(self, name: str) -> Tensor | None:
        """The current value of a parameter."""
        source = self.sources.get(name)
        if callable(source):
            return source(self.owner)
        return None if source is None else getattr(self.owner, source)

    def values(self) -> list[Tensor | None]:
        """The current values of all parameters."""
        return [self.get(name) for name in self.sources]


def owner_parameters(*names: str) -> Callable[[C], C]:
    """A class decorator that makes these parameters of an op properties, read from the owner."""

    def decorate(cls: C) -> C:
        for name in names:
            setattr(cls, name, _owner_property(name))
        return cls

    return decorate


def _owner_property(name: str) -> property:
    def read(op: Any) -> Tensor | None:
        # while the op is constructed it has no source: the AttributeError has torch look among the parameters
        found: Tensor | None = op._parameter_source.get(name)
        return found

    def discard(op: Any, value: Any) -> None:
        """The setter that the op's constructor uses, before parameters are bound."""
        op._parameters[name] = value

    return property(read, discard)


def bind_parameters(op: Op[Any], owner: nn.Module, sources: Mapping[str, Source]) -> None:
    """Have the op read its parameters from the owner, and drop those that it was built with.

    The owner does not become a child of the op.
    """
    op.__dict__[PARAMETER_SOURCE] = ParameterSource(owner, dict(sources))
    for name in [*op._parameters]:
        del op._parameters[name]


def attach(owner: nn.Module, stand_in: nn.Module, built_for: Any) -> None:
    """Attach a stand-in to its owner, not as a child.   built_for: the state that it was built for, for `attached`"""
    owner.__dict__[STAND_IN] = stand_in
    stand_in.__dict__.update(built_for=built_for, replaces=type(owner).forward)


def attached(owner: nn.Module, built_for: Any) -> Any:
    """The stand-in of the owner; None if there is none, or if it was built for another state."""
    found = owner.__dict__.get(STAND_IN)
    return found if found is not None and found.built_for == built_for else None


def only_while_attached(forward: F) -> F:
    """A decorator of bound forwards that calls the forward of the class where no stand-in is attached, or where the
    class has got another forward since. A wrapper such as accelerate's autocast calls the bound one after `revert` too.
    """

    @functools.wraps(forward)
    def either(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        return (forward if is_attached(self) else type(self).forward)(self, *args, **keywords)

    return cast("F", either)


def is_attached(owner: nn.Module) -> bool:
    """Whether a module has a stand-in, made for the forward that its class has now.

    Traced code does not read the stand-in for that: dynamo would go on with it where it is rebuilt afterwards.
    """
    if not torch.compiler.is_compiling():
        return _is_attached(owner)
    guard(type(owner), "forward")
    return STAND_IN in owner.__dict__ and _evaluate_untraced(_is_attached, id(owner)) == 1


def _is_attached(owner: nn.Module) -> bool:
    stand_in = owner.__dict__.get(STAND_IN)
    return stand_in is not None and stand_in.replaces is type(owner).forward


# --- whether a stand-in still computes what its owner does


class ConfigSnapshot(NamedTuple):
    """A `ConfigSnapshot` records the attributes of a module, and its children that have no parameters, such as an
    activation.
    """

    names: tuple[str, ...]
    children: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, module: nn.Module) -> ConfigSnapshot:
        own = module.__dict__
        names = tuple(
            [n for n in own if n not in NON_CONFIG_ATTRS and n not in (STAND_IN, "forward")]
        )
        inner = [n for n, m in module._modules.items() if m is not None and not [*m.parameters()]]
        snapshot = cls(names, tuple(inner), ())
        return snapshot._replace(values=snapshot.current(module))

    def current(self, module: nn.Module) -> tuple[Any, ...]:
        """The current values.  Raises KeyError where an attribute or a child was removed."""
        own, inner = module.__dict__, module._modules
        return (*[own[n] for n in self.names], *[inner[n] for n in self.children])

    def matches(self, module: nn.Module) -> bool:
        """Whether the module still has the recorded values, and its recorded children have no hooks."""
        try:
            current = self.current(module)
        except KeyError:
            return False
        if not all(map(is_, current, self.values)) and not all(
            map(_same_value, current, self.values)
        ):
            return False
        return not any(map(is_hooked, [module._modules[n] for n in self.children]))  # type: ignore[arg-type]


def _same_value(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, int | float | str) and a == b)


def evaluate(predicate: Callable[..., Any], owner: nn.Module, *args: Any) -> bool:
    """`predicate(owner, *args)`. While dynamo traces it is evaluated outside of the trace, and what it may read is
    guarded.
    """
    if torch.compiler.is_compiling():
        guard(owner, *_guarded_names(id(owner)).split())
        return _evaluate_untraced(predicate, id(owner), *args) == 1
    return bool(predicate(owner, *args))


@assume_constant_result
def _evaluate_untraced(predicate: Callable[..., Any], owner: int, *args: Any) -> int:
    return int(bool(predicate(object_at(owner), *args)))


@assume_constant_result
def _guarded_names(owner: int) -> str:
    """Names, separated by spaces, of the constants, callables and parameterless children of a module."""
    module: nn.Module = object_at(owner)
    snapshot = ConfigSnapshot.of(module)
    current = zip((*snapshot.names, *snapshot.children), snapshot.values, strict=True)
    return " ".join([n for n, v in current if isinstance(v, CONSTANT_TYPES) or callable(v)])


def guard(module: Any, *names: str) -> None:
    """Read attributes while dynamo traces, so that it guards them and recompiles when one changes."""
    if torch.compiler.is_compiling():
        for name in names:
            found = getattr(module, name, None)
            isinstance(found, CONSTANT_TYPES) and bool(found)


def is_current(owner: nn.Module) -> bool:
    """Whether the owner's configuration is the one that its stand-in was built for. If not, its own forward runs
    until `apply` is called again.
    """
    return evaluate(_is_current, owner)


def _is_current(owner: nn.Module) -> bool:
    stand_in: Any = owner.__dict__[STAND_IN]
    return bool(stand_in.built_for.matches(owner)) or warn_changed(owner)


def warn_changed(owner: nn.Module) -> bool:
    """Log, once per class, that a module has changed since `apply`.   -> False, the value of `is_current` then"""
    if (name := type(owner).__name__) not in _warned:
        _warned.add(name)
        log.warning("a %s has changed since hf.apply, and runs as written: apply it again.", name)
    return False


# --- modules whose parameters may be read without calling them


def not_plain_reason(module: nn.Module | None) -> str | None:
    """Why a module is not just a Linear whose parameters may be used without calling it; None if it is."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return f"is {type(module).__name__}, whose forward is not Linear's"
    guard(module, "forward")
    if "forward" in module.__dict__:
        return "has a forward of its own (replaced on the instance)"
    return "has hooks" if is_hooked(module) else None


def quantized_reason(weight: Tensor) -> str | None:
    """Why GEMMs cannot take a weight (it is quantized), or None."""
    if not weight.is_floating_point() or weight.itemsize < 2 or hasattr(weight, "quant_state"):
        return f"is quantized ({dtype_name(weight.dtype)})"
    return None


def is_sharded(*modules: nn.Module | None) -> bool:
    """Whether parameters are DTensors now: with FSDP2 outside of calls, with tensor parallelism in calls too."""
    return any(
        is_dtensor(type(p)) for m in modules if m is not None for p in m._parameters.values()
    )


def is_readable(*modules: nn.Module | None) -> bool:
    """Whether modules are Linears whose parameters may be used now without calling them."""
    return all(not_plain_reason(m) is None for m in modules) and not is_sharded(*modules)


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module would run hooks."""
    return has_hooks(module.__dict__)
