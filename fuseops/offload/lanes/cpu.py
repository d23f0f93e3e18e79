"""Lanes for CPU tensors: copies in host memory, which run synchronously."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .protocol import Buf, Event, Lane
from .real import RealLanes

CPU = torch.device("cpu")


class CpuLanes(RealLanes):
    """`CpuLanes` copy on the CPU.   budget: bytes of host memory, None for no limit"""

    def __init__(self, budget: int | None = None) -> None:
        super().__init__(CPU, self.make, budget)

    @staticmethod
    def make(nbytes: int) -> Tensor:
        """A region of host memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def move(
        self, lane: Lane, sources: Sequence[Buf], target: Buf, offsets: Sequence[int]
    ) -> Event | None:
        base = target.at or target.data.data_ptr()
        for source, offset in zip(sources, offsets, strict=True):
            ctypes.memmove(base + offset, source.at or source.data.data_ptr(), source.nbytes)
        return None
