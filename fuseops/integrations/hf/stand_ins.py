"""Ops whose parameters are lent by a module of another library, and read from it at each call.

Nothing is copied or cached: what a reload, an optimizer, FSDP, an adapter or a parametrization changes is what the next
call runs. The module keeps its parameters, so their names, layouts and places in a state_dict stay its own. The ops are
built once and hang on the module without being its children.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from operator import is_
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from fuseops.ops.op import OF_EVERY_MODULE, Op
from fuseops.ops.paths import LENDER, LENT
from fuseops.plan.key import has_hooks
from fuseops.torch_private import assume_constant_result, is_dtensor
from fuseops.words import dtype_name

Source = str | Callable[[Any], Tensor | None]  # the owner's attribute, or what reads it there
C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
CONSTANT_TYPES = (int, float, str, type(None))
log = logging.getLogger("fuseops.fusion")
_warned: set[str] = set()  # which classes have changed after hf.apply, once a process


class ParameterSource(NamedTuple):
    """A lender is the module of transformers that an op takes its parameters from."""

    owner: nn.Module
    sources: Mapping[str, Source]

    def get(self, name: str) -> Tensor | None:
        """A parameter, as the owner has it now."""
        source = self.sources.get(name)
        if callable(source):
            return source(self.owner)
        return None if source is None else getattr(self.owner, source)


def owner_parameters(*names: str) -> Callable[[C], C]:
    """Have these keywords of an op's `fwd` be read from the module that lends them."""

    def decorate(cls: C) -> C:
        for name in names:
            setattr(cls, name, _owner_property(name))
        return cls

    return decorate


def _owner_property(name: str) -> property:
    def read(op: Any) -> Tensor | None:
        # without a lender, while the op is constructed, torch looks among the parameters
        found: Tensor | None = op._lender.get(name)
        return found

    def discard(op: Any, value: Any) -> None:
        """A constructor may say that there is none."""
        op._parameters[name] = value

    return property(read, discard)


def bind_parameters(op: Op[Any], owner: nn.Module, sources: Mapping[str, Source]) -> None:
    """Say where the op finds its parameters, in the place of those it was built with. The owner is no child of it."""
    op.__dict__[LENDER] = ParameterSource(owner, dict(sources))
    for name in [*op._parameters]:
        del op._parameters[name]


def attach(owner: nn.Module, stand_in: nn.Module, built_for: Any) -> None:
    """Keep what stands in for the owner's forward, and what it was built for. It is no child of the owner."""
    owner.__dict__[LENT] = stand_in
    stand_in.__dict__.update(built_for=built_for, replaces=type(owner).forward)


def attached(owner: nn.Module, built_for: Any) -> Any:
    """What stands in for the owner's forward, unless it was built for something else."""
    found = owner.__dict__.get(LENT)
    return found if found is not None and found.built_for == built_for else None


def only_while_attached(forward: F) -> F:
    """Have a bound forward be that of the class where nothing hangs on the module, as who has wrapped it, like
    accelerate for mixed precision, calls it after `revert` too; and where the class has another one by now.
    """

    @functools.wraps(forward)
    def either(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        stand_in, own = self.__dict__.get(LENT), type(self).forward
        ours = stand_in is not None and stand_in.replaces is own
        return (forward if ours else own)(self, *args, **keywords)

    return cast("F", either)


# --- whether it still computes the same


class ConfigSnapshot(NamedTuple):
    """A `Said` is what a module says of itself beside its parameters: its own attributes, and its children without
    parameters, such as an activation.
    """

    names: tuple[str, ...]
    children: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, module: nn.Module) -> ConfigSnapshot:
        own = module.__dict__
        names = tuple([n for n in own if n not in OF_EVERY_MODULE and n not in (LENT, "forward")])
        inner = [n for n, m in module._modules.items() if m is not None and not [*m.parameters()]]
        said = cls(names, tuple(inner), ())
        return said._replace(values=said.current(module))

    def current(self, module: nn.Module) -> tuple[Any, ...]:
        """The values, as the module has them now.  Raises KeyError where one is gone."""
        own, inner = module.__dict__, module._modules
        return (*[own[n] for n in self.names], *[inner[n] for n in self.children])

    def matches(self, module: nn.Module) -> bool:
        """Whether a module says the same, and nothing hangs on its children being called."""
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
    """The answer to a question about a module; in a trace it is asked outside of it, once for what is read here."""
    if torch.compiler.is_compiling():
        guard(owner, *_guarded_names(id(owner)).split())
        return _evaluate_untraced(predicate, id(owner), *args) == 1
    return bool(predicate(owner, *args))


@assume_constant_result
def _evaluate_untraced(predicate: Callable[..., Any], owner: int, *args: Any) -> int:
    from fuseops.run.traced import alive

    return int(bool(predicate(alive(owner), *args)))


@assume_constant_result
def _guarded_names(owner: int) -> str:
    """Names of a module's numbers, words and functions, and of its children without parameters."""
    from fuseops.run.traced import alive

    module: nn.Module = alive(owner)
    said = ConfigSnapshot.of(module)
    current = zip((*said.names, *said.children), said.values, strict=True)
    return " ".join([n for n, v in current if isinstance(v, CONSTANT_TYPES) or callable(v)])


def guard(module: Any, *names: str) -> None:
    """Read attributes, in a trace: dynamo guards what it reads, and traces anew where one is another."""
    if torch.compiler.is_compiling():
        for name in names:
            found = getattr(module, name, None)
            isinstance(found, CONSTANT_TYPES) and bool(found)


def is_current(owner: nn.Module) -> bool:
    """Whether the owner computes what its stand-in was built for, by what it says of itself. Where not, its own forward
    runs, until `apply` has looked at it again.
    """
    return evaluate(_is_current, owner)


def _is_current(owner: nn.Module) -> bool:
    stand_in: Any = owner.__dict__[LENT]
    return bool(stand_in.built_for.matches(owner)) or warn_changed(owner)


def warn_changed(owner: nn.Module) -> bool:
    """Tell, once for each class, that a module has changed.   -> False, as it does not stand any more"""
    if (name := type(owner).__name__) not in _warned:
        _warned.add(name)
        log.warning("a %s has changed since hf.apply, and runs as written: apply it again.", name)
    return False


# --- what may be read


def not_plain_reason(module: nn.Module | None, kind: type[nn.Module]) -> str | None:
    """Why a module may not be read past its `forward`, that of `kind`; None if it may."""
    if not isinstance(module, kind) or type(module).forward is not kind.forward:
        return f"is {type(module).__name__}, whose forward is not {kind.__name__}'s"
    guard(module, "forward")
    if "forward" in module.__dict__:
        return "has a forward of its own (replaced on the instance)"
    return "has hooks" if is_hooked(module) else None


def quantized_reason(weight: Tensor) -> str | None:
    """Why a weight is of no float dtype that GEMMs take, or None."""
    if not weight.is_floating_point() or weight.itemsize < 2 or hasattr(weight, "quant_state"):
        return f"is quantized ({dtype_name(weight.dtype)})"
    return None


def is_sharded(*modules: nn.Module | None) -> bool:
    """Whether parameters are DTensors now: under FSDP2 between calls, under tensor parallelism in them, too."""
    return any(
        is_dtensor(type(p)) for m in modules if m is not None for p in m._parameters.values()
    )


def is_hooked(module: nn.Module) -> bool:
    """Whether a call of a module would run hooks."""
    return has_hooks(module.__dict__)
