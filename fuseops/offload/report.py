"""Reports of scopes: a line for each saved tensor with decision and reason, and totals in bytes."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from fuseops.words import aligned, dtype_name, size

from .transfers import Bundle

SCHEMA_VERSION = 1
MOVED, SHARED, KEPT, MISSED = "moved", "shared", "kept", "missed"


class Entry(NamedTuple):
    """An `Entry` is a saved tensor, or several that are equal in all fields.

    nbytes    of its storage; 0 where another entry counts them, where a model holds them anyway,
              and where they are not known (missed)
    decision  "moved" to the host; "shared", lies in a storage that was moved already; "kept" on the
              device; "missed", other hooks inside the scope took what this module saved
    """

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    nbytes: int
    decision: str
    reason: str
    also: tuple[str, ...] = ()  # other names of the same tensor
    times: int = 1


@dataclass(frozen=True, repr=False)
class Report:
    """A `Report` lists the saved tensors that a scope saw up to now, and the bytes that it moved."""

    scope: str
    entries: tuple[Entry, ...]
    moved_bytes: int  # copied to the host
    moved_count: int
    back_bytes: int  # copied to the device again
    back_count: int
    host_bytes: int  # in host buffers now
    held: tuple[tuple[str, int], ...]  # name, bytes: moved, but something else holds the original
    schedule: tuple[tuple[str, int], ...] = ()  # of a scheduler: steps, transfers, misses, memory

    @property
    def kept_bytes(self) -> int:
        """Bytes of the tensors that stayed, each storage once, without parameters and buffers."""
        return sum(e.nbytes * e.times for e in self.entries if e.decision == KEPT)

    def named(self, name: str) -> tuple[Entry, ...]:
        """Entries of the tensor with that name."""
        return tuple(e for e in self.entries if e.name == name or name in e.also)

    def to_json(self) -> dict[str, Any]:
        """Plain data, with a schema_version."""
        data: dict[str, Any] = {"schema_version": SCHEMA_VERSION, "scope": self.scope}
        for total in ("moved_bytes", "moved_count", "back_bytes", "back_count", "host_bytes"):
            data[total] = getattr(self, total)
        data["kept_bytes"] = self.kept_bytes
        data["schedule"] = dict(self.schedule)
        data["held"] = [{"name": name, "nbytes": nbytes} for name, nbytes in self.held]
        data["entries"] = [{**e._asdict(), "dtype": dtype_name(e.dtype)} for e in self.entries]
        return data

    def summary(self) -> str:
        """The totals in one line."""
        return (
            f"{self.scope}: moved {size(self.moved_bytes)} in {self.moved_count} copies, brought "
            f"back {size(self.back_bytes)} in {self.back_count}; kept {size(self.kept_bytes)}; "
            f"{size(self.host_bytes)} on the host now"
        )

    def __repr__(self) -> str:
        return f"<Report of {self.summary()}>"

    def __str__(self) -> str:
        rows = [_HEAD, *map(_row, self.entries)]
        held = [f"{name}: {size(n)} moved, but held by another reference" for name, n in self.held]
        facts = ", ".join(f"{what.replace('_', ' ')} {n}" for what, n in self.schedule)
        return "\n".join([*aligned(rows), self.summary(), *([facts] if facts else []), *held])


_HEAD = ("name", "op", "shape", "dtype", "bytes", "decision", "reason", "times")


def _row(entry: Entry) -> tuple[str, ...]:
    name = entry.name + (f" (+{len(entry.also)})" if entry.also else "")
    shape = "x".join(map(str, entry.shape)) if entry.dtype is not None else ""
    return (
        *(name, entry.op, shape or "-", dtype_name(entry.dtype) or "-", size(entry.nbytes)),
        *(entry.decision, entry.reason, str(entry.times)),
    )


class MovedStorage(Protocol):
    """A `MovedStorage` is a record as the ledger sees it: `nbytes` on the link, `storage_nbytes` on the device."""

    name: str
    nbytes: int
    storage_nbytes: int
    handles: int
    bundle: Bundle | None
    origin: weakref.ref[torch.UntypedStorage]

    @property
    def released(self) -> bool: ...
    def mover(self) -> Any: ...


class Ledger:
    """A `Ledger` counts for one scope and those around it. Autograd's own threads report to it too."""

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.chain: tuple[Ledger, ...] = (self,)  # with those around it, innermost first
        self.entries: dict[Entry, int] = {}
        self.out = self.back = (0, 0)
        self.records: list[weakref.ref[MovedStorage]] = []
        # a saved tensor was read, so what is saved next belongs to another step
        self.backward_seen = False
        self._lock = threading.Lock()
        self._limit = 64  # length of `records` at which dead ones are removed

    def nest_in(self, outer: Ledger | None) -> None:
        """Report to the ledger of the enclosing scope too."""
        self.chain = (self, *(() if outer is None else outer.chain))

    def add(self, entry: Entry) -> None:
        self.add_all([entry])

    def add_all(self, entries: list[Entry]) -> None:
        """Counts entries, and empties the list."""
        for ledger in self.chain:
            with ledger._lock:
                counts = ledger.entries
                for entry in entries:
                    counts[entry] = counts.get(entry, 0) + 1
        entries.clear()

    def add_moved(self, entry: Entry, record: MovedStorage) -> None:
        ref, nbytes = weakref.ref(record), record.nbytes
        for ledger in self.chain:
            with ledger._lock:
                ledger.entries[entry] = ledger.entries.get(entry, 0) + 1
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
                ledger.entries[entry] = ledger.entries.get(entry, 0) - 1
                ledger.entries[kept] = ledger.entries.get(kept, 0) + 1
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
            entries = tuple(e._replace(times=n) for e, n in self.entries.items() if n > 0)
        released = [r for r in records if r.released]
        held = tuple((r.name, r.storage_nbytes) for r in released if r.origin() is not None)
        host = sum(r.nbytes for r in records if r.bundle is not None)
        return Report(self.scope, entries, *self.out, *self.back, host, held)
