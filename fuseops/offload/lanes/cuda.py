"""Lanes of one CUDA device: the current stream computes, each direction has a copy stream.

`record_stream` is not used: memory that it touches is not reused while the host runs ahead. The
schedule holds references instead, and has compute wait for a copy before it lets the bytes go.
"""

import ctypes
import functools
import logging
import mmap
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseops import torch_private

from .host_memory import DATA, HostMemory, copy_all
from .protocol import Buf, Event, Lane, Place, not_implied

log = logging.getLogger("fuseops.offload")


class CudaEvent(Event):
    """A `CudaEvent` is a point of a stream. Its native event is used again once nobody can wait for this one.

    captured  whether it lies in a graph that was captured
    """

    __slots__ = ("captured", "unused")

    def __init__(self, lane: Lane, native: Any, captured: bool, unused: list[Any]) -> None:
        super().__init__(lane, native)
        self.captured, self.unused = captured, unused

    def __del__(self) -> None:
        self.unused.append(self.native)


class CudaLanes:
    """`CudaLanes` run a schedule's copies on streams of a device; `budget` bytes of host memory, None for no limit."""

    def __init__(self, device: torch.device, budget: int | None = None) -> None:
        self.device = device
        self._host = HostMemory(pinned, budget)
        self.arena = self._host.arena
        self._copies: dict[Lane, torch.cuda.Stream] = copy_streams(device)
        self._streams: dict[Any, torch.cuda.Stream] = {}
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._unused: list[Any] = []  # native events, to record again
        self._memcpy = memcpy()
        weakref.finalize(self, unpin, device, self.arena.regions).atexit = False

    def alloc(self, nbytes: int, device: Place, name: str) -> Buf:
        if device == "device":
            data = torch_private.nothing(torch.uint8, self.device).new_empty(nbytes)
            return Buf(name, nbytes, device, data, self.compute())
        return self._host.alloc(nbytes, name)

    def free(self, buf: Buf) -> None:
        if buf.place == "host":
            self.arena.give(buf.slab, buf.after)
        elif buf.owner != self.compute():  # another stream will reuse it: after all that we know of
            self._stream_of(buf.owner).wait_stream(self.stream("compute"))
        buf.data = None

    def copy(
        self,
        lane: Lane,
        sources: Sequence[Buf],
        target: Buf,
        offsets: Sequence[int] = (0,),
        after: Sequence[Event | None] = (),
    ) -> Event:
        compute, capturing = self._now()
        stream = self._copies.get(lane, compute)
        at, starts = target.data.data_ptr(), [source.data.data_ptr() for source in sources]
        for event in not_implied(after, compute):
            if event is None:
                native = self._event()
                torch_private.record_event(native, compute)
                torch_private.wait_event(native, stream)
                self._unused.append(native)
            else:
                _wait(stream, event, capturing)
        if self._memcpy is None or torch_private.current_device() != self._index:
            with torch.cuda.stream(stream):
                copy_all(list(map(DATA, sources)), target.data, offsets)
        else:
            for source, start, offset in zip(sources, starts, offsets, strict=True):
                self._memcpy(at + offset, start, source.nbytes, stream.cuda_stream)
        return self._recorded(lane, stream, capturing)

    def record(self, lane: Lane) -> Event:
        compute, capturing = self._now()
        return self._recorded(lane, self._copies.get(lane, compute), capturing)

    def wait(self, lane: Lane, event: Event) -> None:
        compute, capturing = self._now()
        if _wait(self._copies.get(lane, compute), event, capturing) and lane == "compute":
            event.known = compute

    def compute(self) -> Hashable:
        which: Hashable = torch_private.current_stream(self._index)
        return which

    def stream(self, lane: Lane) -> torch.cuda.Stream:
        """What the lane is on this device."""
        return self._copies.get(lane) or self._stream_of(self.compute())

    def _stream_of(self, which: Any) -> torch.cuda.Stream:
        stream = self._streams.get(which)
        if stream is None:
            number, index, kind = which
            stream = torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)  # type: ignore[no-untyped-call]
            self._streams[which] = stream
        return stream

    def _now(self) -> tuple[torch.cuda.Stream, bool]:
        """The stream that computes, and whether it is captured into a graph; the default one cannot be."""
        which = torch_private.current_stream(self._index)
        return self._stream_of(which), which[0] != 0 and torch_private.is_capturing()

    def _event(self) -> Any:
        """A native event that nobody waits for."""
        try:
            return self._unused.pop()
        except IndexError:
            return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def _recorded(self, lane: Lane, stream: torch.cuda.Stream, capturing: bool) -> Event:
        native = self._event()
        torch_private.record_event(native, stream)
        return CudaEvent(lane, native, capturing, self._unused)


def _wait(stream: torch.cuda.Stream, event: Event, capturing: bool) -> bool:
    """Have a stream wait.   -> whether it has to"""
    # A captured graph starts after, and ends before, all that its stream is given around it.
    if not isinstance(event, CudaEvent) or event.captured != capturing:
        return False
    torch_private.wait_event(event.native, stream)
    return True


@functools.cache
def memcpy() -> Callable[[int, int, int, int], int] | None:
    """The driver's copy of (target, source, bytes, stream); None where there is none. A copy by a tensor goes through
    the dispatcher, and on the current stream.
    """
    try:
        call = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    call.restype = _no_error
    return call


def _no_error(code: int) -> int:
    if code:
        raise RuntimeError(f"CUDA error {code}: a copy could not be started")
    return code


@functools.cache
def copy_streams(device: torch.device) -> dict[Lane, torch.cuda.Stream]:
    """One stream out and one back for a device, made once: streams are few."""
    return {
        "d2h": torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        "h2d": torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
    }


def pinned(nbytes: int) -> Tensor:
    """Page-locked host memory of exactly that size; pageable, with a warning, if it is refused."""
    if torch_private.is_capturing():
        raise RuntimeError("CUDA graph capture can pin none; run the step once before")
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    region = torch.frombuffer(memory, dtype=torch.uint8)
    region.zero_()  # by several threads; a page at a time inside cudaHostRegister takes longer
    error = torch.cuda.cudart().cudaHostRegister(region.data_ptr(), nbytes, 0)  # type: ignore[no-untyped-call]
    if int(error) != 0:
        log.warning("%d bytes of host memory could not be pinned: copies will be slow", nbytes)
    return region


def unpin(device: torch.device, regions: list[Tensor]) -> None:
    """Give regions back, once no copy can be using them."""
    if regions:
        torch.cuda.synchronize(device)
    while regions:
        torch.cuda.cudart().cudaHostUnregister(regions.pop().data_ptr())  # type: ignore[no-untyped-call]
