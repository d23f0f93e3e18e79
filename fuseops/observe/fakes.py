"""What a step on fake tensors needs: fakes in the place of a model's tensors, and bytes that live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fuseops.torch_private import WeakStorage, storage_key

from .untouched import nothing_waits


@contextmanager
def faked(model: nn.Module, fake: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Parameters, buffers and tensors that are plain attributes are replaced by their fakes, tied ones by one; what
    waits for backward_dw stays.
    """
    made: dict[int, Tensor] = {}
    before: list[tuple[Any, str, Tensor]] = []
    for module in model.modules():
        tables: tuple[Any, ...] = (module._parameters, module._buffers, vars(module))
        for table in tables:
            for name, t in table.items():
                if isinstance(t, Tensor):
                    before.append((table, name, t))
                    if id(t) not in made:
                        made[id(t)] = fake(t)
                    table[name] = made[id(t)]
    try:
        with nothing_waits(model):
            yield
    finally:
        for table, name, t in before:
            table[name] = t


class LiveBytes:
    """Bytes of the storages that were added and that live, each counted once."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._living: dict[int, tuple[WeakStorage, int]] = {}

    def add(self, tensors: Iterable[Tensor], count: bool = True) -> None:
        """count=False: these do not count, nor does what lies in their storages."""
        for storage in (t.untyped_storage() for t in tensors):
            key = storage_key(storage)
            if key not in self._living:
                nbytes = storage.nbytes() if count else 0
                self._living[key] = WeakStorage(storage), nbytes
                self.nbytes += nbytes

    def forget(self) -> None:
        """Leave out those that have died."""
        for key in [key for key, (weak, _) in self._living.items() if weak.expired()]:
            self.nbytes -= self._living.pop(key)[1]
