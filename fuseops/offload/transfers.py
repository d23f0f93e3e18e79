"""What a schedule moves and for whom: storages that leave (items), the transfers that they share (bundles), and the
calls of layers that saved them. Pure.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

from .lanes.protocol import Buf, Event
from .order import OrderKey


class Item:
    """An `Item` is one storage, at one version, that was chosen to leave.

    source    its bytes on the device, until they are let go
    kept      why it stays after all, once that is known
    offset    in the bundle
    unread    saved tensors in this storage that no backward has read; handles: that still exist
    """

    kept: str | None = None
    bundle: "Bundle | None" = None
    offset = 0
    unread = handles = 1

    def __init__(self, name: str, source: Buf) -> None:
        self.name, self.nbytes = name, source.nbytes
        self.source: Any = source  # or None

    @property
    def released(self) -> bool:
        return self.bundle is not None and self.bundle.released

    # --- told or asked by the schedule, of whoever follows this storage

    def ready(self) -> Event | None:
        """A point of compute at which its bytes are complete, while it is being saved; None: now."""
        return None

    def leaves(self, point: Literal["copy", "release"]) -> None:
        """Its copy starts, unless it is `kept` by then, or its bytes on the device are let go."""

    def comes_back(self) -> None:
        """Its copy back starts."""

    def stays(self, reason: str) -> None:
        """It does not leave after all."""


class Bundle:
    """A bundle is what is on the host in one buffer, and comes back at once: one large storage, or several small ones.

    items     none once the last of them has ended, as host
    due       the boundary at which the sources are let go
    written   the host has the bytes; None: now
    handles   how many items have some; unread: how many are
    target    brought back, and not yet read
    arrived   when that is over; None: it was at once
    awaited   the owner of the target has waited for that
    wanted    a backward comes before the release: the sources stay
    previous  of one that left in no call of a layer: the one before it that did
    begun     a backward has read one that left in no call of a layer
    """

    handles = unread = 0
    previous: "Bundle | None" = None
    target: Any = None  # or a Buf
    arrived: Event | None = None
    awaited = released = wanted = begun = False

    def __init__(
        self,
        items: list[Item],
        nbytes: int,
        host: Buf,
        due: int,
        written: Event | None,
    ) -> None:
        self.items, self.nbytes, self.due, self.written = items, nbytes, due, written
        self.host: Any = host  # or None


@dataclass(eq=False, slots=True)
class LayerRun:
    """A `LayerRun` is one call of one layer, with what it saved, from its forward to the end of its backward."""

    key: OrderKey
    previous: "LayerRun | None"  # entered before it in the same forward
    owner: Hashable  # the compute lane that it runs on
    items: list[Item] = field(default_factory=list)
    small: list[Item] = field(default_factory=list)  # wait for the end of the call
    waiting: int = 0  # bytes of these
    handles: int = 0  # saved tensors that still exist
    running: bool = True
    backward: bool = False  # has begun
    soon: bool = False  # its backward begins too soon for anything of it to leave

    @property
    def alive(self) -> bool:
        return self.running or self.handles > 0


@dataclass
class Stats:
    """The stats count the copies, bytes and misses of a schedule."""

    out_bytes: int = 0
    out_count: int = 0
    back_bytes: int = 0
    back_count: int = 0
    misses: int = 0  # brought back only when they were read
    steps: int = 0
