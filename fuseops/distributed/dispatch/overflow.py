"""Overflows of bounded dispatchers: flags on the device, which all ranks come to know without waiting for it.

Every one has a flag. The ranks gather those of a round: of the dispatchers that ran forward until the first backward of
one of them is through, or one runs again. The gathered flags are copied to the host behind the other work, and read
once they are there: before a later forward of the group, and behind each backward. On the CPU a forward reads them at
its end. A step that is captured takes no part, so `check_overflow` is for its replays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.ops.local import Ranks


class Flagged(Protocol):
    """A `Flagged` is a dispatcher with an overflow flag (`Bounded`)."""

    flag: Tensor  # (1,) int32 on the device

    def room(self) -> str:
        """What there is room for, for errors."""
        ...


class GatheredFlags(NamedTuple):
    """A `GatheredFlags` holds the flags of a round on the host, valid once `arrived` says so."""

    dispatchers: tuple[Flagged, ...]
    flags: Tensor  # (W, dispatchers)
    arrived: Callable[[], bool]


class OverflowWatch:
    """An `OverflowWatch` raises on all ranks of a group for an overflow on one of them, and waits for no device.

    Ranks call its methods alike. But when flags have arrived is each host's own affair: one may raise a call later.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self.dispatchers: dict[Flagged, None] = {}
        self.round: list[Flagged] = []
        self.on_their_way: list[GatheredFlags] = []

    def begin_forward(self, dispatcher: Flagged) -> None:
        """Raise FuseOpsError for a known overflow, and note that a dispatcher runs."""
        self.dispatchers[dispatcher] = None
        if _is_captured(dispatcher):
            return
        self.check()
        if torch_private.in_backward():  # a recomputation overflows where the forward has
            return
        if dispatcher in self.round:
            self.gather()
        self.round.append(dispatcher)

    def end_forward(self, dispatcher: Flagged) -> None:
        """Raise FuseOpsError for an overflow that can be read at once."""
        if reads_at_once(dispatcher.flag):
            self.gather()
            self.check()

    def end_backward(self, dispatcher: Flagged) -> None:
        """End the round, and raise FuseOpsError for a known overflow."""
        if not _is_captured(dispatcher):
            self.gather()
            self.check()

    def gather(self) -> None:
        """Start gathering the flags of the round. A collective."""
        if self.round:
            mine = torch.cat([dispatcher.flag for dispatcher in self.round])
            flags = torch_private.all_gather(mine, 0, self.group).view(-1, len(mine))
            self.on_their_way.append(GatheredFlags(tuple(self.round), *start_copy(flags)))
            self.round = []

    def check(self) -> None:
        """Raise FuseOpsError for an overflow of any rank whose flags have arrived; all flags are reset then."""
        while self.on_their_way and self.on_their_way[0].arrived():
            dispatchers, flags, _ = self.on_their_way.pop(0)
            if flags.any():
                self.reset()
                ranks = [dist.get_global_rank(self.group, r) for r in _set(flags.any(1))]
                _raise(ranks, [dispatchers[i].room() for i in _set(flags.any(0))])

    def overflowed(self) -> list[str]:
        """`Flagged.room` of the dispatchers that overflowed on this rank. Waits for the device; resets all flags."""
        if not self.dispatchers:
            return []
        flags = torch.cat([dispatcher.flag for dispatcher in self.dispatchers])
        found = [[*self.dispatchers][i].room() for i in _set(flags)]
        self.reset()
        return found

    def reset(self) -> None:
        """Forget all overflows."""
        self.round, self.on_their_way = [], []
        for dispatcher in self.dispatchers:
            dispatcher.flag.zero_()


_watches: dict[Any, OverflowWatch] = {}


def watch_of(group: Any) -> OverflowWatch:
    """The `OverflowWatch` of a process group."""
    if group not in _watches:
        _watches[group] = OverflowWatch(group)
    return _watches[group]


def check_overflow(group: Any = None) -> None:
    """Raise FuseOpsError on every rank if tokens of any rank did not fit since the last call.

    A layer raises by itself, but some calls later, since it does not wait; replays of a captured step never do. This is
    a collective that waits for the device: call it on all ranks at the end of a step, where the loss is read. Sums of
    the layer are NaN from the overflow on.   group: the ranks, a ProcessGroup or a DeviceMesh of one dimension, by
    default all.
    """
    Ranks(group)  # refuses what is none
    mine = [room for watch in _watches.values() for room in watch.overflowed()]
    if not dist.is_initialized():
        if mine:
            _raise([0], mine)
        return
    group = group.get_group() if hasattr(group, "get_group") else group or dist.group.WORLD
    ranks = _overflowed_ranks(bool(mine), group)
    if ranks:
        rooms: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(rooms, mine, group=group)
        _raise(ranks, [room for of_rank in rooms for room in of_rank])


def _overflowed_ranks(mine: bool, group: Any) -> list[int]:
    """The global ranks whose flag is set."""
    on_host = "cpu" in dist.get_backend_config(group)
    device = "cpu" if on_host else torch.cuda.current_device()
    flags = torch_private.all_gather(torch.tensor([mine], device=device).int(), 0, group)
    return [dist.get_global_rank(group, rank) for rank in _set(flags)]


def _raise(ranks: Sequence[int], rooms: Sequence[str]) -> NoReturn:
    raise FuseOpsError(
        f"experts: on rank {', '.join(map(str, ranks))} more tokens or copies came than there is room for: "
        f"{'; '.join(dict.fromkeys(rooms))}. Sums since then are NaN, and what was updated by them. Raise `capacity` "
        "of ExpertParallel, or take dispatcher='host_counts', which has no bound."
    )


def _set(flags: Tensor) -> list[int]:
    """The indices of flags that are set."""
    return [i for i, flag in enumerate(flags.tolist()) if flag]


def _is_captured(dispatcher: Flagged) -> bool:
    return dispatcher.flag.is_cuda and torch.cuda.is_current_stream_capturing()


def reads_at_once(flag: Tensor) -> bool:
    """Whether the host can read a flag without waiting for a device."""
    return not flag.is_cuda


def start_copy(flags: Tensor) -> tuple[Tensor, Callable[[], bool]]:
    """Start copying flags to the host.   -> the copy, and a function that says whether it is complete"""
    if not flags.is_cuda:
        return flags, lambda: True
    copied = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
    copied.copy_(flags, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return copied, event.query
