"""The data of a plan: the decision for each saved tensor, and the step before and after."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, get_args

from fuseops.arguments import is_one_of, shown
from fuseops.errors import FuseOpsError
from fuseops.offload.schedule import OFFLOAD, QUANTIZE, Decision, LinkSettings

from .hardware import Hardware
from .planner import Limits
from .profile import Profile, Recompute
from .simulate import Simulation, Window


class PlannedTensor(NamedTuple):
    """A `PlannedTensor` is the decision for one saved tensor.

    window  the times of its copies, None if it is not offloaded
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
class PlanData:
    """A `PlanData` says what to do with every saved tensor of a step, and what that will cost.

    tensors     one entry for each saved storage, in save order
    before      the step with nothing moved; after: under this plan
    free        bytes that can be offloaded without a stall, by simulation; without a budget the plan moves them all
    dropped     groups that are recomputed
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

        A tensor that is offloaded in one of several micro-batches is so here; the schedule keeps it where it is read
        too soon.
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
        """The assumptions behind the prediction, in words."""
        return self.profile.assumed

    def bytes_of(self, decision: str) -> int:
        """Bytes of all tensors with that decision.  Raises FuseOpsError for a word that is none."""
        if not is_one_of(decision, get_args(Decision)):
            known = ", ".join(get_args(Decision))
            raise FuseOpsError(f"bytes_of(decision) expects one of {known}, got {shown(decision)}.")
        return sum(t.nbytes for t in self.tensors if t.decision == decision)

    def owner(self, simulation: Simulation) -> str:
        """The layer and direction at the peak of a simulation."""
        return self.profile.owner_at(simulation.peak_position)
