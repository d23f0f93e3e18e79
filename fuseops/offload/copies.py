"""Copies of whole storages to host memory and back, a class a device.

On CUDA each direction has a stream of its own. Order comes from events alone, enqueued at fixed
points of the program: nothing asks whether a copy is done, so the host never waits and every run
enqueues the same. `record_stream` is not
used: memory it touches is not reused while the host runs ahead. Instead the source of a copy is
    held (`Pending`) until its compute stream has been told to wait for the copy; what is freed
    after that can be reused safely. Pinned buffers come from torch's caching host allocator, which
    hands one out again only after the copies that use it.
"""

import functools
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .storages import as_bytes


class HostCopy(NamedTuple):
    """The bytes of one storage in host memory."""

    buffer: Tensor  # (nbytes,) uint8
    written: torch.cuda.Event | None  # after it the buffer holds the bytes; None: it already does


class Pending(NamedTuple):
    """A copy that is under way, and the source that it reads."""

    source: Tensor  # (nbytes,) uint8, on the device
    compute: torch.cuda.Stream  # wrote the source, and will reuse its memory
    written: torch.cuda.Event

    def settle(self) -> None:
        """All that compute does from here on, reusing that memory too, is after the copy."""
        self.compute.wait_event(self.written)


class Copies(Protocol):
    """Moves storages of one device."""

    def buffer(self, nbytes: int) -> Tensor:
        """Host memory for so many bytes.  Raises RuntimeError or MemoryError when there is none."""

    def out(self, storage: torch.UntypedStorage, buffer: Tensor) -> tuple[HostCopy, Pending | None]:
        """Start to copy `storage`. A Pending is settled before the source is let go."""

    def back(self, copy: HostCopy) -> torch.UntypedStorage:
        """A new storage on the device with those bytes, for the current compute stream."""

    def stream(self) -> torch.cuda.Stream | None:
        """The current compute stream, for which `back` would bring a storage."""


class CpuCopies:
    """CPU tensors: to separate host buffers and back, at once. It shows what is exact anywhere."""

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def out(self, storage: torch.UntypedStorage, buffer: Tensor) -> tuple[HostCopy, None]:
        return HostCopy(buffer.copy_(as_bytes(storage)), None), None

    def back(self, copy: HostCopy) -> torch.UntypedStorage:
        return copy.buffer.clone().untyped_storage()

    def stream(self) -> None:
        return None


class CudaCopies:
    """CUDA tensors: to pinned memory on one stream and back on another, both ways at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.d2h, self.h2d = _stream(device), _stream(device)

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def out(self, storage: torch.UntypedStorage, buffer: Tensor) -> tuple[HostCopy, Pending]:
        compute, source = self.stream(), as_bytes(storage)
        self.d2h.wait_event(compute.record_event())  # the source has been written
        with torch.cuda.stream(self.d2h):
            buffer.copy_(source, non_blocking=True)
            written = self.d2h.record_event()
        return HostCopy(buffer, written), Pending(source, compute, written)

    def back(self, copy: HostCopy) -> torch.UntypedStorage:
        compute = self.stream()
        target = torch.empty(copy.buffer.numel(), dtype=torch.uint8, device=self.device)
        # That may be memory which compute has still to read, so copy after all it was given so far.
        self.h2d.wait_event(compute.record_event())
        if copy.written is not None:
            self.h2d.wait_event(copy.written)
        with torch.cuda.stream(self.h2d):
            target.copy_(copy.buffer, non_blocking=True)
            arrived = self.h2d.record_event()
        compute.wait_event(arrived)  # orders the next use of the target's memory as well
        return target.untyped_storage()

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)


def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@functools.cache
def copies_of(device: torch.device) -> Copies:
    """The copies of a device, made once: streams are few. Its kind is one of KINDS."""
    return CudaCopies(device) if device.type == "cuda" else CpuCopies()


KINDS = frozenset({"cpu", "cuda"})
