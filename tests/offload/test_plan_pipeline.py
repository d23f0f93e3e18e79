"""Pipelines: the order of every rank is possible, bubbles are those of the formula, and each rank
holds what its schedule says.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles_drawn import LINK, MB, profile_of

from fuseops.errors import FuseOpsError
from fuseops.offload.planning.pipeline import (
    FORWARD,
    Pipeline,
    Turn,
    parts,
    plan_pipeline,
    rank_profile,
    starts,
    turns,
)
from fuseops.offload.planning.planner import Limits
from fuseops.offload.planning.profile import Profile
from fuseops.offload.planning.simulate import LinkSettings, simulate

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
    return rank_profile(profile, pipeline, rank, starts(profile, pipeline))


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
    began = starts(profile_for(pipeline), pipeline)
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


def test_stages_cover_the_step() -> None:
    profile = profile_of(7, 1, lambda layer, n: MB, lambda layer: 1e-3)
    split = parts(profile, 3)
    covered = sorted(p for part in split for ops in (part.forward, part.backward) for p in ops)
    assert covered == list(range(len(profile.ops)))
    assert [len(part.layers) for part in split] == [2, 3, 2]


@pytest.mark.parametrize("wrong", [Pipeline(0, 1), Pipeline(2, 3, 2), Pipeline(2, 0)])
def test_pipelines_that_there_are_not(wrong: Pipeline) -> None:
    with pytest.raises(FuseOpsError, match="micro_batches"):
        turns(wrong, 0)


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(FuseOpsError, match="at least as"):
        parts(profile_for(Pipeline(2, 2)), 3)
