"""`launch` runs every Triton kernel: with a device guard, by the interpreter, or recorded for a replay or the
ahead-of-time table.

Device code is in ``fuseops.kernels.device``, the only modules that import Triton; ``device("norm")`` imports one at the
first launch, so that fuseops imports without Triton.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.kernels.triton_private import Launcher, enter_context, launcher_of

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRET = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"
NUM_SMS_INTERPRETED = 3


class Launch(NamedTuple):
    """A `Launch` is recorded instead of run: to be replayed, or for the ahead-of-time table."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


class LaunchRecorder:
    """A `LaunchRecorder` collects launches instead of running them, as if on a GPU of this architecture and size.

    rehearses: they are for a replay, and may depend on operands alone
    """

    def __init__(self, arch: int, num_sms: int = 132, rehearses: bool = False) -> None:
        self.arch, self.num_sms, self.rehearses = arch, num_sms, rehearses
        self.launches: list[Launch] = []


class _KernelsThread(threading.local):
    """A `_KernelsThread` holds what scopes of this thread have set: another may launch while this one records."""

    def __init__(self) -> None:
        # set here, not on the class: dynamo also guards on keys that a dict lacks
        self.reference_only = False
        self.as_arch = 0
        # True: calls are replayed without asking `may_replay`; or the `Transcriber` that records them
        self.replay_mode: Any = False
        self.in_fake = False  # inside of a fake, where temporaries take no memory
        self.recorder: LaunchRecorder | None = None


thread = _KernelsThread()


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
"""Default compiler options. A product and the sum it is added to are rounded once, whatever a release of Triton does by
default: 3.9 warns without the option, and 3.10 changes the default."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """Run ``kernel[grid](*args, **options)`` on the device of its first argument, a tensor; nothing when the
    grid is empty.   -> the compiled kernel, if one ran

    Arguments by position, then every constexpr by keyword: they come last in the kernel's signature.
    """
    recorder = thread.recorder
    if recorder is not None:
        recorder.launches.append(Launch(kernel, grid, args, options))
        return None
    if 0 in grid:
        return None
    if INTERPRET:
        _interpreter().install()  # a kernel of another package is not loaded by `device`
        constants_of(kernel, args, options)
        with _interpreter().silent():
            kernel[grid](*args, **options)
        return None
    if args[0].device.index == torch.cuda.current_device():
        return _run(kernel, grid, args, options)
    with torch.cuda.device(args[0].device):
        return _run(kernel, grid, args, options)


def launch_and_bind(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], options: dict[str, Any]
) -> Launcher | None:
    """Launch with aligned operands.   -> the kernel's `Launcher`, None where only Triton can launch it"""
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


_launchers: dict[tuple[Any, ...], tuple[Any, Launcher | None]] = {}


def _run(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """``kernel[grid](*args, **options)``; Triton specialises on the arguments only once a variant, and launches itself
    what its hooks are told of.
    """
    variant = variant_of(args)
    key = kernel, args[0].device.index, variant, *options, *options.values()
    compiled, launcher = _launchers.get(key, (None, None))
    if launcher is not None and not launcher.hooks.launch_enter_hook.calls:
        _relaunch(launcher, grid, args)
        return compiled
    enter_context()
    compiled = kernel[grid](*args, **(COMPILER | options))
    if variant is not None and key not in _launchers:
        _launchers[key] = compiled, launcher_of(compiled, constants_of(kernel, args, options))
    return compiled


def variant_of(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Everything about these arguments that Triton specialises a kernel on; None where one is neither plain nor a
    descriptor of this package, whose class determines its layout.
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


def _relaunch(launcher: Launcher, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    """Launch a compiled kernel on the current device, with pointers as numbers and encoded descriptors."""
    flat: list[Any] = []
    number = 0
    for arg in args:
        kind = type(arg)
        if kind is int or kind is float:
            flat.append(arg)
        elif kind is Tensor or kind is Parameter:
            flat.append(arg.data_ptr())
        else:
            flat += launcher.encode_descriptor(arg, number)
            number += 1
    blocks, stream = (*grid, 1, 1)[:3], launcher.stream_of(args[0].device.index)
    launcher.raw(*blocks, stream, *launcher.head, *flat, *launcher.constants)


_archs: dict[torch.device, int] = {}


@torch_private.assume_constant_result
def arch_of(device: torch.device) -> int:
    """Compute capability as one number: 90 on Hopper."""
    arch = _archs.get(device)
    if arch is None:
        major, minor = torch.cuda.get_device_capability(device)
        arch = _archs[device] = 10 * major + minor
    return arch


def current_arch(where: torch.device) -> int:
    """The architecture of a launch on this device; the interpreter counts as Hopper."""
    if thread.recorder is not None:
        return thread.recorder.arch
    return 90 if where.type != "cuda" else arch_of(where)


def num_sms(where: torch.device) -> int:
    """The number of multiprocessors, the unit of persistent grids."""
    if thread.recorder is not None:
        return thread.recorder.num_sms
    return NUM_SMS_INTERPRETED if where.type != "cuda" else _num_sms(where)


def pdl_chain(where: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options of the first launch, options of the later ones) of consecutive launches in one call.

    From Hopper on a launch may begin while the one before it ends (programmatic dependent launch): kernels allow it by
    ``pdl_trigger``, and wait by ``pdl_wait`` before they touch memory that an earlier one wrote.
    """
    if INTERPRET or current_arch(where) < 90:
        return {"PDL": False}, {"PDL": False}
    return {"PDL": True}, {"PDL": True, "launch_pdl": True}


def pdl_overlap(where: torch.device) -> dict[str, Any]:
    """Options of a launch that may begin while any launch before it ends.

    From Hopper on (programmatic dependent launch). The kernel starts with ``pdl_trigger_and_wait(PDL)``, which waits
    for the writes of earlier launches.
    """
    return pdl_chain(where)[1]


@functools.cache
def _num_sms(where: torch.device) -> int:
    return torch.cuda.get_device_properties(where).multi_processor_count
