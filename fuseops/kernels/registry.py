"""One way to add a kernel: ``@kernel_op`` on its launcher.

    @kernel_op(twin=twins.rmsnorm_fwd)
    def rmsnorm_fwd(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...

registers ``torch.ops.fuseops.rmsnorm_fwd``, whose schema is the launcher's signature, with
* the launcher on CUDA tensors (on CPU tensors too under ``TRITON_INTERPRET=1``), the twin
  elsewhere;
* a fake for ``torch.compile`` made from the twin (or ``fake=``, where the twin reads values);
* a FLOP formula where one is given (memory-bound kernels count none, as torch's own elementwise
  ops) and a byte formula (each input read once and each output written once, unless ``nbytes=``
  says otherwise);
* ``cases``, arguments on the meta device, from which the ahead-of-time table and the tests find
  every kernel.

Called eagerly with plain tensors, the dispatcher is bypassed; whatever has to see the op (a
dispatch or function mode, functorch, a tensor subclass, autograd, dynamo) still sees it. Autograd
belongs to the ops layer: a kernel op has no derivative of its own.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler

from fuseops.errors import FuseOpsError

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"

_library = torch.library.Library("fuseops", "FRAGMENT")
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_num_function_modes = torch._C._len_torch_function_stack
_functorch_level = torch._C._functorch.peek_interpreter_stack

KERNEL_OPS: dict[str, KernelOp] = {}


class KernelOp:
    """A kernel with its twin and formulas, callable like the launcher it was made from."""

    def __init__(self, launcher, twin, fake, flops, nbytes, min_arch, cases) -> None:
        functools.update_wrapper(self, launcher)
        self.name: str = launcher.__name__
        self.label = f"fuseops::{self.name}"
        self.launcher, self.twin = launcher, twin
        self.min_arch: Callable[..., int] | None = min_arch
        self.cases: Callable[[], Iterable[tuple[Any, ...]]] = cases
        self._nbytes = nbytes
        if self.name in KERNEL_OPS:
            raise FuseOpsError(f"kernel op '{self.name}' is registered twice")
        _library.define(self.name + torch.library.infer_schema(launcher, mutates_args=()))
        _library.impl(self.name, self.body, "CompositeExplicitAutograd")
        torch.library.register_fake(self.label, fake or twin, lib=_library)
        self.op = getattr(torch.ops.fuseops, self.name).default
        if flops is not None:
            _register_flops(getattr(torch.ops.fuseops, self.name), flops)
        KERNEL_OPS[self.name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or _num_dispatch_modes()
            or _num_function_modes()
            or _functorch_level() is not None
            or not _plain(args)
            or (kwargs and not _plain(kwargs.values()))
        ):
            return self.op(*args, **kwargs)
        if profiler._is_profiler_enabled:
            with torch.profiler.record_function(self.label):
                return self.body(*args, **kwargs)
        return self.body(*args, **kwargs)

    def body(self, *args: Any, **kwargs: Any) -> Any:
        """The computation itself, on the backend of the first tensor."""
        run = self.launcher if self._runs_triton(args, kwargs) else self.twin
        return run(*args, **kwargs)

    def nbytes(self, *args: Any) -> int:
        """The least number of bytes this call has to move."""
        if self._nbytes is not None:
            return self._nbytes(*args)
        return tensor_bytes(args) + tensor_bytes(self.op(*meta(args)))

    def _runs_triton(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                if value.device.type == "cpu":
                    return INTERPRET
                if value.device.type != "cuda" or not _has_triton():
                    return False
                return self.min_arch is None or arch_of(value.device) >= self.min_arch(
                    *args, **kwargs
                )
        return False

    def __repr__(self) -> str:
        return f"<kernel op {self.label}>"


def kernel_op(
    *,
    twin: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    flops: Callable[..., Any] | None = None,
    nbytes: Callable[..., Any] | None = None,
    min_arch: Callable[..., int] | None = None,
    cases: Callable[[], Iterable[tuple[Any, ...]]] = tuple[Any, ...],
) -> Callable[[Callable[..., Any]], KernelOp]:
    """Register the decorated launcher. ``min_arch(*args)`` names the first architecture (80, 90,
    ...) that can run it; older ones run the twin."""
    return lambda launcher: KernelOp(launcher, twin, fake, flops, nbytes, min_arch, cases)


def tensor_bytes(value: Any) -> int:
    """Bytes of every tensor in a value or in a tuple or list of values."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(map(tensor_bytes, value)) if isinstance(value, (tuple, list)) else 0


def meta(value: Any) -> Any:
    """The same value with its tensors on the meta device."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return type(value)(map(meta, value)) if isinstance(value, (tuple, list)) else value


@functools.cache
def arch_of(device: torch.device) -> int:
    """Compute capability as one number: 90 on Hopper."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _plain(values: Iterable[Any]) -> bool:
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is nn.Parameter:
            if value.requires_grad and torch.is_grad_enabled():
                return False
        elif isinstance(value, Tensor):
            return False
    return True


def _register_flops(packet: Any, formula: Callable[..., Any]) -> None:
    # Imported here because torch's flop counter imports Triton, or warns that there is none.
    from torch.utils.flop_counter import register_flop_formula

    register_flop_formula(packet)(formula)
