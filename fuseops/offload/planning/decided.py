"""A plan: for every saved tensor whether it stays, leaves or is made again, with the reason, and what
the step will cost.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fuseops.offload.schedule import DISPATCH, OFFLOAD, QUANTIZE, RECOMPUTE
from fuseops.words import size

from . import html, text, trace
from .hardware import Hardware
from .planner import Limits
from .profile import Profile, Recompute
from .simulate import LinkSettings, Simulation, Window


class PlannedTensor(NamedTuple):
    """The decision for one saved tensor.

    window  when its bytes leave and come back, None if they do not
    """

    name: str
    op: str
    layer: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    decision: str
    reason: str
    window: Window | None = None


@dataclass(frozen=True, repr=False)
class OffloadPlan:
    """What to do with every saved tensor of a step, and what that will cost.

    tensors     one entry a saved storage, in save order
    before      the step with nothing moved; after: under this plan
    free        bytes that can leave without a stall, as the simulation says: without a budget the
                plan moves them all, and one that a budget of that peak keeps costs no time
    dropped     what is made again
    lean        peak of the step, nothing moved, if the model preferred memory (`fo.configure`); 0 where that is not
                lower than `before.peak`, or the budget is not
    warnings    what the plan cannot do
    """

    profile: Profile
    hardware: Hardware
    settings: LinkSettings
    limits: Limits
    tensors: tuple[PlannedTensor, ...]
    before: Simulation
    after: Simulation
    free: int = 0
    lean: int = 0
    warnings: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    dropped: tuple[Recompute, ...] = ()

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Layers that are recomputed as a whole."""
        return tuple(group.name for group in self.dropped if group.kind == "module")

    @cached_property
    def decisions(self) -> dict[str, str]:
        """Name -> "keep", "offload", "quantize", "recompute" or "dispatch", for everything that could move.

        Of several micro-batches: what leaves in one leaves, and the schedule keeps it again where it is read too soon.
        """
        could = [t for t in self.tensors if t.layer and t.nbytes]
        leave = {t.name: t.decision for t in could if t.decision in (OFFLOAD, QUANTIZE)}
        return {t.name: leave.get(t.name, t.decision) for t in could}

    @property
    def fits(self) -> bool:
        """Whether the predicted peak and host bytes are within the limits."""
        return not self.limits.excess(self.after.peak, self.after.host)

    @property
    def assumed(self) -> tuple[str, ...]:
        """What the prediction rests on without having been seen."""
        return self.profile.assumed

    def bytes_of(self, decision: str) -> int:
        """Bytes of all tensors with that decision."""
        return sum(t.nbytes for t in self.tensors if t.decision == decision)

    def owner(self, simulation: Simulation) -> str:
        """Where the peak of a simulation stands."""
        return self.profile.owner_at(simulation.peak_position)

    # --- pages and files

    def explain(self, every: bool = False, wide: bool = False, width: int = 100) -> str:
        """Budget, prediction, and the tensors of each decision and reason, with their bytes.

        every: one line a tensor; otherwise equal decisions for equal tensors of layers share one.
        wide: when what leaves is on the link, out and back, and how long before it is read.
        width: columns of the text, beside which names of tensors and times may reach.
        """
        return text.report(self, every, wide, width)

    __str__ = explain

    def __repr__(self) -> str:
        return (
            f"OffloadPlan({self.profile.model}, offload {size(self.bytes_of(OFFLOAD) + self.bytes_of(QUANTIZE))}, "
            f"recompute {size(self.bytes_of(RECOMPUTE))}, dispatch {size(self.bytes_of(DISPATCH))}, "
            f"peak {size(self.before.peak)} -> {size(self.after.peak)})"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data with a schema_version."""
        return text.as_json(self)

    def save_trace(self, path: str | Path) -> None:
        """A timeline for chrome://tracing or ui.perfetto.dev: the lanes, and bytes on the device."""
        Path(path).write_text(json.dumps(trace.trace(self)), encoding="utf-8")

    def to_html(self) -> str:
        """A page of its own: timeline, bytes, table."""
        return html.page(self)

    def save_html(self, path: str | Path) -> None:
        """Write `to_html()` to a file."""
        Path(path).write_text(self.to_html(), encoding="utf-8")

    def _repr_html_(self) -> str:
        return html.fragment(self)
