"""What a forward saved for its backward: every tensor, its name, and the bytes that it alone keeps
alive.

A pack hook sees every tensor that is saved, ours and those of plain modules. It hands autograd a
handle and keeps a weak reference, so that after the forward the live handles are exactly what the
graph holds: what was saved for a result that the model threw away is gone by then.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.ops import names
from fuseops.plan.records import SavedTensor

from .labels import Labels

Storages = tuple[tuple[int, int], ...]  # (id, bytes) of each


class Where(NamedTuple):
    """A `Where` says which module runs while autograd saves a tensor."""

    owner: Any  # the call of a Sequential that it belongs to, None outside of all
    path: str  # of the innermost module
    # prefix of the bridge's names, where an op runs outside its Sequential's plan
    alone: str | None

    def absolute(self, name: str) -> str:
        """A name of the bridge's, relative to the root."""
        if self.alone is None:
            return name
        return f"{self.path}.{name.removeprefix(self.alone)}".lstrip(".")


class Handle:
    """A handle is what autograd keeps in the place of a saved tensor while a step is observed."""

    __slots__ = ("__weakref__", "is_param", "names", "owner", "tensor")

    def __init__(self, tensor: Tensor, owner: Any, names: list[str], is_param: bool) -> None:
        self.tensor, self.owner, self.names, self.is_param = tensor, owner, names, is_param


class SavedLedger:
    """Records what is packed while its hooks are on.

    labels: name what no op of fuseops saves
    """

    def __init__(self, where: Callable[[bool], Where], labels: Labels) -> None:
        self.where, self.labels = where, labels
        self._handles: list[weakref.ref[Handle]] = []

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The scope to run the forward in; use it together with `names.observe()`."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda handle: handle.tensor)

    def _pack(self, tensor: Tensor) -> Handle:
        promised = names.take_name(tensor)
        where = self.where(promised is not None)
        if promised is None:
            found = [*self.labels.of_torch(tensor, sys._getframe().f_back).names]
        else:
            found = [where.absolute(name) for name in promised.names]
        # detached: a saved output that is returned as it is makes a reference cycle
        is_param = promised is not None and promised.is_param
        handle = Handle(tensor.detach(), where.owner, found, is_param)
        self._handles.append(weakref.ref(handle))
        return handle

    def living(self) -> Iterator[Handle]:
        """What the graph holds, in save order."""
        return filter(None, (handle() for handle in self._handles))


def listed(hooks: tuple[Any, Any] | None) -> bool:
    """Whether these saved-tensor hooks are of a ledger: what is saved is to be listed, and not to be moved."""
    return hooks is not None and isinstance(getattr(hooks[0], "__self__", None), SavedLedger)


def storages(tensor: Tensor) -> Storages:
    """The storages below a tensor: one, or those of a wrapper's inner tensors."""
    return tuple(_storage(part) for part in torch_private.plain_parts(tensor))


def _storage(tensor: Tensor) -> tuple[int, int]:
    try:
        return torch_private.storage_id(tensor), tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # sparse layouts have none of their own
        return id(tensor), tensor.numel() * tensor.element_size()


def tensors_by_owner(
    ledger: SavedLedger, parameters: Mapping[int, str], buffers: Mapping[int, str]
) -> list[tuple[Any, SavedTensor]]:
    """Every saved tensor that lives, in save order, with the call it belongs to.

    parameters, buffers: storage -> name. What the model holds anyway costs nothing; every other
    storage is counted once, at the first tensor that keeps it.
    """
    found: list[tuple[Any, SavedTensor]] = []
    counted: dict[int, str] = {}
    for handle in ledger.living():
        own, *others = handle.names
        saved = _entry(own, handle, parameters, buffers, counted)
        found.append((handle.owner, saved))
        again = saved._replace(nbytes=0, shared_with=own)
        found += [(handle.owner, again._replace(name=name)) for name in others]
    return found


def _entry(
    name: str,
    handle: Handle,
    parameters: Mapping[int, str],
    buffers: Mapping[int, str],
    counted: dict[int, str],
) -> SavedTensor:
    tensor, is_param = handle.tensor, handle.is_param
    nbytes, shared = 0, None
    for storage, size in storages(tensor):
        if storage in parameters:
            is_param = True
            shared = shared or parameters[storage]
        elif storage in buffers:
            shared = shared or buffers[storage]
        elif storage in counted:
            shared = shared or counted[storage]
        else:
            counted[storage] = name
            nbytes += size
    return SavedTensor(
        name,
        tuple(tensor.shape),
        tensor.dtype,
        nbytes,
        None if shared == name else shared,
        is_param,
    )
