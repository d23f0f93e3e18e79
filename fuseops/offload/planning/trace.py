"""A plan's step as a Chrome trace: compute, copies out and back, stalls, and bytes on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fuseops.offload.lanes.simulated import Busy

from .plan_data import PlanData

TITLES = {
    "layers": "layers",
    "compute": "compute",
    "d2h": "D2H",
    "h2d": "H2D",
    "network": "network",
}
LANES = {lane: number for number, lane in enumerate(TITLES, 1)} | {"stalls": 2}  # of compute


def intervals(plan: PlanData) -> Iterator[Busy]:
    """What every lane does, beside "layers" and "stalls". A layer's backward ends at the next boundary, its forward at
    its end or the next boundary.
    """
    profile, after = plan.profile, plan.after
    at = [level.seconds for level in after.levels] + [after.seconds]
    boundaries = profile.boundaries
    for boundary, following in zip(boundaries, [*boundaries[1:], None], strict=True):
        call = profile.calls[boundary.which]
        end = len(profile.ops) if following is None else following.position
        if boundary.what == "forward":
            end = min(end, call.leave)
        if end > boundary.position:
            name = f"{boundary.what} {call.layer}"
            yield Busy("layers", name, at[boundary.position], at[end])
    yield from after.busy
    for wait in after.stalls:
        yield Busy("stalls", f"waits for {wait.what} on {wait.on}", wait.start, wait.end)


def trace(plan: PlanData) -> dict[str, Any]:
    """The JSON object format of Chrome traces; times in microseconds."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {"model": plan.profile.model, "hardware": plan.hardware.name},
        "traceEvents": [*_names(plan), *_events(plan)],
    }


def _names(plan: PlanData) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "offload plan"}}
    for lane, title in TITLES.items():
        if lane == "network" and not plan.profile.network:
            continue
        event = {"ph": "M", "pid": 1, "tid": LANES[lane]}
        yield event | {"name": "thread_name", "args": {"name": title}}
        yield event | {"name": "thread_sort_index", "args": {"sort_index": LANES[lane]}}


def _events(plan: PlanData) -> Iterator[dict[str, Any]]:
    for piece in intervals(plan):
        yield {
            "ph": "X",
            "pid": 1,
            "tid": LANES[piece.lane],
            "name": piece.name,
            "ts": piece.start * 1e6,
            "dur": (piece.end - piece.start) * 1e6,
            "args": {"bytes": piece.nbytes} if piece.nbytes else {},
        }
    for name, simulation in (("planned", plan.after), ("nothing moved", plan.before)):
        for level in simulation.levels:
            yield {
                "ph": "C",
                "pid": 1,
                "name": f"bytes on the device, {name}",
                "ts": level.seconds * 1e6,
                "args": {"bytes": level.nbytes},
            }
