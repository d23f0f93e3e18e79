"""Lanes of one CUDA device: the current stream computes, and each direction has a copy stream.

`record_stream` is not used: its memory is not reused while the host runs ahead. Instead the schedule holds references,
and makes compute wait for a copy before it releases the bytes.
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

COPIES_PER_EVENT = 3
"""The most copies of one direction that share an event: waiting for the first waits for all of them."""


class CudaEvent(Event):
    """A `CudaEvent` is a point of a stream, or the end of a few copies. Its native event is reused once this object is
    freed, as nobody can wait for it then.
    """

    __slots__ = ("copies", "unused")
    copies: int
    unused: list[Any]

    def __del__(self) -> None:
        if self.native is not None:
            self.unused.append(self.native)


class Streams(dict[Any, torch.cuda.Stream]):
    """`Streams` maps the key of `torch_private.current_stream`, (id, index, type), to a stream."""

    def __missing__(self, stream_key: Any) -> torch.cuda.Stream:
        number, index, kind = stream_key
        made = torch.cuda.Stream(stream_id=number, device_index=index, device_type=kind)  # type: ignore[no-untyped-call]
        self[stream_key] = made
        return made


class CudaLanes(RealLanes):
    """`CudaLanes` run copies on streams of a device.   budget: bytes of host memory, None for no limit

    A few consecutive copies of one direction share an event. It is recorded at the first wait for it, or before their
    stream gets other work.
    """

    synchronous = False

    def __init__(self, device: torch.device, budget: int | None = None) -> None:
        super().__init__(device, pinned, budget)
        self._copies = copy_streams(device)
        self._streams = Streams()
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._unused: list[Any] = []  # native events, to be reused
        self._memcpy = memcpy()
        # the event of the last copies of a lane, until it is recorded
        self._open_events: dict[Lane, CudaEvent] = {}
        self._last_waits: dict[Lane, Event] = {}  # what each copy lane waited for last
        weakref.finalize(self, unpin, device, self.arena.regions).atexit = False

    def make_owner_wait(self, owner: Hashable) -> None:
        self._streams[owner].wait_stream(self.stream("compute"))

    def move(
        self, lane: Lane, sources: Sequence[Buf], target: Buf, offsets: Sequence[int]
    ) -> Event:
        stream_key = torch_private.current_stream(self._index)
        if torch_private.current_device() != self._index:
            with torch.cuda.device(self._index):
                return self.move(lane, sources, target, offsets)
        at, number = target.at or target.data.data_ptr(), self._copies[lane].cuda_stream
        for source, offset in zip(sources, offsets, strict=True):
            begin = source.at or source.data.data_ptr()
            if code := self._memcpy(at + offset, begin, source.nbytes, number):
                raise RuntimeError(f"CUDA error {code}: a copy could not be started")
        capturing = stream_key[0] != 0 and torch_private.is_capturing()
        event = self._open_events.get(lane)
        if event is None or event.captured != capturing:
            event = self._open_events[lane] = self._event(lane, None, capturing)
            event.copies = 1
        else:
            event.copies += 1
            if event.copies == COPIES_PER_EVENT:
                self._close_event(lane, capturing)
        return event

    def _close_event(self, lane: Lane, capturing: bool) -> None:
        """Record the open event of a lane, so that later copies have another one."""
        # popped before it is recorded: another thread may copy meanwhile
        event = self._open_events.pop(lane, None)
        if event is not None and event.captured == capturing:
            self._record(event, self._copies[lane])

    def record(self, lane: Lane) -> Event:
        stream_key = torch_private.current_stream(self._index)
        stream = self._copies.get(lane) or self._streams[stream_key]
        capturing = stream_key[0] != 0 and torch_private.is_capturing()
        return self._event(lane, stream_key if lane == "compute" else None, capturing, stream)

    def _event(
        self,
        lane: Lane,
        known_to: Hashable,
        capturing: bool,
        stream: torch.cuda.Stream | None = None,
    ) -> CudaEvent:
        """An event, recorded now if a stream is given."""
        event = CudaEvent(lane, known_to, None, capturing)
        event.unused = self._unused
        if stream is not None:
            self._record(event, stream)
        return event

    def _record(self, event: Event, stream: torch.cuda.Stream) -> None:
        event.native = self._unused.pop() if self._unused else torch.cuda.Event()  # type: ignore[no-untyped-call]
        torch_private.record_event(event.native, stream)

    def wait(self, lane: Lane, event: Event) -> None:
        stream_key = torch_private.current_stream(self._index)
        capturing = stream_key[0] != 0 and torch_private.is_capturing()
        # A captured graph is ordered as a whole with the work around it on its stream.
        if event.captured != capturing:
            return
        on_compute = lane == "compute"
        if event.known_to == stream_key if on_compute else event is self._last_waits.get(lane):
            return  # it has waited already
        if lane in self._open_events:
            self._close_event(lane, capturing)
        if event is self._open_events.get(event.lane):
            self._close_event(event.lane, capturing)
        if event.native is None:
            self._record(event, self._copies[event.lane])
        torch_private.wait_event(event.native, self._copies.get(lane) or self._streams[stream_key])
        if on_compute:
            event.mark_waited(stream_key)
        else:
            self._last_waits[lane] = event

    def compute(self) -> Hashable:
        stream_key: Hashable = torch_private.current_stream(self._index)
        return stream_key

    def stream(self, lane: Lane) -> torch.cuda.Stream:
        """The stream of a lane."""
        return self._copies.get(lane) or self._streams[self.compute()]


@functools.cache
def memcpy() -> Callable[[int, int, int, int], int]:
    """The driver's copy function of (target, source, bytes, stream), which returns an error or 0. A tensor's copy would
    go through the dispatcher, on the current stream.  Raises FuseOpsError where there is no such driver.
    """
    try:
        call = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    except (OSError, AttributeError) as error:
        raise FuseOpsError(f"offload from CUDA devices needs NVIDIA's driver: {error}.") from None
    call.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return call


@functools.cache
def copy_streams(device: torch.device) -> dict[Lane, torch.cuda.Stream]:
    """The two copy streams of a device, made once: torch has few streams."""
    return {
        "d2h": torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        "h2d": torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
    }


def pinned(nbytes: int) -> Tensor:
    """Page-locked host memory of exactly that size; pageable, with a warning, if pinning fails."""
    if torch_private.is_capturing():
        raise RuntimeError("CUDA graph capture can pin none; run the step once before")
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Most Linux kernels give shared memory, mmap's default, no huge pages. Private memory has them, but would be
        # copied on write after a fork, so it is excluded from children.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(mmap.MADV_DONTFORK)
    else:
        memory = mmap.mmap(-1, nbytes)
    region = torch.frombuffer(memory, dtype=torch.uint8)
    region.zero_()  # faults the pages in by torch's threads, faster than cudaHostRegister does
    error = torch.cuda.cudart().cudaHostRegister(region.data_ptr(), nbytes, 0)  # type: ignore[no-untyped-call]
    if int(error) != 0:
        log.warning("%d bytes of host memory could not be pinned: copies will be slow", nbytes)
    return region


def unpin(device: torch.device, regions: list[Tensor]) -> None:
    """Unpin regions, once no copy can be using them."""
    if regions:
        torch.cuda.synchronize(device)
    while regions:
        torch.cuda.cudart().cudaHostUnregister(regions.pop().data_ptr())  # type: ignore[no-untyped-call]
