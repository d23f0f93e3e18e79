"""The records of a schedule: storages that are offloaded (items), their transfers (bundles), and the calls of layers
that saved them. Pure.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

from .lanes.protocol import Buf, Event
from .order import OrderKey

MoveStep = Literal["copy", "release", "reload"]


class Item:
    """An `Item` is one storage, at one version, that was chosen to be offloaded.

    source       its bytes on the device, until their release
    kept_reason  why it is kept after all, once that is known
    offset       in the bundle
    unread       how many saved tensors in this storage no backward has read
    handles      how many of them still exist
    """

    kept_reason: str | None = None
    bundle: "Bundle | None" = None
    offset = 0
    unread = handles = 1

    def __init__(self, name: str, source: Buf) -> None:
        self.name, self.nbytes = name, source.nbytes
        self.source: Any = source  # or None

    @property
    def released(self) -> bool:
        return self.bundle is not None and self.bundle.released

    # --- called by the schedule

    def ready_event(self) -> Event | None:
        """The point of compute at which its bytes are complete, while it is being saved; None: now."""
        return None

    def on_move(self, what: MoveStep) -> None:
        """Its copy starts, unless this sets `kept_reason`; its bytes on the device are released; its reload starts."""

    def on_keep(self, reason: str) -> None:
        """It is kept after all."""


class Bundle:
    """A bundle is one transfer in one host buffer: one large storage, or several small ones.

    items           empty once the last of them is dropped; host is None then
    due             the boundary at which the sources are released
    d2h_done        the end of the offload; None: it is over
    handles         how many items have handles; unread: how many have unread tensors
    target          the device buffer of the reload, until all is read
    h2d_done        the end of the reload; None: it is over
    retained        a backward comes before the release, so the sources are kept
    previous        outside of layers: the bundle that was sent before it
    backward_begun  outside of layers: a backward has read from it
    """

    handles = unread = 0
    previous: "Bundle | None" = None
    target: Any = None  # or a Buf
    h2d_done: Event | None = None
    released = retained = backward_begun = False

    def __init__(
        self,
        items: list[Item],
        nbytes: int,
        host: Buf,
        due: int,
        d2h_done: Event | None,
    ) -> None:
        self.items, self.nbytes, self.due, self.d2h_done = items, nbytes, due, d2h_done
        self.host: Any = host  # or None


@dataclass(eq=False, slots=True)
class LayerRun:
    """A `LayerRun` is one call of a layer with what it saved, from its forward to the end of its backward."""

    key: OrderKey
    previous: "LayerRun | None"  # the call before it in the same forward
    owner: Hashable  # the compute lane that it runs on
    items: list[Item] = field(default_factory=list)
    small_items: list[Item] = field(default_factory=list)  # sent together at the end of the call
    small_nbytes: int = 0  # their bytes
    handles: int = 0  # saved tensors that still exist
    running: bool = True
    backward_begun: bool = False
    keeps_all: bool = False  # its backward begins too soon to offload anything

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
    misses: int = 0  # reloads that started only at the read
    steps: int = 0
