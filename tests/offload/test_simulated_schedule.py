"""Laws 19 and 21 on the schedule: every simulated step is ordered, no wait of it can be spared, and
the planner's fast prediction says what the simulation says.
"""

from __future__ import annotations

import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles_drawn import LINK, MB, profile_of, profiles, with_codes, with_network

from fuseops.offload.lanes.protocol import Event, Lane
from fuseops.offload.lanes.simulated import (
    OrderError,
    SimulatedBuf,
    SimulatedEvent,
    SimulatedLanes,
    Wait,
)
from fuseops.offload.planning.cost_model import Choice, CostModel, Prediction
from fuseops.offload.planning.profile import Profile
from fuseops.offload.planning.simulate import Simulation, simulate
from fuseops.offload.schedule import LAST_GROUP, Item, LinkSettings, Schedule

settings_drawn = st.builds(
    LinkSettings,
    lag=st.integers(0, 3),
    ahead=st.integers(1, 2),
    small=st.sampled_from([0, 10 * MB, 100 * MB]),
    bundle=st.sampled_from([15 * MB, 1000 * MB]),
)


def some_names(profile: Profile) -> st.SearchStrategy[set[str]]:
    return st.just(set()) | st.sets(st.sampled_from([s.name for s in profile.saved]))


@given(st.data(), profiles(micro_batches=1), settings_drawn)
def test_law_19_every_step_is_ordered(data: Any, profile: Profile, settings: LinkSettings) -> None:
    chosen = data.draw(st.sets(st.sampled_from(range(len(profile.saved)))))
    coded = data.draw(some_names(profile))
    profile = with_codes(profile, coded)
    done = simulate(profile, chosen, LINK, settings, coded=coded)
    on_link = [s.codes or s.nbytes for s in profile.saved]
    assert sum(on_link[k] for k in done.windows) <= done.moved <= sum(on_link[k] for k in chosen)
    computes = sum(op.seconds for op in profile.ops if op.lane == "compute")
    assert done.seconds == pytest.approx(computes + done.coding + done.stall + done.network)
    assert profile.seconds * (1 - 1e-9) <= done.seconds  # what travels may cover a stall
    assert done.seconds <= (profile.seconds + done.coding + done.stall) * (1 + 1e-9)
    assert bool(done.coding) == any(
        profile.saved[k].codes for k in {*chosen} - {*done.kept_reasons}
    )
    assert done.levels[-1].nbytes >= profile.ops[-1].resident - sum(
        s.nbytes for s in profile.saved if s.freed >= len(profile.ops)
    )


@given(st.data(), profiles(micro_batches=3), settings_drawn)
def test_law_19_holds_for_micro_batches(
    data: Any, profile: Profile, settings: LinkSettings
) -> None:
    simulate(
        profile, data.draw(st.sets(st.sampled_from(range(len(profile.saved))))), LINK, settings
    )


@given(profiles(), st.integers(1, 4), st.integers(0, 3))
def test_what_travels_hides_behind_what_does_not_wait_for_it(
    profile: Profile, later: int, more: int
) -> None:
    """A step with nothing moved is the profile's clock, waits for the network included; who waits later waits less."""
    near, far = (with_network(profile, 3, k) for k in (later, later + more))
    for each in (near, far):
        done = simulate(each, (), LINK)
        assert done.seconds == pytest.approx(each.seconds) and not done.stall
    assert far.seconds <= near.seconds * (1 + 1e-9)
    assert near.network == pytest.approx(far.network)
    at_once = with_network(profile, 3, 1)
    assert at_once.seconds == pytest.approx(sum(op.seconds for op in profile.ops))


def test_nothing_chosen_is_the_profile_itself() -> None:
    profile = profile_of(4, 3, lambda layer, n: (n + 1) * MB, lambda layer: 1e-3)
    done = simulate(profile, (), LINK)
    assert [level.nbytes for level in done.levels] == [op.resident for op in profile.ops]
    assert (done.stall, done.moved, done.peak) == (0, 0, profile.peak)


def test_what_leaves_is_away_between_release_and_reload() -> None:
    profile = profile_of(5, 1, lambda layer, n: MB, lambda layer: 1.0)  # a very fast link
    done = simulate(profile, [0], LINK, LinkSettings(lag=1, ahead=1, small=0))
    away = [
        position
        for position, (op, level) in enumerate(zip(profile.ops, done.levels, strict=True))
        if level.nbytes < op.resident
    ]
    calls = profile.calls
    assert away == list(range(calls[1].enter, calls[1].backward))
    assert done.stall == 0 and done.kept_reasons == {}


def test_the_last_group_stays() -> None:
    profile = profile_of(4, 1, lambda layer, n: MB, lambda layer: 1.0)
    done = simulate(profile, range(4), LINK, LinkSettings(lag=1, ahead=1, small=0))
    assert done.kept_reasons == {3: LAST_GROUP}


def test_a_link_that_is_too_slow_stalls_by_what_is_missing() -> None:
    """One tensor of 10 ms on the link, given 1 ms: compute waits 9 at the release."""
    profile = profile_of(4, 1, lambda layer, n: 100 * MB, lambda layer: 1e-3, ops_per_layer=1)
    done = simulate(profile, [0], LINK, LinkSettings(lag=1, ahead=1, small=0))
    release, arrival = done.stalls
    assert done.windows[0].slack == pytest.approx(-10e-3)
    assert release.end - release.start == pytest.approx(10e-3)
    assert (release.on, arrival.on) == ("d2h", "h2d")


# --- law 21


Edge = tuple[Lane, int]  # the lane that waits, and which of all recorded events for


class Forgetful(SimulatedLanes):
    """Forgets to let one lane wait for one event, however often it is told to."""

    def __init__(self, forgotten: Edge | None = None) -> None:
        super().__init__(LINK.lane_seconds)
        self.forgotten = forgotten
        self.numbers: dict[int, int] = {}
        self.edges: dict[Edge, list[Wait]] = {}
        self.implied: dict[Edge, bool] = {}  # whether earlier events imply all waits of an edge

    def record(self, lane: Lane) -> SimulatedEvent:
        event = super().record(lane)
        self.numbers[event.serial] = len(self.numbers)
        return event

    def wait(self, lane: Lane, event: Any) -> None:
        edge = (lane, self.numbers[event.serial])
        if edge != self.forgotten:
            known = all(map(operator.ge, self._clocks[lane], event.clock))
            self.implied[edge] = self.implied.get(edge, True) and known
            super().wait(lane, event)
            self.edges.setdefault(edge, []).append(self.waits[-1])


# What other waits imply, always: a copy back starts after compute let the original go, and so after
# the copy out; host bytes are used again after compute has read what came back.
IMPLIED = {("h2d", "d2h"), ("d2h", "h2d")}


@pytest.mark.parametrize("small", [0, 10 * MB])
def test_law_21_no_wait_can_be_spared(small: int) -> None:
    profile = profile_of(
        5, 3, lambda layer, n: (40, 8, 4)[n] * MB, lambda layer: 2e-3, micro_batches=2
    )

    def run(forgotten: Edge | None) -> Forgetful:
        lanes, settings = Forgetful(forgotten), LinkSettings(lag=1, ahead=1, small=small)
        simulate(profile, range(len(profile.saved)), LINK, settings, lanes=lanes)
        return lanes

    whole, caught = run(None), 0
    for edge, waits in whole.edges.items():
        try:
            run(edge)
        except OrderError:
            caught += 1
        else:
            kinds = {(wait.lane, wait.on) for wait in waits}
            assert kinds <= IMPLIED or whole.implied[edge], waits
    assert caught > len(whole.edges) / 3


def test_law_06_host_bytes_wait_for_their_reader_however_early_the_next_is_ready() -> None:
    """`start_offload` says that a tensor is complete: its copy waits for little else."""
    lanes = SimulatedLanes()
    schedule = Schedule(lanes, LinkSettings(lag=0, small=0))

    def made(name: str) -> SimulatedBuf:
        buf = lanes.alloc(MB, "device", name)
        lanes.op("compute", (), (buf,), 1.0)
        return buf

    early, ready = made("b.x"), lanes.record("compute")
    call = schedule.enter("a")
    item = Item("a.x", made("a.x"))
    schedule.save(call, item)
    schedule.leave(call)
    schedule.backward(call)
    schedule.fetch(item)
    schedule.mark_read(item)
    schedule.drop(call, item)
    reserved = lanes.arena.reserved
    following = schedule.enter("b")
    again = Item("b.x", early)
    again.ready_event = lambda: ready  # type: ignore[method-assign]
    schedule.save(following, again)  # the same host bytes
    schedule.leave(following)
    assert lanes.arena.reserved == reserved and schedule.stats.out_count == 2


def test_what_is_let_go_together_is_waited_for_once_for_each_kind_of_event() -> None:
    """The last copy out implies those before it, unless one of the two lies in a graph that is captured."""
    waited: list[Event] = []

    class Noting(SimulatedLanes):
        def wait(self, lane: Lane, event: Event) -> None:
            if lane == "compute":
                waited.append(event)
            super().wait(lane, event)

    for captured, times in ((False, 1), (True, 2)):
        lanes = Noting()
        schedule = Schedule(lanes, LinkSettings(lag=9, small=0))
        items = [Item(name, lanes.alloc(MB, "device", name)) for name in "abc"]
        schedule.send_node(items)
        assert items[1].bundle is not None and items[1].bundle.d2h_done is not None
        items[1].bundle.d2h_done.captured = captured
        waited.clear()
        schedule.close()
        assert len(waited) == times and {item.released for item in items} == {True}


def sent(lag: int, names: str) -> tuple[Schedule, list[Item]]:
    """One storage for each node, outside of layers."""
    lanes = SimulatedLanes()
    schedule = Schedule(lanes, LinkSettings(lag=lag, small=0))
    items = [Item(name, lanes.alloc(MB, "device", name)) for name in names]
    for item in items:
        schedule.send_node([item])
    return schedule, items


def read(schedule: Schedule, item: Item) -> None:
    schedule.fetch(item)
    schedule.mark_read(item)
    if item.bundle is not None and not item.bundle.backward_begun:
        schedule.begin_backward(item.bundle)


def test_a_read_is_a_boundary_which_lets_go_what_is_due() -> None:
    schedule, items = sent(3, "abcd")
    assert [item.released for item in items] == [True, False, False, False]
    read(schedule, items[3])  # "c" is the next to be read
    assert [item.released for item in items] == [True, True, False, False]
    assert schedule.stats.back_count == 0


def test_what_is_read_next_comes_back_ahead_unless_it_was_read() -> None:
    schedule, items = sent(0, "abc")
    read(schedule, items[1])  # and "a" comes back for the next
    assert schedule.stats.back_count == 2
    read(schedule, items[2])
    assert schedule.stats.back_count == 3
    read(schedule, items[0])
    assert schedule.stats.back_count == 3 and schedule.stats.misses == 2


def stepped(schedule: Schedule, backwards: str) -> list[list[str]]:
    """A step of layers "a", "b" and "c" with a storage each, and their backwards in some order.   -> what is back on
    the device when each of them has begun
    """
    calls, items, back = {}, {}, []
    for name in "abc":
        calls[name] = schedule.enter(name)
        items[name] = Item(name, schedule.lanes.alloc(MB, "device", name))
        if not schedule.save(calls[name], items[name]):
            schedule.keep(calls[name])
        schedule.leave(calls[name])
    for name in backwards:
        schedule.backward(calls[name])
        bundles = {other: item.bundle for other, item in items.items()}
        back.append([other for other, bundle in bundles.items() if bundle and bundle.target])
        schedule.fetch(items[name])
        schedule.mark_read(items[name])
        schedule.drop(calls[name], items[name])
    return back


def test_the_first_step_reloads_along_the_chain_of_calls_and_later_ones_in_the_order_of_the_last() -> (
    None
):
    schedule = Schedule(SimulatedLanes(), LinkSettings(lag=0, small=0))
    assert stepped(schedule, "cba") == [["b", "c"], ["a", "b"], ["a"]]
    assert schedule.stats.misses == 1  # of "c"
    schedule = Schedule(SimulatedLanes(), LinkSettings(lag=0, small=0))
    stepped(schedule, "cab")
    assert stepped(schedule, "cab")[0] == ["a"]  # "c" stays: its backward is next


# --- the planner's prediction


@given(st.data(), profiles(groups=True), settings_drawn)
def test_the_prediction_is_the_simulation(
    data: Any, profile: Profile, settings: LinkSettings
) -> None:
    """To the byte and the nanosecond where every tensor has a transfer of its own. A wait for other ranks may cover a
    stall or a recomputation before it, which the prediction does not see: it is late then, by no more than these.
    """
    settings = settings._replace(small=0, lag=max(settings.lag, 1))
    coded = frozenset(data.draw(some_names(profile)))
    profile = with_codes(profile, coded)
    model = CostModel(profile, LINK, settings, coded)
    leave = data.draw(
        st.frozensets(st.sampled_from(range(len(model.items))))
        if model.items
        else st.just(frozenset())
    )
    drop = data.draw(st.frozensets(st.sampled_from(range(len(model.groups)))))
    assert not any(model.conflicts)
    leave -= {k for g in drop for k in model.members[g]}
    prediction = model.predict(Choice(leave, drop))
    done = simulate(
        profile,
        [k for item in leave for k in model.items[item]],
        LINK,
        settings,
        recompute=drop,
        coded=coded,
    )
    assert done.kept_reasons == {}
    predicts(profile, prediction, done, within=1e-12)
    assert prediction.recompute == pytest.approx(done.recompute + done.coding)
    assert (prediction.peak, prediction.top) == (done.peak, done.peak_position)
    assert prediction.host == done.host


@given(st.data(), profiles(micro_batches=1))
def test_transfers_of_several_are_predicted_closely(data: Any, profile: Profile) -> None:
    settings = LinkSettings(lag=1, ahead=1, small=1000 * MB, bundle=10_000 * MB)
    model = CostModel(profile, LINK, settings)
    if not model.items:
        return
    leave = data.draw(st.frozensets(st.sampled_from(range(len(model.items)))))
    prediction = model.predict(Choice(leave, frozenset()))
    done = simulate(profile, [k for item in leave for k in model.items[item]], LINK, settings)
    predicts(profile, prediction, done, within=max(0.05 * done.stall, 1e-5))


def predicts(profile: Profile, prediction: Prediction, done: Simulation, within: float) -> None:
    """Stalls are those of the simulation, but for so many seconds. Where a network hides some of them, no step is
    predicted shorter than it is.
    """
    if any(op.lane == "network" for op in profile.ops):
        late = prediction.seconds - done.seconds
        assert -within <= late <= prediction.stall + prediction.recompute + within
    else:
        assert prediction.stall == pytest.approx(done.stall, abs=within)
