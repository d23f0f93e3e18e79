"""A run of adjacent ops looks up the plan of a call, or builds it, and executes it.

The cache key has no size of dim 0. It consists of classes, needs, training flags, dtypes, device, autocast, settings,
side inputs, returned names, and the outcome of every condition.
"""

import logging
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.nn.utils import parametrize

from fuseops import kernels
from fuseops.errors import FuseOpsError
from fuseops.kernels import registry
from fuseops.ops import scopes
from fuseops.ops.halves import check_halves
from fuseops.ops.local import to_local_input
from fuseops.ops.op import Shape, numel
from fuseops.ops.paths import path_of
from fuseops.ops.structure import Swap
from fuseops.plan.build import RunPlan, build
from fuseops.plan.chain import Chain
from fuseops.plan.cover import (
    check_names,
    check_strict,
    choose,
    reasons_against,
    reasons_under_recipe,
    scan,
)
from fuseops.plan.facts import Facts, needs_of, roles_of
from fuseops.plan.key import KeyGuard, PlanKey, Tokens
from fuseops.plan.segment import Segment, is_builtin
from fuseops.recipes import Quantized
from fuseops.rules.builtin_rules import BUILTIN_RULES, POINTWISE
from fuseops.rules.rule import Conditions, RunEnd, RunPosition
from fuseops.torch_private import is_dtensor, is_nested

from . import bridge, buffers, checks, ranges, repeats
from .bridge import NodeState
from .buffers import Buffers
from .checks import check_dtype, check_meta, describe, dtype_mismatch
from .contract import ContractCheck
from .gate import gains, gated_runs
from .modes import mode_of
from .object_table import TABLE
from .plan_cache import MAX_SHAPES, CacheEntry, LastCall, PlanCache
from .steps import CallContext, write_forward

log = logging.getLogger("fuseops.fusion")


class Run:
    """A run is the ops of one Sequential between two plain modules (or one op that is called alone), planned and
    cached together.
    """

    def __init__(self, chain: Chain, end: RunEnd, offset: int = 0, alone: bool = False) -> None:
        self.chain, self.end, self.alone = chain, end, alone
        self.ops, self.names = chain.ops, chain.names
        self.swaps = any(isinstance(op, Swap) for op in self.ops)  # y has the shape of a side input
        self.offset = offset  # position of the first op in the Sequential
        self.plan_cache = PlanCache(self.names[0])
        # of inputs, without the rows, that were checked: every op takes them
        self.shapes: set[Any] = set()
        self.last_call: LastCall | None = None
        self.table_numbers: list[int] = []  # of the objects that this run put into TABLE
        weakref.finalize(self, TABLE.drop, self.table_numbers)

    # --- finding the plan

    def plan(
        self, x: Tensor, side: Mapping[str, Any], tokens: Tokens, live: tuple[str, ...]
    ) -> RunPlan:
        """The plan of this call: cached, or built now."""
        entry = self._entry_of(x, side, tokens, live)
        plan = self._plan_in(entry, x, side)
        last = self.last_call
        if last is not None and last.entry is entry and last.plans is not None:
            if len(last.plans) >= MAX_SHAPES:
                last.plans.clear()
            last.plans[x.shape] = plan
        return plan

    def repeated_plan(
        self,
        x: Tensor,
        side: Mapping[str, Any],
        tokens: Tokens,
        live: tuple[str, ...],
        versions: object,
    ) -> RunPlan | None:
        """The plan of a call like the last one, None where anything that it depends on has changed.

        versions: of the dicts of the ops
        """
        last = self.last_call  # read once: another thread may replace it
        if last is None or not last.plans or not last.guard.fits(x, side, tokens, live, versions):
            return None
        try:
            return last.plans.get(x.shape)
        except RuntimeError:  # a nested tensor, which `plan` refuses
            return None

    def _plan_in(self, entry: CacheEntry, x: Tensor, side: Mapping[str, Any]) -> RunPlan:
        self._check_shape(x, side)
        reasons = self.reasons(entry, x, side) if entry.scan.candidates or entry.gated else ()
        plan = entry.plans.get(tuple([reason is None for reason in reasons]))
        if plan is None:
            plan = self.plan_of(entry, reasons)
        if reasons and scopes.current().watchers:
            # watchers that read the misses get the reasons of this call
            against, _ = self._reasons_under_recipe(entry, reasons)
            misses = choose(entry.scan, against).misses
            plan = plan if misses == plan.misses else plan._replace(misses=misses)
        if entry.gated and scopes.current().watchers:
            shapes = [*self._shapes(x, side)]
            rows = lambda i: numel(shapes[i][:-1])  # noqa: E731
            plan = plan._replace(gains=gains(entry.gated, self.names, rows))
        return plan

    def _reasons_under_recipe(
        self, entry: CacheEntry, reasons: Sequence[str | None]
    ) -> tuple[tuple[str | None, ...], frozenset[int]]:
        """Why each candidate may not fire under the recipe, and the indices of the ops that stay in high precision."""
        count = len(entry.scan.candidates)
        pairs = zip(entry.gated, reasons[count:], strict=True)
        high = frozenset([i for layer, why in pairs if why is not None for i in layer.ops])
        roles = [None if i in high else of for i, of in enumerate(entry.facts.roles)]
        recipe = entry.facts.settings.recipe
        return reasons_under_recipe(entry.scan, self.ops, reasons[:count], recipe, roles), high

    def _check_shape(self, x: Tensor, side: Mapping[str, Any]) -> None:
        """Have every op check the shape of x; once for all numbers of rows, since they share a plan."""
        try:
            shape: Any = x.shape[1:] if x.dim() > 1 else (x.shape,)  # its one axis is no row
        except RuntimeError:
            raise checks.nested_tensor_error(self.chain) from None  # the strided ones have no shape
        if self.swaps:
            shape = shape, *[side[name].shape for name in self.chain.outside]
        try:
            if shape not in self.shapes:
                deque(self._shapes(x, side), maxlen=0)
                self.shapes.add(shape)
        except TypeError:  # a symbolic size has no hash
            deque(self._shapes(x, side), maxlen=0)

    def _entry_of(
        self, x: Tensor, side: Mapping[str, Any], tokens: Tokens, live: tuple[str, ...]
    ) -> CacheEntry:
        """The cache entry of this call. A call like the last one is recognised without building a key."""
        last = self.last_call  # read once: another thread may replace it
        if last is not None and last.guard.fits(x, side, tokens, live):
            return last.entry
        key = PlanKey.of(self.chain, x, side, tokens, live)
        entry = self.entry(key)
        self.last_call = None
        with suppress(KeyError):
            candidates = entry.scan.candidates
            has_user_rules = any(
                c.rule not in BUILTIN_RULES and c.rule is not POINTWISE for c in candidates
            )
            candidate_ops = {i for c in candidates for i in range(c.start, c.stop)}
            guard = KeyGuard(self.chain, key, () if has_user_rules else candidate_ops)
            self.last_call = LastCall(guard, entry, None if has_user_rules else {})
        return entry

    def register(self, item: Any) -> int:
        """Put an object into the table that traced code reads.   -> its number"""
        self.table_numbers.append(TABLE.add(item))
        return self.table_numbers[-1]

    def reasons(
        self, entry: CacheEntry, x: Tensor, side: Mapping[str, Any]
    ) -> tuple[str | None, ...]:
        """Why each candidate of an entry may not fire in this call, None where it may; then, of each run of gated
        linear ops, why it stays in high precision.
        """
        sides = {name: tuple(side[name].shape) for name in self.chain.outside}
        shapes = [*self.chain.shapes(tuple(x.shape), sides)]

        def conditions(start: int, stop: int) -> Conditions:
            return self._conditions(entry, x, start, stop, shapes, sides)

        against = reasons_against(entry.scan, self.chain, entry.facts.settings, conditions)
        if not entry.gated:
            return against
        return (*against, *[j.reason(numel(shapes[j.ops[0]][:-1])) for j in entry.gated])

    def _conditions(
        self,
        entry: CacheEntry,
        x: Tensor,
        start: int,
        stop: int,
        shapes: Sequence[Shape],
        sides: Mapping[str, Shape],
    ) -> Conditions:
        call, shape, out = entry.facts.key.call, shapes[start], shapes[stop]
        return Conditions(
            shape=shape,
            k=shape[-1] if shape else 1,
            n=out[-1] if out else 1,
            rows=numel(shape[:-1]),
            dtype=call.compute or x.dtype,
            device=x.device,
            recipe=entry.facts.settings.recipe,
            needs=entry.facts.needs[start:stop],
            training=self.ops[start].training,
            reads=self.chain.reads[start:stop],
            sides=sides,
            compiling=call.compiling,
        )

    def entry(self, key: PlanKey) -> CacheEntry:
        """The cache entry of a key, added if it is new."""
        known = self.plan_cache.lookup(key)
        if known is not None:
            return known
        call = key.call
        check_dtype(self.ops, self.names, call.dtype)
        check_meta(self.chain, key)
        check_halves(self.ops, self.names)
        settings = scopes.resolve(*call.tokens)
        if is_nested(call.x_class) and not settings.reference:
            raise checks.nested_tensor_error(self.chain)
        if call.layout is not torch.strided and is_builtin(self.ops[0]) and not settings.reference:
            raise checks.not_strided_error(self.chain, call.layout)
        modes = [
            mode_of(name, op, call, settings, self.alone)
            for name, op in zip(self.names, self.ops, strict=True)
        ]
        facts = Facts(
            key=key,
            settings=settings,
            modes=tuple(mode for mode, _ in modes),
            notes=tuple(note for _, note in modes),
            offset=self.offset,
            needs=needs_of(self.chain, key),
            roles=roles_of(self.chain, settings.recipe, [mode for mode, _ in modes]),
        )
        rules = () if settings.reference else (*settings.rules, *BUILTIN_RULES)
        check_names(settings, rules)
        opaque = [note if mode and note != "alias" else None for mode, note in modes]
        place = RunPosition(opaque, self.end, self.offset)
        layers, scanned = scopes.layers_of(call.tokens), scan(self.ops, rules, place, settings)
        gated = gated_runs(self.chain, scanned, facts)
        return self.plan_cache.insert(key, CacheEntry(layers, scanned, facts, {}, gated))

    def plan_of(self, entry: CacheEntry, reasons: tuple[str | None, ...]) -> RunPlan:
        """The plan of an entry for this outcome of its conditions: cached, or built now."""
        answers = tuple(reason is None for reason in reasons)
        if answers in entry.plans:
            return entry.plans[answers]
        against, high = self._reasons_under_recipe(entry, reasons)
        plan = build(self.chain, choose(entry.scan, against), entry.facts, high)
        check_strict(plan.misses, entry.scan, against, entry.facts.settings)
        entry.plans[answers] = plan
        log.info("new plan: %s", "; ".join(map(str, plan.forward)))
        return plan

    def _shapes(self, x: Tensor, side: Mapping[str, Any]) -> Iterator[Shape]:
        """The shapes of x before op 0, 1, ... and after the last one. An error gets a note that names the op."""
        i = -1
        try:
            sides = {name: tuple(side[name].shape) for name in self.chain.outside}
            for shape in self.chain.shapes(tuple(x.shape), sides):
                i += 1
                yield shape
        except FuseOpsError as error:
            path = path_of(self.ops[i])
            at = repr(path) if path else f"{self.names[i]!r} of a fuseops.Sequential"
            error.add_note(f"at op {at}; the input of the sequence is {describe(x)}")
            raise

    # --- running

    def __call__(
        self,
        x: Any,
        env: dict[str, Any],
        tokens: Tokens,
        live: tuple[str, ...],
        path: str,
        scratch: dict[str, Any],
        versions: object,
        out: Buffers | None = None,
    ) -> Any:
        """Run the ops on x. Side tensors are read from `env`, and published to it.

        versions: of the dicts of the ops, as `Runner.versions`.  out: the caller's buffers for "y" and "dx"; then this
        run is a single op.
        """
        original = x
        if type(x) is Quantized:  # planned as the tensor that it represents
            x = x.carrier
        elif type(x) is not Tensor and is_dtensor(type(x)) and self.chain.local:
            original = x = to_local_input(x, self.chain.layout)
        watchers = scopes.thread.active.watchers
        if out is None and not watchers:
            plan = self.repeated_plan(x, env, tokens, live, versions)
            if plan is not None:
                return run_segments(plan.segments, original, env, path, CallContext(scratch))
        parametrized = any(op.__dict__["_modules"] for op in self.ops)
        with parametrize.cached() if parametrized else nullcontext():  # computed once a forward
            plan = self.plan(x, env, tokens, live)
            for watcher in watchers:
                watcher(plan)
            if out is not None:
                self._check_buffers(plan, out, x, env, path)
            return run_segments(plan.segments, original, env, path, CallContext(scratch, out))

    def _check_buffers(
        self, plan: RunPlan, out: Buffers, x: Tensor, env: dict[str, Any], path: str
    ) -> None:
        """Raise FuseOpsError unless the only op of this run can write to these buffers."""
        seg = plan.segments[0]
        op = bridge.where(seg, path)
        if seg.kind != "node":
            raise FuseOpsError(
                f"{op} cannot write to a buffer of the caller, since it runs outside of fuseops' autograd node "
                f"({plan.forward[0].note}): leave it out of `out`."
            )
        if "dx" in out and not (seg.needs_grad and "x" in seg.forward[0].calls[0].needs):
            raise FuseOpsError(
                f"dx of {op} is to be written to a buffer, but no gradient of its input is computed in this call: "
                "leave it out of `out`."
            )
        *_, shape = self._shapes(x, env)
        buffers.check_buffers(op, out, x, shape, registered_inputs(seg, env))


def run_segments(
    segments: Sequence[Segment], x: Any, env: dict[str, Any], path: str, context: CallContext
) -> Any:
    """Run segments in order, with autocast off where the plan accounts for it. Errors get a note that names the op."""
    if profiler._is_profiler_enabled or ranges.NVTX:
        segments = ranges.in_ranges(segments, path)
    try:
        for seg in segments:  # the except reads it
            if seg.kind == "call":
                x = call_op(seg, x, env)
            elif seg.tap is not None and seg.checked_forward:
                env[seg.tap] = x
            elif seg.autocast:
                with torch.autocast(seg.device, enabled=False):
                    x = run_segment(seg, x, env, NodeState(path, context))
            elif seg.kind == "node" and seg.needs_grad and not seg.exports:  # most
                x = bridge.run_node(seg, NodeState(path, context), x, registered_inputs(seg, env))
            else:
                x = run_segment(seg, x, env, NodeState(path, context))
            for name in seg.last_reads:
                del env[name]
        return x
    except Exception as error:
        where = bridge.where(seg, path, error)
        note = f"in the forward of fuseops {where}; x {describe(x)}{_describe_others(seg, env)}"
        clearer = dtype_mismatch(seg, path, error)
        if clearer is None:
            error.add_note(note)
            raise
        clearer.add_note(note)
        raise clearer from error


def _describe_others(seg: Segment, env: Mapping[str, Any]) -> str:
    """Describe the side inputs and parameters of a segment, for a message."""
    tensors = [(name, env.get(name)) for name in seg.reads]
    tensors += [(f"{seg.names[i]}.{name}", getattr(seg.ops[i], name)) for i, name in seg.params]
    return "".join(f", {name} {describe(t)}" for name, t in tensors if isinstance(t, Tensor))


def call_op(seg: Segment, x: Any, env: dict[str, Any]) -> Any:
    """Call an op through its own `__call__`, which returns (y, *published)."""
    (op,), (step,) = seg.ops, seg.forward
    reads = [(keyword, at) for keyword, at in step.args[0] if at < len(seg.reads)]
    y = op(x, **{keyword: env[seg.reads[at]] for keyword, at in reads})
    if op.writes:
        y, *published = y
        places = [at for _, at in step.writes]
        for name, at in zip(seg.exports, seg.export_positions, strict=True):
            env[name] = published[places.index(at)]
    return y


def run_segment(seg: Segment, x: Any, env: dict[str, Any], state: NodeState | None) -> Any:
    """Run a segment. In traced code, which publishes no names and has no messages, state is None."""
    inputs = inputs_of(seg, env) if state is None else registered_inputs(seg, env)
    if seg.kind == "node" and seg.needs_grad:
        if state is None:
            y = bridge.run_traced_node(seg.number, x, inputs)
        else:
            y = bridge.run_node(seg, state, x, inputs)
        if seg.exports:
            y, *exported = y
            env.update(zip(seg.exports, exported, strict=True))
        return y
    forward = seg.fwd or write_forward(seg)
    context = CallContext() if state is None else state.context
    if state is not None and not seg.checked_forward:
        context = context._replace(contract=ContractCheck(seg, inputs))
    if seg.kind == "node" and state is not None:
        y, *_ = repeats.forward(seg, forward, x, inputs, context, registry.may_replay())
    elif seg.kind == "node" or seg.aliases:
        # alias ops call no kernel; traced code writes nothing, since checkpoint refuses to trace a write
        y, _, _ = forward(x, inputs, context)
    else:
        with kernels.reference_only():
            y, _, _ = forward(x, inputs, context)
    for name, place in zip(seg.exports, seg.export_positions, strict=True):
        env[name] = inputs[place]
    return y


def registered_inputs(seg: Segment, env: dict[str, Any]) -> list[Any]:
    """`inputs_of`, faster where every parameter is a registered tensor of its op."""
    if seg.registered is None:
        return inputs_of(seg, env)
    try:
        parameters = [op.__dict__[kind][name] for op, kind, name in seg.registered]
    except KeyError:  # parametrized since the plan was built
        return inputs_of(seg, env)
    return [*_side_tensors(seg, env), *parameters] if seg.reads else parameters


def _side_tensors(seg: Segment, env: dict[str, Any]) -> list[Any]:
    """The side inputs that a segment reads, dequantized."""
    found = [env[name] for name in seg.reads]
    return [t.dequantize() if type(t) is Quantized else t for t in found]


def inputs_of(seg: Segment, env: dict[str, Any]) -> list[Any]:
    """Side inputs and parameters of a segment, in the order in which its node takes them."""
    inputs = _side_tensors(seg, env)
    for position, local in seg.local_reads:
        inputs[position] = local.compute_tensor(inputs[position])
    for i, name in seg.params:
        op = seg.ops[i]
        registered = op._parameters
        t = registered[name] if name in registered else getattr(op, name)
        own = op._local
        inputs.append(own[name].compute_tensor(t) if name in own else t)
    return inputs
