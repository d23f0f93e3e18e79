"""Names the rank that has ended, in the error of one that waited for it in vain.

A kernel that waits too long for another rank traps, and the CUDA error that follows comes up wherever the host is then;
gloo names a socket. So each rank knows the processes of the others on its host, and an exception that ends it says
which of them are gone. Where NCCL's own thread meets the error first and aborts, Python says nothing any more: so a
thread looks for processes that are gone, and writes to stderr while this one is still there.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

LATE = 3.0
"""Seconds that a process may be gone, with its groups still open here, before that is said."""

_processes: dict[Any, dict[int, int]] = {}
"""By group: the process of every rank on this host."""


def watch(group: Any, aloud: bool = False) -> None:
    """Know the processes of a group. A collective, the first time.   aloud: whether a thread looks for them"""
    if group in _processes:
        return
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (socket.gethostname(), os.getpid()), group=group)
    here = socket.gethostname()
    _processes[group] = {rank: pid for rank, (host, pid) in enumerate(found) if host == here}
    _install()
    if aloud:
        _look_aside()


def ended() -> Iterator[str]:
    """A sentence for every rank of a watched group whose process is gone."""
    for group, processes in [*_processes.items()]:  # a thread asks, too
        for rank, process in processes.items():
            if not runs(process):
                try:
                    where = dist.get_global_rank(group, rank)
                except ValueError:  # the group was destroyed: nobody waits in it
                    break
                yield f"rank {where} has ended (process {process}), and this one waited for it."


def runs(process: int) -> bool:
    """Whether a process of this host is there and no zombie."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or no /proc
        return True


@functools.cache
def _install() -> None:
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        for sentence in ended():
            error.add_note(sentence)
        before(kind, error, traceback)

    sys.excepthook = hook


@functools.cache
def _look_aside() -> None:
    threading.Thread(target=_look, name="fuseops-lost", daemon=True).start()


def _look() -> None:
    """Say once that others have ended, if this process goes on with its groups as if they were there."""
    while not [*ended()]:
        time.sleep(LATE / 3)
    time.sleep(LATE)
    if dist.is_initialized():
        sys.stderr.write("".join(f"fuseops: {sentence}\n" for sentence in ended()))
        sys.stderr.flush()
