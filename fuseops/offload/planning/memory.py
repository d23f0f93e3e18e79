"""How many bytes are on the device after each op: the allocator's own count on CUDA, storages that
live elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fuseops.torch_private import WeakStorage, storage_key


class Meter(Protocol):
    """Counts bytes while a step runs."""

    def before(self) -> None:
        """An op is about to run."""

    def after(self, made: Sequence[Tensor]) -> int:
        """It ran, and made tensors in new storages.   -> most bytes on the device meanwhile"""


class StorageMeter:
    """Storages that the step made and that live, beside those that were there before.

    What an op allocates and frees inside itself is not seen.
    """

    def __init__(self, there: Iterable[Tensor]) -> None:
        self._living: dict[int, tuple[WeakStorage, int]] = {}
        self._bytes = 0
        self._add(there)

    def before(self) -> None:
        self._forget()

    def after(self, made: Sequence[Tensor]) -> int:
        self._forget()
        self._add(made)
        return self._bytes

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for t in tensors:
            storage = t.untyped_storage()
            if storage_key(storage) not in self._living:
                self._living[storage_key(storage)] = (WeakStorage(storage), storage.nbytes())
                self._bytes += storage.nbytes()

    def _forget(self) -> None:
        for key in [key for key, (weak, _) in self._living.items() if weak.expired()]:
            self._bytes -= self._living.pop(key)[1]


class CudaMeter:
    """Active bytes of torch's caching allocator: what law 15 calls the peak."""

    def before(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def after(self, made: Sequence[Tensor]) -> int:
        return int(torch.cuda.memory_stats()["active_bytes.all.peak"])


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor inside containers, dataclasses and the outputs of Hugging Face models."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name, None))
