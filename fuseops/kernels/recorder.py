"""Launches that are noted instead of run: for the ahead-of-time gate, and to be replayed (``replay``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fuseops.errors import FuseOpsError


class Launch(NamedTuple):
    """A `Launch` is one noted launch: what the ahead-of-time gate compiles."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]


class LaunchRecorder:
    """Collects launches instead of running them.

    stands_for: the device whose architecture and multiprocessors launchers see; None where `arch` and `num_sms` say.
    launch: launches one of them, and gives what launches it again: see `launch.launched`.
    """

    def __init__(
        self, arch: int = 0, num_sms: int = 132, stands_for: torch.device | None = None
    ) -> None:
        self.arch, self.num_sms, self.stands_for = arch, num_sms, stands_for
        self.launches: list[Launch] = []
        self.launch: Callable[..., Any] | None = None


class _Thread(threading.local):
    recorder: LaunchRecorder | None = None


thread = _Thread()  # an autograd thread may launch while another one records


@contextmanager
def noting(recorder: LaunchRecorder) -> Iterator[LaunchRecorder]:
    """Inside, launches of this thread are noted and not run."""
    outer, thread.recorder = thread.recorder, recorder
    try:
        yield recorder
    finally:
        thread.recorder = outer


class ReplayError(FuseOpsError):
    """A launcher does more than allocate and launch, or depends on more than its operands."""


def depends(on: str) -> None:
    """Called by a launcher whose launches depend on something else than operands: they are not replayed."""
    if thread.recorder is not None and thread.recorder.stands_for is not None:
        raise ReplayError(f"it depends on {on}")
