"""Alternation of a forward with the backward of another micro-batch: where one would wait for tokens, the other runs.

Each has a thread, but only one of the two runs at a time, until it would read tokens in flight. So launches and
collectives have one order, equal on all ranks that have the same layers, and shared state needs no lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.ops.op import Op

FORWARD, BACKWARD = "forward", "backward"
OTHER = {FORWARD: BACKWARD, BACKWARD: FORWARD}

_active_pair: Pair | None = None


def give_way(side: str) -> None:
    """Switch to the other side of a pair until it gives way in turn. Call it before reading tokens in flight.

    side: the side that the tokens belong to. A forward that is recomputed in a backward does not give way: it runs with
    the random state of the first one, from which the other side must not draw.
    """
    pair = _active_pair
    if pair is not None and torch_private.in_backward() == (side == BACKWARD):
        pair.give_way(side)


class Pair:
    """A `Pair` runs two functions in alternation, the forward first."""

    def __init__(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        self._calls = {FORWARD: forward, BACKWARD: backward}
        self._turn, self._side = threading.Condition(), FORWARD
        self._ended: set[str] = set()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run both to their ends.  Raises the error of the one that failed first."""
        global _active_pair
        if _active_pair is not None:
            raise FuseOpsError("two pairs of a forward and a backward run at once in this process.")
        thread = threading.Thread(target=self._run, args=(BACKWARD, current_stream()), daemon=True)
        _active_pair = self
        try:
            thread.start()
            self._run(FORWARD, ExitStack())
            thread.join()
        finally:
            _active_pair = None
        if self._error is not None:
            raise self._error

    def _run(self, side: str, where: AbstractContextManager[Any]) -> None:
        try:
            with where:
                self._wait(side)
                self._calls[side]()
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._ended.add(side)
            self._pass_to(OTHER[side])

    def give_way(self, side: str) -> None:
        """Let the other side run until it gives way in turn, or has ended."""
        if OTHER[side] not in self._ended:
            self._pass_to(OTHER[side])
        self._wait(side)

    def _pass_to(self, side: str) -> None:
        with self._turn:
            self._side = side
            self._turn.notify_all()

    def _wait(self, side: str) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._side == side)
        if self._error is not None:
            raise FuseOpsError(f"the {OTHER[side]} that ran in turns with this {side} has failed.")


def current_stream() -> AbstractContextManager[Any]:
    """A context that sets this thread's current device and stream in another thread."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ExitStack()
    return torch.cuda.stream(torch.cuda.current_stream())


def overlap_pairs(schedule: Any) -> None:
    """Have a pipeline schedule alternate its pairs of a forward and a backward, so that the all-to-all of one overlaps
    the GEMMs of the other. Such pairs, of two stages of one rank, are those of torch's ScheduleDualPipeV.

        schedule = ScheduleDualPipeV([first, second], micro_batches, loss_fn=loss)
        overlap_pairs(schedule)

    Both run on the caller's stream. Before experts of one side wait for tokens or sums that `host_counts` or
    `fixed_capacity` sends, the kernels of the other side are launched, up to the point where it would wait: attention
    of one overlaps the dispatch of the other, experts the return. Results are equal to those without, bit for bit.
    Raises FuseOpsError for a schedule without such pairs, stages without expert-parallel layers whose dispatcher
    overlaps compute, a stage under DistributedDataParallel, and a torch with another pipeline runtime.
    """
    name = type(schedule).__name__
    kind = torch_private.overlap_action_type(schedule)
    if kind is None:
        raise FuseOpsError(
            f"overlap_pairs({name}): it pairs no forward with a backward that this torch ({torch.__version__}) would "
            "let others run. ScheduleDualPipeV does, from torch 2.12 on."
        )
    modules = [stage.submod for stage in schedule._stages]
    if any(isinstance(m, torch.nn.parallel.DistributedDataParallel) for m in modules):
        raise FuseOpsError(
            f"overlap_pairs({name}): a stage is under DistributedDataParallel, which knows one forward a process at a "
            "time. Shard it by fully_shard."
        )
    ops: list[Any] = [op for m in modules for op in m.modules() if isinstance(op, Op)]
    dispatchers = [op.dispatcher for op in ops if hasattr(op, "dispatcher")]
    if not any(dispatcher.overlaps_compute for dispatcher in dispatchers):
        names = sorted({dispatcher.name for dispatcher in dispatchers})
        have = ", ".join(names) or "no experts over ranks"
        raise FuseOpsError(
            f"overlap_pairs({name}): its stages have {have}, and nothing that travels beside other kernels: "
            "ExpertParallel(dispatcher='host_counts') or 'fixed_capacity'."
        )

    def in_turns(action: Any, context: Any) -> None:
        perform = torch_private.pipeline_perform()
        Pair(*(partial(perform, each) for each in action.sub_actions)).run()

    schedule.register_custom_function(kind, in_turns)
