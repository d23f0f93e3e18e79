"""How many bytes are on the device after each op: the allocator's own count on CUDA, storages that
live elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fuseops.ops.op import Op

from .fakes import LiveBytes


class Meter(Protocol):
    """Counts bytes while a step runs."""

    def before(self) -> None:
        """An op is about to run."""

    def after(self, made: Sequence[Tensor]) -> int:
        """The op ran, and made tensors in new storages.   -> most bytes on the device meanwhile"""


def outside_bytes(model: nn.Module) -> int:
    """What the ops of a model keep outside of torch's allocator, after a step or a rehearsal of one."""
    found: dict[Any, int] = {}
    for op in model.modules():
        for whose, nbytes in op.outside().items() if isinstance(op, Op) else ():
            found[whose] = max(found.get(whose, 0), nbytes)
    return sum(found.values())


class StorageMeter:
    """Storages that the step made and that live, beside those that were there before.

    What an op allocates and frees inside itself is not seen.
    """

    def __init__(self, there: Iterable[Tensor]) -> None:
        self._live = LiveBytes()
        self._live.add(there)

    def before(self) -> None:
        pass

    def after(self, made: Sequence[Tensor]) -> int:
        self._live.forget()
        self._live.add(made)
        return self._live.nbytes


class CudaMeter:
    """Active bytes of torch's caching allocator: what law 15 calls the peak."""

    def before(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def after(self, made: Sequence[Tensor]) -> int:
        stats = torch.cuda.memory_stats_as_nested_dict()  # all of them flat take 0.5 ms an op
        return int(stats["active_bytes"]["all"]["peak"])


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
