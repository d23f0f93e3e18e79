"""PATH_OR_MODULE: imports `build() -> (model, args, side)` from a file or a module."""

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import nn

EXPECTED = "build() -> (model, args, side): a module, a tuple of inputs, a dict of keyword inputs"


class UsageError(Exception):
    """The command was called with something that it cannot use."""


class Target(NamedTuple):
    """A model and the inputs to run it on."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    side: dict[str, Any]


def load(name: str) -> Target:
    """Raises UsageError for a path or module without a `build()` that gives what is expected."""
    module = (
        _from_file(Path(name))
        if name.endswith(".py") or Path(name).exists()
        else _from_module(name)
    )
    build = getattr(module, "build", None)
    if not callable(build):
        raise UsageError(f"{name} defines no build(). Expected {EXPECTED}.")
    try:
        inspect.signature(build).bind()
    except TypeError as error:
        raise UsageError(f"build() of {name} is called without arguments: {error}.") from None
    return _checked(name, build())


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"no file {path}. Expected a Python file with {EXPECTED}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file. Expected one with {EXPECTED}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look their module up
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def _from_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise UsageError(
            f"no module {name!r}, and no file of that name. Expected either with {EXPECTED}."
        ) from None
    finally:
        sys.path.remove(str(Path.cwd()))


def _checked(name: str, built: Any) -> Target:
    if not isinstance(built, tuple) or len(built) != 3 or not isinstance(built[0], nn.Module):
        got = (
            f"({', '.join(type(b).__name__ for b in built)})"
            if isinstance(built, tuple)
            else type(built).__name__
        )
        raise UsageError(f"build() of {name} returned {got}. Expected {EXPECTED}.")
    model, args, side = built
    if not isinstance(args, (tuple, list)) or (
        isinstance(args, tuple) and hasattr(args, "_fields")
    ):
        args = (args,)
    if not isinstance(side, dict):
        raise UsageError(
            f"build() of {name} returned {type(side).__name__} as side. Expected {EXPECTED}."
        )
    return Target(name, model, tuple(args), side)
