"""The ledger of a forward: every tensor that was saved for its backward, its name, and the bytes that it keeps alive.

A pack hook sees every tensor that is saved, by fuseops and by plain modules. It gives autograd a handle and keeps a
weak reference to it, so that after the forward the live handles are exactly what the graph holds. What was saved for a
result that the model dropped is freed by then.
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

    owner: Any  # the call of a Sequential that saves the tensor, or None
    path: str  # of the innermost module
    # prefix of the bridge's names, where an op runs outside its Sequential's plan
    op_prefix: str | None

    def absolute(self, name: str) -> str:
        """The name relative to the root, of one that the bridge gave."""
        if self.op_prefix is None:
            return name
        return f"{self.path}.{name.removeprefix(self.op_prefix)}".lstrip(".")


class Handle:
    """A handle is what autograd keeps in the place of a saved tensor while a step is observed."""

    __slots__ = ("__weakref__", "is_param", "names", "owner", "tensor")

    def __init__(self, tensor: Tensor, owner: Any, names: list[str], is_param: bool) -> None:
        self.tensor, self.owner, self.names, self.is_param = tensor, owner, names, is_param


class SavedLedger:
    """A `SavedLedger` records the tensors that are packed while its hooks are active.

    where   gives the module that packs; its argument: a node of fuseops does
    labels  name the tensors that no op of fuseops saves
    """

    def __init__(self, where: Callable[[bool], Where], labels: Labels) -> None:
        self.where, self.labels = where, labels
        self._handles: list[weakref.ref[Handle]] = []

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The context to run the forward in, together with `names.observe()`."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda handle: handle.tensor)

    def _pack(self, tensor: Tensor) -> Handle:
        promised = names.take_name(tensor)
        where = self.where(promised is not None)
        if promised is None:
            found = [*self.labels.name_torch_saved(tensor, sys._getframe().f_back).names]
        else:
            found = [where.absolute(name) for name in promised.names]
        # detached: a saved output that is returned as it is makes a reference cycle
        is_param = promised is not None and promised.is_param
        handle = Handle(tensor.detach(), where.owner, found, is_param)
        self._handles.append(weakref.ref(handle))
        return handle

    def live_handles(self) -> Iterator[Handle]:
        """The handles that the graph still holds, in save order."""
        return filter(None, (handle() for handle in self._handles))


def is_ledger(hooks: tuple[Any, Any] | None) -> bool:
    """Whether these saved-tensor hooks are a ledger's: then offload does not move what is saved."""
    return hooks is not None and isinstance(getattr(hooks[0], "__self__", None), SavedLedger)


def storages(tensor: Tensor) -> Storages:
    """The storages of a tensor: one, or those of the inner tensors of a wrapper subclass."""
    return tuple(_storage(part) for part in torch_private.plain_parts(tensor))


def _storage(tensor: Tensor) -> tuple[int, int]:
    try:
        return torch_private.storage_id(tensor), tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # a sparse layout has no storage
        return id(tensor), tensor.numel() * tensor.element_size()


def tensors_by_owner(
    ledger: SavedLedger, parameters: Mapping[int, str], buffers: Mapping[int, str]
) -> list[tuple[Any, SavedTensor]]:
    """Every live saved tensor in save order, with the call that owns it.

    parameters, buffers: storage -> name. Their storages count no bytes; every other one counts once, at the first
    tensor that keeps it alive.
    """
    found: list[tuple[Any, SavedTensor]] = []
    counted: dict[int, str] = {}
    for handle in ledger.live_handles():
        name, *others = handle.names
        saved = _entry(name, handle, parameters, buffers, counted)
        found.append((handle.owner, saved))
        alias = saved._replace(nbytes=0, shared_with=name)
        found += [(handle.owner, alias._replace(name=other)) for other in others]
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
