"""A run of adjacent ops: finds the plan of a call, and executes it.

The plan is cached by answers, never by the size of dim 0: classes, needs, training flags, dtypes, device, autocast,
settings, side inputs, what is returned, and the outcome of every condition.
"""

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import FuseOpsError, FusionMissError, SideInputError
from ..ops import scopes
from ..ops.op import Op
from ..ops.scopes import Settings
from . import bridge
from .bridge import SEGMENTS, Live, describe
from .build import Facts, RunPlan, build, needs_of
from .cover import Scan, choose, reasons_against, scan
from .rule import Conditions
from .segment import Segment
from .tables import TABLES

log = logging.getLogger("fuseops.fusion")

Tokens = tuple[int, int, int]  # process, model, scopes


class _Entry(NamedTuple):
    """All plans of one key; they differ in the outcome of conditions only."""

    scan: Scan
    facts: Facts
    plans: dict[tuple[bool, ...], RunPlan]


def opaque_reason(op: Op[Any]) -> str | None:
    """Why an op is called through its own `__call__` and matched by no rule, or None."""
    own = op.__dict__
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return "has hooks"
    if "forward" in own:
        return "has a forward of its own (replaced on the instance)"
    if op.__class__.forward is not Op.forward:
        return "overrides forward"
    return None


def op_facts(op: Op[Any], parameters: Sequence[str], grad: bool) -> Any:
    """What a plan depends on, of one op: class, mode, hooks, and its parameters' need, dtype and class."""
    own = op.__dict__
    registered = own["_parameters"]
    facts = [op.__class__, own["training"], op.alias]
    if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        facts.append("hooks")
    if "forward" in own:
        facts.append("forward")
    for name in parameters:
        p = registered[name] if name in registered else getattr(op, name)
        facts.append(None if p is None else (grad and p.requires_grad, p.dtype, p.__class__))
    return tuple(facts)


def _is_dtensor(t: Any) -> bool:
    return type(t).__name__ == "DTensor"


class Run:
    """The ops of one Sequential between two plain modules (or one op that is called alone)."""

    def __init__(self, ops: Sequence[Op[Any]], names: Sequence[str], end: str, alone: bool = False) -> None:
        self.ops, self.names, self.end, self.alone = tuple(ops), tuple(names), end, alone
        self.entries: dict[Any, _Entry] = {}
        self.parameter_names = tuple(op.parameter_names() for op in self.ops)
        written: set[str] = set()
        reads: dict[str, None] = {}
        for name, op in zip(self.names, self.ops, strict=True):
            reads |= dict.fromkeys(n for n in op.side_names() if n not in written)
            for w in op.writes:
                if w in reads:
                    raise SideInputError(f"op {name!r} writes {w!r}, which is read before it is written.")
                written.add(w)
        self.reads, self.writes = tuple(reads), frozenset(written)
        self.segments: list[int] = []
        weakref.finalize(self, _forget, self.segments)

    # --- the key

    def _key(self, x: Tensor, side: Mapping[str, Any], tokens: Tokens, live: frozenset[str]) -> Any:
        grad = torch.is_grad_enabled()
        ops = [op_facts(op, wanted, grad) for op, wanted in zip(self.ops, self.parameter_names, strict=True)]
        sides = [(n, t.dtype, grad and t.requires_grad) for n in self.reads for t in (side[n],)]
        kind = x.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return (
            *ops, *sides, tokens, live, x.dtype, x.device, grad and x.requires_grad, type(x), autocast,
            torch.compiler.is_compiling(),
        )  # fmt: skip

    # --- finding the plan

    def plan(self, x: Tensor, side: Mapping[str, Any], tokens: Tokens, live: frozenset[str]) -> RunPlan:
        """The plan of this call, from the cache or new."""
        key = self._key(x, side, tokens, live)
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = self._entry(x, side, tokens, live)
        if not entry.scan.candidates:
            plan = entry.plans.get(())
            return plan if plan is not None else self._new_plan(entry, (), x)
        reasons = self._reasons(entry, x)
        plan = entry.plans.get(tuple([r is None for r in reasons]))
        return plan if plan is not None else self._new_plan(entry, reasons, x)

    def _reasons(self, entry: _Entry, x: Tensor) -> tuple[str | None, ...]:
        return reasons_against(
            entry.scan, self.ops, entry.facts.settings, lambda start, stop: self._conditions(entry.facts, x, start, stop)
        )

    def _conditions(self, facts: Facts, x: Tensor, start: int, stop: int) -> Conditions:
        shape = tuple(x.shape)
        for op in self.ops[:start]:
            shape = op.out_shape(shape)
        out = shape
        for op in self.ops[start:stop]:
            out = op.out_shape(out)
        rows = 1
        for size in shape[:-1]:
            rows = rows * size
        return Conditions(
            shape=shape,
            k=shape[-1] if shape else 1,
            n=out[-1] if out else 1,
            rows=rows,
            dtype=facts.compute or x.dtype,
            device=x.device,
            capability=torch.cuda.get_device_capability(x.device) if x.is_cuda else None,
            recipe=facts.settings.recipe,
            needs=needs_of(self.ops, facts)[start:stop],
            training=self.ops[start].training,
        )

    def _entry(self, x: Tensor, side: Mapping[str, Any], tokens: Tokens, live: frozenset[str]) -> _Entry:
        settings = scopes.resolve(*tokens)
        facts = self._facts(x, side, settings, live)
        rules = () if settings.reference else (*settings.rules, *TABLES)
        check_names(settings, rules)
        opaque = [note if mode else None for mode, note in zip(facts.modes, facts.notes, strict=True)]
        opaque = [None if self.ops[i].alias else why for i, why in enumerate(opaque)]
        return _Entry(scan(self.ops, rules, opaque, self.end), facts, {})

    def _facts(self, x: Tensor, side: Mapping[str, Any], settings: Settings, live: frozenset[str]) -> Facts:
        grad = torch.is_grad_enabled()
        grads = set()
        for i, (op, wanted) in enumerate(zip(self.ops, self.parameter_names, strict=True)):
            for name in wanted:
                p = getattr(op, name)
                if grad and p is not None and p.requires_grad:
                    grads.add((i, name))
        kind = x.device.type
        modes = [self._mode(op, x, settings) for op in self.ops]
        return Facts(
            settings=settings,
            x_needs=grad and x.requires_grad,
            grads=frozenset(grads),
            side_grads=frozenset(n for n in self.reads if grad and side[n].requires_grad),
            modes=tuple(mode for mode, _ in modes),
            notes=tuple(note for _, note in modes),
            compute=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            device=x.device,
            live=live,
        )

    def _mode(self, op: Op[Any], x: Tensor, settings: Settings) -> tuple[str, str]:
        """How an op runs when no span covers it, and why."""
        why = None if self.alone else opaque_reason(op)
        if why is not None:
            return "call", why
        if _is_dtensor(x) or any(_is_dtensor(p) for p in op._parameters.values()):
            return "plain", "works on DTensors"
        if settings.reference:
            return "plain", "reference"
        if op.pure and torch.compiler.is_compiling():
            return "plain", "level-1 op under torch.compile"
        return ("plain", "alias") if op.alias else ("", "")

    def _new_plan(self, entry: _Entry, reasons: tuple[str | None, ...], x: Tensor) -> RunPlan:
        self._check_shapes(x)
        cover = choose(entry.scan, reasons, len(self.ops))
        plan = build(self.ops, self.names, cover, entry.facts)
        for segment in plan.segments:
            SEGMENTS[segment.id] = segment
            self.segments.append(segment.id)
        check_strict(plan, entry.facts.settings)
        entry.plans[tuple(r is None for r in reasons)] = plan
        log.info("new plan: %s", "; ".join(map(str, plan.forward)))
        return plan

    def _check_shapes(self, x: Tensor) -> None:
        shape = tuple(x.shape)
        for name, op in zip(self.names, self.ops, strict=True):
            try:
                shape = op.out_shape(shape)
            except FuseOpsError as error:
                error.add_note(f"at op {name!r} of a fuseops.Sequential; x is {describe(x)}")
                raise

    # --- running

    def __call__(
        self, x: Any, env: dict[str, Any], tokens: Tokens, live: frozenset[str], path: str, scratch: dict[str, Any]
    ) -> Any:
        """Run the ops on x; side tensors are read from, and published to, `env`."""
        plan = self.plan(x, env, tokens, live)
        for watcher in scopes.thread.watchers:
            watcher(plan)
        for seg in plan.segments:
            x = run_segment(seg, x, env, Live(path, scratch))
        return x


def _forget(segments: list[int]) -> None:
    for segment in segments:
        SEGMENTS.pop(segment, None)


def run_segment(seg: Segment, x: Any, env: dict[str, Any], live: Live) -> Any:
    """Run one segment with autocast off where the plan reads it, and say where an error happened."""
    try:
        if seg.kind == "call":
            return seg.ops[0](x, **{name: env[name] for name in seg.reads})
        if seg.autocast and not (seg.kind == "plain" and seg.ops[0].pure):
            with torch.autocast(seg.device, enabled=False):
                return _run(seg, x, env, live)
        return _run(seg, x, env, live)
    except Exception as error:
        error.add_note(f"in the forward of fuseops {bridge.where(seg, live.path)}; x {describe(x)}")
        raise


def _run(seg: Segment, x: Any, env: dict[str, Any], live: Live) -> Any:
    inputs = [env[name] for name in seg.reads]
    for i, name in seg.params:
        op = seg.ops[i]
        registered = op.__dict__["_parameters"]
        inputs.append(registered[name] if name in registered else getattr(op, name))
    if seg.kind == "node" and seg.needs_grad:
        y = bridge.run_node(seg, live, x, inputs)
        if seg.exports:
            y, *exported = y
            env.update(zip(seg.exports, exported, strict=True))
        return y
    y, _, _ = bridge.run_forward(seg, x, inputs, live.scratch, quantize=seg.kind == "node")
    env.update({name: inputs[place] for name, place in zip(seg.exports, seg.export_positions, strict=True)})
    return y


def check_names(settings: Settings, rules: Sequence[Any]) -> None:
    """Raise when `strict` or `disable` names a rule that does not exist."""
    known = {rule.name for rule in rules}
    strict = settings.strict if isinstance(settings.strict, frozenset) else frozenset()
    unknown = (settings.disable | strict) - known
    if unknown and rules:
        raise FuseOpsError(f"no rule is called {sorted(unknown)}; the rules in scope are {sorted(known)}.")


def check_strict(plan: RunPlan, settings: Settings) -> None:
    """Raise FusionMissError for a condition or overlap miss of a rule that strict mode protects."""
    for miss in plan.misses:
        near = miss.reason.startswith("op ") or " ends" in miss.reason
        protected = settings.strict is True or (isinstance(settings.strict, frozenset) and miss.rule in settings.strict)
        if protected and not near and not (settings.strict is True and miss.reason.startswith("overlaps")):
            raise FusionMissError(f"rule {miss.rule!r} did not fire at {miss.span[0]}:{miss.span[1]}: {miss.reason}")

