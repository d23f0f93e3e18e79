"""Watches each op of a step, and counts bytes on the device: by the allocator on CUDA, by live storages elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fuseops.ops.op import Op
from fuseops.torch_private import (
    TorchDispatchMode,
    WeakStorage,
    plain_parts,
    pytree,
    storage_key,
)


def outside_bytes(model: nn.Module) -> int:
    """The bytes that ops of a model keep outside of torch's allocator, after a step or a dry run of one."""
    found: dict[Any, int] = {}
    for op in model.modules():
        for key, nbytes in op.across_ranks.outside.items() if isinstance(op, Op) else ():
            found[key] = max(found.get(key, 0), nbytes)
    return sum(found.values())


class StorageMeter:
    """A `StorageMeter` counts the bytes of live storages: those of tensors that exist before the step, and those that
    ops make. What an op allocates and frees inside itself is not counted.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        self.nbytes = 0
        self._living: dict[int, tuple[WeakStorage, int]] = {}
        self.after(existing)

    def before(self) -> None:
        """An op is about to run."""

    def after(self, made: Iterable[Tensor]) -> int:
        """The op ran, and returned tensors in new storages.   -> most bytes on the device since `before`"""
        for key in [key for key, (weak, _) in self._living.items() if weak.expired()]:
            self.nbytes -= self._living.pop(key)[1]
        for storage in (t.untyped_storage() for t in made):
            key = storage_key(storage)
            if key not in self._living:
                self._living[key] = WeakStorage(storage), storage.nbytes()
                self.nbytes += storage.nbytes()
        return self.nbytes


class CudaMeter:
    """A `CudaMeter` reads the peak of active bytes of torch's caching allocator."""

    def before(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def after(self, made: Iterable[Tensor]) -> int:
        stats = torch.cuda.memory_stats_as_nested_dict()  # the flat form takes 0.5 ms an op
        return int(stats["active_bytes"]["all"]["peak"])


Meter = StorageMeter | CudaMeter


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers, dataclasses and nodes of torch's pytree."""
    parts: Iterable[Any] = ()
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (tuple, list)):
        parts = value
    elif is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name, None) for field in fields(value)]
    elif type(value) in pytree.SUPPORTED_NODES:
        parts = pytree.tree_leaves(value)
    for part in parts:
        yield from tensors_in(part)


class OpWatcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """An `OpWatcher` is a dispatch mode below autograd that watches all ops but those that return views.

    on_op  called after an op: func, args, kwargs, its result, and the tensors in it that have new storages
    run    runs the op
    """

    def __init__(
        self,
        on_op: Callable[[Any, Any, Any, Any, list[Tensor]], None],
        run: Callable[[Any, Any, Any], Any] = lambda func, args, kwargs: func(*args, **kwargs),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_op, self._run = on_op, run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        before = {storage_key(t.untyped_storage()) for t in storage_tensors((args, kwargs))}
        out = self._run(func, args, kwargs)
        made = [t for t in storage_tensors(out) if storage_key(t.untyped_storage()) not in before]
        if made or func._schema.is_mutable:  # else it returned a view
            self._on_op(func, args, kwargs, out, made)
        return out


def named_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an op by name."""
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | {**kwargs}


def dense_tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers but sparse ones, which have no storage."""
    return (t for t in tensors_in(value) if t.layout in (torch.strided, torch.jagged))


def storage_tensors(value: Any) -> Iterator[Tensor]:
    """Every plain tensor in nested containers that has a storage; wrapper subclasses are taken apart."""
    parts = (part for t in tensors_in(value) for part in plain_parts(t))
    return (part for part in parts if part.layout is torch.strided)
