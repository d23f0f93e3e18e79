"""A path says where a module stands in its model: names of saved tensors begin with it, and errors say it.

Known once a root has been seen (`run.config.set_root`); prefixes that wrappers put before a child are left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

LENT = "_lent"  # key in a module's `__dict__`: what stands in for its forward, with the module's parameters
LENDER = "_lender"  # in an op's `__dict__`: where it finds its parameters, which another module has
SPREAD = "_spread"  # there: how what stands in is spread, when it is built, over ranks that share the module's experts
WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def stripped(path: str) -> str:
    """A dotted path without the prefixes of wrappers."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`named_modules()`, and what stands in for the forward of one, under its path."""
    for path, module in model.named_modules():
        yield path, module
        stand_in = module.__dict__.get(LENT)
        if stand_in is not None:
            yield from stand_in.named_modules(prefix=path)


def set_path(module: nn.Module, path: str, prefix: str) -> None:
    """prefix: of the names of what it saves, the path of the Sequential that the names are relative to, and a dot."""
    module.__dict__["_path"], module.__dict__["_prefix"] = path, prefix


def path_of(module: nn.Module) -> str | None:
    """None: no root has been seen."""
    path: str | None = module.__dict__.get("_path")
    return path


def prefix_of(module: nn.Module) -> str | None:
    """None: no root has been seen."""
    prefix: str | None = module.__dict__.get("_prefix")
    return prefix
