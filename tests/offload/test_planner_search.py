"""Law 23: the planner beside exhaustive search, and how long it may take."""

from __future__ import annotations

import copy
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles_drawn import LINK, MB, carried, profile_of, profiles, transformer

from fuseops.offload.planning.cost_model import Choice, CostModel
from fuseops.offload.planning.hardware import Hardware
from fuseops.offload.planning.plan import plan_profile
from fuseops.offload.planning.planner import NOTHING, Limits, Solution, judge, solve
from fuseops.offload.planning.profile import Profile, Resave
from fuseops.offload.planning.simulate import simulate
from fuseops.offload.planning.timetable import Timetable
from fuseops.offload.planning.together import shares
from fuseops.offload.schedule import LinkSettings


def subsets(values: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Every one, the smallest first."""
    listed = list(values)
    return chain.from_iterable(combinations(listed, n) for n in range(len(listed) + 1))


def exhaustive(model: CostModel, limits: Limits) -> Solution:
    """The best choice of all, by trying every one."""
    choices = [NOTHING]
    for drop in subsets(range(len(model.groups))):
        if any(model.conflicts[g] & set(drop) for g in drop):
            continue
        taken = frozenset(chain.from_iterable(model.members[g] for g in drop))
        left = (k for k in range(len(model.items)) if k not in taken)
        choices += [Choice(frozenset(leave), frozenset(drop)) for leave in subsets(left)]
    return min((judge(model, limits, choice) for choice in choices), key=lambda s: s.cost)


def both(profile: Profile, lag: int, tight: float, host: float | None) -> tuple[Solution, Solution]:
    """What the planner found and what is best. tight: 0 the lowest peak there is, 1 no limit."""
    model = CostModel(profile, LINK, LinkSettings(lag=lag, ahead=1, small=0))
    lowest = exhaustive(model, Limits(0)).prediction.peak
    limits = Limits(
        int(lowest + tight * (profile.peak - lowest)),
        None if host is None else int(host * sum(model.nbytes)),
    )
    best = exhaustive(model, limits)
    return solve(model, limits), best


def drawn(seed: int) -> tuple[Profile, int, float, float | None]:
    """A profile of at most nine tensors and limits for it."""
    rng = random.Random(seed)
    layers = rng.randint(2, 6)
    each = max(1, min(3, 9 // layers))
    sizes = [rng.randint(1, 40) * MB for _ in range(layers * each)]
    times = [rng.randint(1, 8) * 1e-3 * rng.choice([0.5, 1, 2, 4]) for _ in range(layers)]
    profile = profile_of(
        layers,
        each,
        lambda layer, n: sizes[layer * each + n],
        lambda layer: times[layer],
        ops_per_layer=rng.randint(1, 3),
        groups=rng.random() < 0.7,
    )
    return profile, rng.randint(1, 2), rng.random(), rng.choice([None, None, 0.3, 0.6])


def test_law_23_close_to_the_best() -> None:
    """At most 2 % above it in nine of ten, never more than 5 %; a fit where there is one."""
    above = []
    for seed in range(60):
        found, best = both(*drawn(seed))
        assert found.fits or not best.fits, f"seed {seed}: infeasible, and exhaustive search is not"
        if best.fits:
            above.append(found.prediction.seconds / best.prediction.seconds - 1)
    assert len(above) > 30 and max(above) > -1e-9
    assert statistics.quantiles(above, n=10)[-1] <= 0.02
    assert max(above) <= 0.05


@settings(max_examples=20)
@given(profiles(groups=True), st.integers(1, 2), st.floats(0, 1))
def test_law_23_a_fit_where_there_is_one(profile: Profile, lag: int, tight: float) -> None:
    found, best = both(profile, lag, tight, None)
    assert found.fits == best.fits
    assert found.prediction.seconds <= best.prediction.seconds * 1.05 or not best.fits


def processor_seconds(work: Callable[[], object]) -> float:
    """What this process computes for it: others on the machine and what tests before left to collect are no fault."""
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        work()
        return time.process_time() - start
    finally:
        gc.enable()


def fifth_of_a_second() -> dict[int, int]:
    """What Python takes that long for on a machine left alone: loops and maxima over memory, as a search is made of."""
    seen: dict[int, int] = {}
    for k in range(800_000):
        seen[k & 0xFFFF] = max(seen.get(k & 0xFFFF, 0), k)
    return seen


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3, None])
def test_law_23_ten_thousand_tensors_take_less_than_a_second(share: float | None) -> None:
    """A slow machine is given as much longer as its Python takes; the best of a few turns counts."""
    profile = transformer(200, 50)
    assert len(profile.saved) == 10_000
    limits = Limits(None if share is None else int(profile.peak * share))
    seconds = []
    for _ in range(8):
        search = partial(solve, CostModel(profile, LINK, LinkSettings()), limits)
        seconds.append(processor_seconds(search) / processor_seconds(fifth_of_a_second) / 5)
        if seconds[-1] < 1.0:
            assert search().fits
            return
    raise AssertionError(
        f"searches took {', '.join(f'{each:.2f}' for each in seconds)} s of such a machine"
    )


def test_without_a_budget_nothing_stalls_and_the_link_is_used() -> None:
    profile = transformer(24, 10)
    model = CostModel(profile, LINK, LinkSettings())
    found = solve(model, Limits())
    assert found.prediction.stall == 0 and not found.choice.drop
    forward = profile.clock[max(call.leave for call in profile.calls)]
    carried = forward * LINK.d2h.peak * 1e9
    assert found.prediction.host > 0.75 * min(carried, sum(model.nbytes))


def test_a_budget_that_holds_anyway_moves_nothing() -> None:
    profile = transformer(8, 4)
    found = solve(CostModel(profile, LINK, LinkSettings()), Limits(profile.peak))
    assert found.prediction.host == 0 and found.prediction.seconds == profile.seconds


def test_recomputation_is_chosen_where_the_link_is_slower() -> None:
    """40 MB a layer take 4 ms on the link, 1 ms to compute again."""
    profile = profile_of(8, 1, lambda layer, n: 40 * MB, lambda layer: 1e-3, groups=True)
    found = solve(CostModel(profile, LINK, LinkSettings(small=0)), Limits(profile.peak - 100 * MB))
    assert found.fits and found.choice.drop
    assert found.prediction.seconds <= profile.seconds + 3.01e-3


@pytest.mark.parametrize("more", [1, 10, 40])
def test_a_little_more_than_is_free_stalls_a_little_and_recomputes_nothing(more: int) -> None:
    """A layer takes 15 ms to compute again; a MB more takes 0.1 ms on the link."""
    profile = transformer(24, 10)
    model = CostModel(profile, LINK, LinkSettings())
    free = solve(model, Limits()).prediction.peak
    found = solve(CostModel(profile, LINK, LinkSettings()), Limits(free - more * MB))
    assert found.fits and not found.choice.drop
    assert found.prediction.stall <= 2e-3 + 2e-4 * more


def test_a_layer_is_not_recomputed_twice() -> None:
    """As a whole, or what its ops can do without: what both would drop is dropped once."""
    profile = profile_of(6, 3, lambda layer, n: 20 * MB, lambda layer: 1e-3, groups=True)
    fields = [
        group._replace(kind="op", saved=group.saved[:1], seconds=group.seconds / 10)
        for group in profile.recompute
    ]
    profile = replace(profile, recompute=(*profile.recompute, *fields))
    for share in (0.9, 0.7, 0.5, 0.1):
        model = CostModel(profile, LINK, LinkSettings(lag=1))
        drop = solve(model, Limits(int(profile.peak * share))).choice.drop
        assert not any(model.conflicts[g] & drop for g in drop)
    cheap = solve(CostModel(profile, LINK, LinkSettings(lag=1)), Limits(profile.peak - 30 * MB))
    assert {profile.recompute[g].kind for g in cheap.choice.drop} <= {"op"}


def test_the_host_budget_is_kept() -> None:
    profile = transformer(8, 4)
    total = sum(s.nbytes for s in profile.saved)
    found = solve(CostModel(profile, LINK, LinkSettings()), Limits(profile.peak // 2, total // 10))
    assert found.prediction.host <= total // 10 or not found.fits
    free = solve(CostModel(profile, LINK, LinkSettings()), Limits(None, total // 10))
    assert 0 < free.prediction.host <= total // 10


def test_the_same_profile_has_the_same_plan() -> None:
    profile, again = transformer(12, 6), copy.deepcopy(transformer(12, 6))
    limits = Limits(profile.peak * 2 // 3)
    first, second = (solve(CostModel(p, LINK, LinkSettings()), limits) for p in (profile, again))
    assert first.choice == second.choice


def test_micro_batches_share_a_decision() -> None:
    profile = profile_of(4, 2, lambda layer, n: MB, lambda layer: 1e-3, micro_batches=3)
    model = CostModel(profile, LINK, LinkSettings(lag=1))
    names = [{profile.saved[k].name for k in item} for item in model.items]
    assert all(len(found) == 1 for found in names)
    assert len({next(iter(found)) for found in names}) == len(model.items)
    assert max(map(len, model.items)) == 3


def free_by_hand(profile: Profile, hardware: Hardware, settings: LinkSettings) -> int:
    """The most bytes of all choices whose simulated step has no stall: by trying every one."""
    movable = [k for item in CostModel(profile, hardware, settings).items for k in item]
    sizes = {chosen: sum(profile.saved[k].nbytes for k in chosen) for chosen in subsets(movable)}
    for chosen in sorted(sizes, key=lambda c: -sizes[c]):
        if simulate(profile, chosen, hardware, settings).stall <= 1e-6:
            return sizes[chosen]
    raise AssertionError("nothing at all leaves without a stall")


def noisy(profile: Profile, spread: float, seed: int) -> Profile:
    """As another recording of the step would have it: every op takes a little longer or shorter."""
    rng = random.Random(seed)
    ops = (op._replace(seconds=op.seconds * rng.lognormvariate(0, spread)) for op in profile.ops)
    return replace(profile, ops=tuple(ops))


@settings(max_examples=20)
@given(
    profiles(max_saved=7, groups=True),
    st.sampled_from([0.0, 0.01, 0.1]),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_a_plan_without_a_budget_moves_all_that_the_link_carries_for_free(
    profile: Profile, spread: float, rate: float, lag: int, seed: int
) -> None:
    profile, hardware = noisy(profile, spread, seed), LINK.with_link(10 * rate)
    schedule = LinkSettings(lag=lag, small=0)
    plan = plan_profile(profile, hardware, settings=schedule)
    assert plan.after.stall <= 1e-6 and not plan.recomputed
    assert plan.bytes_of("offload") == plan.after.moved == plan.free
    assert plan.free >= free_by_hand(profile, hardware, schedule)


@pytest.mark.parametrize("seed", range(6))
def test_what_leaves_for_free_is_close_to_what_a_link_could_carry(seed: int) -> None:
    profile = noisy(transformer(24, 10, seed), 0.03, seed)
    hardware = LINK.with_link(random.Random(seed).uniform(3, 12))
    for lag in (2, 3, 4):
        plan = plan_profile(profile, hardware, settings=LinkSettings(lag=lag))
        most = carried(CostModel(profile, hardware, LinkSettings(lag=lag)))
        assert 0.97 * most <= plan.free <= most


@settings(max_examples=20)
@given(profiles(groups=True), st.integers(0, 99))
def test_a_budget_that_the_free_plan_keeps_costs_no_time(profile: Profile, seed: int) -> None:
    """However two recordings of one step differ: so nothing is made again but where compute waits for others anyway."""
    profile = noisy(profile, 0.02, seed)
    free = plan_profile(profile, LINK)
    plan = plan_profile(profile, LINK, Limits(free.after.peak))
    assert plan.fits and plan.after.seconds <= profile.seconds + 1e-5
    assert plan.free == free.free or plan.settings != free.settings


@given(st.integers(0, 1000), st.lists(st.integers(0, 500), min_size=1, max_size=6))
def test_ranks_share_one_budget(budget: int, needs: list[int]) -> None:
    """All that there is but for a rest of the division, what is needed if it suffices, and no less than an equal part
    to whoever needs that.
    """
    found = shares(budget, needs)
    assert budget - len(needs) < sum(found) <= budget
    for share, need in zip(found, needs, strict=True):
        assert share >= min(need, budget // len(needs))
        assert share >= need or sum(needs) > budget
    assert sorted(found) == [share for _, share in sorted(zip(needs, found, strict=True))]


@pytest.mark.parametrize("lag", range(1, 6))
def test_a_storage_can_leave_whatever_else_may(lag: int) -> None:
    """One that a later layer reads soon holds back no other that would share a transfer with it."""
    profile = profile_of(4, 2, lambda layer, n: MB, lambda layer: 4e-3)
    for call in range(1, 4):
        at, read = profile.calls[call].enter + 1, profile.calls[call].backward + 1
        shared = profile.saved[0]._replace(again=(Resave(call, at, read),))
        saved = [shared, *profile.saved[1:]]
        for small in (0, 1 << 40):
            link = LinkSettings(lag=lag, small=small)
            movable = Timetable(replace(profile, saved=tuple(saved)), link).movable
            for k in range(len(saved)):
                others = [s._replace(why="it stays") for s in saved]
                others[k] = saved[k]
                alone = Timetable(replace(profile, saved=tuple(others)), link).movable
                assert alone == [k] * (k in movable), (call, small, k)


def test_what_others_hold_until_it_is_read_does_not_leave() -> None:
    """A step's input, say: moving it would free nothing."""
    profile = profile_of(6, 2, lambda layer, n: MB, lambda layer: 4e-3)
    first = profile.saved[0]
    saved = (first._replace(held=first.freed), *profile.saved[1:])
    plan = plan_profile(replace(profile, saved=saved), LINK, settings=LinkSettings(small=0))
    assert plan.decisions[first.name] == "keep"
    assert "held by another reference" in plan.tensors[0].reason
    assert plan.before.peak - plan.after.peak == plan.free
