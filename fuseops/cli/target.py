"""The PATH_OR_MODULE of a command: a file or module that defines `build() -> (model, args, side)`."""

import argparse
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from fuseops.errors import FuseOpsError

EXPECTED = "build() -> (model, args, side): a module, a tuple of inputs, a dict of keyword inputs"


class UsageError(Exception):
    """An argument of the command that it cannot use."""


class UserCodeError(Exception):
    """Raised from the error of the user's file, or of its `build()`."""


class Target(NamedTuple):
    """A `Target` is a model and the inputs to run it on."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    side: dict[str, Any]


def add_target(parser: argparse.ArgumentParser, where: str = "", instead: str = "") -> None:
    """Add the argument for the model of a command.   instead: the default model, for an optional argument"""
    left_out = f"; left out: {instead}" if instead else ""
    parser.add_argument(
        "target",
        nargs="?" if instead else None,
        metavar="PATH_OR_MODULE",
        help=f"defines build() -> (model, args, side){where}{left_out}",
    )


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Turn an OSError of writing the file, inside, into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}.") from None


def load(name: str) -> Target:
    """The target of a path or module.  Raises UsageError where it has no `build()` as expected."""
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
    with _user_code():
        built = build()
    return _checked(name, built)


@contextmanager
def _user_code() -> Iterator[None]:
    """Turn an error of the user's code, inside, into a UserCodeError."""
    try:
        yield
    except (FuseOpsError, UsageError):
        raise  # their messages say where
    except Exception as error:
        raise UserCodeError from error


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    """Run the user's code, inside, where it can import its neighbours."""
    sys.path.insert(0, str(folder))
    try:
        with _user_code():
            yield
    finally:
        sys.path.remove(str(folder))


def user_error_in(error: Exception) -> BaseException | None:
    """The error of the user's code, or None for one of fuseops: decided by the innermost frame outside of torch.

    Where fuseops called a module there, that is a module of torch in the user's model. Where it passed on an op that
    torch had called, as a dry run does, the frame is that of the caller.
    """
    if isinstance(error, UserCodeError):
        return error.__cause__
    frames = _without_passed_on(traceback.extract_tb(error.__traceback__))
    inside: list[traceback.FrameSummary] = []  # of torch, below the innermost frame that is not
    while frames and _is_within(frames[-1].filename, TORCH):
        inside.insert(0, frames.pop())
    if not frames:
        return None
    called_module = bool(inside) and inside[0].filename == nn.modules.module.__file__
    return error if called_module or not _is_internal(frames[-1].filename) else None


def _without_passed_on(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """The frames above a mode of fuseops, where all that it did was to call the op that it was given."""
    for i, frame in enumerate(frames):
        if frame.name == "__torch_dispatch__" and _is_within(frame.filename, FUSEOPS):
            below = [f.filename for f in frames[i:] if not _is_within(f.filename, FUSEOPS)]
            passed_on = below[:1] == [str(TORCH / "_ops.py")]
            return frames[:i] if passed_on and all(_is_within(f, TORCH) for f in below) else frames
    return frames


def user_traceback(user_error: BaseException) -> str:
    """The traceback of an error, with the frames of the user's code only."""
    formatted = traceback.TracebackException.from_exception(user_error)
    chain: list[Any] = [formatted]
    for one in chain:
        frames = [f for f in one.stack if not _is_internal(f.filename)]
        if frames:
            one.stack = traceback.StackSummary.from_list(frames)
        else:
            one.stack = None  # without its header
        chain += [other for other in (one.__cause__, one.__context__) if other is not None]
    return "".join(formatted.format())


FUSEOPS, TORCH = Path(__file__).parents[1], Path(torch.__file__).parent


def _is_within(filename: str, folder: Path) -> bool:
    return Path(filename).is_relative_to(folder)


def _is_internal(filename: str) -> bool:
    """Whether a frame is one of fuseops, torch or the import system."""
    frozen = filename.startswith("<frozen ") or "importlib" in filename
    return frozen or _is_within(filename, FUSEOPS) or _is_within(filename, TORCH)


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"no file {path}. Expected a Python file with {EXPECTED}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file. Expected one with {EXPECTED}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickle look their module up
    with _importing_from(path.resolve().parent):
        spec.loader.exec_module(module)
    return module


def _from_module(name: str) -> ModuleType:
    try:
        with _importing_from(Path.cwd()):
            return importlib.import_module(name)
    except UserCodeError as user_error:
        error = user_error.__cause__
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{name}.".startswith(f"{missing}."):
            raise  # the module exists: it has an error, or imports a missing one
        raise UsageError(
            f"no module {name!r}, and no file of that name. Expected either with {EXPECTED}."
        ) from None


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
