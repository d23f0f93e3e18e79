"""Handles, which autograd's graph holds for saved tensors, and records, which follow offloaded storages.

A handle has the tensor itself (`Kept`), or its layout in a storage that was offloaded (`Moved`). A record is one
storage at one version, moved once for all saved tensors in it; it is the schedule's item. A ledger counts both for the
report of a scope. Autograd frees handles with the graph. A freed handle is put into a queue, since its finalizer may
run anywhere, and the schedule drops a record with its last handle. So exceptions, retain_graph and dropped graphs need
no code of their own.

In-place guard: saved-tensor hooks switch off autograd's own check, so each handle compares the version counter that
autograd would have compared. A counter only grows, so one check when the tensor is unpacked finds every write since it
was saved; checks at the copy and at the release tell when it was. A moved tensor leaves an alias of zero bytes that
shares its counter. Kernels that write a tensor call `torch.autograd.graph.increment_version`, as torch's own do. Writes
through `.data`, `set_` or numpy change no counter and are not detected, as in plain torch.

Resizing a storage changes no counter either. One that is resized before its copy is kept; a tensor whose bytes are not
complete is refused when it is read.
"""

import logging
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from typing import NamedTuple

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
from .report import KEPT, Entry, Report, in_other_shapes
from .schedule import LAST_GROUP, Item, LayerRun, MoveStep, Schedule
from .storages import StorageMap, StridedLayout, layout_of, rows_of, tensor_in

log = logging.getLogger("fuseops.offload")

MAX_GROUPS = 1 << 13  # groups of entries that are counted later
MAX_LISTED = 64  # entries of one name; those after them that differ in shape and bytes alone are counted together
RESIZED = "its storage was given another size before its copy"


class Verdict(NamedTuple):
    """A `Verdict` is a scope's decision for a saved tensor, valid for all with the same name, shape, bytes and the
    like. It does not cover what differs from step to step: which tensors share a storage, and whether the host has
    room.
    """

    entry: Entry  # for the report: moved, or kept with a reason
    uncounted: Entry  # the same without bytes, where another entry counts the storage
    saved: SavedName  # kept alive: its id is in the key of the cache
    coding: Coding | None = None  # how it is quantized, if it is


class EntryGroup:
    """An `EntryGroup` holds entries that are reported together. Two groups are never equal."""

    __slots__ = ("entries",)

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = (*entries,)


class Ledger:
    """A `Ledger` counts for one scope and those around it. Autograd's own threads report to it too.

    entries  how often each was reported; of one name the first MAX_LISTED
    """

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.chain: tuple[Ledger, ...] = (self,)  # with those around it, innermost first
        self.entries: dict[Entry, int] = {}
        self._groups: dict[EntryGroup, int] = {}  # how often each was reported again
        self._listed: Counter[str] | None = None  # entries by name, once they are
        # those that are not listed, without shape and bytes: how many there were, and their bytes
        self._others: dict[Entry, tuple[int, int]] = {}
        self.out = self.back = (0, 0)
        self.records: list[weakref.ref[Record]] = []
        # a saved tensor was read, so what is saved next belongs to another step
        self.backward_seen = False
        self._lock = threading.Lock()
        self._limit = 64  # length of `records` at which dead ones are removed

    def nest_in(self, outer: "Ledger | None") -> None:
        """Report to the ledger of the enclosing scope too."""
        self.chain = (self, *(() if outer is None else outer.chain))

    def add(self, entry: Entry) -> None:
        self.add_all([entry])

    def add_all(self, entries: list[Entry]) -> None:
        """Counts entries, and empties the list."""
        for ledger in self.chain:
            with ledger._lock:
                ledger._count_once(entries)
        entries.clear()

    def _count_once(self, entries: Iterable[Entry]) -> None:
        counts = self.entries
        for entry in entries:
            if entry in counts or len(counts) < MAX_LISTED:
                counts[entry] = counts.get(entry, 0) + 1
            else:
                self._count_by_name(entry, 1)

    def add_group(self, group: "EntryGroup") -> None:
        """Count the entries of a group, which are looked at when it is reported for the first time only."""
        for ledger in self.chain:
            with ledger._lock:
                times = ledger._groups.get(group)
                if times is not None:
                    ledger._groups[group] = times + 1
                    continue
                if len(ledger._groups) >= MAX_GROUPS:
                    ledger._count_groups()
                ledger._count_once(group.entries)
                ledger._groups[group] = 0

    def _count_groups(self) -> None:
        groups, self._groups = self._groups, {}
        for group, times in groups.items():
            for entry in group.entries:
                self._count_by_name(entry, times)

    def _count_by_name(self, entry: Entry, times: int) -> None:
        """Counts an entry by itself, or with those in other shapes where MAX_LISTED of its name are listed."""
        if entry in self.entries or len(self.entries) < MAX_LISTED:
            self.entries[entry] = self.entries.get(entry, 0) + times
            return
        if self._listed is None:
            self._listed = Counter(known.name for known in self.entries)
        if self._listed[entry.name] < MAX_LISTED:
            self._listed[entry.name] += 1
            self.entries[entry] = times
        else:
            alike = entry._replace(shape=(), nbytes=0)
            count, nbytes = self._others.get(alike, (0, 0))
            self._others[alike] = count + times, nbytes + times * entry.nbytes

    def add_moved(self, entry: Entry, record: "Record") -> None:
        ref, nbytes = weakref.ref(record), record.nbytes
        for ledger in self.chain:
            with ledger._lock:
                counts = ledger.entries
                if entry in counts or len(counts) < MAX_LISTED:
                    counts[entry] = counts.get(entry, 0) + 1
                else:
                    ledger._count_by_name(entry, 1)
                ledger.out = (ledger.out[0] + nbytes, ledger.out[1] + 1)
                if len(ledger.records) >= ledger._limit:
                    ledger.records = [r for r in ledger.records if r() is not None]
                    ledger._limit = 2 * len(ledger.records) + 64
                ledger.records.append(ref)

    def move_to_kept(self, entry: Entry, nbytes: int, reason: str) -> None:
        """A tensor that was reported as moved, with so many bytes, is kept after all."""
        kept = entry._replace(decision=KEPT, nbytes=nbytes, reason=reason)
        for ledger in self.chain:
            with ledger._lock:
                ledger._count_by_name(entry, -1)
                ledger._count_by_name(kept, 1)
                ledger.out = (ledger.out[0] - nbytes, ledger.out[1] - 1)

    def add_reloaded(self, nbytes: int) -> None:
        for ledger in self.chain:
            with ledger._lock:
                ledger.back = (ledger.back[0] + nbytes, ledger.back[1] + 1)

    def take_backward_seen(self) -> bool:
        """Whether a backward began since the last call of this."""
        seen, self.backward_seen = self.backward_seen, False
        return seen

    def report(self) -> Report:
        with self._lock:
            records = [record for ref in self.records if (record := ref()) is not None]
        for mover in {record.mover() for record in records}:
            if mover is not None:
                mover.collect_dead()
        records = [record for record in records if record.handles]
        with self._lock:
            self._count_groups()
            entries = [e._replace(times=n) for e, n in self.entries.items() if n > 0]
            entries += [in_other_shapes(e, n, b) for e, (n, b) in self._others.items() if n > 0]
        released = [r for r in records if r.released]
        held = tuple((r.name, r.storage_nbytes) for r in released if r.origin() is not None)
        host = sum(r.nbytes for r in records if r.bundle is not None)
        return Report(self.scope, tuple(entries), *self.out, *self.back, host, held)


class Mover:
    """A `Mover` runs a schedule for tensors of one device, under a lock for all threads."""

    def __init__(self, schedule: Schedule, lanes: RealLanes) -> None:
        self.schedule, self.lanes = schedule, lanes
        self.ref = weakref.ref(self)  # for records, which it must not be in a cycle with
        self.lock = threading.RLock()
        self.node_records: list[Record] = []  # to be offloaded once their node is packed
        # freed handles and whether they were read; finalizers append, without the lock
        self.dead: deque[tuple[LayerRun | None, Item | None, bool]] = deque()

    def enter(self, layer: str) -> LayerRun:
        """The forward of a layer begins."""
        with self.lock:
            self.collect_dead()
            return self.schedule.enter(layer)

    def backward(self, call: LayerRun) -> None:
        """The backward of a layer begins."""
        with self.lock:
            self.collect_dead()
            self.schedule.backward(call)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self.close()

    def close(self) -> None:
        """Close the schedule: no boundary will come any more."""
        with self.lock:
            if self.dead:
                self.collect_dead()
            self.schedule.close()

    def save(
        self, call: LayerRun | None, t: Tensor, verdict: Verdict, ledger: Ledger
    ) -> "Moved | str":
        """Offload the storage of t, as codes or exactly.   -> its handle, or why it is kept

        call: of a layer; None: `send_node` sends it once its node is packed
        """
        if call is not None and call.keeps_all:
            return LAST_GROUP  # before it is encoded
        record = Record(t, verdict, ledger, self)
        if call is None:
            self.node_records.append(record)
        else:
            with self.lock:
                if self.dead:
                    self.collect_dead()
                if not self.schedule.save(call, record):
                    return str(record.kept_reason)
                record.call = call
        thread.last.set(t.untyped_storage(), weakref.ref(record))
        ledger.add_moved(verdict.entry, record)
        return Moved(t, verdict.entry, record, call, self, ledger)

    def send_node(self) -> None:
        """Send the storages of the node that was packed."""
        with self.lock:
            if self.dead:
                self.collect_dead()
            items: list[Item] = [record for record in self.node_records if record.handles]
            self.node_records.clear()
            self.schedule.send_node(items)
        for item in items:
            if item.kept_reason is not None:
                log.warning("%s stays: %s", item.name, item.kept_reason)

    def collect_dead(self) -> None:
        """Drop the records of freed handles from the schedule."""
        with self.lock:
            dead, drop = self.dead, self.schedule.drop
            while dead:
                call, item, read = dead.popleft()
                drop(call, item, read=read)


class Record(Item):
    """A `Record` is an offloaded storage at one version. It detects writes, and reports what happens to the storage.

    storage_nbytes  bytes of the storage; `nbytes` are those on the link
    write_seen      when a write was first seen, in words
    replaced        the storage got other memory before its copy was over
    call            the call of a layer that saved it, if any
    """

    write_seen = ""
    replaced = False
    call: LayerRun | None = None
    _device_copy: "weakref.ref[UntypedStorage] | None" = None
    _start = 0
    _stream: object = None

    def __init__(self, t: Tensor, verdict: Verdict, ledger: Ledger, mover: Mover) -> None:
        storage = t.untyped_storage()
        self.origin, self.storage_nbytes = weakref.ref(storage), storage.nbytes()
        self.entry, _, _, self.coding = verdict
        if self.coding is not None:
            storage = encode(storage, self.coding).untyped_storage()
        name, owner = self.entry.name, mover.lanes.compute()
        super().__init__(name, Buf(name, storage.nbytes(), "device", storage, owner))
        self.ledger, self.mover = ledger, mover.ref
        self.guard, self.version = empty_alias(t), t._version
        self._address = storage.data_ptr()
        self._base = weakref.ref(t if t._base is None else t._base)

    def ready_event(self) -> Event | None:
        origin, mover = self.origin(), self.mover()
        if self.coding is not None or origin is None or mover is None:
            return None
        event = marks.ready_event(origin, self.version) if marks.complete.entries else None
        frame = names.thread.frame
        if event is not None or frame is None or not frame.tensors or mover.lanes.synchronous:
            return event
        # all tensors of a node are ready before the first of them is saved
        if frame.ready is None or frame.ready.known_to != self.source.owner:
            frame.ready = mover.lanes.record("compute")
        point: Event = frame.ready
        return point

    def on_move(self, what: MoveStep) -> None:
        if what == "reload":
            self.ledger.add_reloaded(self.nbytes)
            return
        if self.guard._version != self.version and not self.write_seen:
            self.write_seen = f", before its {what}"
        if self.source is None:
            return  # its bytes are in a buffer of the schedule
        storage, mover = self.source.data, self.mover()
        if what == "copy":
            self._address = storage.data_ptr()
            if storage.nbytes() != self.nbytes:
                self.kept_reason = RESIZED
        elif mover is None or not mover.lanes.synchronous:
            self.replaced = (storage.data_ptr(), storage.nbytes()) != (self._address, self.nbytes)

    def on_keep(self, reason: str) -> None:
        self.ledger.move_to_kept(self.entry, self.nbytes, reason)

    def holds_bytes_of(self, t: Tensor) -> bool:
        """Whether this has the bytes of t, which is in the same storage: neither written nor resized since.

        False where t has a version counter of its own.
        """
        if not self.version == t._version == self.guard._version:
            return False
        if t.untyped_storage().nbytes() != self.storage_nbytes:
            return False
        return self._base() is base_of(t) or share_version_counter(t, self.guard)

    def view(self, schedule: Schedule, layout: StridedLayout) -> Tensor:
        """A tensor of that layout, on device bytes that are shared while another tensor on this stream uses them."""
        storage = None if self._device_copy is None else self._device_copy()
        if storage is None or schedule.lanes.compute() != self._stream:
            buf, start = schedule.fetch(self)
            data: UntypedStorage = buf.data
            if self.coding is not None:
                coded = rows_of(data, torch.uint8, 1).view(-1)[start : start + self.nbytes]
                data, start = decode(coded, self.coding), 0
            if self.handles > 1:
                self._device_copy, self._stream = weakref.ref(data), schedule.lanes.compute()
                self._start = start
            storage = data
        else:
            start = self._start
        if self.replaced or storage.nbytes() < start + self.storage_nbytes:
            raise _resized(self.entry)
        return tensor_in(storage, layout, start)


class _RecordsThread(threading.local):
    def __init__(self) -> None:
        self.last: StorageMap[weakref.ref[Record]] = StorageMap()  # of each storage in this thread


thread = _RecordsThread()


def find_record(t: Tensor) -> Record | None:
    """The record that has the bytes of t, or None."""
    storage = t.untyped_storage()
    entry = thread.last.entries.get(storage_key(storage))  # without a call: most storages are new
    record = None if entry is None else entry[1]()
    if record is None or record.origin() is not storage or not record.holds_bytes_of(t):
        return None
    mover = record.mover()
    if mover is None:
        return None
    if mover.dead:
        mover.collect_dead()
    return record if record.handles else None


def any_offloaded(storages: Sequence[UntypedStorage]) -> bool:
    """Whether one of them has a record that is in use."""
    if not thread.last.entries:
        return False
    known = [ref() for ref in thread.last.get_all(storages) if ref is not None]
    return any(record is not None and record.handles for record in known)


class CallToken:
    """A `CallToken` is shared by all kept tensors that one call of a layer saved. It is freed with the last of them,
    and the schedule counts it as one handle.
    """

    __slots__ = ("call", "mover")

    def __init__(self, mover: Mover, call: LayerRun) -> None:
        self.mover, self.call = mover, call
        with mover.lock:
            mover.schedule.keep(call)

    def __del__(self) -> None:
        self.mover.dead.append((self.call, None, True))


class Kept:
    """A `Kept` is the handle of a saved tensor that is kept on its device."""

    __slots__ = ("__weakref__", "entry", "ledger", "tensor", "token", "version")

    def __init__(
        self, t: Tensor, entry: Entry, ledger: Ledger, token: CallToken | None = None
    ) -> None:
        # Not t itself: a saved output holds its node, which would hold it through this handle.
        self.tensor = t.detach()
        self.version = t._version
        self.entry, self.ledger, self.token = entry, ledger, token

    def restore(self) -> Tensor:
        for ledger in self.ledger.chain:
            ledger.backward_seen = True
        if self.tensor._version != self.version:
            raise _written(self.tensor, self.version, self.entry, "")
        return self.tensor


class Moved:
    """A `Moved` is the handle of a saved tensor whose storage is offloaded."""

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
        """The tensor, for the current compute stream. The first of a call begins its backward."""
        for ledger in self.ledger.chain:
            ledger.backward_seen = True
        record, mover, call = self.record, self.mover, self.call
        if record.guard._version != record.version:
            raise _written(record.guard, record.version, self.entry, record.write_seen)
        with mover.lock:
            if mover.dead:
                mover.collect_dead()
            schedule = mover.schedule
            if call is not None and not call.backward_begun:
                schedule.backward(call)
            tensor = record.view(schedule, self.layout)
            schedule.mark_read(record, again=self.read)
            self.read = True
            bundle = record.bundle
            if call is None and bundle is not None and not bundle.backward_begun:
                schedule.begin_backward(bundle)
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
