"""Plans for the ranks of a pipeline.

From the profile of one step of the whole model come the steps of all ranks: which micro-batch runs
forward or backward when, with the bubbles between, and what every rank holds meanwhile. Each is
planned like any other step: the schedule knows micro-batches by the number of a layer's call.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from fuseops.errors import FuseOpsError
from fuseops.offload.arguments import one_of

from .decided import OffloadPlan
from .hardware import Hardware
from .plan import plan_profile
from .planner import UNLIMITED, Limits
from .profile import LayerCall, Profile, ProfiledOp, Saved
from .simulate import DEFAULT, LinkSettings
from .turns import BACKWARD, FORWARD, INPUT, WEIGHT, Pipeline, Turn, turns

PRODUCTS = ("Linear", "GroupedLinear")  # whose weight gradients a stage may delay
# a name of torch's own: what a stage received is a leaf to it
MADE_BY = re.compile(r"\.\w+Backward\d*\.(\d+)$")
HELD = "held until its weight gradient is computed"
RECEIVED = "received from another stage, whose buffer the pipeline keeps"


class Part(NamedTuple):
    """Ops of the whole step that one stage runs: forward and backward, as ranges of positions."""

    layers: range
    forward: range
    backward: range


def parts(profile: Profile, stages: int) -> list[Part]:
    """The model in stages of as equal numbers of layers as can be; what comes before the first layer
    belongs to the first stage, what comes after the last (head, loss) to the last.

    Raises FuseOpsError when there are fewer layers than stages, or micro-batches already.
    """
    calls, end = profile.calls, len(profile.ops)
    if len(calls) < stages or any(c.ordinal or c.backward < 0 for c in calls):
        raise FuseOpsError(
            f"a pipeline of {stages} stages needs the profile of one micro-batch with at least as "
            f"many layers, each with a backward; {profile.model} has {len(calls)} calls of layers."
        )
    bounds = [round(s * len(calls) / stages) for s in range(stages + 1)]
    turn = min(c.backward for c in calls)
    found = []
    for first, last in pairwise(bounds):
        start = calls[first].enter if first else 0
        stop = calls[last].enter if last < len(calls) else turn
        back = (calls[last - 1].backward, calls[first - 1].backward if first else end)
        found.append(Part(range(first, last), range(start, stop), range(*back)))
    return found


def starts(profile: Profile, pipeline: Pipeline) -> dict[Turn, float]:
    """When each turn begins: as soon as its rank is free and what it needs has come."""
    order = {rank: turns(pipeline, rank) for rank in range(pipeline.ranks)}
    split = parts(profile, pipeline.stages)
    done: dict[Turn, float] = {}
    began: dict[Turn, float] = {}
    free = dict.fromkeys(order, 0.0)
    while any(order.values()):
        ready = []
        for rank, waiting in order.items():
            needed = _needs(waiting[0], pipeline) if waiting else []
            if waiting and all(turn in done for turn in needed):
                ready.append((max([free[rank], *(done[turn] for turn in needed)]), rank))
        if not ready:
            raise FuseOpsError(f"the order of this pipeline waits for itself: {_heads(order)}.")
        start, rank = min(ready)
        turn = order[rank].pop(0)
        began[turn] = start
        done[turn] = free[rank] = start + _seconds(profile, pipeline, split, turn)
        if turn.way == INPUT:  # to who waits for the gradient, it is as good as the whole
            done[turn._replace(way=BACKWARD)] = done[turn]
    return began


def _heads(order: Mapping[int, list[Turn]]) -> str:
    return ", ".join(f"rank {rank}: {waiting[0]}" for rank, waiting in order.items() if waiting)


def _needs(turn: Turn, pipeline: Pipeline) -> list[Turn]:
    way, micro_batch, stage = turn
    if way == WEIGHT:
        return [turn._replace(way=INPUT)]
    if way == FORWARD:
        return [Turn(way, micro_batch, stage - 1)] if stage else []
    last = stage == pipeline.stages - 1
    return [Turn(FORWARD if last else BACKWARD, micro_batch, stage if last else stage + 1)]


def _range_of(split: list[Part], turn: Turn) -> range:
    return split[turn.stage].forward if turn.way == FORWARD else split[turn.stage].backward


def _share(pipeline: Pipeline, way: str) -> float:
    """What a turn takes of the time of its ops."""
    return {INPUT: 1 - pipeline.weight_share, WEIGHT: pipeline.weight_share}.get(way, 1.0)


def _seconds(profile: Profile, pipeline: Pipeline, split: list[Part], turn: Turn) -> float:
    ops = _range_of(split, turn)
    took = profile.clock[ops.stop] - profile.clock[ops.start]
    if turn.way not in (INPUT, WEIGHT):
        return took
    computes = sum(op.seconds for op in profile.ops[ops.start : ops.stop] if op.lane == "compute")
    weights = pipeline.weight_share * computes
    return weights if turn.way == WEIGHT else took - weights


# --- the step of a rank


def rank_profile(
    profile: Profile, pipeline: Pipeline, rank: int, began: dict[Turn, float]
) -> Profile:
    """The step of one rank: its turns, and the bubbles between.  began: the `starts` of all turns."""
    split = parts(profile, pipeline.stages)
    memory = _Memory(profile)
    ops: list[ProfiledOp] = []  # with bytes beside saved ones
    at: dict[Turn, int] = {}
    now = 0.0
    for turn in turns(pipeline, rank):
        if began[turn] > now:
            ops.append(ProfiledOp("bubble", began[turn] - now, 0))
        at[turn] = len(ops)
        ops += _ops_of(profile, pipeline, split, turn, memory.temporary, len(ops))
        now = began[turn] + _seconds(profile, pipeline, split, turn)
    saved, calls = _copies(profile, split, at)
    held, change = _kept(profile, pipeline, split, at, memory.lasting)
    for s in saved:
        if s.why != RECEIVED:  # among the buffers
            change[s.at] += s.nbytes
            change[s.freed] -= s.nbytes
    done = []
    for position, op in enumerate(ops):
        held += change[position]
        done.append(op._replace(resident=held + op.resident))
    notes = [
        "parameters and gradients are shared out evenly over layers; a rank's stalls delay no other"
    ]
    if any(turn.way == WEIGHT for turn in at):
        notes.append(
            f"the weight half of a backward takes {pipeline.weight_share:.0%} of it; until then it holds x of every "
            "product, and a gradient as large"
        )
    return replace(
        profile,
        model=f"{profile.model}, rank {rank} of {pipeline.ranks}",
        ops=tuple(done),
        saved=tuple(saved),
        calls=tuple(calls),
        recompute=(),
        assumed=(*profile.assumed, *notes),
    )


def _ops_of(
    profile: Profile,
    pipeline: Pipeline,
    split: list[Part],
    turn: Turn,
    temporary: list[int],
    first: int,
) -> Iterator[ProfiledOp]:
    """The ops of a turn that begins at position `first`; what travels between ranks does in the input half."""
    ops, share = _range_of(split, turn), _share(pipeline, turn.way)
    for p in ops:
        op = profile.ops[p]
        part = share if op.lane == "compute" else float(turn.way != WEIGHT)
        join = first + op.join - ops.start if op.join in ops else -1
        nbytes = temporary[p] if turn.way != WEIGHT else 0
        yield op._replace(seconds=op.seconds * part, resident=nbytes, join=join)


def _kept(
    profile: Profile, pipeline: Pipeline, split: list[Part], at: dict[Turn, int], lasting: int
) -> tuple[int, dict[int, int]]:
    """Bytes that a rank has all the time, and changes by position of what torch's stages keep: a buffer for each
    micro-batch and direction in which something comes, and what a stage has sent on until its backward.
    """
    stages = {turn.stage for turn in at}
    layers = sum(len(split[stage].layers) for stage in stages)
    came = [sum(s.nbytes for s in profile.saved if _received(part, s)) for part in split]
    came.append(0)  # nobody comes after the last
    buffers = pipeline.micro_batches * sum(came[stage] + came[stage + 1] for stage in stages)
    change: dict[int, int] = defaultdict(int)
    for turn in at:
        if turn.way == FORWARD:
            end, backward = _forward_and_backward(split, at, turn)
            change[end] += came[turn.stage + 1]
            change[backward] -= came[turn.stage + 1]
    return lasting * layers // len(profile.calls) + buffers, change


def _received(part: Part, s: Saved) -> bool:
    """Whether a stage gets a storage that its layers save from the stage before it."""
    return s.call in part.layers and 0 <= s.made < part.forward.start


def _forward_and_backward(split: list[Part], at: dict[Turn, int], turn: Turn) -> tuple[int, int]:
    """Where a forward ends, and where its backward, or the input half of it, begins."""
    backward = at.get(turn._replace(way=INPUT))
    if backward is None:
        backward = at[turn._replace(way=BACKWARD)]
    return at[turn] + len(split[turn.stage].forward), backward


def _copies(
    profile: Profile, split: list[Part], at: dict[Turn, int]
) -> tuple[list[Saved], list[LayerCall]]:
    """Saved storages and calls of all micro-batches of a rank, with the positions of its step."""
    saved: list[Saved] = []
    calls: list[LayerCall] = []
    forwards = [turn for turn in at if turn.way == FORWARD]
    for turn in sorted(forwards, key=lambda t: at[t]):
        part, (_, backward) = split[turn.stage], _forward_and_backward(split, at, turn)
        weight = at.get(turn._replace(way=WEIGHT))
        copy = _Copy(part, turn.micro_batch, at[turn], backward, len(calls), weight)
        calls += [copy.call(profile.calls[k]) for k in part.layers]
        for s in profile.saved:
            if s.call in part.layers:
                saved += copy.saved(s)
    return saved, calls


class _Copy(NamedTuple):
    """A part of the profile, placed in the step of a rank for one micro-batch."""

    part: Part
    micro_batch: int
    forward: int  # where its turns begin
    backward: int
    first_call: int
    weight: int | None = None  # where the weight half has a turn of its own

    def place(self, p: int) -> int:
        """The position in the rank's step of `p` in the profile."""
        forward, backward = self.part.forward, self.part.backward
        if p >= backward.start:
            return self.backward + min(p, backward.stop) - backward.start
        return self.forward + min(max(p, forward.start), forward.stop) - forward.start

    def number(self, call: int) -> int:
        return self.first_call + call - self.part.layers.start

    def call(self, call: LayerCall) -> LayerCall:
        return LayerCall(
            call.layer, self.micro_batch, *map(self.place, (call.enter, call.leave, call.backward))
        )

    def saved(self, s: Saved) -> list[Saved]:
        """The storage, and the gradient that waits beside it for the weight half, where it is x of a product."""
        copy = self._saved(s)
        if self.weight is None or s.op not in PRODUCTS or not s.name.endswith(".x"):
            return [copy]
        span = self.part.backward
        freed = self.weight + min(max(s.read, span.start), span.stop - 1) - span.start + 1
        copy = copy._replace(freed=max(copy.freed, freed))
        dy = copy._replace(
            name=f"{s.name[:-1]}dy",
            made=copy.read,
            at=copy.read,
            held=copy.freed,
            read=copy.freed,
            why=HELD,
            again=(),
        )
        return [copy, dy]

    def _saved(self, s: Saved) -> Saved:
        before = s.made < self.part.forward.start
        received = before and self.part.forward.start > 0
        return s._replace(
            name=MADE_BY.sub(r".leaf.\1", s.name) if received else s.name,
            call=self.number(s.call),
            at=self.place(s.at),
            held=self.place(s.held),
            read=self.place(s.read),
            freed=self.place(s.freed),
            why=s.why or (RECEIVED if _received(self.part, s) else None),
            made=self.forward - 1 if before else self.place(s.made),
            again=tuple(
                a._replace(call=self.number(a.call), at=self.place(a.at), read=self.place(a.read))
                for a in s.again
                if a.call in self.part.layers
            ),
        )


class _Memory:
    """Bytes of the whole step, taken apart: what lasts, saved storages, and temporaries of each op."""

    def __init__(self, profile: Profile) -> None:
        alive = [0] * (len(profile.ops) + 1)
        for s in profile.saved:
            alive[s.at] += s.nbytes
            alive[s.freed] -= s.nbytes
        rest, now = [], 0
        for op, difference in zip(profile.ops, alive, strict=False):
            now += difference
            rest.append(op.resident - now)
        self.lasting = rest[-1] if rest else 0  # parameters, and gradients by then
        boundaries = sorted({b.position for b in profile.boundaries} | {0, len(rest)})
        self.temporary = [0] * len(rest)
        for position, nbytes in enumerate(rest):
            n = bisect_right(boundaries, position)
            low = min(rest[boundaries[n - 1] : boundaries[n]])
            self.temporary[position] = nbytes - low


def plan_pipeline(
    profile: Profile,
    hardware: Hardware,
    pipeline: Pipeline,
    limits: Limits = UNLIMITED,
    settings: LinkSettings = DEFAULT,
) -> tuple[OffloadPlan, ...]:
    """One plan a rank, each under the same limits.

    Raises FuseOpsError for a pipeline that there is not, or that the profile has too few layers for.
    """
    one_of(
        profile, Profile, "plan_pipeline(profile, ...)", "a step's profile, such as plan.profile"
    )
    began = starts(profile, pipeline)
    return tuple(
        plan_profile(rank_profile(profile, pipeline, rank, began), hardware, limits, settings)
        for rank in range(pipeline.ranks)
    )
