"""Reports of scopes: a line for each saved tensor with decision and reason, and totals in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fuseops.arguments import instance_of
from fuseops.words import aligned, dtype_name, size

SCHEMA_VERSION = 1
MOVED, SHARED, KEPT, MISSED = "moved", "shared", "kept", "missed"


class Entry(NamedTuple):
    """An `Entry` is a saved tensor, or several that are equal in all fields. After 64 entries of one name, those in
    other shapes are one entry without a shape, whose reason says so and whose nbytes are their mean.

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


def in_other_shapes(entry: Entry, times: int, nbytes: int) -> Entry:
    """The entry of a tensor in the shapes that are not listed.   nbytes: of all of them"""
    reason = f"{entry.reason}; in other shapes, bytes are their mean"
    return entry._replace(nbytes=round(nbytes / times), reason=reason, times=times)


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
        """Entries of the tensor with that name.  Raises FuseOpsError for what is no text."""
        instance_of(name, str, "Report.named(name)", "the name of a saved tensor")
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
