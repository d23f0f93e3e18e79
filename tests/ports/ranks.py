"""Two processes that run cells of the matrix together: started once, given one cell after another."""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

WORLD = 2
COLLECTIVE = timedelta(seconds=40)  # a rank that waits longer for the other one gives up
CELL = 200  # seconds in which a cell must answer


class Outcome(NamedTuple):
    """What one rank says of a cell."""

    differences: list[str]
    worst: float  # the largest distance, in units of the mean of its tensor
    error: str | None = None
    kinds: tuple[str, ...] = ()  # classes of the error
    trace: str = ""


# --- in a rank -----------------------------------------------------------------------------------------------------


class RankPort:
    """A port as one rank sees it: its own micro-batches, on its own device."""

    def __init__(self, port: Any, rank: int, micro_batches: int, device: torch.device) -> None:
        self._port, self._first, self._device = port, rank * micro_batches, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    def stock(self) -> nn.Module:
        return self._port.stock().to(self._device)

    def ported(self) -> nn.Module:
        return self._port.ported().to(self._device)

    def batch(self, index: int) -> Any:
        move = torch.utils._pytree.tree_map
        return move(lambda t: t.to(self._device), self._port.batch(self._first + index))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return self._port.blocks(getattr(model, "module", model))

    def experts(self, model: nn.Module) -> list[nn.Parameter]:
        return self._port.experts(getattr(model, "module", model))


def averaged(port: Any, model: nn.Module, step: Any) -> Any:
    """The step with gradients averaged over the ranks, of whole weights, where no wrapper did it."""
    from rank_features import whole
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    spread = isinstance(model, FSDPModule | DistributedDataParallel)
    grads = {}
    for name, grad in sorted(step.grads.items()):
        alike = not spread and not isinstance(grad, DTensor)  # experts have been averaged, too
        grad = whole(grad)
        if alike:
            grad = grad.contiguous()
            dist.all_reduce(grad)
            grad /= WORLD
        grads[name] = grad
    return step._replace(grads=grads)


def run_step(port: Any, model: nn.Module, cell: Sequence[Any]) -> Any:
    from run import train

    return averaged(port, model, train(port, model, cell))


def expected(port: Any, cell: Sequence[Any]) -> Any:
    """The single-process stock step of this rank's micro-batches, gradients averaged over the ranks.

    Where a feature changes the numerics it is the ported model with fusion off, under the same features.
    """
    from features import single_precision
    from rank_features import FSDP_MIXED
    from run import prepared

    import fuseops as fo

    if any(f.changes_numerics for f in cell):
        model = prepared(port, port.ported(), cell)
        fo.configure(model, fusion=False)
        return run_step(port, model, [f for f in cell if f.name != "compile"])
    there = [f for f in cell if f.on_stock]
    model = prepared(port, port.stock(), there)
    if all(f.name != FSDP_MIXED for f in cell):
        return run_step(port, model, there)
    step = run_step(port, single_precision(port, model), there)
    grads = {n: g.double() for n, g in step.grads.items()}  # those of the float64 weights
    return step._replace(grads=grads)


def compared(name: str, titles: tuple[str, ...], device: torch.device) -> Outcome:
    """Run one cell on this rank."""
    import features
    from run import coarsest, differences, prepared

    by_name = {f.name: f for f in features.FEATURES}
    cell = tuple(by_name[title] for title in titles)
    if len(cell) == 2 and device.type == "cpu":  # as the single-process matrix does
        cell = features.pair(*cell)
    count = max(f.micro_batches for f in cell)
    port = RankPort(_port(name), dist.get_rank(), count, device)
    torch.manual_seed(0)
    want = expected(port, cell)
    got = run_step(port, prepared(port, port.ported(), cell), cell)
    dtype = coarsest(cell)
    pairs = [
        *zip(got.outputs, want.outputs, strict=True),
        *zip(got.losses, want.losses, strict=True),
    ]
    pairs += [(got.grads.get(n), g) for n, g in want.grads.items()]
    worst = max(float("inf") if a is None else _distance(a, b) for a, b in pairs)
    return Outcome(differences(got, want, dtype), worst)


def _distance(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float((a - b).abs().max() / b.abs().mean().clamp_min(1e-300))


@cache
def _port(name: str) -> Any:
    return importlib.import_module(name).PORT


def serve(rank: int, store: str, backend: str, pipe: Connection) -> None:
    """Answer one cell after another until told None."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device = torch.device("cpu" if backend == "gloo" else f"cuda:{rank}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=WORLD,
        timeout=COLLECTIVE,
        device_id=device if device.type == "cuda" else None,
    )
    while (cell := pipe.recv()) is not None:
        pipe.send(_outcome(*cell, device))
    dist.destroy_process_group()


def _outcome(name: str, titles: tuple[str, ...], device: torch.device) -> Outcome:
    try:
        return compared(name, titles, device)
    except Exception as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        return Outcome([], float("nan"), text, kinds, traceback.format_exc())


# --- outside -------------------------------------------------------------------------------------------------------


class Ranks:
    """Both processes, started at the first cell, and again when they are not in step any more."""

    def __init__(self, backend: str = "gloo") -> None:
        self._backend = backend
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with tempfile.NamedTemporaryFile(delete=False) as store:
            pass
        for rank in range(WORLD):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, store.name, self._backend, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def stop(self) -> None:
        """End both processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []

    def run(self, port: str, titles: tuple[str, ...]) -> list[Outcome]:
        """The outcomes of one cell on each rank. A rank that does not answer in time has one too."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((port, titles))
        outcomes = [self._answer(rank, pipe) for rank, pipe in enumerate(self._pipes)]
        if outcomes[0].kinds != outcomes[1].kinds or "TimeoutError" in outcomes[0].kinds:
            self.stop()  # one rank may wait in a collective that the other one never entered
        return outcomes

    def _answer(self, rank: int, pipe: Connection) -> Outcome:
        try:
            if pipe.poll(CELL):
                outcome: Outcome = pipe.recv()
                return outcome
            text = f"rank {rank} gave no answer in {CELL} s"
        except EOFError:
            text = f"rank {rank} died"
        return Outcome([], float("nan"), text, ("TimeoutError",), text)
