"""The order in which layers run forward and backward: recorded in one step, predicted for the next.

Boundaries are keyed by layer and ordinal of its call in the step, which tells micro-batches, pipeline stages and uses
of one layer apart. When a prediction is wrong, the schedule follows the chain of forward calls for the rest of the
step, and the report counts it.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple


class OrderKey(NamedTuple):
    """An `OrderKey` names one call of a layer in a step."""

    layer: str
    ordinal: int


class Boundary(NamedTuple):
    """A `Boundary` is the begin of the forward or backward of one call of a layer."""

    way: str  # "forward" or "backward"
    key: OrderKey


class Order:
    """An `Order` predicts the boundaries of the running step from those of the last complete one.

    recorded  boundaries of the last complete step, if it is known
    """

    def __init__(self, recorded: Iterable[Boundary] = ()) -> None:
        self.mispredicted = 0
        self._learn(recorded)
        self._running: list[Boundary] = []
        self._ordinals: defaultdict[str, int] = defaultdict(int)
        self._as_recorded = True  # the running step has followed `recorded` so far

    def start(self, complete: bool) -> None:
        """A step begins.   complete: the one before ran the backward of every forward"""
        if complete and self._running:
            self._learn(self._running)
        self._running = []
        self._ordinals.clear()
        self._as_recorded = True

    def _learn(self, recorded: Iterable[Boundary]) -> None:
        self.recorded = tuple(recorded)
        self._places = {boundary: i for i, boundary in enumerate(self.recorded)}

    def key(self, layer: str) -> OrderKey:
        """The key of the next call of a layer."""
        ordinal, self._ordinals[layer] = self._ordinals[layer], self._ordinals[layer] + 1
        return OrderKey(layer, ordinal)

    def advance(self, boundary: Boundary) -> None:
        """The running step has reached a boundary."""
        at = len(self._running)
        self._running.append(boundary)
        if self._as_recorded and self.recorded and self.recorded[at : at + 1] != (boundary,):
            self._as_recorded = False
            self.mispredicted += 1

    @property
    def predicts(self) -> bool:
        """Whether there is a recorded step, and this one has followed it so far."""
        return bool(self.recorded) and self._as_recorded

    def upcoming(self, count: int) -> tuple[Boundary, ...]:
        """The next boundaries, as recorded."""
        at = len(self._running)
        return self.recorded[at : at + count] if self.predicts else ()

    def distance(self, key: OrderKey) -> int | None:
        """How many boundaries after its forward the backward of a call begins, if that is known."""
        forward = self._places.get(Boundary("forward", key))
        backward = self._places.get(Boundary("backward", key))
        if not self.predicts or forward is None or backward is None:
            return None
        return backward - forward
