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
from fuseops.errors import FuseOpsError

from .protocol import Buf, Event, Lane
from .real import RealLanes

log = logging.getLogger("fuseops.offload")

SHARED = 3
"""Copies one way at most that have one event: who waits for the first waits for all of them."""


class CudaEvent(Event):
    """A `CudaEvent` is a point of a stream, or the end of a few copies. Its native event is used again once nobody can
    wait for this one.
    """

    __slots__ = ("copies", "unused")
    copies: int
    unused: list[Any]

    def __del__(self) -> None:
        if self.native is not None:
            self.unused.append(self.native)


class Streams(dict[Any, torch.cuda.Stream]):
    """`Streams` finds a stream by what `torch_private.current_stream` says of it: by (id, index, type)."""

    def __missing__(self, which: Any) -> torch.cuda.Stream:
        number, index, kind = which
        made = torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)  # type: ignore[no-untyped-call]
        self[which] = made
        return made


class CudaLanes(RealLanes):
    """`CudaLanes` run a schedule's copies on streams of a device; `budget` bytes of host memory, None for no limit.

    A few copies one way that nothing comes between share an event. It is recorded when somebody waits for it, or before
    their stream does anything else.
    """

    def __init__(self, device: torch.device, budget: int | None = None) -> None:
        super().__init__(device, pinned, budget)
        self._copies = copy_streams(device)
        self._streams = Streams()
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._unused: list[Any] = []  # native events, to record again
        self._memcpy = memcpy()
        self._open: dict[Lane, CudaEvent] = {}  # of the last copies of a lane, until it is recorded
        self._heard: dict[Lane, Event] = {}  # what each copy lane waited for last
        weakref.finalize(self, unpin, device, self.arena.regions).atexit = False

    def hand_over(self, owner: Hashable) -> None:
        self._streams[owner].wait_stream(self.stream("compute"))

    def move(
        self, lane: Lane, sources: Sequence[Buf], target: Buf, offsets: Sequence[int]
    ) -> Event:
        which = torch_private.current_stream(self._index)
        if torch_private.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self.move(lane, sources, target, offsets)
        at, number = target.at or target.data.data_ptr(), self._copies[lane].cuda_stream
        for source, offset in zip(sources, offsets, strict=True):
            begin = source.at or source.data.data_ptr()
            if code := self._memcpy(at + offset, begin, source.nbytes, number):
                raise RuntimeError(f"CUDA error {code}: a copy could not be started")
        capturing = which[0] != 0 and torch_private.is_capturing()
        event = self._open.get(lane)
        if event is None or event.captured != capturing:
            event = self._open[lane] = self._event(lane, None, capturing)
            event.copies = 1
        else:
            event.copies += 1
            if event.copies == SHARED:
                self._end_of_copies(lane, capturing)
        return event

    def _end_of_copies(self, lane: Lane, capturing: bool) -> None:
        """What goes this way from here on has another event."""
        # taken out before it is recorded: another thread may copy meanwhile
        event = self._open.pop(lane, None)
        if event is not None and event.captured == capturing:
            self._record(event, self._copies[lane])

    def record(self, lane: Lane) -> Event:
        which = torch_private.current_stream(self._index)
        stream = self._copies.get(lane) or self._streams[which]
        capturing = which[0] != 0 and torch_private.is_capturing()
        return self._event(lane, which if lane == "compute" else None, capturing, stream)

    def _event(
        self,
        lane: Lane,
        whose: Hashable,
        capturing: bool,
        stream: torch.cuda.Stream | None = None,
    ) -> CudaEvent:
        """An event, recorded now if a stream is given."""
        event = CudaEvent(lane, whose, None, capturing)
        event.unused = self._unused
        if stream is not None:
            self._record(event, stream)
        return event

    def _record(self, event: Event, stream: torch.cuda.Stream) -> None:
        event.native = self._unused.pop() if self._unused else torch.cuda.Event()  # type: ignore[no-untyped-call]
        torch_private.record_event(event.native, stream)

    def wait(self, lane: Lane, event: Event) -> None:
        which = torch_private.current_stream(self._index)
        capturing = which[0] != 0 and torch_private.is_capturing()
        # A captured graph starts after, and ends before, all that its stream is given around it.
        if event.captured != capturing:
            return
        if event.whose == which if lane == "compute" else event is self._heard.get(lane):
            return  # as before
        if lane in self._open:
            self._end_of_copies(lane, capturing)
        if event is self._open.get(event.lane):
            self._end_of_copies(event.lane, capturing)
        if event.native is None:
            self._record(event, self._copies[event.lane])
        torch_private.wait_event(event.native, self._copies.get(lane) or self._streams[which])
        if lane == "compute":
            event.awaited(which)
        else:
            self._heard[lane] = event

    def compute(self) -> Hashable:
        which: Hashable = torch_private.current_stream(self._index)
        return which

    def stream(self, lane: Lane) -> torch.cuda.Stream:
        """What the lane is on this device."""
        return self._copies.get(lane) or self._streams[self.compute()]


@functools.cache
def memcpy() -> Callable[[int, int, int, int], int]:
    """The driver's copy of (target, source, bytes, stream), which returns an error or 0. A copy by a tensor goes
    through the dispatcher, and on the current stream.  Raises FuseOpsError where there is no such driver.
    """
    try:
        call = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    except (OSError, AttributeError) as error:
        raise FuseOpsError(f"offload from CUDA devices needs NVIDIA's driver: {error}.") from None
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return call


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
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Shared memory, which mmap makes by default, has no huge pages as most kernels are set up. Private memory has,
        # but a fork would have it copied: a child gets none of it.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(mmap.MADV_DONTFORK)
    else:
        memory = mmap.mmap(-1, nbytes)
    region = torch.frombuffer(memory, dtype=torch.uint8)
    region.zero_()  # by torch's threads; a page at a time inside cudaHostRegister takes longer
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
