"""What a schedule moves and for whom: storages that leave (items), the transfers that they share (bundles), and the
calls of layers that saved them. Pure.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from .lanes.protocol import Buf, Event
from .order import OrderKey


@dataclass(eq=False, slots=True)
class Item:
    """One storage, at one version, that was chosen to leave.

    source  its bytes on the device, until they are let go
    kept    why it stays after all, once that is known
    tell    called with "copy", "release" and "reload" when that happens to it, and with the reason
            if it stays after all
    """

    name: str
    nbytes: int
    source: Buf | None
    tell: Callable[[str], None] = lambda point: None
    kept: str | None = None
    bundle: "Bundle | None" = None
    offset: int = 0  # in the bundle
    unread: int = 1  # saved tensors in this storage that no backward has read
    handles: int = 1  # ... that still exist

    @property
    def released(self) -> bool:
        return self.bundle is not None and self.bundle.released


@dataclass(eq=False, slots=True)
class Bundle:
    """What one transfer moves: one large storage, or several small ones."""

    items: list[Item]
    nbytes: int
    host: Buf
    source: Buf
    due: int  # the boundary at which the source is let go
    written: Event  # the host has the bytes
    target: Buf | None = None  # brought back, and not yet read
    arrived: Event | None = None
    released: bool = False
    wanted: bool = False  # a backward comes before the release: the source stays

    @property
    def name(self) -> str:
        return self.items[0].name


@dataclass(eq=False, slots=True)
class LayerRun:
    """The token of one call of one layer."""

    key: OrderKey
    previous: "LayerRun | None"  # entered before it in the same forward
    owner: Hashable  # the compute lane that it runs on
    items: list[Item] = field(default_factory=list)
    small: list[Item] = field(default_factory=list)  # wait for the end of the call
    handles: int = 0  # saved tensors that still exist
    running: bool = True
    backward: bool = False  # has begun
    soon: bool = False  # its backward begins too soon for anything of it to leave

    @property
    def alive(self) -> bool:
        return self.running or self.handles > 0


@dataclass
class Stats:
    """What the schedule did."""

    out_bytes: int = 0
    out_count: int = 0
    back_bytes: int = 0
    back_count: int = 0
    misses: int = 0  # brought back only when they were read
    steps: int = 0
