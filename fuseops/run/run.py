"""A run of adjacent ops finds the plan of a call, and executes it.

The plan is cached by answers, never by the size of dim 0: classes, needs, training flags, dtypes, device, autocast,
settings, side inputs, what is returned, and the outcome of every condition.
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
    in_precision,
    reasons_against,
    scan,
)
from fuseops.plan.facts import Facts, needs_of, roles_of
from fuseops.plan.key import Glance, PlanKey, Tokens
from fuseops.plan.segment import Segment, is_own
from fuseops.recipes import Quantized
from fuseops.rules.builtin_rules import BUILTIN_RULES, POINTWISE
from fuseops.rules.rule import Conditions, RunEnd, RunPosition
from fuseops.torch_private import is_dtensor, is_nested

from . import bridge, buffers, checks, ranges, repeats
from .bridge import Live
from .buffers import Buffers
from .checks import check_dtype, check_meta, describe, dtype_mismatch
from .entries import MOST_SHAPES, Entries, KnownPlans, Last
from .first import FirstCall
from .gate import gains, layers_of
from .modes import mode_of
from .steps import Once, write_forward
from .traced import TABLE

log = logging.getLogger("fuseops.fusion")


class Run:
    """A run is the ops of one Sequential between two plain modules (or one op that is called alone), planned and
    cached together.
    """

    def __init__(self, chain: Chain, end: RunEnd, offset: int = 0, alone: bool = False) -> None:
        self.chain, self.end, self.alone = chain, end, alone
        self.ops, self.names = chain.ops, chain.names
        self.swaps = any(isinstance(op, Swap) for op in self.ops)  # y has the shape of a side input
        self.offset = offset  # of the first op among everything that the Sequential runs
        self.entries = Entries(self.names[0])
        self.shapes: set[Any] = set()  # axes of inputs, without the rows, that every op takes
        self.last: Last | None = None
        self.numbers: list[int] = []  # of this run's objects in TABLE
        weakref.finalize(self, TABLE.drop, self.numbers)

    # --- finding the plan

    def plan(
        self, x: Tensor, side: Mapping[str, Any], tokens: Tokens, live: tuple[str, ...]
    ) -> RunPlan:
        """The plan of this call, from the cache or new."""
        entry = self._entry_of(x, side, tokens, live)
        plan = self._plan_in(entry, x, side)
        last = self.last
        if last is not None and last.entry is entry and last.plans is not None:
            if len(last.plans) >= MOST_SHAPES:
                last.plans.clear()
            last.plans[x.shape] = plan
        return plan

    def repeated(
        self,
        x: Tensor,
        side: Mapping[str, Any],
        tokens: Tokens,
        live: tuple[str, ...],
        versions: object,
    ) -> RunPlan | None:
        """The plan of a call like the last one, if nothing that it depends on has changed.   versions: of its ops"""
        last = self.last  # once: another thread may put its own there
        if last is None or not last.plans or not last.glance.fits(x, side, tokens, live, versions):
            return None
        try:
            return last.plans.get(x.shape)
        except RuntimeError:  # a nested tensor, which `plan` refuses
            return None

    def _plan_in(self, entry: KnownPlans, x: Tensor, side: Mapping[str, Any]) -> RunPlan:
        self._check_shape(x, side)
        reasons = self.reasons(entry, x, side) if entry.scan.candidates or entry.layers else ()
        plan = entry.plans.get(tuple([reason is None for reason in reasons]))
        if plan is None:
            plan = self.plan_of(entry, reasons)
        if reasons and scopes.current().watchers:
            # who reads the misses gets the reasons of this call
            against, _ = self._in_precision(entry, reasons)
            misses = choose(entry.scan, against).misses
            plan = plan if misses == plan.misses else plan._replace(misses=misses)
        if entry.layers and scopes.current().watchers:
            shapes = [*self._shapes(x, side)]
            rows = lambda i: numel(shapes[i][:-1])  # noqa: E731
            plan = plan._replace(gains=gains(entry.layers, self.names, rows))
        return plan

    def _in_precision(
        self, entry: KnownPlans, reasons: Sequence[str | None]
    ) -> tuple[tuple[str | None, ...], frozenset[int]]:
        """The reasons of candidates under the recipe, and which ops it leaves in high precision."""
        count = len(entry.scan.candidates)
        judged = zip(entry.layers, reasons[count:], strict=True)
        high = frozenset([i for layer, why in judged if why is not None for i in layer.ops])
        roles = [None if i in high else of for i, of in enumerate(entry.facts.roles)]
        recipe = entry.facts.settings.recipe
        return in_precision(entry.scan, self.ops, reasons[:count], recipe, roles), high

    def _check_shape(self, x: Tensor, side: Mapping[str, Any]) -> None:
        """Ask every op whether it takes x: once for each shape beyond the rows, since a plan serves all of them."""
        try:
            shape: Any = x.shape[1:] if x.dim() > 1 else (x.shape,)  # its one axis is no row
        except RuntimeError:
            raise checks.nested_tensor(self.chain) from None  # the strided ones have no shape
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
    ) -> KnownPlans:
        """The entry of this call. Most are calls like the one before, which takes no key to tell."""
        last = self.last  # once: another thread may put its own there
        if last is not None and last.glance.fits(x, side, tokens, live):
            return last.entry
        key = PlanKey.of(self.chain, x, side, tokens, live)
        entry = self.entry(key)
        self.last = None
        with suppress(KeyError):
            candidates = entry.scan.candidates
            asked = any(c.rule not in BUILTIN_RULES and c.rule is not POINTWISE for c in candidates)
            read = {i for c in candidates for i in range(c.start, c.stop)}
            glance = Glance(self.chain, key, () if asked else read)
            self.last = Last(glance, entry, None if asked else {})
        return entry

    def numbered(self, item: Any) -> int:
        """Put an object of this run into the table that traced code reads."""
        self.numbers.append(TABLE.add(item))
        return self.numbers[-1]

    def reasons(
        self, entry: KnownPlans, x: Tensor, side: Mapping[str, Any]
    ) -> tuple[str | None, ...]:
        """Why each candidate of an entry may not fire in this call, None where it may; then, why each layer stays in
        high precision.
        """
        sides = {name: tuple(side[name].shape) for name in self.chain.outside}
        shapes = [*self.chain.shapes(tuple(x.shape), sides)]

        def conditions(start: int, stop: int) -> Conditions:
            return self._conditions(entry, x, start, stop, shapes, sides)

        against = reasons_against(entry.scan, self.chain, entry.facts.settings, conditions)
        if not entry.layers:
            return against
        return (*against, *[j.reason(numel(shapes[j.ops[0]][:-1])) for j in entry.layers])

    def _conditions(
        self,
        entry: KnownPlans,
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

    def entry(self, key: PlanKey) -> KnownPlans:
        """The entry of a key, from the cache or new."""
        known = self.entries.latest(key)
        if known is not None:
            return known
        call = key.call
        check_dtype(self.ops, self.names, call.dtype)
        check_meta(self.chain, key)
        check_halves(self.ops, self.names)
        settings = scopes.resolve(*call.tokens)
        if is_nested(call.x_class) and not settings.reference:
            raise checks.nested_tensor(self.chain)
        if call.layout is not torch.strided and is_own(self.ops[0]) and not settings.reference:
            raise checks.not_strided(self.chain, call.layout)
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
        held, scanned = scopes.layers_of(call.tokens), scan(self.ops, rules, place, settings)
        layers = layers_of(self.chain, scanned, facts)
        return self.entries.put(key, KnownPlans(held, scanned, facts, {}, layers))

    def plan_of(self, entry: KnownPlans, reasons: tuple[str | None, ...]) -> RunPlan:
        """The plan of an entry, given the outcome of its conditions, from the cache or new."""
        answers = tuple(reason is None for reason in reasons)
        if answers in entry.plans:
            return entry.plans[answers]
        against, high = self._in_precision(entry, reasons)
        plan = build(self.chain, choose(entry.scan, against), entry.facts, high)
        check_strict(plan.misses, entry.scan, against, entry.facts.settings)
        entry.plans[answers] = plan
        log.info("new plan: %s", "; ".join(map(str, plan.forward)))
        return plan

    def _shapes(self, x: Tensor, side: Mapping[str, Any]) -> Iterator[Shape]:
        """Shapes before op 0, 1, ... and after the last one; an error says at which op it came up."""
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
        """Run the ops on x; side tensors are read from, and published to, `env`.

        versions: of what the ops hold, as of `Runner`.  out: the caller's buffers for "y" and "dx" of an op that is by
        itself.
        """
        given = x
        if type(x) is Quantized:  # planned as the tensor that it stands for
            x = x.carrier
        elif type(x) is not Tensor and is_dtensor(type(x)) and self.chain.local:
            given = x = to_local_input(x, self.chain.layout)
        watchers = scopes.thread.active.watchers
        if out is None and not watchers:
            repeated = self.repeated(x, env, tokens, live, versions)
            if repeated is not None:
                return run_segments(repeated.segments, given, env, path, Once(scratch))
        parametrized = any(op.__dict__["_modules"] for op in self.ops)
        with parametrize.cached() if parametrized else nullcontext():  # computed once a forward
            plan = self.plan(x, env, tokens, live)
            for watcher in watchers:
                watcher(plan)
            if out is not None:
                self._check_buffers(plan, out, x, env, path)
            return run_segments(plan.segments, given, env, path, Once(scratch, out))

    def _check_buffers(
        self, plan: RunPlan, out: Buffers, x: Tensor, env: dict[str, Any], path: str
    ) -> None:
        """Raise FuseOpsError unless the op of this run, which has no other, can write to these buffers."""
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
        buffers.check(op, out, x, shape, _inputs(seg, env))


def run_segments(
    segments: Sequence[Segment], x: Any, env: dict[str, Any], path: str, once: Once
) -> Any:
    """Run segments with autocast off where the plan reads it, and say where an error happened."""
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
                    x = run_segment(seg, x, env, Live(path, once))
            elif seg.kind == "node" and seg.needs_grad and not seg.exports:  # most
                x = bridge.run_node(seg, Live(path, once), x, _inputs(seg, env))
            else:
                x = run_segment(seg, x, env, Live(path, once))
            for name in seg.ends:
                del env[name]
        return x
    except Exception as error:
        where = bridge.where(seg, path, error)
        note = f"in the forward of fuseops {where}; x {describe(x)}{_others(seg, env)}"
        clearer = dtype_mismatch(seg, path, error)
        if clearer is None:
            error.add_note(note)
            raise
        clearer.add_note(note)
        raise clearer from error


def _others(seg: Segment, env: Mapping[str, Any]) -> str:
    """What else a segment takes, in words."""
    tensors = [(name, env.get(name)) for name in seg.reads]
    tensors += [(f"{seg.names[i]}.{name}", getattr(seg.ops[i], name)) for i, name in seg.params]
    return "".join(f", {name} {describe(t)}" for name, t in tensors if isinstance(t, Tensor))


def call_op(seg: Segment, x: Any, env: dict[str, Any]) -> Any:
    """An op through its own `__call__`, which returns what it publishes after y."""
    (op,), (step,) = seg.ops, seg.forward
    reads = [(keyword, at) for keyword, at in step.args[0] if at < len(seg.reads)]
    y = op(x, **{keyword: env[seg.reads[at]] for keyword, at in reads})
    if op.writes:
        y, *published = y
        places = [at for _, at in step.writes]
        for name, at in zip(seg.exports, seg.export_positions, strict=True):
            env[name] = published[places.index(at)]
    return y


def run_segment(seg: Segment, x: Any, env: dict[str, Any], live: Live | None) -> Any:
    """Run a segment; in traced code, which has no names and no messages, live is None."""
    inputs = inputs_of(seg, env) if live is None else _inputs(seg, env)
    if seg.kind == "node" and seg.needs_grad:
        if live is None:
            y = bridge.run_traced_node(seg.number, x, inputs)
        else:
            y = bridge.run_node(seg, live, x, inputs)
        if seg.exports:
            y, *exported = y
            env.update(zip(seg.exports, exported, strict=True))
        return y
    forward = seg.fwd or write_forward(seg)
    once = Once() if live is None else live.once
    if live is not None and not seg.checked_forward:
        once = once._replace(look=FirstCall(seg, inputs))
    if seg.kind == "node" and live is not None:
        y, *_ = repeats.forward(seg, forward, x, inputs, once, registry.may_replay())
    elif seg.kind == "node" or seg.aliases:
        # alias ops call no kernel; traced code writes nothing, since checkpoint refuses to trace a write
        y, _, _ = forward(x, inputs, once)
    else:
        with kernels.reference_only():
            y, _, _ = forward(x, inputs, once)
    for name, place in zip(seg.exports, seg.export_positions, strict=True):
        env[name] = inputs[place]
    return y


def _inputs(seg: Segment, env: dict[str, Any]) -> list[Any]:
    """`inputs_of`, where all of them are what is registered."""
    if seg.registered is None:
        return inputs_of(seg, env)
    try:
        parameters = [op.__dict__[kind][name] for op, kind, name in seg.registered]
    except KeyError:  # it is parametrized by now
        return inputs_of(seg, env)
    return [*_sides(seg, env), *parameters] if seg.reads else parameters


def _sides(seg: Segment, env: dict[str, Any]) -> list[Any]:
    """What ops read by name: tensors, of a quantized one what it stands for."""
    found = [env[name] for name in seg.reads]
    return [t.dequantize() if type(t) is Quantized else t for t in found]


def inputs_of(seg: Segment, env: dict[str, Any]) -> list[Any]:
    """Side inputs and parameters of a segment, as its node takes them."""
    inputs = _sides(seg, env)
    for position, local in seg.local_reads:
        inputs[position] = local.compute_tensor(inputs[position])
    for i, name in seg.params:
        op = seg.ops[i]
        registered = op._parameters
        t = registered[name] if name in registered else getattr(op, name)
        own = op._local
        inputs.append(own[name].compute_tensor(t) if name in own else t)
    return inputs
