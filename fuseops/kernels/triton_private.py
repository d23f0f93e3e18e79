"""Every private name of Triton that fuseops launches by, in one place.

`tests/kernels/test_triton_private.py` fails when one of them is gone.

Triton looks at every argument of a launch, encodes every tensor descriptor, asks the driver about every pointer and
calls its hooks each time. A `Launcher` gets numbers, and calls what Triton has in C: in 3.6 one for each kernel, in 3.9
one for all. Other releases launch by themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch


class Launcher:
    """Launches one compiled kernel, as Triton 3.6 does.

    raw       (x, y, z, stream, *head, *operands): the launcher in C; pointers are numbers, descriptors are encoded
    head      what stands before the operands: the function, how it is launched, no scratch and no hooks
    hooked    (grid, stream, operands): the same with Triton's launch hooks, if somebody has set one
    """

    __slots__ = ("compiled", "constants", "head", "hooks", "metas", "raw", "stream_of")

    def __init__(self, compiled: Any, constants: tuple[Any, ...]) -> None:
        from triton import knobs
        from triton.runtime import driver

        run = compiled.run
        names = (
            inspect.getclosurevars(run.launch).nonlocals if inspect.isfunction(run.launch) else {}
        )
        self.raw: Callable[..., None] = names.get("launcher", run.launch)
        self.metas: Sequence[Any] = names.get("tensordesc_meta") or ()
        self.stream_of: Callable[[int], int] = driver.active.get_current_stream
        self.compiled, self.constants = compiled, constants
        self.hooks = knobs.runtime
        # cooperative, PDL, two scratch buffers, metadata; then what hooks would be told, and hooks
        launched = compiled.function, False, run.launch_pdl, None, None, compiled.packed_metadata
        self.head: tuple[Any, ...] = (*launched, None, None, None)

    def hooked(self, grid: tuple[int, ...], stream: int, operands: Sequence[Any]) -> None:
        told = self.compiled.launch_metadata(grid, stream)
        hooks = self.hooks.launch_enter_hook, self.hooks.launch_exit_hook
        self.raw(*grid, stream, *self.head[:6], told, *hooks, *operands)

    def encoded(self, descriptor: Any, number: int) -> list[Any]:
        """The operands that the kernel's descriptor of this number becomes."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        enter_context()
        found: list[Any] = make_tensordesc_arg(descriptor, self.metas[number], *self.UNREAD)
        return found

    UNREAD: ClassVar[tuple[Any, ...]] = ()  # what encoding is given besides, and does not read


class TupleLauncher(Launcher):
    """Launches one compiled kernel, as Triton 3.9 does: operands come as one tuple, behind their types."""

    __slots__ = ()
    UNREAD = ((),)

    def __init__(self, compiled: Any, constants: tuple[Any, ...]) -> None:
        super().__init__(compiled, constants)
        run, below = compiled.run, self.raw
        self.raw = lambda *given: below(*given[:15], given[15:])
        # cooperative, PDL, metadata; what hooks would be told, and hooks; two scratch buffers; types
        launched = compiled.function, False, run.launch_pdl, compiled.packed_metadata
        types = run.arg_annotations, run.kernel_signature
        self.head = (*launched, None, None, None, None, None, *types)

    def hooked(self, grid: tuple[int, ...], stream: int, operands: Sequence[Any]) -> None:
        told = self.compiled.launch_metadata(grid, stream)
        hooks = self.hooks.launch_enter_hook, self.hooks.launch_exit_hook
        self.raw(*grid, stream, *self.head[:4], told, *hooks, *self.head[7:], *operands)


LAUNCHERS = {"3.6": Launcher, "3.9": TupleLauncher}
"""By release of Triton, whose launchers take their arguments in these orders."""


def enter_context() -> None:
    """Encoding a descriptor takes a CUDA context, and autograd's threads begin without one. This call into CUDA gives
    them theirs; Triton does so only when it loads or launches, which is later.
    """
    torch.cuda.is_current_stream_capturing()


def launcher_of(compiled: Any, constants: tuple[Any, ...]) -> Launcher | None:
    """The launcher of a kernel, None where Triton has to see each launch."""
    import triton

    kind = LAUNCHERS.get(".".join(triton.__version__.split(".")[:2]))
    run = compiled.run
    if kind is None or run.global_scratch_size or getattr(run, "gsan_enabled", False):
        return None
    return kind(compiled, constants)
