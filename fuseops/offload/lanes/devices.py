"""The lanes of every device, made once: streams are few, and pinned memory is dear."""

import functools

import torch

from .cpu import CpuLanes
from .cuda import CudaLanes
from .real import RealLanes

KINDS = frozenset({"cpu", "cuda"})


def make_lanes(device: torch.device, budget: int | None = None) -> RealLanes:
    """New lanes with a host memory of their own, of at most `budget` bytes."""
    return CudaLanes(device, budget) if device.type == "cuda" else CpuLanes(budget)


@functools.cache
def lanes_of(device: torch.device) -> RealLanes:
    """The lanes that all scopes share; a device is of one of KINDS."""
    return make_lanes(device)
