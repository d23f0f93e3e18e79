"""Each op of a step, and how many bytes are on the device after it: the allocator's own count on CUDA, storages that
live elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fuseops.ops.op import Op
from fuseops.torch_private import WeakStorage, plain_parts, storage_key


class Meter(Protocol):
    """Counts bytes while a step runs."""

    def before(self) -> None:
        """An op is about to run."""

    def after(self, made: Iterable[Tensor]) -> int:
        """The op ran, and made tensors in new storages.   -> most bytes on the device meanwhile"""


def outside_bytes(model: nn.Module) -> int:
    """What the ops of a model keep outside of torch's allocator, after a step or a rehearsal of one."""
    found: dict[Any, int] = {}
    for op in model.modules():
        for whose, nbytes in op.outside().items() if isinstance(op, Op) else ():
            found[whose] = max(found.get(whose, 0), nbytes)
    return sum(found.values())


class StorageMeter:
    """A `StorageMeter` counts the bytes of storages that live: those of the step, beside those that were there before.

    What an op allocates and frees inside itself is not seen.
    """

    def __init__(self, there: Iterable[Tensor] = ()) -> None:
        self.nbytes = 0
        self._living: dict[int, tuple[WeakStorage, int]] = {}
        self.after(there)

    def before(self) -> None:
        pass

    def after(self, made: Iterable[Tensor]) -> int:
        for key in [key for key, (weak, _) in self._living.items() if weak.expired()]:
            self.nbytes -= self._living.pop(key)[1]
        for storage in (t.untyped_storage() for t in made):
            key = storage_key(storage)
            if key not in self._living:
                self._living[key] = WeakStorage(storage), storage.nbytes()
                self.nbytes += storage.nbytes()
        return self.nbytes


class CudaMeter:
    """A `CudaMeter` reads the active bytes of torch's caching allocator: what law 15 calls the peak."""

    def before(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def after(self, made: Iterable[Tensor]) -> int:
        stats = torch.cuda.memory_stats_as_nested_dict()  # all of them flat take 0.5 ms an op
        return int(stats["active_bytes"]["all"]["peak"])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor inside containers, dataclasses and what torch's pytrees know to take apart."""
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


class Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every op below autograd that does work.

    ran  is told of it: func, args, kwargs, what it returned, and the tensors of new storages in that
    run  runs it
    """

    def __init__(
        self,
        ran: Callable[[Any, Any, Any, Any, list[Tensor]], None],
        run: Callable[[Any, Any, Any], Any] = lambda func, args, kwargs: func(*args, **kwargs),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ran, self._run = ran, run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        before = {storage_key(t.untyped_storage()) for t in stored((args, kwargs))}
        out = self._run(func, args, kwargs)
        made = [t for t in stored(out) if storage_key(t.untyped_storage()) not in before]
        if made or func._schema.is_mutable:  # another op gives a view
            self._ran(func, args, kwargs, out, made)
        return out


def by_name(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an op is given, by the names of its arguments."""
    return dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | {**kwargs}


def dense(value: Any) -> Iterator[Tensor]:
    """Every tensor inside but sparse ones, which have no storage to ask for its bytes."""
    return (t for t in tensors_in(value) if t.layout in (torch.strided, torch.jagged))


def stored(value: Any) -> Iterator[Tensor]:
    """Every tensor inside that has a storage; of a wrapper those that it is made of."""
    parts = (part for t in tensors_in(value) for part in plain_parts(t))
    return (part for part in parts if part.layout is torch.strided)
