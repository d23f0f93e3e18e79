"""Ops whose parameters are lent by a module of another library, and read from it at each call.

Nothing is copied or cached: what a reload, an optimizer, FSDP, an adapter or a parametrization changes is what the next
call runs. The module keeps its parameters, so their names, layouts and places in a state_dict stay its own. The ops are
built once and hang on the module without being its children.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from fuseops.ops.op import Op
from fuseops.ops.paths import LENDER, LENT
from fuseops.torch_private import is_dtensor
from fuseops.words import dtype_name

Source = Callable[[Any], Tensor | None]


class Lender(NamedTuple):
    """A lender is the module of transformers that an op takes its parameters from."""

    owner: nn.Module
    sources: Mapping[str, Source]

    def get(self, name: str) -> Tensor | None:
        """A parameter, as the owner has it now."""
        source = self.sources.get(name)
        return None if source is None else source(self.owner)


def lent(name: str) -> Any:
    """The keyword `name` of an op's `fwd`, read from the module that lends it."""

    def read(op: Any) -> Tensor | None:
        # without a lender, while the op is constructed, torch looks among the parameters
        found: Tensor | None = op._lender.get(name)
        return found

    def leave(op: Any, value: Any) -> None:
        """A constructor may say that there is none."""
        op._parameters[name] = value

    return property(read, leave)


def lend(op: Op[Any], owner: nn.Module, sources: Mapping[str, Source]) -> None:
    """Say where the op finds its parameters, in the place of those it was built with. The owner is no child of it."""
    op.__dict__[LENDER] = Lender(owner, dict(sources))
    for name in [*op._parameters]:
        del op._parameters[name]


def hang(owner: nn.Module, stand_in: nn.Module, built_for: Any) -> None:
    """Keep what stands in for the owner's forward, and what it was built for. It is no child of the owner."""
    owner.__dict__[LENT] = stand_in
    stand_in.__dict__["built_for"] = built_for


def hung(owner: nn.Module, built_for: Any) -> Any:
    """What stands in for the owner's forward, unless it was built for something else."""
    found = owner.__dict__.get(LENT)
    return found if found is not None and found.built_for == built_for else None


def plain(module: nn.Module | None, kind: type[nn.Module]) -> str | None:
    """Why a module may not be read past its `forward`, that of `kind`; None if it may."""
    if not isinstance(module, kind) or type(module).forward is not kind.forward:
        return f"is {type(module).__name__}, whose forward is not {kind.__name__}'s"
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
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
