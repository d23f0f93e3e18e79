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


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Run ``kernel[grid](*args, **options)`` on the device of its first argument; nothing when the
    grid is empty.   -> the compiled kernel, if one ran
    """
    if _recorder is not None:
        _recorder.launches.append(Launch(kernel, grid, args, options))
        return None
    if 0 in grid:
        return None
    if INTERPRET:
        with _interpreter().silent():
            kernel[grid](*args, **options)
        return None
    if args[0].device.index == torch.cuda.current_device():
        return kernel[grid](*args, **options)
    with torch.cuda.device(args[0].device):
        return kernel[grid](*args, **options)


def recorded() -> bool:
    """Whether launches are recorded and not run."""
    return _recorder is not None


class Prepared:
    """A kernel with its options, for launches that differ in nothing that its code depends on: types,
    alignment, and the integers that Triton specializes.

    Later launches skip Triton's own look at every argument, which costs more than the launch.
    `aligned` says that all addresses are multiples of 16, as Triton likes them; it looks at each
    launch otherwise. Capitals come last in the kernel's signature.
    """

    def __init__(self, kernel: Any, aligned: bool, **options: Any) -> None:
        self.kernel, self.aligned, self.options = kernel, aligned, options
        self.compiled: Any = None
        self.constants: tuple[Any, ...] = ()

    def __call__(self, grid: tuple[int], *args: Any) -> None:
        if self.compiled is None or _recorder is not None:
            compiled = launch(self.kernel, grid, *args, **self.options)
            if self.aligned and compiled is not None:
                names = self.kernel.arg_names[len(args) :]
                self.constants = tuple(self.options[name] for name in names)
                self.compiled = compiled
        elif args[0].device.index == torch.cuda.current_device():
            self.compiled[(*grid, 1, 1)](*args, *self.constants)
        else:
            with torch.cuda.device(args[0].device):
                self.compiled[(*grid, 1, 1)](*args, *self.constants)


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


@functools.cache
def _num_sms(where: torch.device) -> int:
    return torch.cuda.get_device_properties(where).multi_processor_count
