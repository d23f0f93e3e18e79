"""Identity and layout: which storage a tensor has, and how to rebuild the tensor on a copy of that storage.

A storage is never identified by its address: memory is reused, and a lookup would find another tensor's entry.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fuseops.torch_private import negated_view, prototype, storage_key

V = TypeVar("V")


class StorageMap(Generic[V]):
    """A `StorageMap` maps storages to values. It keeps no storage alive, and never finds the entry of a storage that is
    gone.
    """

    def __init__(self) -> None:
        self.entries: dict[int, tuple[weakref.ref[torch.UntypedStorage], V]] = {}
        self._limit = 64

    def get(self, storage: torch.UntypedStorage) -> V | None:
        entry = self.entries.get(storage_key(storage))
        # the key of a freed storage may be reused
        return entry[1] if entry is not None and entry[0]() is storage else None

    def get_all(self, storages: Sequence[torch.UntypedStorage]) -> list[V | None]:
        """`get` of each, in one call."""
        found = [*map(self.entries.get, map(storage_key, storages))]
        if not any(found):
            return found  # type: ignore[return-value]
        return [
            e[1] if e is not None and e[0]() is storage else None
            for e, storage in zip(found, storages, strict=True)
        ]

    def set(self, storage: torch.UntypedStorage, value: V) -> None:
        if len(self.entries) >= self._limit:
            self._forget_dead()
        self.entries[storage_key(storage)] = (weakref.ref(storage), value)

    def set_all(self, storages: Sequence[torch.UntypedStorage], values: Iterable[V]) -> None:
        """`set` of each, in one call."""
        if len(self.entries) >= self._limit:
            self._forget_dead()
        for storage, value in zip(storages, values, strict=False):
            self.entries[storage_key(storage)] = (weakref.ref(storage), value)

    def _forget_dead(self) -> None:
        self.entries = {k: e for k, e in list(self.entries.items()) if e[0]() is not None}
        self._limit = 2 * len(self.entries) + 64

    def set_if_new(self, storage: torch.UntypedStorage, value: V) -> bool:
        """Sets the value of a storage that has none.   -> whether it was set"""
        entry = self.entries.get(storage_key(storage))
        if entry is not None and entry[0]() is storage:
            return False
        self.set(storage, value)
        return True


# how a tensor lies in its storage: size, strides, offset, dtype, and whether it is conjugated and negated lazily
StridedLayout = tuple[torch.Size, tuple[int, ...], Any, torch.dtype, bool, bool]


def layout_of(t: Tensor) -> StridedLayout:
    dtype = t.dtype
    conj = dtype.is_complex and t.is_conj()
    return t.shape, t.stride(), t.storage_offset(), dtype, conj, t.is_neg()


def tensor_in(storage: torch.UntypedStorage, layout: StridedLayout, start: int = 0) -> Tensor:
    """The tensor of that layout in the part of `storage` that begins at byte `start`, without any conversion: every
    dtype and every NaN payload is preserved.
    """
    size, stride, offset, dtype, conj, neg = layout
    t = prototype(dtype, storage.device).data  # a new tensor, in half the time of torch.empty
    t.set_(storage, offset + start // dtype.itemsize if start else offset, size, stride)
    if conj:
        t = t.conj()
    return negated_view(t) if neg else t


def rows_of(storage: torch.UntypedStorage, dtype: torch.dtype, width: int) -> Tensor:
    """The whole storage as rows of `width` elements.   -> (rows, width)"""
    t = prototype(dtype, storage.device).new_empty(0)
    return t.set_(storage, 0, (storage.nbytes() // dtype.itemsize // width, width), (width, 1))
