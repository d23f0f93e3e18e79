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

from fuseops.ops.op import NON_CONFIG_ATTRS, Op
from fuseops.ops.paths import PARAMETER_SOURCE, STAND_IN
from fuseops.plan.key import has_hooks
from fuseops.torch_private import assume_constant_result, is_dtensor
from fuseops.words import dtype_name

Source = str | Callable[[Any], Tensor | None]  # the owner's attribute, or what reads it there
C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., Any])
SIMPLE = (int, float, str, type(None))
log = logging.getLogger("fuseops.fusion")
_told: set[str] = set()  # which classes have changed after hf.apply, once a process


class Lender(NamedTuple):
    """A lender is the module of transformers that an op takes its parameters from."""

    owner: nn.Module
    sources: Mapping[str, Source]

    def get(self, name: str) -> Tensor | None:
        """A parameter, as the owner has it now."""
        source = self.sources.get(name)
        if callable(source):
            return source(self.owner)
        return None if source is None else getattr(self.owner, source)


def borrows(*names: str) -> Callable[[C], C]:
    """Have these keywords of an op's `fwd` be read from the module that lends them."""

    def borrowing(cls: C) -> C:
        for name in names:
            setattr(cls, name, _borrowed(name))
        return cls

    return borrowing


def _borrowed(name: str) -> property:
    def read(op: Any) -> Tensor | None:
        # without a lender, while the op is constructed, torch looks among the parameters
        found: Tensor | None = op._parameter_source.get(name)
        return found

    def leave(op: Any, value: Any) -> None:
        """A constructor may say that there is none."""
        op._parameters[name] = value

    return property(read, leave)


def lend(op: Op[Any], owner: nn.Module, sources: Mapping[str, Source]) -> None:
    """Say where the op finds its parameters, in the place of those it was built with. The owner is no child of it."""
    op.__dict__[PARAMETER_SOURCE] = Lender(owner, dict(sources))
    for name in [*op._parameters]:
        del op._parameters[name]


def hang(owner: nn.Module, stand_in: nn.Module, built_for: Any) -> None:
    """Keep what stands in for the owner's forward, and what it was built for. It is no child of the owner."""
    owner.__dict__[STAND_IN] = stand_in
    stand_in.__dict__.update(built_for=built_for, stands_for=type(owner).forward)


def hung(owner: nn.Module, built_for: Any) -> Any:
    """What stands in for the owner's forward, unless it was built for something else."""
    found = owner.__dict__.get(STAND_IN)
    return found if found is not None and found.built_for == built_for else None


def while_hung(forward: F) -> F:
    """Have a bound forward be that of the class where nothing hangs on the module, as who has wrapped it, like
    accelerate for mixed precision, calls it after `revert` too; and where the class has another one by now.
    """

    @functools.wraps(forward)
    def either(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        stand_in, own = self.__dict__.get(STAND_IN), type(self).forward
        ours = stand_in is not None and stand_in.stands_for is own
        return (forward if ours else own)(self, *args, **keywords)

    return cast("F", either)


# --- whether it still computes the same


class Said(NamedTuple):
    """A `Said` is what a module says of itself beside its parameters: its own attributes, and its children without
    parameters, such as an activation.
    """

    names: tuple[str, ...]
    children: tuple[str, ...]
    values: tuple[Any, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Said:
        own = module.__dict__
        names = tuple(
            [n for n in own if n not in NON_CONFIG_ATTRS and n not in (STAND_IN, "forward")]
        )
        inner = [n for n, m in module._modules.items() if m is not None and not [*m.parameters()]]
        said = cls(names, tuple(inner), ())
        return said._replace(values=said.now(module))

    def now(self, module: nn.Module) -> tuple[Any, ...]:
        """The values, as the module has them now.  Raises KeyError where one is gone."""
        own, inner = module.__dict__, module._modules
        return (*[own[n] for n in self.names], *[inner[n] for n in self.children])

    def still_of(self, module: nn.Module) -> bool:
        """Whether a module says the same, and nothing hangs on its children being called."""
        try:
            now = self.now(module)
        except KeyError:
            return False
        if not all(map(is_, now, self.values)) and not all(map(_alike, now, self.values)):
            return False
        return not any(map(hooked, [module._modules[n] for n in self.children]))  # type: ignore[arg-type]


def _alike(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, int | float | str) and a == b)


def asked(question: Callable[..., Any], owner: nn.Module, *more: Any) -> bool:
    """The answer to a question about a module; in a trace it is asked outside of it, once for what is read here."""
    if torch.compiler.is_compiling():
        watch(owner, *_said_by(id(owner)).split())
        return _asked_outside(question, id(owner), *more) == 1
    return bool(question(owner, *more))


@assume_constant_result
def _asked_outside(question: Callable[..., Any], owner: int, *more: Any) -> int:
    from fuseops.run.traced import alive

    return int(bool(question(alive(owner), *more)))


@assume_constant_result
def _said_by(owner: int) -> str:
    """Names of a module's numbers, words and functions, and of its children without parameters."""
    from fuseops.run.traced import alive

    module: nn.Module = alive(owner)
    said = Said.of(module)
    now = zip((*said.names, *said.children), said.values, strict=True)
    return " ".join([n for n, v in now if isinstance(v, SIMPLE) or callable(v)])


def watch(module: Any, *names: str) -> None:
    """Read attributes, in a trace: dynamo guards what it reads, and traces anew where one is another."""
    if torch.compiler.is_compiling():
        for name in names:
            found = getattr(module, name, None)
            isinstance(found, SIMPLE) and bool(found)


def stands(owner: nn.Module) -> bool:
    """Whether the owner computes what its stand-in was built for, by what it says of itself. Where not, its own forward
    runs, until `apply` has looked at it again.
    """
    return asked(_stands, owner)


def _stands(owner: nn.Module) -> bool:
    stand_in: Any = owner.__dict__[STAND_IN]
    if stand_in.built_for.still_of(owner):
        return True
    if (name := type(owner).__name__) not in _told:
        _told.add(name)
        log.warning("a %s has changed since hf.apply, and runs as written: apply it again.", name)
    return False


# --- what may be read


def plain(module: nn.Module | None, kind: type[nn.Module]) -> str | None:
    """Why a module may not be read past its `forward`, that of `kind`; None if it may."""
    if not isinstance(module, kind) or type(module).forward is not kind.forward:
        return f"is {type(module).__name__}, whose forward is not {kind.__name__}'s"
    watch(module, "forward")
    if "forward" in module.__dict__:
        return "has a forward of its own (replaced on the instance)"
    return "has hooks" if hooked(module) else None


def quantized(weight: Tensor) -> str | None:
    """Why a weight is of no float dtype that GEMMs take, or None."""
    if not weight.is_floating_point() or weight.itemsize < 2 or hasattr(weight, "quant_state"):
        return f"is quantized ({dtype_name(weight.dtype)})"
    return None


def sharded(*modules: nn.Module | None) -> bool:
    """Whether parameters are DTensors now: under FSDP2 between calls, under tensor parallelism in them, too."""
    return any(
        is_dtensor(type(p)) for m in modules if m is not None for p in m._parameters.values()
    )


def hooked(module: nn.Module) -> bool:
    """Whether a call of a module would run hooks."""
    return has_hooks(module.__dict__)
