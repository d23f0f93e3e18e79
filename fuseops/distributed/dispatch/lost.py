"""Names the ranks that have ended in the error of a rank that waited for them.

A kernel that waits too long for another rank traps, and the CUDA error surfaces wherever the host is then; gloo names a
socket. So each rank knows the processes of the others on its host, and an uncaught exception gets a note that names
those that are gone. NCCL's own thread may abort the process before Python sees an exception, so a thread polls the
processes too, and writes to stderr.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from fuseops.machine import machine_id

GRACE_SECONDS = 3.0
"""Seconds between the end of a process, with its groups still open here, and the message of the polling thread."""

_pids: dict[Any, dict[int, int]] = {}
"""Process group -> rank -> process id, of the ranks on this host."""


def watch(group: Any, poll: bool = False) -> None:
    """Watch the processes of a group. A collective in the first call.   poll: whether a thread polls them"""
    if group in _pids:
        return
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (machine_id(), os.getpid()), group=group)
    here = machine_id()
    _pids[group] = {rank: pid for rank, (machine, pid) in enumerate(found) if machine == here}
    _install()
    if poll:
        _start_polling()


def lost_ranks() -> Iterator[str]:
    """A message for every rank of a watched group whose process has ended."""
    for group, pids in [*_pids.items()]:  # a copy: the thread iterates, too
        for rank, pid in pids.items():
            if not is_alive(pid):
                try:
                    where = dist.get_global_rank(group, rank)
                except ValueError:  # the group was destroyed: nobody waits in it
                    break
                yield f"rank {where} has ended (process {pid}), and this one waited for it."


def is_alive(pid: int) -> bool:
    """Whether a process of this host is running, and not a zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
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
        for sentence in lost_ranks():
            error.add_note(sentence)
        before(kind, error, traceback)

    sys.excepthook = hook


@functools.cache
def _start_polling() -> None:
    threading.Thread(target=_poll, name="fuseops-lost", daemon=True).start()


def _poll() -> None:
    """Wait until a rank has ended; write so to stderr if this process still has its groups after GRACE_SECONDS."""
    while not [*lost_ranks()]:
        time.sleep(GRACE_SECONDS / 3)
    time.sleep(GRACE_SECONDS)
    if dist.is_initialized():
        sys.stderr.write("".join(f"fuseops: {sentence}\n" for sentence in lost_ranks()))
        sys.stderr.flush()
