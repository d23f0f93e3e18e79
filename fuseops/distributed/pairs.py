"""A forward and the backward of another micro-batch in turns: where one would wait for tokens, the other goes on.

Each has a thread, and one of the two runs at a time, until it would read tokens that are on their way. So launches and
collectives have one order, the same on every rank that has the same layers, and nothing is shared by two that run.
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

FORWARD, BACKWARD = "forward", "backward"
OTHER = {FORWARD: BACKWARD, BACKWARD: FORWARD}

_now: Pair | None = None


def give_way(side: str) -> None:
    """Before tokens are read that are on their way: in a pair, the other goes on until it would read such tokens.

    side: whose tokens they are. A forward that runs again in a backward has the random numbers of the first one, and
    the other must draw none of them: it does not give way.
    """
    pair = _now
    if pair is not None and torch_private.in_backward() == (side == BACKWARD):
        pair.give_way(side)


class Pair:
    """Runs two functions in turns, the forward first."""

    def __init__(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        self._calls = {FORWARD: forward, BACKWARD: backward}
        self._turn, self._side = threading.Condition(), FORWARD
        self._ended: set[str] = set()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Both, to their ends.  Raises what the first of them to fail has raised."""
        global _now
        if _now is not None:
            raise FuseOpsError("two pairs of a forward and a backward run at once in this process.")
        thread = threading.Thread(target=self._run, args=(BACKWARD, here()), daemon=True)
        _now = self
        try:
            thread.start()
            self._run(FORWARD, ExitStack())
            thread.join()
        finally:
            _now = None
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
        """Let the other run until it gives way in turn, or has ended."""
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


def here() -> AbstractContextManager[Any]:
    """The device and the stream of this thread, for another one."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ExitStack()
    return torch.cuda.stream(torch.cuda.current_stream())


def overlap_pairs(schedule: Any) -> None:
    """Have a schedule run its pairs of a forward and a backward in turns, so that the all-to-all of one lies under the
    GEMMs of the other: those of torch's ScheduleDualPipeV, which are of two stages of one rank.

        schedule = ScheduleDualPipeV([first, second], micro_batches, loss_fn=loss)
        overlap_pairs(schedule)

    Both run on the stream of the caller. Where experts of one wait for tokens, or for their sums, that `host_counts` or
    `fixed_capacity` sends, the kernels of the other are launched first, to the point where it would wait: attention of
    the one under the dispatch of the other, experts under the return. Results are those without, bit for bit.
    Raises FuseOpsError for a schedule without such pairs, stages without experts over ranks whose tokens travel beside
    other kernels, a stage under DistributedDataParallel, and a torch whose runtime is another.
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
    ways = [op.exchange for m in modules for op in m.modules() if hasattr(op, "exchange")]
    if not any(way.beside for way in ways):
        have = ", ".join(sorted({way.name for way in ways})) or "no experts over ranks"
        raise FuseOpsError(
            f"overlap_pairs({name}): its stages have {have}, and nothing that travels beside other kernels: "
            "ExpertParallel(way='host_counts') or 'fixed_capacity'."
        )

    def in_turns(action: Any, context: Any) -> None:
        perform = torch_private.pipeline_perform()
        Pair(*(partial(perform, each) for each in action.sub_actions)).run()

    schedule.register_custom_function(kind, in_turns)
