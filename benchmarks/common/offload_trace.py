"""What a trace of steps with offload says of the stream that computes: where it stood still and for what, and how long
the GPU takes from one kernel to the next while large copies run.
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

LARGE = 1 << 20  # bytes of a copy that is offload's
FOLLOWS = 20.0  # microseconds: what begins so soon after a copy waited for it
LINK = {"DtoH": "out", "HtoD": "back"}
Event = dict[str, Any]


class Span(NamedTuple):
    """Something that the device did, in microseconds."""

    begin: float
    end: float
    launched: float


class Trace:
    """The device's part of a trace: spans of the stream with most of the kernels' time, and large copies by way."""

    def __init__(self, events: Iterable[Event]) -> None:
        events = [e for e in events if "dur" in e]
        of_host = ("cuda_runtime", "cuda_driver")
        launches = [e for e in events if e.get("cat") in of_host]
        self._launched = {e["args"].get("correlation"): e["ts"] for e in launches}
        device = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
        of_stream: dict[Any, float] = defaultdict(float)
        for e in device:
            of_stream[e["args"]["stream"]] += e["dur"] * (e["cat"] == "kernel")
        main = max(of_stream, key=lambda stream: of_stream[stream])
        self.computed = self._spans(e for e in device if e["args"]["stream"] == main)
        aside = [e for e in device if e["args"]["stream"] != main]
        large = {way: [e for e in aside if _large(e, kind)] for kind, way in LINK.items()}
        self.sent = {way: sum(e["args"]["bytes"] for e in copies) for way, copies in large.items()}
        self.copies = {way: self._spans(copies) for way, copies in large.items()}

    def _spans(self, events: Iterable[Event]) -> list[Span]:
        launches = ((e, self._launched.get(e["args"].get("correlation"), 0.0)) for e in events)
        return sorted(Span(e["ts"], e["ts"] + e["dur"], launched) for e, launched in launches)

    def found(self, steps: int) -> dict[str, float]:
        """Of a step, on average: ms, those in which nothing was computed, those of them in which the host had not
        launched what came next, and those until a large copy had ended. GB/s of these copies. And the median of
        microseconds from one kernel to the next where nothing else is waited for: with no copy, and beside copies.
        """
        waits = list(self._waits())
        ends = sorted(copy.end for copies in self.copies.values() for copy in copies)
        whole = self.computed[-1].end - self.computed[0].begin
        idle = sum(later.begin - end for end, later in waits)
        late = sum(max(min(later.begin, later.launched) - end, 0.0) for end, later in waits)
        behind = sum(_until_one_of(ends, end, later) for end, later in waits)
        times = {"ms": whole, "idle_ms": idle, "host_late_ms": late, "behind_copies_ms": behind}
        found = {name: us / 1e3 / steps for name, us in times.items()}
        for way, copies in self.copies.items():
            took = sum(copy.end - copy.begin for copy in copies)
            found[f"{way}_gb_s"] = self.sent[way] / took / 1e3 if took else 0.0
        return found | self._between(waits)

    def _waits(self) -> Iterable[tuple[float, Span]]:
        """(when all before it had ended, what began later)"""
        end = self.computed[0].end
        for span in self.computed[1:]:
            if span.begin > end:
                yield end, span
            end = max(end, span.end)

    def _between(self, waits: list[tuple[float, Span]]) -> dict[str, float]:
        """Kernels that were launched in time and follow at once."""
        beside = defaultdict[str, list[float]](list)
        for end, later in waits:
            if later.launched < end - FOLLOWS and later.begin - end < FOLLOWS:
                ways = (way for way in self.copies if self._runs(way, later.begin))
                beside["_and_".join(ways) or "nothing"].append(later.begin - end)
        return {f"us_beside_{way}": statistics.median(us) for way, us in beside.items()}

    def _runs(self, way: str, when: float) -> bool:
        """Whether a copy does: one after another, they end in the order in which they begin."""
        at = bisect.bisect_right(self.copies[way], (when, float("inf"))) - 1
        return at >= 0 and when <= self.copies[way][at].end


def _large(e: Event, kind: str) -> bool:
    return e["cat"] == "gpu_memcpy" and kind in e["name"] and e["args"].get("bytes", 0) >= LARGE


def _until_one_of(ends: list[float], end: float, later: Span) -> float:
    """Microseconds of a wait that a large copy ended."""
    at = bisect.bisect_right(ends, later.begin) - 1
    last = ends[at] if at >= 0 else 0.0
    if last <= end or later.begin - last > FOLLOWS or later.launched > last:
        return 0.0
    return later.begin - max(end, later.launched)
