"""The lanes of an offloaded step, and what a schedule may ask of them.

A lane runs what it is given in order; lanes run beside each other. Order between lanes comes from
events alone: nobody asks for the time, or whether something has finished, so that every run
enqueues the same. Three kinds of lanes speak this protocol: a simulated clock, bytes in host memory
(`cpu`) and CUDA streams (`cuda`).
"""

import itertools
from collections.abc import Hashable, Sequence
from typing import Any, Literal

from fuseops.errors import FuseOpsError

Lane = Literal["host", "compute", "d2h", "h2d", "network"]
Place = Literal["device", "host"]
# the last in simulations alone
LANES: tuple[Lane, ...] = ("host", "compute", "d2h", "h2d", "network")

_serials = itertools.count()


class NoRoomError(FuseOpsError):
    """The host budget has no room for a buffer; the message is the reason that reports give."""


class Event:
    """An `Event` is a point in a lane: everything that the lane was given before it was recorded.

    whose     the compute lane that comes after it: its own, or the one that waited for it last; None: nobody's
    since     when that one did, to be compared with serials
    native    what the lanes know it by; None: it has not been recorded
    captured  whether it lies in a CUDA graph
    """

    __slots__ = ("captured", "lane", "native", "serial", "since", "whose")

    def __init__(
        self, lane: Lane, whose: Hashable = None, native: Any = None, captured: bool = False
    ) -> None:
        self.lane, self.whose, self.native, self.captured = lane, whose, native, captured
        self.serial = self.since = next(_serials)  # of two events the later has the higher number

    def awaited(self, whose: Hashable) -> None:
        """A compute lane waits for it."""
        self.whose, self.since = whose, next(_serials)

    def is_before(self, point: "Event") -> bool:
        """Whether a lane that waits for a point of compute need not wait for this: compute had done so by then."""
        return self.whose is not None and self.whose == point.whose and self.since < point.serial


class Buf:
    """A `Buf` is a buffer of bytes on the device or the host.

    data   of device bytes: the storage that they are in, as long as they are needed; nothing in a simulation
    at     of host bytes: their address; 0 of a storage, which is asked, since it may be given other memory
    owner  of device bytes: the compute lane that may use them again once they are freed
    after  of host bytes that were freed and are used again: the copy that may still read them
    """

    __slots__ = ("after", "at", "data", "name", "nbytes", "owner", "place")

    def __init__(
        self,
        name: str,
        nbytes: int,
        place: Place,
        data: Any = None,
        owner: Hashable = None,
    ) -> None:
        self.name, self.nbytes, self.place = name, nbytes, place
        self.data, self.at, self.owner = data, 0, owner
        self.after: Event | None = None

    def __repr__(self) -> str:
        return f"Buf({self.name!r}, {self.nbytes} bytes, {self.place})"


class Lanes:
    """`Lanes` are the streams of compute and of copies that a schedule gives its work to."""

    at_once = False  # whatever a lane is given is over before the next

    def alloc(self, nbytes: int, device: Place, name: str) -> Buf:
        """New bytes; those on the device belong to the compute lane, which may still be reading
        them. Host bytes can have an `after`.  Raises NoRoomError when the host budget is used up.
        """
        raise NotImplementedError

    def free(self, buf: Buf) -> None:
        """Give bytes back. On the device that is a write on the compute lane; host bytes carry
        `after` to their next user.
        """
        raise NotImplementedError

    def copy(
        self,
        lane: Lane,
        sources: Sequence[Buf],
        target: Buf,
        offsets: Sequence[int] = (0,),
        ready: Event | None = None,
        after: Event | None = None,
    ) -> Event | None:
        """Enqueue a copy of each source to its offset (bytes) in the target, once the lane has waited for `ready`, a
        point of compute, and for `after`. ready None: for all that compute has been given.   -> the point at which it
        is over, None if it is already
        """
        if not self.at_once:
            ready = ready or self.record("compute")
            self.wait(lane, ready)
            if after is not None and not after.is_before(ready):
                self.wait(lane, after)
        return self.move(lane, sources, target, offsets)

    def move(
        self, lane: Lane, sources: Sequence[Buf], target: Buf, offsets: Sequence[int]
    ) -> Event | None:
        """`copy`, waiting for nothing."""
        raise NotImplementedError

    def record(self, lane: Lane) -> Event:
        """The point that the lane has been filled up to."""
        raise NotImplementedError

    def wait(self, lane: Lane, event: Event) -> None:
        """All that the lane is given from here on runs after the event."""
        raise NotImplementedError

    def compute(self) -> Hashable:
        """Which compute lane the caller is on: one thread may use several CUDA streams."""
        return "compute"
