"""Names the ranks that have ended, or raised, in the error of a rank that waited for them.

A kernel that waits too long for another rank traps, and the CUDA error surfaces wherever the host is then; gloo names a
socket. So each rank knows the processes of the others on its host, and an uncaught exception gets a note that names
those that are gone. A rank that raises in a dispatch, or ends by an exception, says so in torch's store, which other
hosts read too; the first of a group alone, since errors of others follow from it. NCCL's own thread may abort the
process before Python sees an exception, so a thread polls the processes too, and writes to stderr.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from fuseops import torch_private
from fuseops.machine import machine_id

GRACE_SECONDS = 3.0
"""Seconds between the end of a process, with its groups still open here, and the message of the polling thread; and
the most that an error waits for the store."""

_pids: dict[Any, dict[int, int]] = {}
"""Process group -> rank -> process id, of the ranks on this host."""

_told: dict[Any, str] = {}
"""Process group -> what this rank has told of itself."""


def watch(group: Any, poll: bool = False) -> None:
    """Watch the processes of a group. A collective in the first call.   poll: whether a thread polls them"""
    if group in _pids:
        return
    _install()
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (machine_id(), os.getpid()), group=group)
    here = machine_id()
    _pids[group] = {rank: pid for rank, (machine, pid) in enumerate(found) if machine == here}
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


@contextlib.contextmanager
def telling(group: Any) -> Iterator[None]:
    """Tell the other ranks of a group of an error in this scope, or take back what was told of an earlier one."""
    try:
        yield
    except Exception as error:
        tell(group, error)
        raise
    if group in _told:
        _take_back(group)


def tell(group: Any, error: BaseException) -> None:
    """Tell the other ranks of a group that this one has raised, unless one of them has told so before."""
    if [*lost_ranks()]:
        return  # the error follows from that

    def claim(store: Any) -> str:
        words = f"rank {dist.get_rank()} has raised {_shortened(error)}"
        return words if store.compare_set(_key(group), "", words) == words.encode() else ""

    words = _ask(claim)
    if words:
        _told[group] = words


def _take_back(group: Any) -> None:
    words = _told.pop(group)
    _ask(lambda store: str(store.compare_set(_key(group), words, "")))


def raised_ranks(error: BaseException) -> Iterator[str]:
    """A message for the first rank of each watched group that has raised another error than this one."""
    said = dict.fromkeys(_ask(partial(_words_of, g)) for g in [*_pids] if g not in _told)
    for words in said:
        if words and not words.endswith(_shortened(error)):
            yield f"{words}, before this rank did."


def _words_of(group: Any, store: Any) -> str:
    found: bytes = store.get(_key(group)) if store.check([_key(group)]) else b""
    return found.decode()


def _key(group: Any) -> str:
    return f"fuseops/raised/{group.group_name}"


def _shortened(error: BaseException) -> str:
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first[:200]}"


def _ask(call: Callable[[Any], str]) -> str:
    """What torch's store answers; "" where it does not, as when the rank that serves it is gone."""
    found: list[str] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(call(torch_private.default_store()))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(GRACE_SECONDS)
    return found[0] if found else ""


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
        for sentence in (*lost_ranks(), *raised_ranks(error)):
            error.add_note(sentence)
        for group in [*_pids]:
            tell(group, error)
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
