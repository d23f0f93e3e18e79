"""Pipeline schedules, as the turns of each rank in order: 1F1B, interleaved 1F1B with several chunks of layers for each
rank, or any schedule of torch.distributed.pipelining, whose backward may be split into two halves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fuseops.arguments import check_integers, is_number, several, shown
from fuseops.errors import FuseOpsError

FORWARD, BACKWARD = "forward", "backward"
INPUT, WEIGHT = "input", "weight"  # the halves of a backward
_WAYS = {"F": FORWARD, "B": BACKWARD, "I": INPUT, "W": WEIGHT}  # in torch's schedules


class Turn(NamedTuple):
    """A `Turn` is the forward or backward of one micro-batch through one stage of a pipeline."""

    way: str
    micro_batch: int
    stage: int


@dataclass(frozen=True)
class Pipeline:
    """A `Pipeline` is a schedule of `micro_batches` over `ranks`, with `chunks` parts of the model on each.

    chunks 1 is 1F1B; more are interleaved, and then the micro-batches are a multiple of the ranks.
    order: of every rank its turns, in the place of those; `Pipeline.of(schedule)` has torch's.
    weight_share: of the time of a backward, what the weight half takes where it comes apart, 0 to 1.
    Raises FuseOpsError for another schedule, and for values of another type.
    """

    ranks: int
    micro_batches: int
    chunks: int = 1
    order: tuple[tuple[Turn, ...], ...] = ()
    weight_share: float = 0.5

    def __post_init__(self) -> None:
        ranks, count, chunks = self.ranks, self.micro_batches, self.chunks
        check_integers("Pipeline", 1, ranks=ranks, micro_batches=count, chunks=chunks)
        if not (is_number(self.weight_share) and 0 <= self.weight_share <= 1):
            raise FuseOpsError(
                f"Pipeline: weight_share is {shown(self.weight_share)}, expected a number from 0 to 1."
            )
        expected = "of every rank its turns, as Pipeline.of(schedule) has them"
        order = several(self.order, Iterable, "Pipeline(order=...)", expected)
        for mine in order:
            several(mine, Turn, "Pipeline(order=...)", expected)
        if order and len(order) != ranks:
            raise FuseOpsError(
                f"Pipeline(order=...) has the turns of {len(order)} ranks, and there are {ranks}."
            )
        if not order and chunks > 1 and count % ranks:
            raise FuseOpsError(
                f"Pipeline{ranks, count, chunks}: with several chunks the micro-batches are a multiple of the ranks."
            )

    @classmethod
    def of(cls, schedule: Any, weight_share: float = 0.5) -> Pipeline:
        """That of a schedule of torch.distributed.pipelining with an order of its own: interleaved, zero bubble, ZBV.

        Raises FuseOpsError for one that has none, as Schedule1F1B.
        """
        orders = getattr(schedule, "pipeline_order", None)
        if not orders or not isinstance(orders, Mapping):
            raise FuseOpsError(
                f"Pipeline.of(schedule): {type(schedule).__name__} has no pipeline_order. 1F1B is "
                "Pipeline(ranks, micro_batches)."
            )
        order = tuple(tuple(_turns_of(orders[rank])) for rank in sorted(orders))
        stages = {turn.stage for mine in order for turn in mine}
        batches = {turn.micro_batch for mine in order for turn in mine}
        return cls(len(order), len(batches), len(stages) // len(order), order, weight_share)

    @property
    def stages(self) -> int:
        """Parts of the model: stage s is on rank s % ranks, unless an order says otherwise."""
        return self.ranks * self.chunks


def _turns_of(actions: Iterable[Any]) -> Iterator[Turn]:
    """The turns of a rank among the actions of torch's schedule."""
    for action in actions:
        if action is None:
            continue
        inner = getattr(action, "sub_actions", None)  # of two that overlap, in later versions
        if inner:
            yield from _turns_of(inner)
        elif action.computation_type.value in _WAYS:
            way = _WAYS[action.computation_type.value]
            yield Turn(way, action.microbatch_index, action.stage_index)


def turns(pipeline: Pipeline, rank: int) -> list[Turn]:
    """The turns of a rank, in order.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM (2021), section 2.2.
    """
    ranks, count, chunks = pipeline.ranks, pipeline.micro_batches, pipeline.chunks
    if pipeline.order:
        return list(pipeline.order[rank])
    total = count * chunks
    ahead = ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    ahead = min(ahead, total)
    forward = [_turn(pipeline, rank, FORWARD, k) for k in range(total)]
    backward = [_turn(pipeline, rank, BACKWARD, k) for k in range(total)]
    steady = [t for pair in zip(forward[ahead:], backward, strict=False) for t in pair]
    return [*forward[:ahead], *steady, *backward[total - ahead :]]


def _turn(pipeline: Pipeline, rank: int, way: str, k: int) -> Turn:
    """The k-th forward or backward of a rank: groups of micro-batches go through chunk after chunk."""
    ranks, chunks = pipeline.ranks, pipeline.chunks
    group, place = divmod(k, ranks * chunks)
    chunk, micro_batch = divmod(place, ranks)
    chunk = chunk if way == FORWARD else chunks - 1 - chunk
    return Turn(way, group * ranks + micro_batch, chunk * ranks + rank)
