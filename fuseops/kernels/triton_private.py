"""The private names of Triton that fuseops uses for launches are all in this file.

`tests/kernels/test_triton_private.py` fails when one of them is gone.

Triton inspects every argument of a launch, encodes every tensor descriptor, asks the driver about every pointer and
calls its hooks each time. A `Launcher` takes numbers, and calls Triton's launcher in C: in 3.6 one for each kernel, in
3.9 one for all. With other releases every launch goes through Triton.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch


class Launcher:
    """A `Launcher` launches one compiled kernel, as Triton 3.6 does.

    raw          (x, y, z, stream, *head, *operands): the launcher in C; pointers are numbers, descriptors are encoded
    head         the arguments before the operands: the function, launch flags, no scratch and no hooks
    hooks        where Triton keeps them: `launch_enter_hook.calls` is empty where this may launch
    UNUSED_ARGS  arguments of the encoder of descriptors that it does not read
    """

    UNUSED_ARGS: ClassVar[tuple[Any, ...]] = ()
    __slots__ = ("constants", "head", "hooks", "metas", "raw", "stream_of")

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
        self.constants, self.hooks = constants, knobs.runtime
        # cooperative, PDL, two scratch buffers, metadata; then the hooks' metadata, and hooks
        launched = compiled.function, False, run.launch_pdl, None, None, compiled.packed_metadata
        self.head: tuple[Any, ...] = (*launched, None, None, None)

    def encode_descriptor(self, descriptor: Any, number: int) -> list[Any]:
        """The operands of the kernel for its descriptor of this number."""
        from triton.backends.nvidia.driver import make_tensordesc_arg

        enter_context()
        found: list[Any] = make_tensordesc_arg(descriptor, self.metas[number], *self.UNUSED_ARGS)
        return found


class TupleLauncher(Launcher):
    """A `TupleLauncher` launches one compiled kernel, as Triton 3.9 does: operands are one tuple, after their types."""

    UNUSED_ARGS = ((),)
    __slots__ = ()

    def __init__(self, compiled: Any, constants: tuple[Any, ...]) -> None:
        super().__init__(compiled, constants)
        run, raw = compiled.run, self.raw
        self.raw = lambda *given: raw(*given[:15], given[15:])
        # cooperative, PDL, metadata; the hooks' metadata, and hooks; two scratch buffers; types
        launched = compiled.function, False, run.launch_pdl, compiled.packed_metadata
        types = run.arg_annotations, run.kernel_signature
        self.head = (*launched, None, None, None, None, None, *types)


LAUNCHERS = {"3.6": Launcher, "3.9": TupleLauncher}
"""By release of Triton, which differ in the order of arguments."""


def enter_context() -> None:
    """Make sure that this thread has a CUDA context, which encoding a descriptor needs: autograd's threads begin
    without one, and Triton sets it only when it loads or launches.
    """
    torch.cuda.is_current_stream_capturing()


def launcher_of(compiled: Any, constants: tuple[Any, ...]) -> Launcher | None:
    """The launcher of a kernel, None where each launch has to go through Triton."""
    import triton

    kind = LAUNCHERS.get(".".join(triton.__version__.split(".")[:2]))
    run = compiled.run
    if kind is None or run.global_scratch_size or getattr(run, "gsan_enabled", False):
        return None
    return kind(compiled, constants)
