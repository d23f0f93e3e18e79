"""Checks of what a caller passes: x, side inputs by name or in a Routing, and `returns`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fuseops.arguments import several
from fuseops.errors import FuseOpsError, SideInputError
from fuseops.ops.op import Op
from fuseops.ops.paths import path_of
from fuseops.ops.routing import Routing
from fuseops.recipes import Quantized
from fuseops.recipes.validate import component_mismatch

RESERVED = frozenset({"x", "returns", "call", "out"})  # keywords of forward, fwd and bwd themselves


def check_side_names(name: str, op: Op[Any], sides: Sequence[str]) -> None:
    """Raise SideInputError for a side tensor of an op with a reserved name, or one that is no string."""
    for side in sides:
        if side in RESERVED or not isinstance(side, str):
            why = "a reserved name" if side in RESERVED else "which is no string"
            raise SideInputError(
                f"op {name!r} ({type(op).__name__}) reads or writes {side!r}, {why}: "
                f"choose a name that is not in {sorted(RESERVED)}."
            )


def describe_module(module: Any) -> str:
    """Class and path of a module, for a message."""
    path = path_of(module)
    return f"{type(module).__name__} {path!r}" if path else type(module).__name__


def check_input(module: nn.Module, x: Any) -> None:
    if isinstance(x, Quantized):
        if x.carrier is None or x.row is None:
            raise FuseOpsError(
                f"{describe_module(module)} got a Quantized, {x}, that is no value: fo.quantize makes one, with rows."
            )
        wrong = None if torch.compiler.is_compiling() else component_mismatch(x)
        if wrong is not None:
            raise FuseOpsError(
                f"{describe_module(module)} got a Quantized of shape {tuple(x.shape)}, {x}: {wrong}."
            )
    elif not isinstance(x, Tensor):
        raise TypeError(
            f"{describe_module(module)} expects x, its first argument, to be a tensor, got {type(x).__name__}."
        )


def non_tensor_error(module: nn.Module, pieces: Sequence[tuple[str, Any]], x: Any) -> TypeError:
    """The error for a plain module that returned no tensor to the op after it."""
    (before, plain), (name, _) = pieces
    return TypeError(
        f"{before!r} ({type(plain).__name__}) in {describe_module(module)} returned {type(x).__name__}, and the op "
        f"{name!r} behind it takes a tensor: wrap the module so that it returns one."
    )


def returned_names(returns: Iterable[str] | None) -> tuple[str, ...]:
    """`returns` as a tuple: a caller passes one name, several, or None."""
    if returns is None or isinstance(returns, str):
        return (returns,) if returns else ()
    if isinstance(returns, list | tuple):  # of which `check_returns` refuses what is no name
        return tuple(returns)
    return several(returns, str, "returns", "names of side outputs")


def check_returns(module: nn.Module, writes: frozenset[str], returns: tuple[str, ...]) -> None:
    unknown = [name for name in returns if name not in writes]
    if unknown:
        raise SideInputError(
            f"{describe_module(module)} writes {sorted(writes)}; `returns` asks for {unknown}."
        )


def side_inputs(
    module: nn.Module,
    reads: tuple[str, ...],
    writes: frozenset[str],
    args: tuple[Any, ...],
    side: dict[str, Any],
) -> dict[str, Any]:
    """The side inputs of a call by name, from its keywords and at most one Routing.

    reads, writes: of the module.  Raises SideInputError for missing, unknown or repeated ones.
    """
    env = dict(side)
    if args:
        if len(args) > 1 or not isinstance(args[0], Routing):
            raise SideInputError(
                f"{describe_module(module)} takes x and at most one Routing by position, got "
                f"{', '.join(type(a).__name__ for a in args)}. Pass side inputs by name: "
                f"it reads {_listed(reads)}.{_counts_hint(reads)}"
            )
        for name, value in args[0]._asdict().items():
            if value is not None and name in reads:
                if name in side:
                    raise SideInputError(
                        f"{describe_module(module)}: {name!r} is in the Routing and passed by name."
                    )
                env[name] = value
    if len(env) != len(reads) or not all(isinstance(env.get(name), Tensor) for name in reads):
        _raise_side_error(module, reads, writes, env)
    return env


def _raise_side_error(
    module: nn.Module, reads: tuple[str, ...], writes: frozenset[str], env: Mapping[str, Any]
) -> None:
    where = describe_module(module)
    for name, value in env.items():
        if name in writes:
            raise SideInputError(f"{where} writes {name!r} itself; it can't be passed in.")
        if name not in reads:
            raise SideInputError(
                f"{where} does not read {name!r}; it reads {_listed(reads)}.{_counts_hint(reads)}"
            )
        if not isinstance(value, Tensor):
            raise SideInputError(
                f"{where}: side input {name!r} must be a tensor, got {type(value).__name__}. "
                f"It reads {_listed(reads)}.{_counts_hint(reads)}"
            )
    missing = [name for name in reads if name not in env]
    written = [name for name in missing if name not in Routing._fields]
    tap_hint = f", or let an op before write them, as Tap({written[0]!r}) does" if written else ""
    raise SideInputError(
        f"{where} needs side inputs {missing}; it reads {_listed(reads)}. Pass them by name, or in a Routing{tap_hint}."
        f"{_counts_hint(missing)}"
    )


def _counts_hint(names: Sequence[str]) -> str:
    """A hint for callers that have counts of rows where `offs` is read."""
    hint = " Routing.from_counts(tokens_per_expert) turns counts into `offs`."
    return hint if "offs" in names else ""


def _listed(names: Sequence[str]) -> str:
    return str(list(names)) if names else "no side inputs"
