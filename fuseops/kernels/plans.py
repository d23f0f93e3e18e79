"""What launchers work out once for a kind of call, and the launches that they keep.

A kind is what configurations and compiled code depend on: dtypes, shapes, strides, alignment, rows to a
power of two. A `Plan` keeps launches by what is left, addresses and row counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fuseops.kernels.replay import Replays

MOST_KEPT = 1024  # launches of one kind of call, and descriptors of one of its operands: of all layers of a model

Again = Callable[[], None]
"""A launch with all its arguments; it holds none of its tensors."""


class Plan:
    """How calls of one kind run: the path, and the launches made so far. In a training step operands come
    back to where they were in the step before, and nothing is left but the launch.

    blocks  of columns that a grouped GEMM works in: an epilogue leaves one sum of a row for each
    """

    def __init__(self, path: str, run: Callable[..., Again | None], blocks: int = 0) -> None:
        self.path, self.run, self.blocks = path, run, blocks
        self.launches: dict[tuple[int, ...], Again] = {}

    def __call__(self, where: tuple[int, ...], *operands: Any) -> None:
        """Run the operands that `where` tells apart from all others of this kind."""
        again = self.launches.get(where)
        if again is not None:
            again()
            return
        again = self.run(*operands)
        if again is not None:
            if len(self.launches) >= MOST_KEPT:
                self.launches.clear()
            self.launches[where] = again


def kept(describe: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """`describe` that remembers the descriptors of the last addresses and shapes: weights stay where
    they are, where activations do not.
    """
    found: dict[tuple[Any, ...], Any] = {}

    def described(t: Tensor) -> Any:
        key = t.data_ptr(), t.shape, t.stride()
        descriptor = found.get(key)
        if descriptor is None:
            if len(found) >= MOST_KEPT:
                found.clear()
            descriptor = found[key] = describe(t)
        return descriptor

    return described


# --- what kinds are made of


def places(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Whether some address is no multiple of 16, which Triton compiles other code for, and the addresses."""
    found = [0 if t is None else t.data_ptr() for t in tensors]
    bits = 0
    for place in found:
        bits |= place
    return bits % 16 != 0, *found


def misaligned(*tensors: Tensor | None) -> bool:
    return bool(places(*tensors)[0])


def kind(t: Tensor | None) -> Any:
    return None if t is None else (t.dtype, t.shape, t.stride())


def way(index: Tensor | None) -> Any:
    """`kind` without the number of rows."""
    return None if index is None else (index.dtype, index.stride())


def rows_kind(rows: int) -> int | None:
    """As the buckets of configurations; None for no rows."""
    return (rows - 1).bit_length() if rows else None


# --- plans by kind


class Plans(dict[tuple[Any, ...], Plan]):
    """Plans by kind, replays of other launchers, and those made under an override, by override."""

    def __init__(self) -> None:
        super().__init__()
        self.replays = Replays()
        self.under: dict[Any, Plans] = {}


class _Planned:
    now = Plans()


planned = _Planned()


@contextmanager
def planning(under: Any = None) -> Iterator[None]:
    """Inside, launchers keep other plans: those of the override `under`, or new ones."""
    outer = planned.now
    planned.now = Plans() if under is None else outer.under.setdefault(under, Plans())
    try:
        yield
    finally:
        planned.now = outer


def forget_plans() -> None:
    """Since what they were made from has changed."""
    planned.now = Plans()
