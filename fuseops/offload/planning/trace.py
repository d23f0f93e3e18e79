"""A plan's step as a Chrome trace: compute, copies out and back, stalls, and bytes on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from .decided import Decided
from .profile import Profile
from .simulate import Simulation

LANES = {"layers": 1, "compute": 2, "d2h": 3, "h2d": 4, "network": 5}
TITLES = {lane: lane for lane in LANES} | {"d2h": "D2H", "h2d": "H2D"}


class TraceSpan(NamedTuple):
    """A `TraceSpan` is the forward or backward of one call of a layer, in seconds of the simulated step."""

    title: str
    way: str
    start: float
    end: float


def spans(profile: Profile, simulation: Simulation) -> Iterator[TraceSpan]:
    """What the layers did when: until the next boundary for a backward, until it left for a forward."""
    at = [level.seconds for level in simulation.levels] + [simulation.seconds]
    boundaries = profile.boundaries
    for boundary, following in zip(boundaries, [*boundaries[1:], None], strict=True):
        call = profile.calls[boundary.which]
        way = "forward" if boundary.what == "enter" else "backward"
        end = len(profile.ops) if following is None else following.position
        if way == "forward":
            end = min(end, call.leave)
        if end > boundary.position:
            yield TraceSpan(call.layer, way, at[boundary.position], at[end])


def trace(plan: Decided) -> dict[str, Any]:
    """The JSON object format of Chrome traces; times in microseconds."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {"model": plan.profile.model, "hardware": plan.hardware.name},
        "traceEvents": [*_names(plan.profile), *_events(plan)],
    }


def _names(profile: Profile) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "offload plan"}}
    for lane, tid in LANES.items():
        if lane == "network" and not profile.network:
            continue
        name = {"name": TITLES[lane]}
        yield {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": name}
        sort = {"sort_index": tid}
        yield {"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": sort}


def _events(plan: Decided) -> Iterator[dict[str, Any]]:
    after = plan.after
    for span in spans(plan.profile, after):
        yield _slice("layers", f"{span.way} {span.title}", span.start, span.end)
    for busy in after.busy:
        args = {"bytes": busy.nbytes} if busy.lane in ("d2h", "h2d") else {}
        yield _slice(busy.lane, busy.name, busy.start, busy.end, **args)
    for wait in after.stalls:
        yield _slice("compute", f"stall: waits for {wait.what}", wait.start, wait.end, on=wait.on)
    for name, simulation in (("planned", after), ("nothing moved", plan.before)):
        for level in simulation.levels:
            yield {
                "ph": "C",
                "pid": 1,
                "name": f"bytes on the device, {name}",
                "ts": level.seconds * 1e6,
                "args": {"bytes": level.nbytes},
            }


def _slice(lane: str, name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": 1,
        "tid": LANES[lane],
        "name": name,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "args": args,
    }
