"""Where a module stands in its model: names of saved tensors begin with that, and errors say it.

Known once a root has been seen (`run.config.set_root`); prefixes that wrappers put before a child are left out.
"""

from __future__ import annotations

from torch import nn

WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def stripped(path: str) -> str:
    """A dotted path without the prefixes of wrappers."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


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
