"""Law 19 on the simulator itself: it times what the lanes do, and refuses what no event orders."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuseops.errors import FuseOpsError
from fuseops.offload.lanes.protocol import LANES
from fuseops.offload.lanes.simulated import OrderError, SimulatedLanes, Wait

MIB = 1 << 20


def copy_out(lanes: SimulatedLanes, *, ordered: bool = True) -> tuple[Any, Any]:
    """A tensor written by compute and copied to the host.   -> (source, host buffer)"""
    x = lanes.alloc(MIB, "device", "x")
    lanes.op("compute", (), (x,), 1.0)
    host = lanes.alloc(MIB, "host", "x")
    if ordered:
        lanes.wait("d2h", lanes.record("compute"))
    lanes.op("d2h", (x,), (host,), 2.0)
    return x, host


def stood_still(wait: Wait) -> bool:
    return wait.lane == "compute" and wait.end > wait.start


def test_lanes_run_side_by_side() -> None:
    lanes = SimulatedLanes()
    x, _ = copy_out(lanes)
    lanes.op("compute", (x,), (), 1.5)
    assert lanes.now == {"compute": 2.5, "d2h": 3.0, "h2d": 0.0, "network": 0.0}
    assert not any(map(stood_still, lanes.waits))


def test_a_wait_stalls_for_what_is_left() -> None:
    lanes = SimulatedLanes()
    x, _ = copy_out(lanes)
    copied = lanes.record("d2h")
    lanes.op("compute", (x,), (), 1.5)
    lanes.wait("compute", copied)
    (stall,) = filter(stood_still, lanes.waits)
    assert (stall.on, stall.start, stall.end) == ("d2h", 2.5, 3.0)
    lanes.wait("compute", copied)
    assert lanes.waits[-1].start == lanes.waits[-1].end == 3.0


def test_a_copy_of_ones_own_comes_after_others_and_is_not_ordered_by_that() -> None:
    lanes = SimulatedLanes()
    back = lanes.alloc(MIB, "device", "back")
    lanes.wait("h2d", lanes.record("compute"))
    lanes.op("h2d", (), (back,), 2.0)
    lanes.stall_behind("h2d")
    (stall,) = filter(stood_still, lanes.waits)
    assert (stall.on, stall.start, stall.end, lanes.now["compute"]) == ("h2d", 0.0, 2.0, 2.0)
    with pytest.raises(OrderError, match="no event orders them"):
        lanes.op("compute", (back,), (), 1.0)


@pytest.mark.parametrize("known", [False, True])
def test_a_copy_waits_for_nothing_that_compute_has_waited_for(known: bool) -> None:
    lanes = SimulatedLanes()
    _, host = copy_out(lanes)
    written = lanes.record("d2h")
    if known:
        lanes.wait("compute", written)
    back, before = lanes.alloc(MIB, "device", "back"), len(lanes.waits)
    lanes.copy("h2d", (host,), back, after=written)
    assert [wait.on for wait in lanes.waits[before:]] == ["compute", "d2h"][: 1 if known else 2]


def test_what_compute_has_waited_for_counts_only_beside_all_that_it_was_given() -> None:
    lanes = SimulatedLanes()
    complete = lanes.record("compute")
    _, host = copy_out(lanes)
    written = lanes.record("d2h")
    lanes.wait("compute", written)
    lanes.copy("h2d", (host,), lanes.alloc(MIB, "host", "again"), ready=complete, after=written)
    assert [wait.on for wait in lanes.waits[-2:]] == ["compute", "d2h"]


def test_bytes_are_counted_where_they_are() -> None:
    lanes = SimulatedLanes()
    x, host = copy_out(lanes)
    lanes.wait("compute", lanes.record("d2h"))
    assert lanes.nbytes == MIB
    lanes.free(x)
    assert lanes.nbytes == 0 and lanes.now["compute"] == 3.0
    assert lanes.arena.used == lanes.arena.peak == MIB
    lanes.free(host)
    assert lanes.arena.used == 0


def test_copying_before_the_source_is_written_is_refused() -> None:
    with pytest.raises(OrderError, match=r"'x.*' on d2h.*on compute.*use x"):
        copy_out(SimulatedLanes(), ordered=False)


def test_freeing_under_a_copy_is_refused() -> None:
    lanes = SimulatedLanes()
    x, _ = copy_out(lanes)
    with pytest.raises(OrderError, match="free x"):
        lanes.free(x)


def test_reading_what_is_still_being_copied_back_is_refused() -> None:
    lanes = SimulatedLanes()
    _, host = copy_out(lanes)
    back = lanes.alloc(MIB, "device", "back")
    lanes.wait("h2d", lanes.record("compute"))
    lanes.wait("h2d", lanes.record("d2h"))
    lanes.op("h2d", (host,), (back,), 1.0)
    with pytest.raises(OrderError, match="on compute"):
        lanes.op("compute", (back,), (), 1.0)


def test_a_target_that_compute_has_not_given_yet_is_refused() -> None:
    lanes = SimulatedLanes()
    _, host = copy_out(lanes)
    lanes.wait("h2d", lanes.record("d2h"))  # which knows nothing of the allocation that follows
    back = lanes.alloc(MIB, "device", "back")
    with pytest.raises(OrderError, match="alloc back"):
        lanes.op("h2d", (host,), (back,), 1.0)


def test_use_after_free_is_refused() -> None:
    lanes = SimulatedLanes()
    x = lanes.alloc(MIB, "device", "x")
    lanes.free(x)
    with pytest.raises(OrderError, match="after its free"):
        lanes.op("compute", (x,), (), 1.0)


def test_host_bytes_are_not_written_again_under_a_copy_that_reads_them() -> None:
    lanes = SimulatedLanes()
    x, host = copy_out(lanes)
    back = lanes.alloc(MIB, "device", "back")
    lanes.wait("h2d", lanes.record("compute"))
    lanes.wait("h2d", lanes.record("d2h"))
    lanes.op("h2d", (host,), (back,), 1.0)
    host.after = lanes.record("h2d")
    lanes.free(host)
    again = lanes.alloc(MIB, "host", "again")
    assert again.after is host.after  # the arena hands it on
    with pytest.raises(OrderError, match="both use again"):
        lanes.op("d2h", (x,), (again,), 1.0)


def test_what_two_hold_is_gone_after_the_second() -> None:
    lanes = SimulatedLanes()
    x = lanes.alloc(MIB, "device", "x")
    lanes.hold(x)
    lanes.free(x)
    lanes.op("compute", (x,), (), 1.0)
    assert lanes.nbytes == MIB
    lanes.free(x)
    assert lanes.nbytes == 0


def test_an_unknown_lane_is_refused() -> None:
    with pytest.raises(FuseOpsError, match="no lane 'nvlink'"):
        SimulatedLanes().op("nvlink", (), (), 1.0)


# Any program: accesses, events and waits in any order. The oracle is the transitive closure of
# "issued before on the same lane" and "recorded before waited for".
steps = st.lists(
    st.tuples(
        st.sampled_from(["read", "write", "record", "wait"]),
        st.sampled_from(LANES),
        st.integers(0, 2),
    ),
    max_size=24,
)


def first_race(program: list[tuple[str, str, int]]) -> int | None:
    """The first step that conflicts with an unordered earlier one, by brute force."""
    before: list[set[int]] = []  # of each step, all that is over when it begins
    last: dict[str, set[int]] = {lane: set() for lane in LANES}
    events: list[set[int]] = []
    for k, (what, lane, n) in enumerate(program):
        if what == "record":
            events.append(set(last[lane]))
        if what == "wait" and events:
            last[lane] = last[lane] | events[n % len(events)]
        before.append(set(last[lane]))
        if what in ("read", "write"):
            for j in range(k):
                other, _, m = program[j]
                touches = other in ("read", "write") and m == n
                if touches and "write" in (what, other) and j not in before[k]:
                    return k
            last[lane].add(k)
    return None


@given(steps)
def test_law_19_exactly_the_races_are_refused(program: list[tuple[str, str, int]]) -> None:
    lanes = SimulatedLanes()
    buffers = [lanes.alloc(1, "host", str(k)) for k in range(3)]
    events, refused = [], None
    for k, (what, lane, n) in enumerate(program):
        try:
            if what == "record":
                events.append(lanes.record(lane))
            elif what == "wait" and events:
                lanes.wait(lane, events[n % len(events)])
            elif what in ("read", "write"):
                touched = (buffers[n],)
                reads, writes = (touched, ()) if what == "read" else ((), touched)
                lanes.op(lane, reads, writes, 1.0)
        except OrderError:
            refused = k
            break
    assert refused == first_race(program)
