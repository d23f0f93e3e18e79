"""What stands in autograd's graph for a saved tensor: a handle, that is the tensor, or its place in
a host copy.

A record is one storage at one version, copied once for all tensors that lie in it. It lives as long
as one of its handles; autograd drops those with the graph, so nothing else is needed for
exceptions, retain_graph or dropped graphs.

In-place guard: saved-tensor hooks switch off autograd's own check, so each handle compares the
version counter that autograd would have compared. A counter only grows, so one look when the tensor
is unpacked sees every write since it was saved, those during the copy included. A tensor that was
moved leaves an alias of zero bytes that shares its counter. Kernels that write a tensor announce it
by `torch.autograd.graph.increment_version`, as torch's own do. Writes through `.data`, `set_` or
numpy change no counter; they are outside the promise, here as in plain torch.
"""

import threading
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from fuseops.errors import InPlaceError
from fuseops.torch_private import WeakStorage, base_of, share_version_counter, storage_key

from .copies import Copies, HostCopy, Pending
from .report import Ledger
from .storages import Layout, layout_of, tensor_in


class Label(NamedTuple):
    """What messages call a saved tensor."""

    name: str
    op: str


class Record:
    """One storage at one version, in host memory."""

    __slots__ = (
        *("__weakref__", "_base", "_live", "_stream", "copies", "copy"),
        *("guard", "name", "nbytes", "origin", "version"),
    )

    def __init__(self, t: Tensor, name: str, copies: Copies, copy: HostCopy) -> None:
        self.name, self.copies, self.copy = name, copies, copy
        self.nbytes = copy.buffer.numel()
        self.version = t._version
        self.guard = _alias_of_no_bytes(t)
        self._base = weakref.ref(base_of(t))
        self.origin = WeakStorage(t.untyped_storage())
        self._live: WeakStorage | None = None
        self._stream: torch.cuda.Stream | None = None

    def is_of(self, t: Tensor) -> bool:
        """Whether this holds the bytes of t, which is in the same storage: no write since.

        A counter that t does not share says nothing about t.
        """
        if not self.version == t._version == self.guard._version:
            return False
        return self._base() is base_of(t) or share_version_counter(t, self.guard)

    def back(self, ledger: Ledger) -> torch.UntypedStorage:
        """The bytes on the device. While somebody on this stream has them, the same storage."""
        storage = None if self._live is None else self._live.storage()
        stream = self.copies.stream()
        if storage is None or stream != self._stream:
            storage = self.copies.back(self.copy)
            self._live, self._stream = WeakStorage(storage), stream
            ledger.came_back(self.nbytes)
        return storage


def _alias_of_no_bytes(t: Tensor) -> Tensor:
    """Shares the version counter of t, and none of its memory."""
    alias = t.detach()
    alias.data = torch.empty(0, dtype=t.dtype, device=t.device)
    return alias


class _Thread(threading.local):
    def __init__(self) -> None:
        self.records: weakref.WeakValueDictionary[int, Record] = weakref.WeakValueDictionary()


_thread = _Thread()


def find(t: Tensor) -> Record | None:
    """The record that already holds the bytes of t, or None."""
    record = _thread.records.get(storage_key(t.untyped_storage()))
    return record if record is not None and record.is_of(t) else None


def copy_out(t: Tensor, name: str, copies: Copies, buffer: Tensor) -> tuple[Record, Pending | None]:
    """Copy the storage of t. A Pending is to be settled before the source is let go."""
    storage = t.untyped_storage()
    copy, pending = copies.out(storage, buffer)
    record = _thread.records[storage_key(storage)] = Record(t, name, copies, copy)
    return record, pending


class Kept:
    """A saved tensor that stays where it is."""

    __slots__ = ("__weakref__", "label", "ledger", "tensor", "version")

    def __init__(self, t: Tensor, label: Label, ledger: Ledger) -> None:
        # Never t itself: a saved output would hold its node, and the node holds it through this.
        self.tensor = t.detach()
        self.version = t._version
        self.label, self.ledger = label, ledger

    def restore(self) -> Tensor:
        self.ledger.backward_began()
        _check(self.tensor, self.version, self.label)
        return self.tensor


class Moved:
    """A saved tensor whose bytes are in a host copy."""

    __slots__ = ("__weakref__", "label", "layout", "ledger", "record")

    def __init__(self, t: Tensor, label: Label, record: Record, ledger: Ledger) -> None:
        self.record, self.label, self.ledger = record, label, ledger
        self.layout: Layout = layout_of(t)

    def restore(self) -> Tensor:
        self.ledger.backward_began()
        _check(self.record.guard, self.record.version, self.label)
        return tensor_in(self.record.back(self.ledger), self.layout)


Handle = Kept | Moved


def _check(guard: Tensor, saved_at: int, label: Label) -> None:
    if guard._version != saved_at:
        raise InPlaceError(
            f"saved tensor {label.name!r} of {label.op} was modified in place before its backward "
            f"ran: it is at version {guard._version}, and was saved at version {saved_at}. The "
            "gradient would be wrong. Write out of place, or into a clone of it."
        )


def unpack(handle: Handle) -> Tensor:
    """The unpack hook of every scope."""
    return handle.restore()
