"""A path is the dotted name of a module in its model: names of saved tensors begin with it, and errors print it.

It is set once a root is known (`run.config.set_root`), without the prefixes that wrappers put before a child.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fuseops.errors import FuseOpsError

# keys of `__dict__`
# of a module: the module that runs instead of its forward, with its parameters
STAND_IN = "_stand_in"
# of an op whose parameters another module owns: a mapping by name
PARAMETER_SOURCE = "_parameter_source"
SHARD_EXPERTS = "_shard_experts"  # of a module: shards the experts of its stand-in over ranks, once that is built
WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def stripped(path: str) -> str:
    """A dotted path without the prefixes of wrappers."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield `named_modules()`, and the modules of each stand-in under the path of the module that it runs for."""
    for path, module in model.named_modules():
        yield path, module
        stand_in = module.__dict__.get(STAND_IN)
        if stand_in is not None:
            yield from stand_in.named_modules(prefix=path)


def check_module(caller: str, model: object) -> None:
    """Raise FuseOpsError for a model that is no module.   caller: the call, for the message"""
    if not isinstance(model, nn.Module):
        raise FuseOpsError(f"{caller} expects an nn.Module, got {type(model).__name__}.")


def set_path(module: nn.Module, path: str, prefix: str) -> None:
    """Set the path of a module, and the prefix of its saved names: the path of their Sequential and a dot."""
    module.__dict__["_path"], module.__dict__["_prefix"] = path, prefix


def path_of(module: nn.Module) -> str | None:
    """The path of a module, None before a root is known."""
    path: str | None = module.__dict__.get("_path")
    return path


def prefix_of(module: nn.Module) -> str | None:
    """The prefix of a module's saved names, None before a root is known."""
    prefix: str | None = module.__dict__.get("_prefix")
    return prefix
