"""What a forward saved for its backward: every tensor, its name, and the bytes that it alone keeps
alive.

A pack hook sees every tensor that is saved, ours and those of plain modules. It hands autograd a
handle and keeps a weak reference, so that after the forward the live handles are exactly what the
graph holds: what was saved for a result that the model threw away is gone by then. A plain module's
tensor gets its name last, by walking the graph, since no tensor knows yet which node saves it while
it is packed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.ops import names
from fuseops.ops.names import SavedName
from fuseops.plan.records import SavedTensor

Storages = tuple[tuple[int, int], ...]  # (id, bytes) of each


class Where(NamedTuple):
    """A `Where` says which module runs while autograd saves a tensor."""

    owner: Any  # the call of a Sequential that it belongs to, None outside of all
    path: str  # of the innermost module
    # prefix of the bridge's names, where an op runs outside its Sequential's plan
    alone: str | None


class Handle:
    """A handle is what autograd keeps in the place of a saved tensor while a step is observed."""

    __slots__ = ("__weakref__", "grad_fn", "known", "tensor", "where")

    def __init__(self, tensor: Tensor, where: Where, known: SavedName | None) -> None:
        self.tensor, self.where, self.known = tensor, where, known
        self.grad_fn = "unknown"  # until the graph is walked


class SavedLedger:
    """Records what is packed while its hooks are on."""

    def __init__(self, where: Callable[[bool], Where]) -> None:
        self.where = where
        self._handles: list[weakref.ref[Handle]] = []
        self._visiting: str | None = None

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The scope to run the forward in; use it together with `names.observe()`."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Handle:
        known = names.take(tensor)
        # detached: a saved output that is returned as it is makes a reference cycle
        handle = Handle(tensor.detach(), self.where(known is not None), known)
        self._handles.append(weakref.ref(handle))
        return handle

    def _unpack(self, handle: Handle) -> Tensor:
        if self._visiting is not None:
            handle.grad_fn = self._visiting
        return handle.tensor

    def living(self) -> Iterator[Handle]:
        """What the graph holds, in save order."""
        return filter(None, (handle() for handle in self._handles))

    def visit(self, outputs: Iterable[Tensor]) -> None:
        """Walk the graph of the outputs, so that every handle learns which node saved it."""
        pending: list[Any] = [t.grad_fn for t in outputs if t.grad_fn is not None]
        seen = set(pending)
        while pending:
            node = pending.pop()
            self._visiting = node.name()
            _touch(node)
            self._visiting = None
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    pending.append(following)


def _touch(node: Any) -> None:
    """Unpack what the node saved. A node that refuses (freed, modified in place) leaves its tensors
    unnamed.
    """
    fields = [n.removeprefix("_raw") for n in dir(node) if n.startswith("_raw_saved_")]
    for field in [*fields, "saved_tensors"]:
        try:
            getattr(node, field, None)
        except RuntimeError:
            continue


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
    ordinals: Counter[tuple[str, str]] = Counter()
    for handle in ledger.living():
        own, *others = _names(handle, ordinals)
        saved = _entry(own, handle, parameters, buffers, counted)
        found.append((handle.where.owner, saved))
        again = saved._replace(nbytes=0, shared_with=own)
        found += [(handle.where.owner, again._replace(name=name)) for name in others]
    return found


def _names(handle: Handle, ordinals: Counter[tuple[str, str]]) -> list[str]:
    (_, path, alone), known = handle.where, handle.known
    if known is None:
        key = (path, handle.grad_fn)
        ordinals[key] += 1
        return [f"{path}.{handle.grad_fn}.{ordinals[key] - 1}".lstrip(".")]
    if alone is None:
        return list(known.names)
    return [f"{path}.{name.removeprefix(alone)}".lstrip(".") for name in known.names]


def _entry(
    name: str,
    handle: Handle,
    parameters: Mapping[int, str],
    buffers: Mapping[int, str],
    counted: dict[int, str],
) -> SavedTensor:
    tensor, known = handle.tensor, handle.known
    nbytes, shared, is_param = 0, None, known is not None and known.is_param
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
