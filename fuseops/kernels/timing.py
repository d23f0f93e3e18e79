"""Time of a call on the GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from fuseops.errors import FuseOpsError

# more than any L2: written between two calls, so that nothing is read from there
CACHE_BYTES = 1 << 28


def time_us(call: Callable[[], Any], rounds: int = 20) -> float:
    """Median microseconds of one call by CUDA events, with a cold L2. Raises FuseOpsError without a GPU."""
    if not torch.cuda.is_available():
        raise FuseOpsError("timing kernels needs a CUDA device, and torch sees none.")
    cache = torch.zeros(CACHE_BYTES, dtype=torch.uint8, device="cuda")
    call()
    events = []
    for _ in range(rounds):
        cache.zero_()  # also keeps the GPU busy while the host queues the call
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events) * 1e3
