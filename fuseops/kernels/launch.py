"""Where every Triton launch passes: device guard, interpreter shim, and the recorder of the
ahead-of-time gate.

Device code lives in ``fuseops.kernels.device``, the only modules that import Triton;
``device("norm")`` loads one at the first launch, so that fuseops imports without Triton.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch

from fuseops.kernels.registry import INTERPRET, arch_of

NUM_SMS_INTERPRETED = 3


class Launch(NamedTuple):
    """One recorded launch: what the ahead-of-time gate compiles."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


class Recorder:
    """Collects launches instead of running them, as if on a GPU of the given architecture."""

    def __init__(self, arch: int, num_sms: int = 132) -> None:
        self.arch, self.num_sms = arch, num_sms
        self.launches: list[Launch] = []


_recorder: Recorder | None = None


def _interpreter() -> ModuleType:
    """Imported here because it imports Triton."""
    from fuseops.kernels import interpreter

    return interpreter


@functools.cache
def device(name: str) -> ModuleType:
    """The Triton module ``fuseops.kernels.device.<name>``."""
    if INTERPRET:
        _interpreter().install()
    return importlib.import_module(f"fuseops.kernels.device.{name}")


_compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: Any,
    key: Any = None,
    **options: Any,
) -> None:
    """Run ``kernel[grid](*args, **options)`` on the device of its first argument; nothing when the
    grid is empty.

    ``key``, if given, names all that the compiled code depends on: types, alignment and the values
    that Triton specializes. A second launch with it skips Triton's own look at every argument, which
    costs more than the launch. Capitals come last, in the order of the kernel's signature.
    """
    if _recorder is not None:
        _recorder.launches.append(Launch(kernel, grid, args, options))
    elif 0 in grid:
        return
    elif INTERPRET:
        with _interpreter().silent():
            kernel[grid](*args, **options)
    elif args[0].device.index == torch.cuda.current_device():
        _run(kernel, grid, args, key, options)
    else:
        with torch.cuda.device(args[0].device):
            _run(kernel, grid, args, key, options)


def _run(
    kernel: Any,
    grid: tuple[int, ...],
    args: tuple[Any, ...],
    key: tuple[Any, ...] | None,
    options: dict[str, Any],
) -> None:
    if key is None:
        kernel[grid](*args, **options)
        return
    key = (kernel, args[0].device.index, *key)
    found = _compiled.get(key)
    if found is None:
        constants = tuple(options[name] for name in kernel.arg_names[len(args) :])
        _compiled[key] = kernel[grid](*args, **options), constants
    else:
        found[0][(*grid, 1, 1)](*args, *found[1])


@contextmanager
def recording(arch: int) -> Iterator[Recorder]:
    """Inside, launches are recorded and not run."""
    global _recorder
    outer, _recorder = _recorder, Recorder(arch)
    try:
        yield _recorder
    finally:
        _recorder = outer


def current_arch(where: torch.device) -> int:
    """Architecture that a launch on this device runs on (the interpreter stands for Hopper)."""
    if _recorder is not None:
        return _recorder.arch
    return 90 if where.type != "cuda" else arch_of(where)


def num_sms(where: torch.device) -> int:
    """Number of multiprocessors, the unit of persistent grids."""
    if _recorder is not None:
        return _recorder.num_sms
    return NUM_SMS_INTERPRETED if where.type != "cuda" else _num_sms(where)


def chain(where: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the first and of every later of the launches that follow each other in one call.

    From Hopper on a launch may begin while the one before it ends (programmatic dependent launch):
    the kernels say when (``before_launch``), and wait (``after_launch``) before they touch what an
    earlier one wrote.
    """
    if INTERPRET or current_arch(where) < 90:
        return {"PDL": False}, {"PDL": False}
    return {"PDL": True}, {"PDL": True, "launch_pdl": True}


@functools.cache
def _num_sms(where: torch.device) -> int:
    return torch.cuda.get_device_properties(where).multi_processor_count
