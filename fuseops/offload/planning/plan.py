"""Makes plans: for every saved tensor whether it is kept, offloaded or recomputed, with the reason, and the predicted
cost of the step. A plan is made for a model, or for a step that was profiled.

    plan = offload.plan(model, batch, peak="11GiB")
    print(plan.explain())
    with offload.Scheduler(model, layers=plan.layers, plan=plan): ...
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseops.arguments import (
    as_path,
    check_flags,
    check_integers,
    instance_of,
    parse_bytes,
    several,
)
from fuseops.globs import as_globs
from fuseops.offload.policy import DEFAULT_MIN_BYTES, Policy
from fuseops.offload.schedule import (
    DEFAULT,
    DISPATCH,
    KEEP,
    OFFLOAD,
    QUANTIZE,
    RECOMPUTE,
    LinkSettings,
)
from fuseops.ops import scopes
from fuseops.ops.paths import check_module
from fuseops.ops.permute import Permute
from fuseops.run.config import set_root
from fuseops.words import size

from . import text, trace
from .cost_model import Choice, CostModel
from .hardware import Hardware
from .plan_data import PlanData, PlannedTensor
from .planner import NOTHING, UNLIMITED, Limits, solve
from .profile import Profile, Recompute
from .record import ProfiledStep
from .simulate import Simulation, simulate
from .step import STAGES, dry_run, layers_of, silent
from .step import record as recorded

log = logging.getLogger("fuseops.offload")

LAGS = (2, 3, 4)  # tried where no settings are given
MAX_SAVED_FOR_LAGS = 2000  # with more saved tensors only the lag in the middle is tried
EXCESS_UNIT = 16 << 20  # bytes over the budget are compared in these units
SLOWDOWNS = (
    1.0,
    1.01,
    1.02,
    1.05,
    1.1,
    1.3,
    2.0,
)  # factors for copies, tried until the simulation has no stall
STALL = 1e-6  # seconds that count as no stall
CODED_SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)  # tried shares of the tensors that may be rounded


class OffloadPlan(PlanData):
    """An `OffloadPlan` says what to do with every saved tensor of a step, and what that will cost."""

    def explain(self, every: bool = False, wide: bool = False, width: int = 100) -> str:
        """Budget, prediction, and the tensors of each decision and reason, with their bytes.

        every: one line a tensor; otherwise equal decisions for equal tensors of layers share one.
        wide: when what leaves is on the link, out and back, and how long before it is read.
        width: columns of the text, beside which names of tensors and times may reach.
        """
        check_flags("OffloadPlan.explain", every=every, wide=wide)
        check_integers("OffloadPlan.explain", 1, width=width)
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
        file = as_path(path, "OffloadPlan.save_trace(path)")
        file.write_text(json.dumps(trace.trace(self)), encoding="utf-8")

    def to_html(self) -> str:
        """A page of its own: timeline, bytes, table."""
        from . import html  # for who draws one

        return html.page(self)

    def save_html(self, path: str | Path) -> None:
        """Write `to_html()` to a file."""
        as_path(path, "OffloadPlan.save_html(path)").write_text(self.to_html(), encoding="utf-8")

    def _repr_html_(self) -> str:
        from . import html

        return html.fragment(self)


def plan(
    model: nn.Module,
    *sample: Any,
    hardware: Hardware | None = None,
    peak: int | str | None = None,
    host: int | str | None = None,
    layers: str | Iterable[str] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    record: bool = False,
    split: Sequence[int] | None = None,
    min_bytes: int = DEFAULT_MIN_BYTES,
    policy: Policy | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **side: Any,
) -> OffloadPlan:
    """Plan the offload of one training step of `model(*sample, **side)`.

    hardware   default: this machine's CUDA device, measured; without one the shipped H200
    peak       most bytes on the device, as a number or "11GiB"; None: whatever leaves without a stall
    host       most bytes of host memory for it
    layers     globs of module paths, the units of the schedule; None: the model's largest list
    loss       makes a scalar of the output; None: its `.loss`, or all of it with gradient one
    record     run the step on the device and measure it; default: a dry run on fake tensors, which
               needs neither the GPU nor its memory
    split      of a dry run: rows that data-dependent selections find, in turn
    min_bytes  smaller tensors stay
    policy     what may leave, instead of min_bytes; the rest stays or, for the peak, is made again
    progress   called with what is done now, how many parts are done, and of how many

    Raises FuseOpsError for values of the wrong kind, globs that match nothing, a step without a
    backward, and in a dry run for shapes that depend on data when no split is given.
    """
    check_module("plan(model, ...)", model)
    limits = Limits(
        None if peak is None else parse_bytes(peak, "plan(peak=...)"),
        None if host is None else parse_bytes(host, "plan(host=...)"),
    )
    check_integers("offload.plan", 0, min_bytes=min_bytes)
    instance_of(policy, (Policy, NoneType), "plan(policy=...)", "an offload.Policy")
    instance_of(loss, (Callable, NoneType), "plan(loss=...)", "a function of the output")
    instance_of(progress, (Callable, NoneType), "plan(progress=...)", "a function")
    instance_of(record, bool, "plan(record=...)", "True or False")
    if split is not None:
        split = several(split, object, "plan(split=...)", "numbers of rows")
        for rows in split:
            check_integers("offload.plan", 0, split=rows)
    known = "an offload.Hardware, such as .load(path)"
    instance_of(hardware, (Hardware, NoneType), "plan(hardware=...)", known)
    globs = None if layers is None else as_globs(layers, "plan(layers=...)")
    if hardware is None:
        hardware = _this_machine() if torch.cuda.is_available() else Hardware.h200()
    units = layers_of(model, globs)
    set_root(model)  # its names stay absolute; what the step itself leaves does not stay
    step = ProfiledStep(model, sample, side, units, loss, policy or Policy(min_bytes=min_bytes))
    notify = progress or silent
    profile = recorded(step, notify) if record else dry_run(step, hardware, split)
    notify("choosing what leaves", STAGES - 1, STAGES)
    found = plan_profile(profile, hardware, limits, layers=globs or tuple(units.values()))
    return found if record else replace(found, lean=_peak_preferring_memory(found, step, split))


def _peak_preferring_memory(
    found: OffloadPlan, step: ProfiledStep, split: Sequence[int] | None
) -> int:
    """The peak of a dry run that prefers memory; 0 where the budget is met without it, or it is no lower."""
    peak, hardware = found.limits.peak, found.hardware
    chooses = any(isinstance(op, Permute) for op in step.model.modules())
    if peak is None or found.before.peak <= peak or not chooses:
        return 0
    with scopes.scope((("prefer", "memory"),)):
        other = simulate(dry_run(step, hardware, split), (), hardware, found.settings)
    return other.peak if other.peak < found.before.peak else 0


@functools.cache
def _this_machine() -> Hardware:
    return Hardware.measure()


def plan_profile(
    profile: Profile,
    hardware: Hardware,
    limits: Limits = UNLIMITED,
    settings: LinkSettings | None = None,
    *,
    layers: tuple[str, ...] = (),
) -> OffloadPlan:
    """Plan for an existing profile.   settings: default: those with the best of several lags"""
    lags = LAGS if len(profile.saved) <= MAX_SAVED_FOR_LAGS else LAGS[1:2]
    tried = [DEFAULT._replace(lag=lag) for lag in lags] if settings is None else [settings]
    planners = [_Planner(profile, hardware, limits, each) for each in tried]
    best, planner = min(
        ((planner.solve(), planner) for planner in planners), key=lambda found: found[0].cost
    )
    return planner.plan(best, layers)


def plan_with_dropped(plan: OffloadPlan, dropped: Collection[tuple[str, str]]) -> OffloadPlan:
    """The plan that recomputes these groups too, or instead of others.   dropped: (kind, name) of each"""
    profile = plan.profile
    planner = _Planner(profile, plan.hardware, plan.limits, plan.settings)
    coded = frozenset(t.name for t in plan.tensors if t.decision == QUANTIZE)
    model = planner.model(coded)
    groups = [*enumerate(profile.recompute)]
    drop = {g for g, group in groups if (group.kind, group.name) in dropped}
    conflicts = frozenset[int]().union(*(model.conflicts[g] for g in drop))
    drop |= {g for g, group in groups if group in plan.dropped and g not in conflicts}
    gone = frozenset[int]().union(*(model.members[g] for g in drop))
    leaves = {k for k, t in enumerate(plan.tensors) if t.decision in (OFFLOAD, QUANTIZE)}
    leave = {n for n, saved in enumerate(model.items) if n not in gone and leaves & {*saved}}
    solved = planner.run(model, Choice(frozenset(leave), frozenset(drop)))
    return planner.plan(solved._replace(free=plan.free), plan.layers)


HOW_REGENERATED = {
    "module": "with its whole layer",
    "op": "by its op",
    "dispatch": "sent again to its experts",
}
"""By the kind of a recomputed group, for the reason."""


class _Simulated(NamedTuple):
    """A `_Simulated` is a choice with the simulation of its step by the schedule.

    cost  compared in order: excess over the budget, seconds, bytes moved (the peak where there is no budget), and the
          negative lag, as a greater lag leaves more time for copies
    free  bytes that could be offloaded without a stall
    """

    model: CostModel
    choice: Choice
    after: Simulation
    cost: tuple[float, ...]
    free: int = 0


class _Planner(NamedTuple):
    """A `_Planner` plans one profile: it searches with a cost model, and compares results by simulation."""

    profile: Profile
    hardware: Hardware
    limits: Limits
    settings: LinkSettings

    def model(self, coded: frozenset[str] = frozenset(), slower: float = 1.0) -> CostModel:
        """The cost model of the search, with copies that take `slower` times as long."""
        return CostModel(self.profile, self.hardware.slower(slower), self.settings, coded)

    def run(self, model: CostModel, choice: Choice) -> _Simulated:
        """Simulate the step under a choice."""
        leave = [k for item in choice.leave for k in model.items[item]]
        after = simulate(
            *(self.profile, leave, self.hardware, self.settings),
            recompute=choice.drop,
            coded=model.coded,
        )
        excess = self.limits.excess(after.peak, after.host)
        nbytes = after.peak if self.limits.peak is None else after.moved
        cost = (-(-excess // EXCESS_UNIT), round(after.seconds, 5), nbytes, -self.settings.lag)
        return _Simulated(model, choice, after, cost)

    # --- choosing

    def solve(self) -> _Simulated:
        """The best choice that was found."""
        found = free = self._solve_stall_free()
        if self.limits.peak is not None:
            found = self._solve_within(frozenset())
            if free.after.peak <= self.limits.peak:
                found = min(found, free, key=lambda s: s.cost)
            found = self._try_codes(found)
        return found._replace(free=free.after.moved)

    def _try_codes(self, exact: _Simulated) -> _Simulated:
        """Try to offload shares of the tensors that may be rounded as codes, evenly over the step.   -> the best, which
        may be `exact`
        """
        names = list(dict.fromkeys(saved.name for saved in self.profile.saved if saved.codes))
        found = exact
        stalls = exact.after.seconds > self.profile.seconds + STALL
        for share in CODED_SHARES if names and stalls else ():
            count = max(1, round(share * len(names)))
            some = frozenset(names[len(names) * n // count] for n in range(count))
            found = min(found, self._solve_within(some), key=lambda s: s.cost)
        return found

    def _solve_stall_free(self) -> _Simulated:
        """Offload all that causes no stall by the simulation, which, other than the cost model, knows that copies in
        both directions at once are slower.
        """
        for slower in SLOWDOWNS:
            model = self.model(slower=slower)
            found = self.run(model, solve(model, Limits(None, self.limits.host)).choice)
            if found.after.stall <= STALL:
                return found
        return self.run(model, NOTHING)

    def _solve_within(self, coded: frozenset[str]) -> _Simulated:
        """The least stall within the limits, with the names in `coded` as codes. When bundles exceed the predicted
        peak, the budget is lowered by that.
        """
        model = self.model(coded)
        peak = budget = self.limits.peak or 0
        for _ in range(3):
            solution = solve(model, Limits(max(budget, 0), self.limits.host))
            found = self.run(model, solution.choice)
            if found.after.peak <= peak or not solution.fits:
                break
            budget -= found.after.peak - peak
        return found

    # --- the plan

    def plan(self, solved: _Simulated, layers: tuple[str, ...]) -> OffloadPlan:
        """The plan of a solved choice, with a reason for every saved tensor."""
        profile, model = self.profile, solved.model
        dropped = [profile.recompute[g] for g in sorted(solved.choice.drop)]
        result = OffloadPlan(
            *(profile, self.hardware, self.settings, self.limits),
            tuple(self._planned(solved)),
            simulate(profile, (), self.hardware, self.settings),
            solved.after,
            free=solved.free,
            layers=layers,
            dropped=tuple(dropped),
        )
        warnings = tuple(_warnings(result, model))
        for warning in warnings:
            log.info("%s: %s", profile.model, warning)
        return replace(result, warnings=warnings)

    def _planned(self, solved: _Simulated) -> Iterator[PlannedTensor]:
        profile = self.profile
        dropped = {
            k: profile.recompute[g] for g in solved.choice.drop for k in profile.recompute[g].saved
        }
        for k, saved in enumerate(profile.saved):
            decision, reason = self._decision(solved, k, dropped.get(k))
            layer = profile.calls[saved.call].layer if saved.call >= 0 else ""
            yield PlannedTensor(
                *(saved.name, saved.op, layer, saved.nbytes, saved.shape, saved.dtype),
                *(decision, reason, solved.after.windows.get(k)),
            )

    def _decision(self, solved: _Simulated, k: int, group: Recompute | None) -> tuple[str, str]:
        """The decision for a saved storage, and its reason.   group: with which it is recomputed, if it is"""
        model, after, saved = solved.model, solved.after, self.profile.saved[k]
        if group is not None:
            decision = DISPATCH if group.kind == "dispatch" else RECOMPUTE
            return decision, f"{HOW_REGENERATED[group.kind]}, {group.seconds * 1e3:.2f} ms"
        if model.of_saved.get(k) in solved.choice.leave:
            if k in after.kept_reasons:
                return KEEP, after.kept_reasons[k]
            if saved.codes and saved.name in model.coded:
                share = saved.codes / saved.nbytes
                return QUANTIZE, f"leaves as float8 codes, {share:.3f} of its bytes"
            window = after.windows.get(k)
            free = window is not None and window.slack >= 0
            return OFFLOAD, "the link has room" if free else "the peak needs it"
        if saved.why is not None:
            return KEEP, saved.why
        if k not in model.of_saved:
            return KEEP, model.immovable.get(k, "its layer has no backward")
        spare = "the link has no more room", "not needed for the peak"
        return KEEP, spare[self.limits.peak is not None]


def _warnings(plan: OffloadPlan, model: CostModel) -> Iterator[str]:
    before, after = plan.before, plan.after
    peak, host = plan.limits.peak, plan.limits.host
    if peak is not None and after.peak > peak:
        yield (
            f"does not fit: the lowest predicted peak is {size(after.peak)} {plan.owner(after)}, "
            f"and {size(peak)} were asked for"
        )
    if host is not None and after.host > host:
        yield f"needs {size(after.host)} of host memory, and {size(host)} were given"
    items, groups = model.covers(before.peak_position)
    if any(not saved.nbytes for saved in plan.profile.saved) and not model.items:
        yield "nothing that the layers save can leave; what is kept below has the reasons"
    elif not items and not groups:
        yield (
            f"offloading cannot lower the peak: it stands {plan.owner(before)}, where "
            "nothing that could leave is away"
        )
    elif after.moved and after.peak >= before.peak:
        yield (
            f"does not lower the peak: {size(after.peak)} {plan.owner(after)}, where what comes back "
            "is on the device again"
        )
