"""Name frames tell whoever packs saved tensors which is which; they come from the autograd bridge.

Pack hooks run after `Function.forward` has returned and while `apply` still runs, in save order. The bridge publishes
the ordered names of a node's saved tensors before `apply` and clears them after; a pack hook takes the next name and
checks that it was promised for this very tensor. Nothing is published while nobody observes.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from fuseops.errors import FuseOpsError


class SavedName(NamedTuple):
    """A `SavedName` says under which names a tensor is saved.

    names   all of them, such as `<path>.<field>`; the first is its own
    op      class name of the op that saves it
    owners  the modules that save it, as far as they are known, none of which it keeps alive; None: the bridge names it,
            and knows no modules
    lasts   this object names the same tensor of the next step
    """

    names: tuple[str, ...]
    is_param: bool
    op: str
    owners: tuple[weakref.ref[nn.Module], ...] | None = None
    lasts: bool = True

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def also(self) -> tuple[str, ...]:
        """Its other names."""
        return self.names[1:]


class Frame:
    """A frame holds the names of what one autograd node is about to save, in save order.

    complete  for whoever moves them: a point of the device's stream at which all of them were there
    packed    for whoever packs all of them when the first is saved: what stands for each
    """

    __slots__ = ("complete", "names", "packed", "taken", "tensors")

    def __init__(self) -> None:
        self.names: Sequence[SavedName] = ()
        self.tensors: Sequence[Tensor] = ()
        self.taken = 0
        self.complete: Any = None
        self.packed: Sequence[Any] | None = None

    def fill(self, names: Sequence[SavedName], tensors: Sequence[Tensor]) -> None:
        self.names, self.tensors = names, tensors


class Outermost:
    """An `Outermost` names modules relative to the Sequential whose forward runs around all others."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._prefixes: dict[int, str] = {}  # of the modules in it, once one of them asks

    def prefix(self, module: nn.Module) -> str:
        if module is self.module:
            return ""
        if not self._prefixes:
            found = self.module.named_modules()
            self._prefixes = {id(m): f"{name}." if name else "" for name, m in found}
        return self._prefixes.get(id(module), "")


class _NamesThread(threading.local):
    observers: int = 0
    frame: Frame | None = None
    outermost: Outermost | None = None


thread = _NamesThread()


@contextmanager
def observe() -> Iterator[None]:
    """Ask the bridge to publish names in this thread (offload scopes and `explain` do)."""
    thread.observers += 1
    try:
        yield
    finally:
        thread.observers -= 1


def take(tensor: Tensor) -> SavedName | None:
    """For pack hooks, once for each tensor, in order: the name of `tensor`, None where no node of fuseops is saving it.

    A plain module may be, or an op that differentiates inside its own fwd: its node's frame has no tensors yet.
    Raises FuseOpsError where it is not the tensor that the node has promised next.
    """
    frame = thread.frame
    if frame is None or not frame.tensors:
        return None
    position, names = frame.taken, frame.names
    frame.taken += 1
    if position >= len(frame.tensors) or frame.tensors[position] is not tensor:
        promised = names[position].names[0] if position < len(names) else "nothing"
        raise FuseOpsError(
            f"saved tensor {position} of a fuseops node is not the one that was promised ({promised}): "
            "another saved-tensors hook changed the order. Please report this with the model."
        )
    return names[position]
