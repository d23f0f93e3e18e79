"""The lanes of an offloaded step, and what a schedule may ask of them.

A lane runs what it is given in order; lanes run beside each other. Order between lanes comes from
events alone: nobody asks for the time, or whether something has finished, so that every run
enqueues the same. Three kinds of lanes speak this protocol: a simulated clock, bytes in host memory
(`cpu`) and CUDA streams (`cuda`).
"""

import itertools
from collections.abc import Hashable, Sequence
from typing import Any, Literal, Protocol

from fuseops.errors import FuseOpsError

Lane = Literal["host", "compute", "d2h", "h2d", "network"]
Place = Literal["device", "host"]
LANES: tuple[Lane, ...] = (
    "host",
    "compute",
    "d2h",
    "h2d",
    "network",
)  # the last in simulations alone

_serials = itertools.count()


class NoRoomError(FuseOpsError):
    """The host budget has no room for a buffer; the message is the reason that reports give."""


class Event:
    """An `Event` is a point in a lane: everything that the lane was given before it was recorded.

    known  the compute lane that waited for it last: what that is given from there on comes after it
    """

    __slots__ = ("known", "lane", "native", "serial")

    def __init__(self, lane: Lane, native: Any = None) -> None:
        self.lane, self.native = lane, native
        self.known: object = Event  # no lane
        self.serial = next(_serials)  # of two events of one lane the later has the higher number


def not_implied(after: Sequence[Event | None], compute: object) -> Sequence[Event | None]:
    """Of what a copy comes after, that which the rest does not imply: a lane that waits for all that compute has been
    given (None) waits for what compute has waited for.
    """
    if None not in after:
        return after
    return [event for event in after if event is None or event.known is not compute]


class Buf:
    """A `Buf` is a buffer of bytes on the device or the host.

    data   what the lanes keep here: a flat uint8 tensor, or nothing in a simulation
    after  of host bytes that were freed and are used again: the copy that may still read them
    slab   of host bytes: their place in the arena
    owner  of device bytes: the compute lane that may use them again once they are freed
    """

    __slots__ = ("after", "data", "name", "nbytes", "owner", "place", "slab")

    def __init__(
        self, name: str, nbytes: int, place: Place, data: Any = None, owner: Hashable = None
    ) -> None:
        self.name, self.nbytes, self.place = name, nbytes, place
        self.data, self.owner = data, owner
        self.after: Event | None = None
        self.slab: Any = None

    def __repr__(self) -> str:
        return f"Buf({self.name!r}, {self.nbytes} bytes, {self.place})"


class Lanes(Protocol):
    """`Lanes` are the streams of compute and of copies that a schedule gives its work to."""

    def alloc(self, nbytes: int, device: Place, name: str) -> Buf:
        """New bytes; those on the device belong to the compute lane, which may still be reading
        them. Host bytes can have an `after`.  Raises NoRoomError when the host budget is used up.
        """

    def free(self, buf: Buf) -> None:
        """Give bytes back. On the device that is a write on the compute lane; host bytes carry
        `after` to their next user.
        """

    def copy(
        self,
        lane: Lane,
        sources: Sequence[Buf],
        target: Buf,
        offsets: Sequence[int] = (0,),
        after: Sequence[Event | None] = (),
    ) -> Event | None:
        """Enqueue a copy of each source to its offset (bytes) in the target, which is free on the compute lane, once
        the lane has waited for these events; None: for all that compute has been given.   -> the point at which it is
        over, None if it is already
        """

    def record(self, lane: Lane) -> Event:
        """The point that the lane has been filled up to."""

    def wait(self, lane: Lane, event: Event) -> None:
        """All that the lane is given from here on runs after the event."""

    def compute(self) -> Hashable:
        """Which compute lane the caller is on: one thread may use several CUDA streams."""
