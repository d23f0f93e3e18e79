"""Observes which Sequentials one real forward calls, and the plans of their runs of ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from fuseops.kernels import registry
from fuseops.ops import scopes
from fuseops.ops.op import Op
from fuseops.ops.paths import prefix_of, walk
from fuseops.plan.build import RunPlan
from fuseops.run.composed import Composed
from fuseops.run.debug import running_op
from fuseops.run.run import Run
from fuseops.run.runner import runner_of

from . import gemms, modules
from .saved import Where

Ops = tuple[Op[Any], ...]
OpsAlone = dict[str, tuple[Op[Any], RunPlan]]
"""By path: ops that are called by themselves, with their plans."""


class SeenTensor(NamedTuple):
    """A `SeenTensor` has the shape and element size of a tensor that may be freed."""

    shape: tuple[int, ...]
    itemsize: int


class SequentialCall:
    """A `SequentialCall` is one call of a Sequential, with the runs of ops and the calls inside it."""

    def __init__(self, module: Composed, path: str, parent: SequentialCall | None) -> None:
        self.module, self.path, self.parent = module, path, parent
        self.pieces: Sequence[tuple[str, Run | nn.Module]] = tuple(runner_of(module).pieces)
        self.expected = [piece for _, piece in self.pieces if isinstance(piece, Run)]
        self.runs: list[tuple[RunPlan, SeenTensor | None]] = []
        self.nested: list[SequentialCall] = []
        self.num_saved = 0
        self.gemms: list[str] = []  # descriptions of those that ran
        # (op, why it runs as plain torch on a GPU) -> the kernels that it does without, in order
        self.twins: dict[tuple[str, str], dict[str, None]] = {}
        self.x: SeenTensor | None = None
        self.alone: OpsAlone = {}  # ops that plain modules in it call

    def continues_with(self, ops: Ops) -> bool:
        """Whether the next run of this call is that of these ops."""
        return len(self.runs) < len(self.expected) and self.expected[len(self.runs)].ops == ops


class Observer:
    """An `Observer` notes the calls of Sequentials during one forward, as a tree."""

    def __init__(self, root: nn.Module, paths: Mapping[int, str]) -> None:
        self.paths = paths
        self.calls: list[SequentialCall] = []  # the outermost ones
        self.alone: OpsAlone = {}  # ops called outside of any Sequential
        self._open: list[SequentialCall] = []  # whose forward runs, outermost first
        self._last: SequentialCall | None = None  # whose run of ops began last
        self._owners = {
            tuple(map(id, piece.ops)): module
            for _, module in walk(root)
            if isinstance(module, Composed)
            for _, piece in runner_of(module).pieces
            if isinstance(piece, Run)
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the calls in this thread while the context is open."""
        with (
            modules.calls_watched(self._enter, self._leave),
            scopes.watch_plans(self._on_plan),
            registry.watch_launches(self._on_launch, self._on_twin),
        ):
            yield

    def where(self, by_node: bool) -> Where:
        """Which module and call the tensor belongs to that is being packed.   by_node: a node of fuseops packs it"""
        running = modules.thread.running
        if not running:
            return Where(None, "", None)
        module, call, path = running[-1], self._call(), modules.path_in(self.paths, running)
        if by_node and not isinstance(module, Op):
            call = self._last
        if call is not None:
            call.num_saved += 1
        if not isinstance(module, Op):
            return Where(call, path, None)
        ((name, _),) = module._planned()
        return Where(call, path, f"{prefix_of(module) or ''}{name}.")

    def _on_launch(self, call: registry.Call) -> None:
        """Adds a kernel launch to the run that began last."""
        if self._last is not None:
            self._last.gemms.extend(gemms.describe_launch(call))

    def _on_twin(self, op: registry.KernelOp[Any, Any], why: str) -> None:
        """Adds a kernel that runs as plain torch to the run that began last."""
        if self._last is not None:
            self._last.twins.setdefault((running_op(), why), {})[op.name] = None

    def _call(self) -> SequentialCall | None:
        return self._open[-1] if self._open else None

    # --- hooks

    def _enter(self, module: nn.Module, args: Any) -> None:
        if isinstance(module, Composed):
            path = modules.path_in(self.paths, modules.thread.running)
            call = self._add_call(module, path, self._call())
            call.x = _seen(args[0]) if args else None
            self._open.append(call)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._open and self._open[-1].module is module:
            self._open.pop()
        call, outer = self._call(), modules.thread.running[-1:]
        if call is None or outer != [call.module]:
            return
        if any(piece is module for _, piece in call.pieces):  # not a parametrization of an op
            call.x = _seen(output)

    def _add_call(
        self, module: Composed, path: str, parent: SequentialCall | None
    ) -> SequentialCall:
        call = SequentialCall(module, path, parent)
        (self.calls if parent is None else parent.nested).append(call)
        return call

    def _on_plan(self, plan: RunPlan) -> None:
        """Adds the plan of a run of ops that begins to the call of its Sequential; notes an op that is called alone."""
        ops = tuple(op for segment in plan.segments for op in segment.ops)
        call, running = self._call(), modules.thread.running
        module = (running or ops)[-1]
        if isinstance(module, Op):
            if call is None or running[-2:-1] != [call.module]:
                alone = self.alone if call is None else call.alone
                alone[modules.path_in(self.paths, running)] = module, plan
            return
        if call is None or not call.continues_with(ops):
            call = self._call_without_hook(ops, call)
        self._last = call
        if call is not None:
            call.runs.append((plan, call.x))

    def _call_without_hook(self, ops: Ops, call: SequentialCall | None) -> SequentialCall | None:
        """The call of a Sequential whose `forward` was called directly, so that no module hook ran, or None."""
        siblings = self.calls if call is None else call.nested
        if siblings and siblings[-1].continues_with(ops):
            return siblings[-1]
        owner = self._owners.get(tuple(map(id, ops)))
        return None if owner is None else self._add_call(owner, self.paths.get(id(owner), ""), call)


def _seen(x: Any) -> SeenTensor | None:
    x = x[0] if isinstance(x, tuple) and x else x
    return SeenTensor(tuple(x.shape), x.element_size()) if isinstance(x, Tensor) else None
