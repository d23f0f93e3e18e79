"""Nodes of fuseops whose saved tensors are as they were in an earlier step. One look at all of them, and one count in
the report, stand for a verdict about each.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, UntypedStorage, nn

from fuseops.ops.names import SavedName
from fuseops.torch_private import storage_key, tensor_guard

from . import marks
from .reasons import PARAMETER, ModelStorages
from .records import EntryGroup, Verdict
from .report import MOVED
from .storages import StorageMap


class KnownNode:
    """A `KnownNode` holds the verdicts about all tensors that a node saves.

    verdicts  one a tensor. They hold for tensors of the same kinds, each in a storage of its own of the same size and
              owner, which is not marked; parameters always stay
    moved     the tensors that move, each with the number of its storage
    kept      the numbers of the other storages, without those of parameters
    counted   those of them whose bytes count
    names     the names of what is kept; `kept_names`: without those of parameters
    to_pack   how many tensors need a handle, up to the last that moves: torch keeps the others itself. The first has
              one in any case, by which its scope follows the node
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        named: Sequence[SavedName],
        followed: Sequence[tuple[Verdict, str | None]],
        owned: ModelStorages,
    ) -> None:
        """followed: the verdicts, and the names for which the storages stay"""
        self.named = named  # kept alive: its id is in the key of the cache
        self.verdicts = [verdict for verdict, _ in followed]
        entries = [verdict.entry for verdict in self.verdicts]
        self._others = [
            k
            for k, (t, entry) in enumerate(zip(tensors, entries, strict=True))
            if not (type(t) is nn.Parameter and entry.reason == PARAMETER)
        ]
        moves = [entries[k].decision == MOVED for k in self._others]
        self.moved = {self._others[n]: n for n, does in enumerate(moves) if does}
        self.kept = [n for n, does in enumerate(moves) if not does]
        self.counted = [n for n in self.kept if entries[self._others[n]].nbytes]
        self.kept_names = [entries[self._others[n]].name for n in self.kept]
        self.names = {e.name: "keep" for k, e in enumerate(entries) if k not in self.moved}
        self.to_pack = max(self.moved, default=0) + 1
        self._residents = [followed[k][1] for k in self._others]
        self._alike = tensor_guard(tensors)
        storages = [tensors[k].untyped_storage() for k in self._others]
        self._sizes = [storage.nbytes() for storage in storages]
        self._owners = owned.get_all(storages)
        self._groups: dict[Any, EntryGroup] = {}

    def storages_of(
        self, tensors: Sequence[Tensor], owned: ModelStorages, resident: StorageMap[str] | None
    ) -> list[UntypedStorage] | None:
        """The storages of tensors for which the verdicts hold, without those of parameters; or None."""
        if not self._alike(*tensors):
            return None
        storages = [tensors[k].untyped_storage() for k in self._others]
        if (
            len({*map(storage_key, storages)}) < len(storages)
            or [storage.nbytes() for storage in storages] != self._sizes
            or owned.get_all(storages) != self._owners
        ):
            return None
        if resident is not None and resident.get_all(storages) != self._residents:
            return None
        if marks.marked.entries and any(marks.marked.get_all(storages)):
            return None
        return storages

    def group(self, counted_before: Sequence[bool | None]) -> EntryGroup:
        """The entries of what is kept.   counted_before: which storages of `counted` another entry has counted"""
        key = (*counted_before,)
        found = self._groups.get(key)
        if found is None:
            numbers = [n for n, before in zip(self.counted, key, strict=True) if before]
            again = {self._others[n] for n in numbers}
            kept = [(k, v) for k, v in enumerate(self.verdicts) if k not in self.moved]
            found = EntryGroup(v.uncounted if k in again else v.entry for k, v in kept)
            self._groups[key] = found
        return found


def own_storages(tensors: Sequence[Tensor]) -> bool:
    """Whether no two of the tensors share a storage, whose bytes count once."""
    return len({storage_key(t.untyped_storage()) for t in tensors}) == len(tensors)
