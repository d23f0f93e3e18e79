"""The lanes of every device, made once: streams are few, and pinned memory is expensive."""

import functools

import torch

from .cpu import CpuLanes
from .cuda import CudaLanes
from .real import RealLanes

KINDS = frozenset({"cpu", "cuda"})


def make_lanes(device: torch.device, budget: int | None = None) -> RealLanes:
    """New lanes with their own host memory, of at most `budget` bytes."""
    return CudaLanes(device, budget) if device.type == "cuda" else CpuLanes(budget)


@functools.cache
def lanes_of(device: torch.device) -> RealLanes:
    """The lanes that all scopes share.   device: of a type in KINDS"""
    return make_lanes(device)
