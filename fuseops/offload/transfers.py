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
    previous  of one that leaves by itself, in no call of a layer: the one before it that did
    begun     whether a backward has read one that left by itself
    """

    __slots__ = (
        *("begun", "bundle", "handles", "kept", "name", "nbytes", "offset", "previous"),
        *("source", "unread"),
    )

    def __init__(self, name: str, source: Buf) -> None:
        self.name, self.nbytes = name, source.nbytes
        self.source: Any = source  # or None
        self.kept: str | None = None
        self.bundle: Bundle | None = None
        self.offset = 0  # in the bundle
        self.unread = 1  # saved tensors in this storage that no backward has read
        self.handles = 1  # ... that still exist
        self.previous: Item | None = None
        self.begun = False

    @property
    def released(self) -> bool:
        return self.bundle is not None and self.bundle.released

    # --- told by the schedule, to whoever follows this storage

    def leaves(self, point: Literal["copy", "release"]) -> None:
        """Its copy starts, or its bytes on the device are let go."""

    def comes_back(self) -> None:
        """Its copy back starts."""

    def stays(self, reason: str) -> None:
        """It does not leave after all."""


@dataclass(eq=False, slots=True)
class Bundle:
    """A bundle is what one transfer over the link moves: one large storage, or several small ones."""

    items: list[Item]  # none once the last of them has ended
    nbytes: int
    host: Buf
    source: Buf
    due: int  # the boundary at which the source is let go
    written: Event | None  # the host has the bytes; None: now
    handles: int = 0  # items that have some
    unread: int = 0  # items that are
    target: Buf | None = None  # brought back, and not yet read
    arrived: Event | None = None  # or, where the copy was over at once, None
    awaited: bool = False  # the owner of the target has waited for that
    released: bool = False
    wanted: bool = False  # a backward comes before the release: the source stays


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
