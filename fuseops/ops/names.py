"""A name frame gives pack hooks the names of the tensors that they pack. The autograd bridge fills it.

Pack hooks run after `Function.forward` has returned and while `apply` still runs, in save order. The bridge publishes
the ordered names of a node's saved tensors before `apply` and clears them after. A pack hook takes the next name and
checks that it belongs to its tensor. Nothing is published without an observer.
"""

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from fuseops import torch_private
from fuseops.errors import FuseOpsError


class SavedName(NamedTuple):
    """A `SavedName` holds the names under which a tensor is saved.

    names   such as `<path>.<field>`; the first is its own
    op      class name of the op that saves it
    owners  weak references to the known modules that save it; None where the bridge, which knows no modules, names it
    stable  whether this object names the same tensor in the next step
    """

    names: tuple[str, ...]
    is_param: bool
    op: str
    owners: tuple[weakref.ref[nn.Module], ...] | None = None
    stable: bool = True

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def also(self) -> tuple[str, ...]:
        """The names after the first."""
        return self.names[1:]


class Frame:
    """A frame holds the names of the tensors that one autograd node is about to save, in save order.

    ready   an event of the device's stream, set by a mover, after which all of them are computed
    packed  the packed values, set by a hook that packs all tensors when the first is saved
    paused  the pair of hooks that was taken from torch's stack for the rest of the node, if any
    """

    __slots__ = ("names", "next_index", "packed", "paused", "ready", "tensors")

    def __init__(self) -> None:
        self.names: Sequence[SavedName] = ()
        self.tensors: Sequence[Tensor] = ()
        self.next_index = 0
        self.ready: Any = None
        self.packed: Sequence[Any] | None = None
        self.paused: tuple[Any, Any] | None = None

    def fill(self, names: Sequence[SavedName], tensors: Sequence[Tensor]) -> None:
        self.names, self.tensors = names, tensors

    def pause_hooks(self) -> None:
        """In a pack hook of the innermost pair: torch saves the other tensors of the node as if there were no hooks."""
        self.paused = torch_private.top_saved_tensor_hooks()
        torch_private.pop_saved_tensor_hooks()

    def close(self) -> None:
        """The node has saved its tensors."""
        if self.paused is not None:
            torch_private.push_saved_tensor_hooks(*self.paused)


class Outermost:
    """An `Outermost` gives module paths relative to the outermost Sequential whose forward is running."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._prefixes: dict[
            int, str
        ] = {}  # by id of the modules in it; filled by the first lookup

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


def take_name(tensor: Tensor) -> SavedName | None:
    """The name of a tensor in a pack hook, which calls this once for each tensor, in order.

    None where no node of fuseops saves it: a plain module does, or an op that differentiates inside its own fwd, whose
    frame has no tensors yet.  Raises FuseOpsError where it is not the next tensor of the frame.
    """
    frame = thread.frame
    if frame is None or not frame.tensors:
        return None
    position, names = frame.next_index, frame.names
    frame.next_index += 1
    if position >= len(frame.tensors) or frame.tensors[position] is not tensor:
        promised = names[position].names[0] if position < len(names) else "nothing"
        raise FuseOpsError(
            f"saved tensor {position} of a fuseops node is not the one that was promised ({promised}): "
            "another saved-tensors hook changed the order. Please report this with the model."
        )
    return names[position]
