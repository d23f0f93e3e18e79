"""The scheduler: attaches to the layers of a model, whose code stays as it is."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import NoneType, TracebackType
from typing import Any, Self, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fuseops import torch_private
from fuseops.arguments import check_integers, instance_of, parse_bytes
from fuseops.errors import FuseOpsError
from fuseops.globs import as_globs
from fuseops.observe import modules
from fuseops.observe.labels import matching_modules
from fuseops.observe.memory import tensors_in
from fuseops.ops.op import Op
from fuseops.ops.paths import check_module
from fuseops.run.composed import Composed
from fuseops.torch_private import pytree
from fuseops.words import plural

from .lanes.devices import make_lanes
from .layers import EntryHook, Hook, InterruptGuard, LayerScope
from .nesting import belongs_to_checkpoint
from .planning.hardware import Hardware
from .planning.plan import OffloadPlan, plan
from .planning.recompute import process_groups_of
from .planning.together import (
    check_same_decisions,
    gather_on_machine,
    share_decisions,
    share_host,
)
from .policy import Policy
from .recompute import RecomputedForward
from .records import Mover
from .report import MISSED, Entry, Report
from .schedule import DEFAULT, DISPATCH, RECOMPUTE, REGENERATED, Decision, LayerRun, Schedule

log = logging.getLogger("fuseops.offload")

UNFUSED = "runs unfused: hooks on an op end its fusion with those around it; take their Sequential as a layer"
NOT_CALLED = "not called, or only inside a compiled region, which runs no hooks: compile the layers"


class Scheduler:
    """A `Scheduler` moves what the layers of a model save to the host, and back before their backward.

        with offload.Scheduler(model, layers="blocks.*") as scheduler:
            for batch in data:
                model(batch).backward()

    layers   globs of module paths: the units of the schedule. What is saved outside them stays
    policy   what moves; default: everything of 1 MiB or more, or, with a plan, nothing more
    plan     a plan, or decisions by name: "keep", "offload" or "quantize" (as float8 codes) for a saved tensor,
             "recompute" for one that its op declares it can do without, or for a layer by its path, "dispatch" for
             tokens that arrived at experts over ranks, which are sent again in the backward. What ranks that share
             experts recompute and dispatch again is the same on all of them (`share_decisions`)
    peak     most bytes on the device: the first forward is recorded and planned for that, with what
             `policy` lets leave; instead of `plan`
    hardware for that plan, with `peak` alone; default: this machine's, measured
    host     most bytes of host memory, as a number or a string such as "64GiB"; beyond it tensors stay
    group    `host` is what all ranks of it on one machine have together: equal parts, or with `peak` by what their
             plans need; and they plan for copies while all of them copy. Every rank makes a scheduler then
    lag      how many layers later the device bytes are released; default: what the plan was made for, or 2
    ahead    how many layers before their backward they are reloaded
    manual   nothing moves but by offload_layer, release_layer and reload_layer

    Raises FuseOpsError for a value of the wrong kind, and when a glob matches no module; the first forward raises it
    for layers on several GPUs.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: str | Iterable[str],
        *,
        policy: Policy | None = None,
        plan: OffloadPlan | Mapping[str, str] | None = None,
        peak: int | str | None = None,
        host: int | str | None = None,
        group: dist.ProcessGroup | None = None,
        hardware: Hardware | None = None,
        lag: int | None = None,
        ahead: int = 1,
        manual: bool = False,
    ) -> None:
        check_module("Scheduler(model, ...)", model)
        instance_of(policy, (Policy, NoneType), "Scheduler(policy=...)", "an offload.Policy")
        instance_of(
            hardware, (Hardware, NoneType), "Scheduler(hardware=...)", "an offload.Hardware"
        )
        instance_of(manual, bool, "Scheduler(manual=...)", "True or False")
        instance_of(group, (dist.ProcessGroup, NoneType), "Scheduler(group=...)", "a process group")
        if lag is not None:
            check_integers("Scheduler", 0, lag=lag)
        check_integers("Scheduler", 1, ahead=ahead)
        self.model = model
        self.layers = matching_modules(model, as_globs(layers, "Scheduler(layers=...)"))
        self.policy = Policy() if policy is None and plan is None and peak is None else policy
        self.plan = plan
        self._check_regenerated()
        self._peak = None if peak is None else parse_bytes(peak, "Scheduler(peak=...)")
        if self._peak is not None and (plan is not None or manual):
            raise FuseOpsError("Scheduler(peak=...) plans by itself: leave out plan= and manual=.")
        if self._peak is None and hardware is not None:
            raise FuseOpsError(
                "Scheduler(hardware=...) is what it plans for, and only with peak= it plans: give both, or a plan= "
                "that offload.plan(..., hardware=...) made."
            )
        self._hardware = hardware
        self._host = None if host is None else parse_bytes(host, "Scheduler(host=...)")
        self._group = group
        if group is not None and self._host is not None and self._peak is None:
            ranks, _ = gather_on_machine(self._host, group)
            self._host //= len(ranks)
        self._lag, self._ahead, self._manual = lag, ahead, manual
        paths = {id(module): path for path, module in self.layers.items()}
        self._scope = LayerScope(model, paths, self.policy, self._make_mover)
        self._hooks: list[RemovableHandle | InterruptGuard] = []
        self._recomputed: list[RecomputedForward] = []

    def _check_regenerated(self) -> None:
        """Raise FuseOpsError for an invalid plan, and for recomputation or dispatch outside of the layers."""
        user_decisions = {} if isinstance(self.plan, OffloadPlan) else decisions_of(self.plan)
        inside = tuple(f"{path}." for path in self.layers)
        for name, decision in user_decisions.items():
            is_layer = decision == RECOMPUTE and name in self.layers
            if decision in REGENERATED and not is_layer and not name.startswith(inside):
                raise FuseOpsError(
                    f"plan={{{name!r}: {decision!r}}}: this is no tensor of a layer"
                    f"{', nor a layer' * (decision == RECOMPUTE)}. The layers are {', '.join(self.layers)}."
                )

    def __repr__(self) -> str:
        where = "attached" if self._hooks else "detached"
        return f"<offload.Scheduler of {type(self.model).__name__}, {plural(len(self.layers), 'layer')}, {where}>"

    def __reduce__(self) -> Any:
        raise FuseOpsError(
            "an offload.Scheduler is not copied or pickled: its hooks are on one model, its buffers in one process. "
            "Keep it outside of the model, and make one for the copy."
        )

    def _make_mover(self, inputs: Any = ()) -> Mover:
        lanes = make_lanes(self._device(inputs), self._host)
        settings = DEFAULT._replace(lag=self.lag, ahead=self._ahead)
        schedule = Schedule(lanes, settings, manual=self._manual)
        return Mover(schedule, lanes)

    def _device(self, inputs: Any) -> torch.device:
        """The device that saved tensors leave: the GPU of the layers, or the CPU.

        inputs: of the layer that runs first. They tell the GPU where parameters are kept on the CPU between forwards
        """
        found = {p.device: path for path, m in self.layers.items() for p in m.parameters()}
        gpus = {device: path for device, path in found.items() if device.type == "cuda"}
        if len(gpus) > 1:
            where = ", ".join(f"{path} on {device}" for device, path in gpus.items())
            raise FuseOpsError(
                f"{self!r}: its layers are on several GPUs ({where}), and a scheduler moves tensors of one: make one "
                "for the layers of each."
            )
        others = (t.device for t in (*tensors_in(inputs), *self.model.parameters()) if t.is_cuda)
        return next(iter(gpus), None) or next(others, torch.device("cpu"))

    @property
    def lag(self) -> int:
        """How many layers later the device bytes are released."""
        if self._lag is not None:
            return self._lag
        return self.plan.settings.lag if isinstance(self.plan, OffloadPlan) else DEFAULT.lag

    @property
    def _decisions(self) -> Mapping[str, Decision]:
        return decisions_of(self.plan)

    # --- attaching

    def attach(self) -> Self:
        """Put the hooks on the layers.  Raises FuseOpsError when they are there already."""
        if self._hooks:
            raise FuseOpsError("this scheduler is attached already; detach it first.")
        modules.install()
        if self._peak is None:
            self._apply_plan()
        else:
            # ahead of FSDP2's hook: the steps of a plan would free what it gathers
            first = EntryHook(self.make_plan)
            self._hooks.append(
                self.model.register_forward_pre_hook(first, prepend=True, with_kwargs=True)
            )
        for module in self.layers.values():
            enter, leave = EntryHook(self._scope.enter), Hook(self._scope.leave)
            self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
            self._hooks.append(module.register_forward_hook(leave, always_call=True))
            self._hooks.append(InterruptGuard(self._scope, module))
        return self

    def _apply_plan(self) -> None:
        """Use the plan from here on."""
        decisions = self._decisions
        layers = self.plan.recomputed if isinstance(self.plan, OffloadPlan) else ()
        recomputed = [
            path for path in self.layers if path in layers or decisions.get(path) == "recompute"
        ]
        if self.plan is not None:
            sent = [name for name, decision in decisions.items() if decision == DISPATCH]
            whole = [path for path in recomputed if process_groups_of(self.layers[path])]
            check_same_decisions([*whole, *sent], self.model)
        self._scope.apply_plan(decisions, recomputed, self.lag)
        self._recomputed += [RecomputedForward(path, self.layers[path]) for path in recomputed]

    def make_plan(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook before the first training forward: plan a step with its arguments. It is recorded, or run dry where
        it runs out of device memory.
        """
        if self._peak is None or self._scope.paused or not torch.is_grad_enabled():
            return  # made already, being made, or in an evaluation
        if belongs_to_checkpoint(torch_private.top_saved_tensor_hooks()):
            raise FuseOpsError(
                f"offload.Scheduler(peak=...): the first training forward of {type(model).__name__} runs in a "
                "checkpoint around all of it, which saves nothing that a plan could move. Checkpoint its layers "
                "instead, or leave peak out."
            )
        if self._group is not None and self._hardware is None and torch.cuda.is_available():
            self._hardware = Hardware.measure(self._group)
        args, kwargs = pytree.tree_map_only(Tensor, _detached, (args, kwargs))
        make_plan = partial(
            plan,
            self.model,
            *args,
            layers=tuple(self.layers),
            peak=self._peak,
            host=self._host,
            hardware=self._hardware,
            policy=self.policy,
            **kwargs,
        )
        self._scope.paused = True
        try:
            try:
                self.plan = make_plan(record=True)
            except torch.OutOfMemoryError:
                self.plan = make_plan()
        finally:
            self._scope.paused = False
        if self._group is not None and self._host is not None:
            self.plan = share_host(self.plan, self._group)
            self._host = self.plan.limits.host
        for group in process_groups_of(self.model):
            self.plan = share_decisions(self.plan, group)
        if not self.plan.fits:
            log.warning("%r: its plan %s", self, "; ".join(self.plan.warnings))
        self._peak = None
        self._apply_plan()

    def detach(self) -> None:
        """Remove the hooks, and release what is being offloaded. Graphs that exist can still run backward."""
        if self._hooks:
            modules.uninstall()
        while self._hooks:
            self._hooks.pop().remove()
        while self._recomputed:
            self._recomputed.pop().remove()
        self._scope.close()

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.detach()
        if error is None:
            self._check_names()

    def _check_names(self) -> None:
        """Raise FuseOpsError where globs of the policy, or names of users' decisions, matched no saved tensor."""
        decisions = () if isinstance(self.plan, OffloadPlan) else self._decisions.items()
        names = [name for name, decision in decisions if decision not in REGENERATED]
        if self.policy is None and not names:
            return
        # entries without a dtype are layers
        saved = [e for e in self._scope.report().entries if e.dtype is not None]
        seen = {name for e in saved for name in (e.name, *e.also)}
        if self.policy is not None:
            self.policy.check(seen)
        wrong = [name for name in names if name not in seen]
        if seen and wrong:
            raise FuseOpsError(
                f"the plan's names {wrong} matched no saved tensor. Names are such as {sorted(seen)[:3]}; "
                "scheduler.report() lists all."
            )

    # --- by hand

    def offload_layer(self, layer: str | LayerRun) -> LayerRun:
        """Start to copy out what a call of a layer saved. layer: a path, which means its newest call,
        or what this returned.
        """
        return self._run_by_hand(Schedule.offload, layer, newest=True)

    def release_layer(self, layer: str | LayerRun) -> LayerRun:
        """Release the device bytes that `offload_layer` copied. A path means the newest call."""
        return self._run_by_hand(Schedule.release, layer, newest=True)

    def reload_layer(self, layer: str | LayerRun) -> LayerRun:
        """Reload them. A path means the oldest live call."""
        return self._run_by_hand(Schedule.reload, layer, newest=False)

    def _run_by_hand(
        self, run: Callable[[Schedule, LayerRun], None], layer: str | LayerRun, newest: bool
    ) -> LayerRun:
        if not self._manual:
            raise FuseOpsError("only Scheduler(manual=True) is driven layer by layer.")
        expected = "the path of a layer, or what offload_layer returned"
        instance_of(layer, (str, LayerRun), f"Scheduler.{run.__name__}_layer(layer)", expected)
        if isinstance(layer, str) and layer not in self.layers:
            raise FuseOpsError(f"no layer {layer!r}; there are {', '.join(self.layers)}.")
        mover = self._scope.mover
        with mover.lock:
            mover.collect_dead()
            calls = [layer] if isinstance(layer, LayerRun) else mover.schedule.calls(layer)
            if not calls:
                raise FuseOpsError(f"layer {layer!r} has no call whose saved tensors are alive.")
            call = calls[-1 if newest else 0]
            run(mover.schedule, call)
        return call

    # --- report

    def report(self) -> Report:
        """What ran: every saved tensor with decision and reason, copies, misses, host memory, and which layers did not
        run, or run unfused.
        """
        report = self._scope.report()
        entries = (*report.entries, *self._missed_layers())
        return replace(report, entries=entries, schedule=tuple(self._schedule_stats()))

    def _missed_layers(self) -> Iterator[Entry]:
        chains = (m._modules.values() for m in self.model.modules() if isinstance(m, Composed))
        with_others = {id(op) for ops in chains if len(ops) > 1 for op in ops}
        for path, module in self.layers.items():
            why = None
            if path not in self._scope.called:
                why = NOT_CALLED
            elif isinstance(module, Op) and id(module) in with_others:
                why = UNFUSED
            if why is not None:
                yield Entry(path, type(module).__name__, (), None, 0, MISSED, why)

    def _schedule_stats(self) -> Iterator[tuple[str, int]]:
        schedule, arena = self._scope.mover.schedule, self._scope.mover.lanes.arena
        self._scope.mover.collect_dead()
        yield from vars(schedule.stats).items()
        yield "mispredicted", schedule.order.mispredicted
        yield "calls_alive", schedule.live_calls
        yield from (("host_reserved", arena.reserved), ("host_peak", arena.peak))

    def assert_matched(self, plan: OffloadPlan | Mapping[str, str] | None = None) -> None:
        """Raises FuseOpsError, with every difference, unless the decisions that ran are those that were planned. Sizes
        are not compared: those of experts' rows change from step to step.
        """
        plan = self.plan if plan is None else plan
        if plan is None:
            raise FuseOpsError("this scheduler follows no plan: pass the one to compare with.")
        expected = decisions_of(plan)
        ran = self._scope.names
        wrong = [
            f"{name}: planned {expected[name]}, {ran.get(name, 'not saved')}"
            for name in sorted(expected)
            if expected[name]
            != ran.get(name, expected[name] if expected[name] in REGENERATED else None)
        ]
        if wrong:
            raise FuseOpsError("what ran is not what was planned:\n" + "\n".join(wrong))


def decisions_of(plan: Any) -> Mapping[str, Decision]:
    """Name -> decision, of a plan or of what users wrote.  Raises FuseOpsError for anything else."""
    found = plan.decisions if isinstance(plan, OffloadPlan) else {} if plan is None else plan
    instance_of(
        found, Mapping, "plan=...", "an OffloadPlan or decisions by name, {name: 'offload'}"
    )
    for name, decision in found.items():
        instance_of(name, str, "a name in plan=...", "that of a saved tensor or of a layer, a str")
        if decision not in get_args(Decision):
            raise FuseOpsError(
                f"plan={{{name!r}: {decision!r}}}: a decision is one of {', '.join(get_args(Decision))}."
            )
    return cast("Mapping[str, Decision]", found)


def _detached(t: Tensor) -> Tensor:
    """t without its graph, as a leaf."""
    return t.detach().requires_grad_(t.requires_grad)
