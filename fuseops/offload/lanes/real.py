"""The base of lanes that copy real bytes: buffers on their device, and host memory from an arena."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from fuseops.torch_private import prototype

from .arena import Arena, Slab
from .protocol import Buf, Lanes, NoRoomError, Place


class RealLanes(Lanes):
    """`RealLanes` copy bytes of a device.

    make    allocates a region of host memory
    budget  the most bytes of host memory; None: no limit
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
            self.arena.give_back(buf)
            return
        if buf.owner != self.compute():
            self.make_owner_wait(buf.owner)
        buf.data = None

    def make_owner_wait(self, owner: Hashable) -> None:
        """Make another compute lane, which reuses bytes that this one frees, wait for all work of this one."""
