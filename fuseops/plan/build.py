"""`build` turns a cover into executable segments: cuts, kept fields, formats of operands, positions of tensors."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fuseops.arguments import shown
from fuseops.errors import FuseOpsError
from fuseops.ops.op import Call, FusedOp, Op, Precision, check_saves_for
from fuseops.ops.paths import path_of
from fuseops.ops.stored import stored_in
from fuseops.ops.weights import scales_of, store_of
from fuseops.recipes import Roles
from fuseops.recipes.gain import Gain
from fuseops.recipes.numerics import UNNAMED, OpName
from fuseops.recipes.scales import ScaleState
from fuseops.recipes.store import WeightStore, kept_bytes

from .chain import Chain, outside_reads
from .cover import Cover, RuleMatch
from .facts import Facts, kept_fields
from .records import HIGH, KeptWeight, Miss, Operand, Span, StaysHigh
from .segment import Args, BackwardStep, ForwardStep, Segment, Slot


class RunPlan(NamedTuple):
    """A `RunPlan` is the plan of one run of ops: its segments, its spans, and the rules that did not fire."""

    segments: tuple[Segment, ...]
    forward: tuple[Span, ...]
    backward: tuple[Span, ...]
    misses: tuple[Miss, ...]
    operands: tuple[Operand, ...]
    weights: tuple[KeptWeight, ...]
    high: tuple[StaysHigh, ...] = ()  # the ops that no recipe quantizes, under one
    gains: tuple[Gain, ...] = ()  # predicted for the call that `explain` observes


class _Unit(NamedTuple):
    """A `_Unit` is a span of ops that its target, one op or fused op, runs in one direction."""

    start: int
    stop: int
    target: Any
    kind: str
    rule: str | None


def build(chain: Chain, cover: Cover, facts: Facts, high: frozenset[int] = frozenset()) -> RunPlan:
    """Plan a run of ops.   high: ops that stay in high precision under the recipe"""
    ops, names = chain.ops, chain.names
    joint = [_unit(c, ops) for c in cover.joint]
    forward = _units(ops, joint, [_unit(c, ops) for c in cover.forward])
    backward = _units(ops, joint, [_unit(c, ops) for c in cover.backward])
    bounds = _cuts(chain, forward, backward, facts)
    builder = _Builder(chain, facts, forward, backward, high)
    segments = tuple(builder.segment(*ends) for ends in itertools.pairwise(bounds))
    return RunPlan(
        segments,
        tuple(_span(u, names, facts) for u in forward),
        tuple(_span(u, names, facts) for u in backward),
        cover.misses,
        tuple(builder.operands()),
        tuple(builder.weights()),
        tuple(builder.unquantized()),
    )


_DEFINES = {"forward": ("fwd",), "backward": ("bwd",), "joint": ("fwd", "bwd", "Saved")}


def _unit(c: RuleMatch, ops: Sequence[Op[Any]]) -> _Unit:
    target = c.fused(ops)
    for name in _DEFINES[c.rule.kind]:
        # an instance may set Saved
        found = target.__dict__.get(name) or getattr(type(target), name, None)
        if found is getattr(FusedOp, name, None):
            raise FuseOpsError(
                f"rule {c.rule.name!r} is a {c.rule.kind} rule: {type(target).__name__} must define {name}."
            )
    if c.rule.kind == "joint":
        _check_joint(target, c.rule.name)
    if len(target.members) != c.stop - c.start:
        raise FuseOpsError(
            f"rule {c.rule.name!r}: {type(target).__name__}.members has {len(target.members)} ops, "
            f"the match has {c.stop - c.start}: pass every matched op to FusedOp.__init__."
        )
    return _Unit(c.start, c.stop, target, c.rule.kind, c.rule.name)


def _check_joint(fused: FusedOp, rule: str) -> None:
    """Raise FuseOpsError for a Saved that is no NamedTuple, and for needs and names of other fields or members."""
    kind = type(fused).__name__
    fields = getattr(fused.Saved, "_fields", None)
    if fields is None:
        raise FuseOpsError(
            f"rule {rule!r}: {kind}.Saved is {shown(fused.Saved)}, expected a NamedTuple."
        )
    check_saves_for(kind, fused, None)
    if unknown := fused.names.keys() - fields:
        raise FuseOpsError(
            f"rule {rule!r}: {kind}.names has {sorted(unknown)}, but what it saves has {sorted(fields)}."
        )
    members = {*map(str, range(len(fused.members)))}
    for name in (*fused.names.values(), *(need for need in fused.saves_for or () if need != "x")):
        member, _, own = name.partition(".")
        if member not in members or not own:
            raise FuseOpsError(
                f"rule {rule!r}: {kind} has {name!r} in names or saves_for, expected 'member.name', as '0.weight', of "
                f"members 0 to {len(members) - 1}."
            )


def _units(ops: Sequence[Op[Any]], *fused: Sequence[_Unit]) -> list[_Unit]:
    by_start = {u.start: u for group in fused for u in group}
    units, position = [], 0
    while position < len(ops):
        unit = by_start.get(position) or _Unit(position, position + 1, ops[position], "op", None)
        units.append(unit)
        position = unit.stop
    return units


def _span(u: _Unit, names: Sequence[str], facts: Facts) -> Span:
    mode = facts.modes[u.start] if u.rule is None else ""
    note = facts.notes[u.start] if mode else ""
    runs = type(u.target).__name__
    ops = tuple(names[u.start : u.stop])
    at = facts.offset
    return Span(u.start + at, u.stop + at, ops, runs, u.rule, mode or u.kind, note)


# --- cuts ----------------------------------------------------------------------------------------------------------


def _cuts(chain: Chain, forward: list[_Unit], backward: list[_Unit], facts: Facts) -> list[int]:
    """The bounds of segments: around every op that runs outside a node, before a Tap or a norm, and between ops of two
    Sequentials. A span is never cut: a bound inside of one moves to its start.
    """
    span_start = {i: u.start for u in (*forward, *backward) for i in range(u.start + 1, u.stop)}
    cuts = {0, len(chain.ops)}
    for i, op in enumerate(chain.ops):
        if facts.modes[i]:
            cuts |= {i, i + 1}
        elif op.cut_before:
            cuts.add(i)
        outside = any(keyword in op._local for keyword, _ in chain.reads[i])  # of the node
        if outside or (i and chain.scopes[i] != chain.scopes[i - 1]):
            while i in span_start:
                i = span_start[i]
            cuts.add(i)
    return sorted(cuts - span_start.keys())


# --- segments ------------------------------------------------------------------------------------------------------


class _Builder:
    """A `_Builder` turns units into segments. It numbers a node's tensors: side inputs, parameters, published ones."""

    def __init__(
        self,
        chain: Chain,
        facts: Facts,
        forward: Sequence[_Unit],
        backward: Sequence[_Unit],
        high: frozenset[int],
    ) -> None:
        self.chain, self.facts, self.high = chain, facts, high
        self.call, self.needs = facts.key.call, facts.needs
        self.ops, self.names = chain.ops, chain.names
        # by the position of the first op; no unit spans two segments
        self.forward = {u.start: u for u in forward}
        self.backward = {u.start: u for u in backward}
        self.last = {name: i for i, sides in enumerate(chain.reads) for _, name in sides}
        self.calls = tuple(map(self._call, range(len(chain.ops))))

    def segment(self, start: int, stop: int) -> Segment:
        ops, chain = self.ops[start:stop], self.chain
        forward = [self.forward[i] for i in range(start, stop) if i in self.forward]
        backward = [self.backward[i] for i in range(start, stop) if i in self.backward]
        fused = any(u.rule for u in (*forward, *backward) if u.start == start)
        mode = "node" if fused else self.facts.modes[start] or "node"
        reads = outside_reads(zip(chain.reads[start:stop], chain.writes[start:stop], strict=True))
        params = [(i, name) for i in range(len(ops)) for name in chain.parameters[start + i]]
        written = [name for sides in chain.writes[start:stop] for _, name in sides]
        keys: list[Any] = [("side", name) for name in reads]
        keys += [("param", i, name) for i, name in params]
        keys += [("side", name) for name in written]
        position = {key: k for k, key in enumerate(keys)}
        exports = tuple(name for name in written if self._outlives(name, stop))
        needed = any(self.needs[start:stop]) and mode == "node"
        forward_steps = [self._forward_step(u, start, position) for u in forward]
        backward_steps = [self._backward_step(u, start, position) for u in reversed(backward)]
        return Segment(
            kind=mode,
            start=start,
            stop=stop,
            ops=ops,
            names=self.names[start:stop],
            reads=reads,
            last_reads=tuple(name for name in reads if not self._outlives(name, stop)),
            params=tuple(params),
            exports=exports,
            export_positions=tuple(position[("side", name)] for name in exports),
            forward=tuple(forward_steps),
            backward=tuple(s for s in backward_steps if s.delayed or any(c.needs for c in s.calls)),
            slots=tuple(slot for slot in self._slots(start, forward) if slot.kept),
            size=len(keys),
            needs_grad=needed,
            device=self.call.device.type,
            autocast=self.call.autocast is not None and not (mode == "plain" and ops[0].pure),
        )

    def _outlives(self, name: str, stop: int) -> bool:
        """Whether a side tensor is read after the segment that ends at `stop`."""
        return self.last.get(name, -1) >= stop or name in self.call.live

    # --- one step

    def _forward_step(self, u: _Unit, base: int, position: dict[Any, int]) -> ForwardStep:
        first = self.ops[u.start]
        return ForwardStep(
            **self._common_fields(u, base, position),
            args=tuple(self._args(i, base, position) for i in range(u.start, u.stop)),
            calls=self.calls[u.start : u.stop],
            takes_call=first.signature.fwd_call,
            keep=self._joint_keep(u) if u.kind == "joint" else frozenset(),
            cast=self.call.compute if first.autocast and not first.pure else None,
            pure=u.kind == "op" and first.pure,
            takes_quantized=self._takes_quantized(u),
            live=any(op.live_call for op in self.ops[u.start : u.stop]),
        )

    def _backward_step(self, u: _Unit, base: int, position: dict[Any, int]) -> BackwardStep:
        members = range(u.start, u.stop)
        last = self.ops[u.stop - 1]
        ops = self.ops[u.start : u.stop]
        calls, delayed = _without_delayed(ops, self.calls[u.start : u.stop])
        wanted = [(i - u.start, i, name) for i in members for name in self.chain.parameters[i]]
        step = BackwardStep(
            **self._common_fields(u, base, position),
            calls=calls,
            pure=u.kind == "op" and last.pure,
            empty=tuple(
                saver.Saved._make([None] * len(saver.Saved._fields))
                for saver in ([u.target] if u.kind == "joint" else ops)
            ),
            takes_call=last.signature.bwd_call,
            takes_dside=last.signature.bwd_dside,
            dx="x" in calls[0].needs,
            live=any(self.ops[i].live_call or self._rounds_at_random(i) for i in members),
            params=tuple(
                (k, name, position[("param", i - base, name)])
                for k, i, name in wanted
                if name in calls[k].needs
            ),
            sides=tuple(
                (i - u.start, keyword, position[("side", name)])
                for i in members
                for keyword, name in self.chain.reads[i]
                if keyword in self.needs[i]
            ),
            main=tuple(
                (k, name)
                for k, i, name in wanted
                if self.ops[i].accumulate_into_main_grad and name in calls[k].needs
            ),
        )
        return replace(step, delayed=replace(step, calls=delayed)) if delayed else step

    def _common_fields(self, u: _Unit, base: int, position: dict[Any, int]) -> dict[str, Any]:
        """The fields that forward and backward steps share."""
        pairs = [pair for sides in self.chain.writes[u.start : u.stop] for pair in sides]
        return {
            "members": tuple(range(u.start - base, u.stop - base)),
            "at": self.facts.offset + u.start,
            "target": u.target,
            "kind": u.kind,
            "scopes": self.chain.scopes[u.start : u.stop],
            "rule": u.rule or "",
            "writes": tuple((keyword, position[("side", name)]) for keyword, name in pairs),
        }

    def _args(self, i: int, base: int, position: dict[Any, int]) -> Args:
        own = [(name, position[("param", i - base, name)]) for name in self.chain.parameters[i]]
        sides = [(keyword, position[("side", name)]) for keyword, name in self.chain.reads[i]]
        return (*own, *sides)

    def _call(self, i: int) -> Call:
        op, needs = self.ops[i], self.needs[i]
        keep, roles = self._keep(op, needs), self._roles(i)
        self._check_stored(i, roles)
        return Call(
            needs=needs,
            keep=keep,
            precision=Precision(self.call.autocast if op.pure else self.call.compute, roles),
            training=op.training,
            store=None if roles is None else self._store(op, roles),
            name=UNNAMED if roles is None else OpName(self._path(i), id(op)),
            scales=None if roles is None or roles.delayed is None else self._scales(i),
            prefer=self.facts.settings.prefer,
        )

    def _path(self, i: int) -> str:
        """The path of an op in the model, or its name in the plan where that is not known."""
        return path_of(self.ops[i]) or self.names[i]

    def _check_stored(self, i: int, roles: Roles | None) -> None:
        """Raise FuseOpsError if a weight that exists as codes only would be multiplied in another format."""
        weight = stored_in(self.ops[i])
        if self.facts.modes[i] == "call":
            return  # it is planned by itself, and asked then
        given = None if roles is None else roles.weight
        high = roles is not None and roles.backward == "high_precision" and "x" in self.needs[i]
        if weight is None or (given == weight.scaling and not self.call.compiling and not high):
            return
        lives = f"op {self._path(i)!r}: its weight lives as {weight.scaling} ({weight.made_by})"
        if self.call.compiling:
            raise FuseOpsError(
                f"{lives}, and torch.compile does not read codes. Compile around the op (torch.compiler.disable), or "
                f"make it without {weight.made_by}: compiled code quantizes weights in high precision in each call."
            )
        wanted = "high precision" if given is None else str(given)
        if high and given is not None:
            wanted = f'{wanted}, and in its backward in high precision (backward="dequantized" reads the codes)'
        raise FuseOpsError(
            f"{lives}, and this call multiplies it as {wanted}. Run it under the recipe that it was made with: "
            "fo.configure(model, recipe=...), or with fo.recipe(..., strict=True)."
        )

    def _store(self, op: Op[Any], roles: Roles) -> WeightStore | None:
        """The cache of the op's quantized weight; None in compiled code, which quantizes it in each call."""
        none = roles.weights == "none" or roles.weight is None or self.call.compiling
        return None if none and stored_in(op) is None else store_of(op)

    def _scales(self, i: int) -> ScaleState:
        op = self.ops[i]
        if self.call.compiling:
            raise FuseOpsError(
                f"{self._path(i)!r} ({type(op).__name__}): the recipe keeps scales from step to step, "
                "which compiled code cannot. Run it eagerly, or take Float8CurrentScaling, whose scales are of the "
                "tensor itself."
            )
        return scales_of(op)

    def _joint_keep(self, u: _Unit) -> frozenset[str]:
        fused = u.target
        needs = {
            f"{i - u.start}.{n}" for i in range(u.start, u.stop) for n in self.needs[i] if n != "x"
        }
        needs |= self.needs[u.start] & {"x"}
        keep = self._keep(fused, frozenset(needs)).difference(fused.again)
        return (
            keep.union(fused.again) if self.facts.settings.dispatch_again and "x" in keep else keep
        )

    def _keep(self, saver: Any, needs: frozenset[str]) -> frozenset[str]:
        """The fields to save; under a recompute policy all fields but those that the op can recompute."""
        fields = saver.Saved._fields
        keep = kept_fields(saver.saves_for, fields, needs)
        if self.facts.settings.recompute and not keep.isdisjoint(saver.recomputes):
            return frozenset(fields) - set(saver.recomputes)
        return keep

    # --- formats of operands

    def _takes_quantized(self, u: _Unit) -> bool:
        """Whether the target takes a quantized x. Its first GEMM, if there is one, must then quantize its input."""
        if not u.target.takes_quantized:
            return False
        reading = [i for i in range(u.start, u.stop) if self.ops[i].multiplies]
        roles = self._roles(reading[0]) if reading else None
        return not reading or (roles is not None and roles.input is not None)

    def _roles(self, i: int) -> Roles | None:
        if self.ops[i].across_ranks.sends:
            i = next(self.chain.receivers(i), i)
        return None if i in self.high else self.facts.roles[i]

    def _rounds_at_random(self, i: int) -> bool:
        roles = self._roles(i)
        return roles is not None and roles.rounds_at_random

    def operands(self) -> Iterator[Operand]:
        """The operands of every GEMM of the run under the recipe."""
        for i, (name, needs) in enumerate(zip(self.names, self.needs, strict=True)):
            roles = self._roles(i)
            if roles is not None and self.ops[i].multiplies:
                backward = not needs.isdisjoint(("x", "weight"))
                for role in ("input", "weight", *["grad_output"] * backward):
                    scaling = getattr(roles, role)
                    if scaling is None:
                        yield Operand(name, role, HIGH, False)
                    else:
                        yield Operand(name, role, str(scaling), scaling.gemm_kind is not None)

    def unquantized(self) -> Iterator[StaysHigh]:
        """The ops whose GEMMs the recipe leaves in high precision, whatever it says."""
        recipe = self.facts.settings.recipe
        for name, op in zip(self.names, self.ops, strict=True):
            if recipe is not None and op.stays_high:
                yield StaysHigh(name, type(op).__name__, type(recipe).__name__, op.stays_high)

    def weights(self) -> Iterator[KeptWeight]:
        """The quantized weights that are kept from call to call."""
        for i, (op, needs) in enumerate(zip(self.ops, self.needs, strict=True)):
            roles = self._roles(i)
            if roles is None or not op.multiplies or stored_in(op) is not None:
                continue
            store = self._store(op, roles)
            if store is None or store.parameter is None:
                continue
            shape = tuple(op.sample("weight").shape)
            layouts = 1 + ("x" in needs and roles.backward is None)
            nbytes = kept_bytes(shape, roles.weight, layouts)  # type: ignore[arg-type]
            yield KeptWeight(f"{self.names[i]}.weight", roles.weights, nbytes)

    # --- saved tensors

    def _slots(self, start: int, forward: Sequence[_Unit]) -> Iterator[Slot]:
        for u in forward:
            if u.kind == "joint":
                fields, known = u.target.Saved._fields, u.target.names
                names = [self._saved_name(u, known.get(f, f"0.{f}")) for f in fields]
                yield _slot(u.start - start, u.target, self._joint_keep(u), names)
                continue
            for i in range(u.start, u.stop):
                op = self.ops[i]
                names = [f"{self.names[i]}.{f}" for f in op.Saved._fields]
                yield _slot(i - start, op, self.calls[i].keep, names)

    def _saved_name(self, u: _Unit, name: str) -> str:
        member, field = name.split(".", 1)
        return f"{self.names[u.start + int(member)]}.{field}"


def _slot(owner: int, saver: Any, keep: frozenset[str], names: Sequence[str]) -> Slot:
    kept = tuple(k for k, field in enumerate(saver.Saved._fields) if field in keep)
    return Slot(owner, saver.Saved, kept, tuple(names), type(saver).__name__)


def _without_delayed(
    ops: Sequence[Op[Any]], calls: tuple[Call, ...]
) -> tuple[tuple[Call, ...], tuple[Call, ...]]:
    """(calls of a backward step without delayed gradients, calls for `backward_dw`), the latter () if no op delays."""
    delayed = [call.needs.intersection(op.delays) for op, call in zip(ops, calls, strict=True)]
    if not any(delayed):
        return calls, ()
    return (
        tuple(c._replace(needs=c.needs - d) for c, d in zip(calls, delayed, strict=True)),
        tuple(c._replace(needs=d) for c, d in zip(calls, delayed, strict=True)),
    )
