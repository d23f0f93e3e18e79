"""Law 23: the planner beside exhaustive search, and how long it may take."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles_drawn import LINK, MB, profile_of, profiles, transformer

from fuseops.offload.planning.model import Model
from fuseops.offload.planning.planner import Limits, Solution, exhaustive, solve
from fuseops.offload.planning.profile import Profile
from fuseops.offload.planning.simulate import Settings


def both(profile: Profile, lag: int, tight: float, host: float | None) -> tuple[Solution, Solution]:
    """What the planner found and what is best. tight: 0 the lowest peak there is, 1 no limit."""
    model = Model(profile, LINK, Settings(lag=lag, ahead=1, small=0))
    lowest = exhaustive(model, Limits(0)).prediction.peak
    limits = Limits(
        int(lowest + tight * (profile.peak - lowest)),
        None if host is None else int(host * sum(model.nbytes)),
    )
    best = exhaustive(model, limits)
    model.evaluations = 0
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
            above.append(found.key.seconds / best.key.seconds - 1)
    assert len(above) > 30 and max(above) > -1e-9
    assert statistics.quantiles(above, n=10)[-1] <= 0.02
    assert max(above) <= 0.05


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=20)
@given(profiles(groups=True), st.integers(1, 2), st.floats(0, 1))
def test_law_23_a_fit_where_there_is_one(profile: Profile, lag: int, tight: float) -> None:
    found, best = both(profile, lag, tight, None)
    assert found.fits == best.fits
    assert found.key.seconds <= best.key.seconds * 1.05 or not best.fits


@pytest.mark.parametrize("share", [0.9, 0.6, 0.3, None])
def test_law_23_ten_thousand_tensors_take_less_than_a_second(share: float | None) -> None:
    profile = transformer(200, 50)
    assert len(profile.saved) == 10_000
    limits = Limits(None if share is None else int(profile.peak * share))
    took = []
    for _ in range(3):  # the best of three, of processor time: others on the machine are no fault
        model = Model(profile, LINK, Settings())
        start = time.process_time()
        assert solve(model, limits).fits
        took.append(time.process_time() - start)
    assert min(took) < 1.0


def test_without_a_budget_nothing_stalls_and_the_link_is_used() -> None:
    profile = transformer(24, 10)
    model = Model(profile, LINK, Settings())
    found = solve(model, Limits())
    assert found.prediction.stall == 0 and not found.choice.drop
    forward = profile.clock[max(call.leave for call in profile.calls)]
    carried = forward * LINK.d2h.peak * 1e9
    assert found.prediction.host > 0.75 * min(carried, sum(model.nbytes))


def test_a_budget_that_holds_anyway_moves_nothing() -> None:
    profile = transformer(8, 4)
    found = solve(Model(profile, LINK, Settings()), Limits(profile.peak))
    assert found.key.moved == 0 and found.key.seconds == profile.seconds


def test_recomputation_is_chosen_where_the_link_is_slower() -> None:
    """40 MB a layer take 4 ms on the link, 1 ms to compute again."""
    profile = profile_of(8, 1, lambda layer, n: 40 * MB, lambda layer: 1e-3, groups=True)
    found = solve(Model(profile, LINK, Settings(small=0)), Limits(profile.peak - 100 * MB))
    assert found.fits and found.choice.drop
    assert found.prediction.seconds <= profile.seconds + 3.01e-3


@pytest.mark.parametrize("more", [1, 10, 40])
def test_a_little_more_than_is_free_stalls_a_little_and_recomputes_nothing(more: int) -> None:
    """A layer takes 15 ms to compute again; a MB more takes 0.1 ms on the link."""
    profile = transformer(24, 10)
    model = Model(profile, LINK, Settings())
    free = solve(model, Limits()).prediction.peak
    found = solve(Model(profile, LINK, Settings()), Limits(free - more * MB))
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
        model = Model(profile, LINK, Settings(lag=1))
        drop = solve(model, Limits(int(profile.peak * share))).choice.drop
        assert not any(model.rivals[g] & drop for g in drop)
    cheap = solve(Model(profile, LINK, Settings(lag=1)), Limits(profile.peak - 30 * MB))
    assert {profile.recompute[g].kind for g in cheap.choice.drop} <= {"op"}


def test_the_host_budget_is_kept() -> None:
    profile = transformer(8, 4)
    total = sum(s.nbytes for s in profile.saved)
    found = solve(Model(profile, LINK, Settings()), Limits(profile.peak // 2, total // 10))
    assert found.prediction.host <= total // 10 or not found.fits
    free = solve(Model(profile, LINK, Settings()), Limits(None, total // 10))
    assert 0 < free.prediction.host <= total // 10


def test_the_same_profile_has_the_same_plan() -> None:
    profile, again = transformer(12, 6), Profile.from_json(transformer(12, 6).to_json())
    limits = Limits(profile.peak * 2 // 3)
    first, second = (solve(Model(p, LINK, Settings()), limits) for p in (profile, again))
    assert first.choice == second.choice


def test_micro_batches_share_a_decision() -> None:
    profile = profile_of(4, 2, lambda layer, n: MB, lambda layer: 1e-3, micro_batches=3)
    model = Model(profile, LINK, Settings(lag=1))
    names = [{profile.saved[k].name for k in item} for item in model.items]
    assert all(len(found) == 1 for found in names)
    assert len({next(iter(found)) for found in names}) == len(model.items)
    assert max(map(len, model.items)) == 3
