"""Processes over gloo that are started once and given one law after another."""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import host_memory
import torch
import torch.distributed as dist

COLLECTIVE = timedelta(seconds=40)  # a rank that waits longer for the others gives up
PRELOADED = ["torch.distributed.fsdp", "torch.distributed.checkpoint", "fuseops.distributed"]
LAW = 120  # seconds in which a law must answer


class Ranks:
    """`world` processes; a law is a function of a module, called on every rank.

    allocator: settings of CUDA's, for processes over NCCL on a GPU each.
    """

    def __init__(self, world: int, allocator: str | None = None) -> None:
        self.world, self.allocator = world, allocator
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")  # torch is imported once for all
        context.set_forkserver_preload(PRELOADED)
        with tempfile.NamedTemporaryFile(delete=False) as store:
            pass
        for rank in range(self.world):
            mine, theirs = context.Pipe()
            args = (rank, self.world, store.name, theirs, self.allocator)
            self._processes.append(context.Process(target=_serve, args=args, daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(mine)

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []

    def run(self, module: str, law: str, *args: Any) -> None:
        """Raises AssertionError with what a rank raised."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((module, law, args))
        said = [_answer(rank, pipe) for rank, pipe in enumerate(self._pipes)]
        wrong = [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]
        if wrong:
            self.stop()  # one may wait in a collective that another never entered
        assert not wrong, "\n".join(wrong)


def _answer(rank: int, pipe: Connection) -> str:
    try:
        return pipe.recv() if pipe.poll(LAW) else f"no answer in {LAW} s"
    except EOFError:
        return "died"


def _serve(rank: int, world: int, store: str, pipe: Connection, allocator: str | None) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options: Any = {"init_method": f"file://{store}", "rank": rank, "world_size": world}
    if allocator is None:
        host_memory.install()
        dist.init_process_group("gloo", timeout=COLLECTIVE, **options)
    else:
        torch.cuda.memory._set_allocator_settings(allocator)
        torch.cuda.set_device(rank)
        here = torch.device("cuda", rank)
        dist.init_process_group("nccl", timeout=COLLECTIVE, device_id=here, **options)
    while (given := pipe.recv()) is not None:
        module, law, args = given
        try:
            torch.manual_seed(0)
            getattr(importlib.import_module(module), law)(*args)
            pipe.send("")
        except Exception:
            pipe.send(traceback.format_exc())
