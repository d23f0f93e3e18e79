"""Plans for the ranks of a pipeline.

From the profile of one step of the whole model come the steps of all ranks: which micro-batch runs
forward or backward when, with the bubbles between, and what every rank holds meanwhile. Each is
planned like any other step: the schedule knows micro-batches by the number of a layer's call.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from fuseops.arguments import instance_of
from fuseops.errors import FuseOpsError
from fuseops.offload.schedule import DEFAULT, LinkSettings

from .hardware import Hardware
from .plan import OffloadPlan, plan_profile
from .planner import UNLIMITED, Limits
from .profile import LayerCall, Profile, ProfiledOp, Saved
from .turns import BACKWARD, FORWARD, INPUT, WEIGHT, Pipeline, Turn, turns

PRODUCTS = ("Linear", "GroupedLinear")  # ops whose weight gradients a stage may delay
# a name by a grad_fn: a tensor that a stage received is a leaf there
MADE_BY = re.compile(r"\.\w+Backward\d*\.(\d+)$")
HELD = "held until its weight gradient is computed"
RECEIVED = "received from another stage, whose buffer the pipeline keeps"


class StageOps(NamedTuple):
    """`StageOps` hold the ops of the whole step that one stage runs: forward and backward, as ranges of positions."""

    layers: range
    forward: range
    backward: range


def split_stages(profile: Profile, stages: int) -> list[StageOps]:
    """Divide the model into stages of nearly equal numbers of layers. Ops before the first layer belong to the first
    stage, those after the last layer (head, loss) to the last.

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
        found.append(StageOps(range(first, last), range(start, stop), range(*back)))
    return found


class Stages:
    """`Stages` are a whole model's step over a pipeline: the ops of a turn, what it waits for, how long it takes.

    began  when each turn begins

    Raises FuseOpsError for a pipeline that waits for itself, or that the profile has too few layers for.
    """

    def __init__(self, profile: Profile, pipeline: Pipeline) -> None:
        self.profile, self.pipeline = profile, pipeline
        self.parts = split_stages(profile, pipeline.stages)
        self.began = self._starts()

    def ops(self, turn: Turn) -> range:
        """Positions in the whole step."""
        part = self.parts[turn.stage]
        return part.forward if turn.way == FORWARD else part.backward

    def needs(self, turn: Turn) -> list[Turn]:
        """The turns that end before a turn begins."""
        way, micro_batch, stage = turn
        if way == WEIGHT:
            return [turn._replace(way=INPUT)]
        if way == FORWARD:
            return [Turn(way, micro_batch, stage - 1)] if stage else []
        last = stage == self.pipeline.stages - 1
        return [Turn(FORWARD if last else BACKWARD, micro_batch, stage if last else stage + 1)]

    def seconds(self, turn: Turn) -> float:
        """How long a turn takes."""
        ops, clock = self.ops(turn), self.profile.clock
        took = clock[ops.stop] - clock[ops.start]
        if turn.way not in (INPUT, WEIGHT):
            return took
        mine = self.profile.ops[ops.start : ops.stop]
        weights = self.pipeline.weight_share * sum(
            op.seconds for op in mine if op.lane == "compute"
        )
        return weights if turn.way == WEIGHT else took - weights

    def _starts(self) -> dict[Turn, float]:
        """A turn begins as soon as its rank is free and the turns that it needs are over."""
        order = {rank: turns(self.pipeline, rank) for rank in range(self.pipeline.ranks)}
        done: dict[Turn, float] = {}
        began: dict[Turn, float] = {}
        free = dict.fromkeys(order, 0.0)
        while any(order.values()):
            ready = []
            for rank, waiting in order.items():
                needed = self.needs(waiting[0]) if waiting else []
                if waiting and all(turn in done for turn in needed):
                    ready.append((max([free[rank], *(done[turn] for turn in needed)]), rank))
            if not ready:
                heads = ", ".join(f"rank {rank}: {left[0]}" for rank, left in order.items() if left)
                raise FuseOpsError(f"the order of this pipeline waits for itself: {heads}.")
            start, rank = min(ready)
            turn = order[rank].pop(0)
            began[turn] = start
            done[turn] = free[rank] = start + self.seconds(turn)
            if turn.way == INPUT:  # it gives the gradient that other stages wait for
                done[turn._replace(way=BACKWARD)] = done[turn]
        return began


# --- the step of a rank


class RankStep:
    """A `RankStep` is the step of one rank of a pipeline: its turns, and the bubbles between.

    ops  with bytes beside saved ones
    at   turn -> position at which it begins
    """

    def __init__(self, stages: Stages, rank: int) -> None:
        self.stages, self.whole, self.pipeline = stages, stages.profile, stages.pipeline
        self.rank, (self.lasting, self.temporary) = rank, _lasting_and_temporary(self.whole)
        self.ops: list[ProfiledOp] = []
        self.at: dict[Turn, int] = {}
        now = 0.0
        for turn in turns(self.pipeline, rank):
            began = stages.began[turn]
            if began > now:
                self.ops.append(ProfiledOp("bubble", began - now, 0))
            self.at[turn] = len(self.ops)
            self.ops += self._ops_of(turn)
            now = began + stages.seconds(turn)

    def profile(self) -> Profile:
        """The profile of the step."""
        saved, calls = self._copies()
        held, change = self._resident_bytes()
        for s in saved:
            if s.why != RECEIVED:  # those are in the buffers
                change[s.at] += s.nbytes
                change[s.freed] -= s.nbytes
        done = []
        for position, op in enumerate(self.ops):
            held += change[position]
            done.append(op._replace(resident=held + op.resident))
        return replace(
            self.whole,
            model=f"{self.whole.model}, rank {self.rank} of {self.pipeline.ranks}",
            ops=tuple(done),
            saved=tuple(saved),
            calls=tuple(calls),
            recompute=(),
            assumed=(*self.whole.assumed, *self._assumed()),
        )

    def _assumed(self) -> Iterator[str]:
        yield "parameters and gradients are shared out evenly over layers; a rank's stalls delay no other"
        if any(turn.way == WEIGHT for turn in self.at):
            yield (
                f"the weight half of a backward takes {self.pipeline.weight_share:.0%} of it; until then it holds x of "
                "every product, and a gradient as large"
            )

    def _ops_of(self, turn: Turn) -> Iterator[ProfiledOp]:
        """The ops of a turn. Transfers between ranks belong to the input half."""
        ops, first, weight = self.stages.ops(turn), self.at[turn], self.pipeline.weight_share
        share = {INPUT: 1 - weight, WEIGHT: weight}.get(turn.way, 1.0)
        for p in ops:
            op = self.whole.ops[p]
            part = share if op.lane == "compute" else float(turn.way != WEIGHT)
            join = first + op.join - ops.start if op.join in ops else -1
            nbytes = self.temporary[p] if turn.way != WEIGHT else 0
            yield op._replace(seconds=op.seconds * part, resident=nbytes, join=join)

    def _resident_bytes(self) -> tuple[int, dict[int, int]]:
        """Bytes that a rank holds throughout, and changes by position of what torch's stages hold: a receive buffer for
        each micro-batch and direction, and what a stage has sent until its backward.
        """
        mine, parts = {turn.stage for turn in self.at}, self.stages.parts
        layers = sum(len(parts[stage].layers) for stage in mine)
        received = [sum(s.nbytes for s in self.whole.saved if _received(part, s)) for part in parts]
        received.append(0)  # there is no stage after the last
        buffers = self.pipeline.micro_batches * sum(received[s] + received[s + 1] for s in mine)
        change: dict[int, int] = defaultdict(int)
        for turn in self.at:
            if turn.way == FORWARD:
                end = self.at[turn] + len(parts[turn.stage].forward)
                change[end] += received[turn.stage + 1]
                change[self._backward(turn)] -= received[turn.stage + 1]
        return self.lasting * layers // len(self.whole.calls) + buffers, change

    def _backward(self, turn: Turn) -> int:
        """Where the backward of a forward, or the input half of it, begins."""
        half = self.at.get(turn._replace(way=INPUT))
        return self.at[turn._replace(way=BACKWARD)] if half is None else half

    def _copies(self) -> tuple[list[Saved], list[LayerCall]]:
        """Saved storages and calls of all micro-batches, with the positions of this step."""
        saved: list[Saved] = []
        calls: list[LayerCall] = []
        forwards = [turn for turn in self.at if turn.way == FORWARD]
        ordinals = Counter[int]()  # by stage
        for turn in sorted(forwards, key=lambda t: self.at[t]):
            part, weight = self.stages.parts[turn.stage], self.at.get(turn._replace(way=WEIGHT))
            at = self.at[turn], self._backward(turn)
            copy = _PlacedStage(part, ordinals[turn.stage], *at, len(calls), weight)
            ordinals[turn.stage] += 1
            calls += [copy.call(self.whole.calls[k]) for k in part.layers]
            for s in self.whole.saved:
                if s.call in part.layers:
                    saved += copy.saved(s)
        return saved, calls


def _received(part: StageOps, s: Saved) -> bool:
    """Whether a stage gets a storage that its layers save from the stage before it."""
    return s.call in part.layers and 0 <= s.made < part.forward.start


class _PlacedStage(NamedTuple):
    """A `_PlacedStage` is the profile of one stage, placed in the step of a rank for one micro-batch."""

    part: StageOps
    ordinal: int  # of its calls
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
        enter, leave, backward = map(self.place, (call.enter, call.leave, call.backward))
        return LayerCall(call.layer, self.ordinal, enter, leave, backward, call.writes)

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


def _lasting_and_temporary(profile: Profile) -> tuple[int, list[int]]:
    """Splits the bytes of a step without saved storages: those that last, and temporaries of each op."""
    alive = [0] * (len(profile.ops) + 1)
    for s in profile.saved:
        alive[s.at] += s.nbytes
        alive[s.freed] -= s.nbytes
    rest = [op.resident - now for op, now in zip(profile.ops, accumulate(alive), strict=False)]
    boundaries = sorted({b.position for b in profile.boundaries} | {0, len(rest)})
    temporary = [0] * len(rest)
    for position, nbytes in enumerate(rest):
        n = bisect_right(boundaries, position)
        temporary[position] = nbytes - min(rest[boundaries[n - 1] : boundaries[n]])
    return rest[-1] if rest else 0, temporary  # parameters, and gradients by then


def plan_pipeline(
    profile: Profile,
    hardware: Hardware,
    pipeline: Pipeline,
    limits: Limits = UNLIMITED,
    settings: LinkSettings = DEFAULT,
) -> tuple[OffloadPlan, ...]:
    """One plan a rank, each under the same limits.

    Raises FuseOpsError for arguments of another type, and for a pipeline that the profile has too few layers for.
    """
    for name, value, kind, expected in (
        ("profile", profile, Profile, "a step's profile, such as plan.profile"),
        ("hardware", hardware, Hardware, "an offload.Hardware, such as .load(path)"),
        ("pipeline", pipeline, Pipeline, "an offload.Pipeline"),
        ("limits", limits, Limits, "an offload.Limits"),
        ("settings", settings, LinkSettings, "the settings of a plan, plan.settings"),
    ):
        instance_of(value, kind, f"plan_pipeline({name}=...)", expected)
    stages = Stages(profile, pipeline)
    return tuple(
        plan_profile(RankStep(stages, rank).profile(), hardware, limits, settings)
        for rank in range(pipeline.ranks)
    )
