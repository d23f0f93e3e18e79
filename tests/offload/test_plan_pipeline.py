"""Pipelines: the order of every rank is possible, bubbles are those of the formula, and each rank
holds what its schedule says.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles_drawn import LINK, MB, profile_of, with_network

from fuseops.errors import FuseOpsError
from fuseops.offload.planning.pipeline import (
    RECEIVED,
    RankStep,
    Stages,
    plan_pipeline,
    split_stages,
)
from fuseops.offload.planning.planner import Limits
from fuseops.offload.planning.profile import Profile
from fuseops.offload.planning.simulate import simulate
from fuseops.offload.planning.turns import BACKWARD, FORWARD, INPUT, WEIGHT, Pipeline, Turn, turns
from fuseops.offload.schedule import LinkSettings

BASE = 100 * MB


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    ranks, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    times = draw(st.integers(1, 3))
    count = ranks * times if chunks > 1 else draw(st.integers(1, 9))
    return Pipeline(ranks, count, chunks)


def profile_for(pipeline: Pipeline, layers: int = 1, size: int = 10 * MB) -> Profile:
    """`layers` in each stage, 1 ms forward and 2 ms backward, one tensor a layer."""
    return profile_of(
        layers * pipeline.stages, 1, lambda layer, n: size, lambda layer: 1e-3, ops_per_layer=2
    )


def profile_of_rank(profile: Profile, pipeline: Pipeline, rank: int) -> Profile:
    return RankStep(Stages(profile, pipeline), rank).profile()


@given(pipelines())
def test_every_micro_batch_goes_through_every_stage_and_back(pipeline: Pipeline) -> None:
    seen: set[Turn] = set()
    for rank in range(pipeline.ranks):
        order = turns(pipeline, rank)
        assert len(order) == len(set(order)) == 2 * pipeline.micro_batches * pipeline.chunks
        assert {turn.stage % pipeline.ranks for turn in order} == {rank}
        for turn in order:
            if turn.way != FORWARD:
                assert order.index(turn._replace(way=FORWARD)) < order.index(turn)
        seen |= set(order)
    assert len(seen) == 2 * pipeline.micro_batches * pipeline.stages


@given(pipelines())
def test_nothing_begins_before_what_it_needs(pipeline: Pipeline) -> None:
    began = Stages(profile_for(pipeline), pipeline).began
    for turn, at in began.items():
        if turn.way == FORWARD and turn.stage:
            assert at >= began[turn._replace(stage=turn.stage - 1)] + 1e-3 - 1e-9
        if turn.way != FORWARD and turn.stage < pipeline.stages - 1:
            assert at >= began[turn._replace(stage=turn.stage + 1)] + 2e-3 - 1e-9


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_bubble_is_that_of_the_formula(ranks: int, chunks: int) -> None:
    """(ranks - 1) / (micro_batches * chunks) of the work itself."""
    pipeline = Pipeline(ranks, 8, chunks)
    profile = profile_of_rank(profile_for(pipeline), pipeline, 0)
    bubble = sum(op.seconds for op in profile.ops if op.name == "bubble")
    work = profile.seconds - bubble
    assert bubble / work == pytest.approx((ranks - 1) / (8 * chunks))


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_of_1f1b_holds_as_many_micro_batches_as_ranks_follow(rank: int) -> None:
    pipeline = Pipeline(4, 8)
    profile = profile_of_rank(profile_for(pipeline), pipeline, rank)
    assert profile.peak == BASE // 4 + (4 - rank) * 10 * MB


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_of_interleaved_1f1b_holds_more(rank: int) -> None:
    pipeline = Pipeline(4, 8, 2)
    profile = profile_of_rank(profile_for(pipeline), pipeline, rank)
    chunks_held = 2 * (4 - rank - 1) + (2 - 1) * 4 + 1
    assert profile.peak == BASE // 4 + chunks_held * 10 * MB


@given(pipelines(), st.integers(1, 2))
def test_every_rank_runs_on_the_schedule_in_order(pipeline: Pipeline, layers: int) -> None:
    """Law 19 for pipelines: whatever leaves, every access is ordered; and bytes add up."""
    for rank in range(pipeline.ranks):
        profile = profile_of_rank(profile_for(pipeline, layers), pipeline, rank)
        done = simulate(profile, range(len(profile.saved)), LINK, LinkSettings(lag=1, small=0))
        assert done.levels[-1].nbytes == profile.ops[-1].resident
        assert done.peak <= profile.peak


def test_planning_lowers_the_peak_of_the_rank_that_has_most() -> None:
    pipeline = Pipeline(4, 8)
    profile = profile_for(pipeline, layers=4, size=2 * MB)
    plans = plan_pipeline(profile, LINK, pipeline, settings=LinkSettings(lag=1, small=0))
    before = [plan.before.peak for plan in plans]
    assert before == sorted(before, reverse=True)
    assert plans[0].after.peak < 0.8 * before[0]
    assert all(plan.after.stall == 0 for plan in plans)
    budget = Limits(int(before[0] * 0.8))
    tight = plan_pipeline(profile, LINK, pipeline, budget, LinkSettings(lag=1, small=0))
    assert all(plan.fits for plan in tight) and tight[-1].after.moved == 0 < tight[0].after.moved


def test_what_leaves_in_one_micro_batch_leaves_by_name() -> None:
    """Of the last stage's last micro-batch much is read too soon: the schedule sees that, call by call."""
    pipeline = Pipeline(2, 4, 2)
    plans = plan_pipeline(profile_for(pipeline), LINK, pipeline)
    mixed = 0
    for plan in plans:
        names = {t.name for t in plan.tensors if t.layer}
        for name in names:
            ways = {t.decision for t in plan.tensors if t.name == name}
            mixed += len(ways) > 1
            assert plan.decisions[name] == ("offload" if "offload" in ways else "keep")
    assert mixed


def received(profile: Profile) -> Profile:
    """The profile where every layer saves its input, which the layer before it has made."""
    first = {s.call: k for k, s in reversed([*enumerate(profile.saved)])}
    saved = [
        s._replace(made=profile.calls[s.call].enter - 1) if k in first.values() else s
        for k, s in enumerate(profile.saved)
    ]
    return replace(profile, saved=tuple(saved))


@given(pipelines(), st.integers(1, 2))
def test_what_a_stage_receives_stays_in_its_buffers(pipeline: Pipeline, layers: int) -> None:
    """A buffer for each micro-batch and direction lasts, so to move what lies in it would free nothing; and what a
    stage has sent is held until its backward.
    """
    size = 10 * MB
    profile = received(profile_for(pipeline, layers, size))
    for rank in range(pipeline.ranks):
        ran = profile_of_rank(profile, pipeline, rank)
        mine = range(rank, pipeline.stages, pipeline.ranks)
        borders = sum((stage > 0) + (stage < pipeline.stages - 1) for stage in mine)
        buffers = borders * pipeline.micro_batches * size
        assert ran.ops[-1].resident == BASE // pipeline.ranks + buffers
        stay = [s for s in ran.saved if s.why == RECEIVED]
        assert len(stay) == sum(stage > 0 for stage in mine) * pipeline.micro_batches
        own = profile_of_rank(profile_for(pipeline, layers, size), pipeline, rank)
        before, after = (own.peak - own.ops[-1].resident, ran.peak - ran.ops[-1].resident)
        assert after <= before + len(mine) * pipeline.micro_batches * size


@given(pipelines(), st.booleans())
def test_every_micro_batch_travels_between_ranks_as_often(pipeline: Pipeline, halves: bool) -> None:
    """What a stage sends to other ranks, and what waits for it there, once a micro-batch."""
    profile = with_network(profile_for(pipeline), 2, 1)
    run = halved(pipeline, 1) if halves else pipeline
    for rank in range(pipeline.ranks):
        ran = profile_of_rank(profile, run, rank)
        alone = profile.network / pipeline.stages * pipeline.chunks
        assert ran.network == pytest.approx(alone * pipeline.micro_batches)
        for p, op in enumerate(ran.ops):
            if op.lane == "network" and op.join >= 0:
                assert ran.ops[op.join].lane == "compute" and op.join == p + 1
        simulate(ran, movable(ran), LINK, LinkSettings(lag=1, small=0))


def test_stages_cover_the_step() -> None:
    profile = profile_of(7, 1, lambda layer, n: MB, lambda layer: 1e-3)
    split = split_stages(profile, 3)
    covered = sorted(p for part in split for ops in (part.forward, part.backward) for p in ops)
    assert covered == list(range(len(profile.ops)))
    assert [len(part.layers) for part in split] == [2, 3, 2]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        *(((ranks, 1), "ranks") for ranks in (0, -1, "2")),
        ((2, 0), "micro_batches"),
        ((2, 2, 0), "chunks"),
        ((2, 3, 2), "multiple of the ranks"),
        *(((2, 2, 1, (), share), "weight_share") for share in (2.0, -0.1, "half")),
        ((2, 1, 1, ((Turn(FORWARD, 0, 0),),)), "turns of 1 ranks"),
        ((2, 1, 1, ((), 3)), "order"),
    ],
)
def test_pipelines_that_there_are_not(wrong: Any, what: str) -> None:
    with pytest.raises(FuseOpsError, match=what):
        Pipeline(*wrong)


def test_plans_of_a_pipeline_take_a_pipeline() -> None:
    with pytest.raises(FuseOpsError, match=r"pipeline=\.\.\.\) expects an offload\.Pipeline"):
        plan_pipeline(profile_for(Pipeline(2, 2)), LINK, (2, 2))  # type: ignore[arg-type]


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(FuseOpsError, match="at least as"):
        split_stages(profile_for(Pipeline(2, 2)), 3)


# --- the halves of a backward apart


def halved(pipeline: Pipeline, late: int) -> Pipeline:
    """The same order with every backward in two: the weight half `late` backwards after its input half."""
    order = []
    for rank in range(pipeline.ranks):
        mine: list[Turn] = []
        waiting: list[Turn] = []
        for turn in turns(pipeline, rank):
            mine.append(turn if turn.way == FORWARD else turn._replace(way=INPUT))
            if turn.way != FORWARD:
                waiting.append(turn._replace(way=WEIGHT))
            if len(waiting) > late:
                mine.append(waiting.pop(0))
        order.append((*mine, *waiting))
    return replace(pipeline, order=tuple(order))


def movable(profile: Profile) -> list[int]:
    return [k for k, s in enumerate(profile.saved) if s.why is None]


def products(profile: Profile) -> Profile:
    """The profile where every saved storage is the input of a product."""
    saved = tuple(s._replace(op="Linear", name=f"{s.name}.x") for s in profile.saved)
    return replace(profile, saved=saved)


@given(pipelines(), st.integers(0, 3))
def test_halves_of_a_backward_take_together_what_it_takes(pipeline: Pipeline, late: int) -> None:
    profile, split = products(profile_for(pipeline)), halved(pipeline, late)
    for rank in range(pipeline.ranks):
        ran = profile_of_rank(profile, split, rank)
        work = sum(op.seconds for op in ran.ops if op.name != "bubble")
        assert work == pytest.approx(3e-3 * pipeline.micro_batches * pipeline.chunks)
        began = Stages(profile, split).began
        for turn, at in began.items():
            if turn.way == WEIGHT:
                assert at >= began[turn._replace(way=INPUT)] + 1e-3 - 1e-9
        done = simulate(ran, movable(ran), LINK, LinkSettings(lag=1, small=0))
        assert done.levels[-1].nbytes == ran.ops[-1].resident


def test_x_and_the_gradient_of_a_product_are_held_until_its_weight_half() -> None:
    pipeline, size = Pipeline(1, 4), 10 * MB
    profile = products(profile_for(pipeline))
    assert profile_of_rank(profile, pipeline, 0).peak == BASE + size
    for late in range(4):  # x and gradient of one between its halves, and of those that wait
        split = profile_of_rank(profile, halved(pipeline, late), 0)
        assert split.peak == BASE + 2 * (late + 1) * size
        waiting = [s for s in split.saved if s.why is not None]
        assert len(waiting) == 4 and all(s.nbytes == size for s in waiting)
    other = profile_of_rank(profile_for(pipeline), halved(pipeline, 3), 0)  # of ops that delay none
    assert other.peak == BASE + size


class Action(NamedTuple):
    """As torch's schedules list them."""

    stage_index: int
    computation_type: Any
    microbatch_index: int
    sub_actions: Any = None


def test_the_order_of_a_schedule_of_torch_is_taken() -> None:
    def action(way: str, batch: int) -> Action:
        return Action(0, SimpleNamespace(value=way), batch)

    order = [action("F", 0), None, action("F", 1), action("I", 0), action("W", 0)]
    pair = Action(0, SimpleNamespace(value="OVERLAP_F_B"), 0, (action("F", 2), action("B", 1)))
    other = [*order, pair, action("B", 2), action("REDUCE_GRAD", 0)]
    pipeline = Pipeline.of(SimpleNamespace(pipeline_order={0: other}))
    assert (pipeline.ranks, pipeline.micro_batches, pipeline.chunks) == (1, 3, 1)
    assert [turn.way for turn in turns(pipeline, 0)] == [
        *(FORWARD, FORWARD, INPUT, WEIGHT, FORWARD, BACKWARD, BACKWARD)
    ]
    with pytest.raises(FuseOpsError, match="has no pipeline_order"):
        Pipeline.of(SimpleNamespace())


def test_an_order_that_waits_for_itself_is_refused() -> None:
    order = ((Turn(BACKWARD, 0, 0), Turn(FORWARD, 0, 0)),)
    pipeline = Pipeline(1, 1, 1, order)
    with pytest.raises(FuseOpsError, match="waits for itself"):
        Stages(profile_for(pipeline), pipeline)
