"""What stands in autograd's graph for a saved tensor: a handle, that is the tensor, or its place in
a storage that has left.

A record is one storage at one version, moved once for all tensors that lie in it: the schedule's
item, told what becomes of it. Autograd drops handles with the graph, and a handle that dies says so
to the schedule (through a queue: it may die anywhere), which lets go of the record after the last;
so nothing else is needed for exceptions, retain_graph or dropped graphs.

In-place guard: saved-tensor hooks switch off autograd's own check, so each handle compares the
version counter that autograd would have compared. A counter only grows, so one look when the tensor
is unpacked sees every write since it was saved; looks when the copy starts and when the device bytes
are let go tell when it was. A tensor that was moved leaves an alias of zero bytes that shares its
counter. Kernels that write a tensor announce it by `torch.autograd.graph.increment_version`, as
torch's own do. Writes through `.data`, `set_` or numpy change no counter; they are outside the
promise, here as in plain torch.

A storage that is emptied or grown changes no counter either. One that still waits for its copy then
stays; what its bytes are not whole any more for is refused when it is read.
"""

import logging
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from operator import methodcaller
from typing import Literal, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from fuseops.errors import InPlaceError
from fuseops.ops import names
from fuseops.ops.names import SavedName
from fuseops.torch_private import base_of, empty_alias, share_version_counter, storage_key

from . import marks
from .codes import Coding, decode, encode
from .lanes.protocol import Buf, Event
from .lanes.real import RealLanes
from .report import Entry, Ledger
from .schedule import LAST_GROUP, Item, LayerRun, Schedule
from .storages import StridedLayout, layout_of, rows_of, tensor_in

log = logging.getLogger("fuseops.offload")

RESIZED = "its storage was given another size before its copy"


class Judged(NamedTuple):
    """A `Judged` is a scope's decision for a saved tensor. It holds for every one of the same name, shape, bytes and
    the like; what differs from step to step is which tensors share a storage, and whether there is
    room.
    """

    entry: Entry  # for the report: moved, or kept for what reason
    again: Entry  # the same, where its storage has been counted
    saved: SavedName  # its id stands for it and for the modules that save it
    coding: Coding | None = None  # how it leaves, if not as it is


class Mover:
    """A `Mover` runs a schedule for real tensors of one device. Threads take turns."""

    def __init__(self, schedule: Schedule, lanes: RealLanes) -> None:
        self.schedule, self.lanes, self.on_gpu = schedule, lanes, lanes.device.type == "cuda"
        self.ref = weakref.ref(self)  # for records, which the schedule holds
        self.lock = threading.RLock()
        self.node: list[Record] = []  # what the node that is being packed has leave
        # handles that are gone, and whether they were read: noted by finalizers, so without the lock
        self.dead: deque[tuple[LayerRun | None, Item | None, bool]] = deque()

    def enter(self, layer: str) -> LayerRun:
        """The forward of a layer begins."""
        with self.lock:
            self.tidy()
            return self.schedule.enter(layer)

    def leave(self, call: LayerRun) -> None:
        """The forward of a layer ends."""
        with self.lock:
            self.schedule.leave(call)

    def backward(self, call: LayerRun) -> None:
        """The backward of a layer begins."""
        with self.lock:
            self.tidy()
            self.schedule.backward(call)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self.close()

    def close(self) -> None:
        """No boundary will come any more."""
        with self.lock:
            if self.dead:
                self.tidy()
            self.schedule.close()

    def save(
        self, call: LayerRun | None, t: Tensor, found: Judged, ledger: Ledger
    ) -> "Moved | str":
        """Have the storage of t leave, as codes or as it is; or why it stays.

        call: of a layer; None: it leaves once its node is packed, by `depart`.
        """
        if call is not None and call.soon:
            return LAST_GROUP  # before codes are made
        record = Record(t, found, ledger, self)
        if call is None:
            self.node.append(record)
        else:
            with self.lock:
                if self.dead:
                    self.tidy()
                if not self.schedule.save(call, record):
                    return str(record.kept)
                record.call = call
        thread.note(storage_key(t.untyped_storage()), record)
        ledger.moved(found.entry, record)
        return Moved(t, found.entry, record, call, self, ledger)

    def depart(self) -> None:
        """A node is packed: what it has leave does so."""
        with self.lock:
            if self.dead:
                self.tidy()
            items: list[Item] = [record for record in self.node if record.handles]
            self.node.clear()
            self.schedule.depart(items)
        for item in items:
            if item.kept is not None:
                log.warning("%s stays: %s", item.name, item.kept)

    def share(self, call: LayerRun | None, item: Item) -> None:
        """One more saved tensor lies in a storage that leaves."""
        with self.lock:
            self.schedule.share(call, item)

    def keep(self, call: LayerRun) -> None:
        """Something that a call saved stays."""
        with self.lock:
            self.schedule.keep(call)

    def by_hand(self, what: Literal["offload", "release", "reload"], call: LayerRun) -> None:
        """One step of a manual schedule."""
        with self.lock:
            self.tidy()
            getattr(self.schedule, what)(call)

    def tidy(self) -> None:
        """Give back what belonged to handles that are gone."""
        with self.lock:
            dead, drop = self.dead, self.schedule.drop
            while dead:
                call, item, read = dead.popleft()
                drop(call, item, read=read)


class Record(Item):
    """A `Record` follows one version of a storage that leaves: writes to it, and for the report what becomes of it.

    whole    its bytes; `nbytes` are those on the link
    written  when a write was first seen
    torn     its storage got other memory before its copy was over
    call     that saved it, if one of a layer did
    """

    written = ""
    torn = False
    call: LayerRun | None = None
    _live: "weakref.ref[UntypedStorage] | None" = None
    _start = 0
    _stream: object = None

    def __init__(self, t: Tensor, found: Judged, ledger: Ledger, mover: Mover) -> None:
        storage = t.untyped_storage()
        self.origin, self.whole = weakref.ref(storage), storage.nbytes()
        self.entry, _, _, self.coding = found
        if self.coding is not None:
            storage = encode(storage, self.coding).untyped_storage()
        name, owner = self.entry.name, mover.lanes.compute()
        super().__init__(name, Buf(name, storage.nbytes(), "device", storage, owner))
        self.ledger, self.mover = ledger, mover.ref
        self.guard, self.version, self._at = empty_alias(t), t._version, storage.data_ptr()
        self._base = weakref.ref(t if t._base is None else t._base)

    def ready(self) -> Event | None:
        origin, mover = self.origin(), self.mover()
        if self.coding is not None or origin is None or mover is None:
            return None
        said = marks.ready(origin, self.version) if marks.complete.entries else None
        frame = names.thread.frame
        if said is not None or frame is None or not frame.tensors or mover.lanes.at_once:
            return said
        # a node's tensors are all there before the first of them is saved
        if frame.ready is None or frame.ready.whose != self.source.owner:
            frame.ready = mover.lanes.record("compute")
        point: Event = frame.ready
        return point

    def leaves(self, point: Literal["copy", "release"]) -> None:
        if self.guard._version != self.version and not self.written:
            self.written = f", before its {point}"
        if self.source is None:
            return  # in a buffer of the schedule's
        storage, mover = self.source.data, self.mover()
        if point == "copy":
            self._at = storage.data_ptr()
            if storage.nbytes() != self.nbytes:
                self.kept = RESIZED
        elif mover is None or not mover.lanes.at_once:
            self.torn = (storage.data_ptr(), storage.nbytes()) != (self._at, self.nbytes)

    def comes_back(self) -> None:
        self.ledger.came_back(self.nbytes)

    def stays(self, reason: str) -> None:
        self.ledger.stayed(self.entry, self.nbytes, reason)

    def is_of(self, t: Tensor) -> bool:
        """Whether this holds the bytes of t, which is in the same storage: no write since, and no other size.

        A counter that t does not share says nothing about t.
        """
        if not self.version == t._version == self.guard._version:
            return False
        if t.untyped_storage().nbytes() != self.whole:
            return False
        return self._base() is base_of(t) or share_version_counter(t, self.guard)

    def view(self, schedule: Schedule, layout: StridedLayout) -> Tensor:
        """A tensor of that layout. While somebody on this stream has the bytes, over the same."""
        storage = None if self._live is None else self._live()
        if storage is None or schedule.lanes.compute() != self._stream:
            buf, start = schedule.fetch(self)
            data: UntypedStorage = buf.data
            if self.coding is not None:
                coded = rows_of(data, torch.uint8, 1).view(-1)[start : start + self.nbytes]
                data, start = decode(coded, self.coding), 0
            if self.handles > 1:
                self._live, self._stream = weakref.ref(data), schedule.lanes.compute()
                self._start = start
            storage = data
        else:
            start = self._start
        if self.torn or storage.nbytes() < start + self.whole:
            raise _resized(self.entry)
        return tensor_in(storage, layout, start)


class _RecordsThread(threading.local):
    """A `_RecordsThread` has the last record of each storage in this thread, by a key that a later storage may get."""

    def __init__(self) -> None:
        self.records: dict[int, weakref.ref[Record]] = {}
        self._limit = 64

    def note(self, key: int, record: Record) -> None:
        if len(self.records) >= self._limit:
            for gone in [k for k, r in self.records.items() if r() is None]:
                del self.records[gone]  # whoever packs a node holds the dict
            self._limit = 2 * len(self.records) + 64
        self.records[key] = weakref.ref(record)


thread = _RecordsThread()


def find(t: Tensor) -> Record | None:
    """The record that already holds the bytes of t, or None."""
    storage = t.untyped_storage()
    known = thread.records.get(storage_key(storage))
    record = None if known is None else known()
    if record is None or record.origin() is not storage or not record.is_of(t):
        return None
    mover = record.mover()
    if mover is None:
        return None
    if mover.dead:
        mover.tidy()
    return record if record.handles else None


class Staying:
    """A `Staying` stands for all that one call of a layer saved and that stays on the device. It dies with the last
    of those tensors, and the schedule counts it as one.
    """

    __slots__ = ("call", "mover")

    def __init__(self, mover: Mover, call: LayerRun) -> None:
        self.mover, self.call = mover, call
        mover.keep(call)

    def __del__(self) -> None:
        self.mover.dead.append((self.call, None, True))


class Kept:
    """A `Kept` is what autograd holds of a saved tensor that stays on its device."""

    __slots__ = ("__weakref__", "entry", "ledger", "of", "tensor", "version")

    def __init__(self, t: Tensor, entry: Entry, ledger: Ledger, of: Staying | None = None) -> None:
        # Never t itself: a saved output would hold its node, and the node holds it through this.
        self.tensor = t.detach()
        self.version = t._version
        self.entry, self.ledger, self.of = entry, ledger, of

    def restore(self) -> Tensor:
        for ledger in self.ledger.chain:
            ledger.backward_seen = True
        if self.tensor._version != self.version:
            raise _written(self.tensor, self.version, self.entry, "")
        return self.tensor


class Moved:
    """A `Moved` is what autograd holds of a saved tensor whose storage leaves for the host."""

    __slots__ = ("__weakref__", "call", "entry", "layout", "ledger", "mover", "read", "record")

    def __init__(
        self,
        t: Tensor,
        entry: Entry,
        record: Record,
        call: LayerRun | None,
        mover: Mover,
        ledger: Ledger,
    ) -> None:
        self.record, self.call, self.mover = record, call, mover
        self.entry, self.ledger = entry, ledger
        self.layout: StridedLayout = layout_of(t)
        self.read = False

    def restore(self) -> Tensor:
        """The tensor, for the current compute stream. With the first of a call its backward begins."""
        for ledger in self.ledger.chain:
            ledger.backward_seen = True
        record, mover, call = self.record, self.mover, self.call
        if record.guard._version != record.version:
            raise _written(record.guard, record.version, self.entry, record.written)
        with mover.lock:
            if mover.dead:
                mover.tidy()
            schedule = mover.schedule
            if call is not None and not call.backward:
                schedule.backward(call)
            tensor = record.view(schedule, self.layout)
            schedule.used(record, again=self.read)
            self.read = True
            bundle = record.bundle
            if call is None and bundle is not None and not bundle.begun:
                schedule.begin(bundle)
            return tensor

    def __del__(self) -> None:
        self.mover.dead.append((self.call, self.record, self.read))


Handle = Kept | Moved


def _written(guard: Tensor, saved_at: int, entry: Entry, when: str) -> InPlaceError:
    return InPlaceError(
        f"saved tensor {entry.name!r} of {entry.op} was modified in place{when} before its "
        f"backward ran: it is at version {guard._version}, and was saved at version "
        f"{saved_at}. The gradient would be wrong. Write out of place, or into a clone of it."
    )


def _resized(entry: Entry) -> InPlaceError:
    return InPlaceError(
        f"saved tensor {entry.name!r} of {entry.op} was emptied, or given other memory, between its forward "
        "and its backward. Leave the storages of saved tensors as they are, or save a clone."
    )


unpack: Callable[[Handle], Tensor] = methodcaller("restore")
"""The unpack hook of every scope."""
