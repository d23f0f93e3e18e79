"""Memory of the host in the place of memory that GPUs share, for processes over gloo as `spawned.Ranks` starts them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from fuseops.distributed.dispatch import device_counts, symmetric

ON_GPUS, OVER_NVSHMEM = symmetric._allocate, device_counts._allocate


class SharedFiles:
    """Buffers of all ranks of a group that this one maps, in the place of GPUs' symmetric memory."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def barrier(self, channel: int, timeout_ms: int) -> None:
        dist.barrier(self.group)

    @staticmethod
    def fabric(group: Any, nbytes: int, device: torch.device) -> symmetric.PeerBuffers:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.truncate(nbytes)
        names: list[Any] = [None] * group.size()
        dist.all_gather_object(names, file.name, group)
        memory = [torch.from_file(n, True, nbytes, dtype=torch.uint8) for n in names]
        dist.barrier(group)
        Path(file.name).unlink()
        table = torch.tensor([m.data_ptr() for m in memory])
        uses = torch.zeros(1, dtype=torch.int64)
        return symmetric.PeerBuffers(table, uses, nbytes, SharedFiles(group), memory)


class OverGloo(device_counts.Lane):
    """A lane whose rows a backend of the host moves. Where nothing came are ids of experts, and NaN.

    Raises where a lane is used twice running: over NVSHMEM its rows may not have been read yet.
    """

    last: device_counts.Lane | None = None

    def _all_to_all(self, send_buffer: Tensor, recv_buffer: Tensor) -> None:
        assert OverGloo.last is not self, "the two lanes take turns"
        OverGloo.last = self
        counts, group = torch.empty_like(self.in_splits), _resolve_process_group(self.group)
        dist.all_to_all_single(counts, self.in_splits, group=group)
        there, total = self.in_splits.tolist(), int(counts.sum())
        recv_buffer[::2], recv_buffer[1::2] = 0, 255
        sizes = counts.tolist(), there
        dist.all_to_all_single(recv_buffer[:total], send_buffer[: sum(there)], *sizes, group=group)
        self.out_splits_offsets.copy_(torch.stack([counts, counts.cumsum(0) - counts]))

    @staticmethod
    def made(group: Any, nbytes: int, device: torch.device) -> device_counts.Lane:
        memory = [torch.full((nbytes,), 255, dtype=torch.uint8) for _ in range(2)]
        sent = torch.empty(group.size(), dtype=torch.int64)
        return OverGloo(group.group_name, *memory, sent, torch.stack([sent, sent]))


def install() -> None:
    """For this process and its end: laws of GPUs are imported beside those of CPUs and need what is real."""
    symmetric._allocate, device_counts._allocate = SharedFiles.fabric, OverGloo.made
    device_counts.LEAST = 0  # so that a row too many raises
