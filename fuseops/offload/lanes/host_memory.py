"""Host buffers out of an arena, for lanes of real bytes."""

from collections.abc import Callable, Sequence
from operator import attrgetter

from torch import Tensor

from .arena import Arena
from .protocol import Buf, NoRoomError

DATA = attrgetter("data")


def copy_all(sources: Sequence[Tensor], target: Tensor, offsets: Sequence[int]) -> None:
    """Copy flat bytes to their places in other ones, on the current stream."""
    if len(sources) == 1 and sources[0].numel() == target.numel():  # what is moved alone
        target.copy_(sources[0], non_blocking=True)
        return
    for source, offset in zip(sources, offsets, strict=True):
        target[offset : offset + source.numel()].copy_(source, non_blocking=True)


class HostMemory:
    """Gives out parts of an arena's regions; `make` brings a region of so many bytes (uint8)."""

    def __init__(self, make: Callable[[int], Tensor], budget: int | None) -> None:
        self.arena = Arena(make, budget)

    def alloc(self, nbytes: int, name: str) -> Buf:
        """Raises NoRoomError when the budget is used up, or the machine has no more."""
        try:
            slab = self.arena.take(nbytes)
        except (RuntimeError, MemoryError, OSError) as error:
            if isinstance(error, NoRoomError):
                raise
            raise NoRoomError(f"no host memory ({error})") from error
        if slab.view is None or slab.view.numel() != nbytes:
            slab.view = self.arena.regions[slab.region][slab.offset : slab.offset + nbytes]
        buf = Buf(name, nbytes, "host", slab.view)
        buf.after, buf.slab = slab.after, slab
        return buf
