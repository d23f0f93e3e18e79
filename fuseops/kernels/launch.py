"""Where every Triton launch passes: device guard, interpreter shim, and the recorder of the
ahead-of-time gate.

Device code lives in ``fuseops.kernels.device``, the only modules that import Triton;
``device("norm")`` loads one at the first launch, so that fuseops imports without Triton.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fuseops.errors import FuseOpsError
from fuseops.kernels.registry import INTERPRET, arch_of
from fuseops.kernels.replay import Launch, LaunchRecorder, apart, noting, thread
from fuseops.kernels.triton_private import Launcher, enter_context, launcher_of

NUM_SMS_INTERPRETED = 3


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


COMPILER = {"enable_fp_fusion": True}
"""What a kernel is compiled with that does not say otherwise. A product and the sum it goes into are rounded once,
whatever a release of Triton does by default: 3.9 warns where nothing is said, and the default of 3.10 is another."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Run ``kernel[grid](*args, **options)`` on the device of its first argument, a tensor; nothing when the
    grid is empty.   -> the compiled kernel, if one ran

    Arguments by position, then every constexpr by keyword: they come last in the kernel's signature.
    """
    recorder = thread.recorder
    if recorder is not None:
        recorder.launches.append(Launch(kernel, grid, args, options))
        recorder.launch = launched
        return None
    if 0 in grid:
        return None
    if INTERPRET:
        _interpreter().install()  # a kernel from elsewhere comes without `device`
        constants_of(kernel, args, options)
        with _interpreter().silent():
            kernel[grid](*args, **options)
        return None
    if args[0].device.index == torch.cuda.current_device():
        return _run(kernel, grid, args, options)
    with torch.cuda.device(args[0].device):
        return _run(kernel, grid, args, options)


def launched(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], options: dict[str, Any]
) -> Launcher | None:
    """Launch operands that are aligned.   -> what launches the kernel again, if anything but Triton can"""
    compiled = launch(kernel, grid, *args, **options)
    if compiled is None:
        return None
    return launcher_of(compiled, constants_of(kernel, args, options))


def constants_of(kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """The constexprs of a launch, in the order of the kernel's signature.  Raises FuseOpsError where one is missing."""
    names = kernel.arg_names[len(args) :]
    missing = [name for name in names if name not in options]
    if missing:
        raise FuseOpsError(
            f"launch({kernel.__name__}, ...): no value for {', '.join(missing)}. Pass every argument by position, and "
            "then every constexpr by keyword, those with defaults too; a fuseops.kernels.Space picks block sizes, "
            "not triton.autotune."
        )
    return tuple(options[name] for name in names)


_bound: dict[tuple[Any, ...], tuple[Any, Launcher | None]] = {}


def _run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """As ``kernel[grid](*args, **options)``, whose look at every argument is taken once a variant."""
    key = _key(kernel, args, options)
    compiled, launcher = _bound.get(key, (None, None))
    if launcher is not None:
        _run_again(launcher, grid, args)
        return compiled
    enter_context()
    compiled = kernel[grid](*args, **(COMPILER | options))
    if key[2] is not None and key not in _bound:
        _bound[key] = compiled, launcher_of(compiled, constants_of(kernel, args, options))
    return compiled


def _key(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    return kernel, args[0].device.index, variant_of(args), *options, *options.values()


def variant_of(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """All that Triton may compile a kernel for of these arguments; None where one is neither plain nor a descriptor of
    this package, whose class says its layout.
    """
    seen: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            seen += arg.dtype, arg.data_ptr() % 16 == 0
        elif kind is int:
            seen.append(1 if arg == 1 else (arg % 16 == 0, arg >> 31))
        elif kind is float:
            seen.append(kind)
        elif getattr(kind, "one_layout", False):
            seen += kind, arg.base.dtype, *arg.block_shape
        else:
            return None
    return tuple(seen)


def _run_again(launcher: Launcher, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    """One launch of a compiled kernel on the current device: pointers are numbers by then, and descriptors encoded."""
    flat: list[Any] = []
    number = 0
    for arg in args:
        kind = type(arg)
        if kind is int or kind is float:
            flat.append(arg)
        elif kind is Tensor or kind is Parameter:
            flat.append(arg.data_ptr())
        else:
            flat += launcher.encoded(arg, number)
            number += 1
    blocks, stream = (*grid, 1, 1)[:3], launcher.stream_of(args[0].device.index)
    operands = (*flat, *launcher.constants)
    if launcher.hooks.launch_enter_hook.calls:
        launcher.hooked(blocks, stream, operands)
    else:
        launcher.raw(*blocks, stream, *launcher.head, *operands)


@contextmanager
def recording(arch: int) -> Iterator[LaunchRecorder]:
    """Inside, launches of this thread are recorded and not run, as if on a GPU of the given architecture."""
    with noting(LaunchRecorder(arch)) as recorder, apart():
        yield recorder


def current_arch(where: torch.device) -> int:
    """Architecture that a launch on this device runs on (the interpreter stands for Hopper)."""
    recorder = thread.recorder
    if recorder is not None:
        if recorder.stands_for is None:
            return recorder.arch
        where = recorder.stands_for
    return 90 if where.type != "cuda" else arch_of(where)


def num_sms(where: torch.device) -> int:
    """Number of multiprocessors, the unit of persistent grids."""
    recorder = thread.recorder
    if recorder is not None:
        if recorder.stands_for is None:
            return recorder.num_sms
        where = recorder.stands_for
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


def overlap(where: torch.device) -> dict[str, Any]:
    """Options of a launch that begins while the one before it, whichever it is, ends.

    From Hopper on (programmatic dependent launch). The kernel starts with ``overlapped(PDL)``, and so
    waits for all that earlier launches wrote before it touches memory.
    """
    return chain(where)[1]


@functools.cache
def _num_sms(where: torch.device) -> int:
    return torch.cuda.get_device_properties(where).multi_processor_count
