"""Marks on tensors and modules, which override what a scope would decide.

A mark on a tensor belongs to its storage, so every view has it; of two marks the later one wins. It has to be made
before the tensor is saved, which is before the op that reads it runs. A mark on a module is in its `__dict__`, so
copies and pickles have it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from fuseops.arguments import shown
from fuseops.errors import FuseOpsError
from fuseops.observe.memory import tensors_in
from fuseops.ops.paths import walk
from fuseops.torch_private import plain_parts, pytree

from .lanes.devices import KINDS, lanes_of
from .lanes.protocol import Event
from .storages import StorageMap

OFFLOAD, KEEP = "offload", "keep"
ATTRIBUTE = "_offload_mark"
marked: StorageMap[str] = StorageMap()
module_changes = 0  # how often modules were marked: invalidates cached decisions
# storage -> version, and the event at which it was complete
complete: StorageMap[tuple[int, Event]] = StorageMap()


def mark_offload(*tensors: Any) -> None:
    """Move these tensors (or all in these containers) to the host, however small. Parameters stay
    all the same.
    """
    for t in _tensors_in(tensors):
        marked.set(t.untyped_storage(), OFFLOAD)


def mark_not_offload(*tensors: Any) -> None:
    """Leave these tensors (or all in these containers) where they are."""
    for t in _tensors_in(tensors):
        marked.set(t.untyped_storage(), KEEP)


def start_offload(*tensors: Any) -> None:
    """These tensors (or all in these containers) are complete now: if they are moved, their copies
    need not wait for what is launched after this, such as the GEMM that reads them.
    """
    for t in _tensors_in(tensors):
        if t.device.type in KINDS:
            event = lanes_of(t.device).record("compute")
            complete.set(t.untyped_storage(), (t._version, event))


def ready_event(storage: UntypedStorage, version: int) -> Event | None:
    """The event at which a storage was complete, if `start_offload` was called at this version of its tensor."""
    known, event = complete.get(storage) or (-1, None)
    return event if known == version else None


def _tensors_in(values: tuple[Any, ...]) -> list[Tensor]:
    """The plain tensors in tensors (subclasses are taken apart) and in containers of them."""
    found: list[Tensor] = []
    for value in values:
        parts = [part for t in tensors_in(value) for part in plain_parts(t)]
        empty = value is None or (isinstance(value, (Mapping, tuple, list)) and not value)
        modules = [m for m in pytree.tree_leaves(value) if isinstance(m, nn.Module)]
        if modules or (not parts and not empty):
            raise FuseOpsError(
                "a mark needs tensors, or tuples, lists, mappings or dataclasses of them; got "
                f"{type(modules[0] if modules else value).__name__}. A module is marked by mark_module."
            )
        found += parts
    for t in found:
        if t.layout is not torch.strided:
            raise FuseOpsError(
                f"a mark needs tensors that have a storage; got one of layout {t.layout}."
            )
    return found


def mark_module(module: nn.Module, mark: str | None) -> None:
    """Decide for all that `module` and the modules in it save: "keep", "offload", or None to take a
    mark back.
    """
    if not isinstance(module, nn.Module):
        raise FuseOpsError(
            f"mark_module(module, ...) expects an nn.Module, got {type(module).__name__}. Tensors have mark_offload."
        )
    if mark not in (KEEP, OFFLOAD, None):
        raise FuseOpsError(
            f"mark_module(mark=...) expects 'keep', 'offload' or None, got {shown(mark)}."
        )
    global module_changes
    module_changes += 1
    for _, child in walk(module):
        if mark is None:
            child.__dict__.pop(ATTRIBUTE, None)
        else:
            child.__dict__[ATTRIBUTE] = mark
