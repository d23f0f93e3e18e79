"""Host buffers out of an arena, for lanes of real bytes."""

from collections.abc import Callable

from torch import Tensor

from .arena import Arena, Slab
from .protocol import Buf, NoRoomError


class HostMemory:
    """Gives out parts of an arena's regions; `make` brings a region of so many bytes (uint8)."""

    def __init__(self, make: Callable[[int], Tensor], budget: int | None) -> None:
        self.arena = Arena(make, budget)
        self._slabs: dict[int, Slab] = {}  # by id of the buffer

    def alloc(self, nbytes: int, name: str) -> Buf:
        """Raises NoRoomError when the budget is used up, or the machine has no more."""
        try:
            slab = self.arena.take(nbytes)
        except (RuntimeError, MemoryError, OSError) as error:
            if isinstance(error, NoRoomError):
                raise
            raise NoRoomError(f"no host memory ({error})") from error
        region: Tensor = self.arena.regions[slab.region]
        buf = Buf(name, nbytes, "host", region[slab.offset : slab.offset + nbytes])
        buf.after = slab.after
        self._slabs[id(buf)] = slab
        return buf

    def free(self, buf: Buf) -> None:
        """Its next user waits for `buf.after`."""
        self.arena.give(self._slabs.pop(id(buf)), buf.after)
