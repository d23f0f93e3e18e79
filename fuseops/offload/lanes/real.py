"""What lanes of real bytes share: buffers on their device, and host memory out of an arena."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from fuseops.torch_private import prototype

from .arena import Arena, Slab
from .protocol import Buf, Lanes, NoRoomError, Place


class RealLanes(Lanes):
    """`RealLanes` copy bytes of a device; `make` brings a region of host memory, of `budget` bytes in all (None: no
    limit).
    """

    def __init__(
        self, device: torch.device, make: Callable[[int], Tensor], budget: int | None
    ) -> None:
        self.device = device
        self.arena = Arena(make, budget)

    def alloc(self, nbytes: int, device: Place, name: str) -> Buf:
        if device == "device":
            storage = prototype(torch.uint8, self.device).new_empty(nbytes).untyped_storage()
            return Buf(name, nbytes, device, storage, self.compute())
        try:
            slab = self.arena.take(nbytes, name)
        except (RuntimeError, MemoryError, OSError) as error:
            if isinstance(error, NoRoomError):
                raise
            raise NoRoomError(f"no host memory ({error})") from error
        if not slab.at:
            region: Tensor = self.arena.regions[slab.region]
            slab.at = region.data_ptr() + slab.offset
        return slab

    def free(self, buf: Buf) -> None:
        if isinstance(buf, Slab):
            self.arena.give(buf)
            return
        if buf.owner != self.compute():
            self.hand_over(buf.owner)
        buf.data = None

    def hand_over(self, owner: Hashable) -> None:
        """Another compute lane will use bytes again that this one lets go of: after all that this one was given."""
