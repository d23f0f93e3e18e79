"""The protocol of lanes, between which a schedule distributes its work.

A lane runs its work in order; lanes run concurrently. Only events order lanes: a schedule queries neither the time nor
whether work has finished, so every run enqueues the same. There are three kinds of lanes: `simulated`, on a simulated
clock; `cpu`, with copies in host memory; `cuda`, with streams.
"""

import itertools
from collections.abc import Hashable, Sequence
from typing import Any, Literal, get_args

from fuseops.errors import FuseOpsError

Lane = Literal["compute", "d2h", "h2d", "network"]  # the last in simulations only
LANES: tuple[Lane, ...] = get_args(Lane)
Place = Literal["device", "host"]

_serials = itertools.count()


class NoRoomError(FuseOpsError):
    """The host budget has no room for a buffer. Reports show the message as a reason."""


class Event:
    """An `Event` is a point in a lane, after all work that the lane was given before it was recorded.

    known_to     the compute lane that is ordered after it: its own, or the last one that waited for it; None: no one
    known_since  the serial of that wait
    native       the event of the device; None: it was not recorded yet
    captured     whether it is in a CUDA graph
    """

    __slots__ = ("captured", "known_since", "known_to", "lane", "native", "serial")

    def __init__(
        self, lane: Lane, known_to: Hashable = None, native: Any = None, captured: bool = False
    ) -> None:
        self.lane, self.known_to, self.native, self.captured = lane, known_to, native, captured
        self.serial = self.known_since = next(_serials)  # later events have higher serials

    def mark_waited(self, known_to: Hashable) -> None:
        """A compute lane has waited for it."""
        self.known_to, self.known_since = known_to, next(_serials)

    def is_before(self, point: "Event") -> bool:
        """Whether a wait for a point of compute implies one for this event: compute had waited for it by then."""
        return (
            self.known_to is not None
            and self.known_to == point.known_to
            and self.known_since < point.serial
        )


class Buf:
    """A `Buf` is a buffer of bytes on the device or the host.

    data   on the device: the storage, until the bytes are freed; None in simulations
    at     on the host: the address; 0 for a storage, whose address may change
    owner  on the device: the compute lane that reuses the bytes once they are freed
    after  on the host, of reused bytes: the copy that may still read them
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
    """`Lanes` are the streams of compute and of copies that a schedule enqueues work on. Those of this class itself
    have no memory, and take no time.
    """

    synchronous = True  # whether each call returns after its work is done

    def alloc(self, nbytes: int, device: Place, name: str) -> Buf:
        """Allocate a buffer. Device bytes belong to the compute lane, earlier work of which may still read them; host
        bytes may have an `after`.  Raises NoRoomError when the host budget is used up.
        """
        return Buf(name, nbytes, device, owner=self.compute())

    def free(self, buf: Buf) -> None:
        """Free a buffer. For device bytes that is a write on the compute lane; host bytes keep `after` for their next
        user.
        """

    def copy(
        self,
        lane: Lane,
        sources: Sequence[Buf],
        target: Buf,
        offsets: Sequence[int] = (0,),
        ready: Event | None = None,
        after: Event | None = None,
    ) -> Event | None:
        """Enqueue a copy of each source to its offset (bytes) in the target, after `ready`, a point of compute, and
        `after`. ready None: after all work that compute has now.   -> the end of the copy, None if it is over
        """
        if not self.synchronous:
            ready = ready or self.record("compute")
            self.wait(lane, ready)
            if after is not None and not after.is_before(ready):
                self.wait(lane, after)
        return self.move(lane, sources, target, offsets)

    def move(
        self, lane: Lane, sources: Sequence[Buf], target: Buf, offsets: Sequence[int]
    ) -> Event | None:
        """`copy` without waits."""
        return None

    def record(self, lane: Lane) -> Event:
        """The point after all work that the lane has now."""
        return Event(lane)

    def wait(self, lane: Lane, event: Event) -> None:
        """Work that the lane is given from here on runs after the event."""

    def compute(self) -> Hashable:
        """The compute lane of the caller: one thread may use several CUDA streams."""
        return "compute"
