"""Segments are the executable form of a plan: flat steps over positions of tensors, fixed before a call runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple, cast

from fuseops.kernels.launch import INTERPRET
from fuseops.ops.local import Local
from fuseops.ops.op import Call, Op
from fuseops.ops.structure import Tap
from fuseops.recipes.quantized import QuantizedForm
from fuseops.torch_private import dict_version

Args = tuple[tuple[str, int], ...]  # (keyword, position in the node's tensors)


def is_builtin(op: Any) -> bool:
    """Whether an op or fused op is built into fuseops, so that it reads only its arguments and attributes."""
    return type(op).__module__.startswith("fuseops.") and not getattr(op, "pure", False)


class Slot(NamedTuple):
    """A `Slot` lists the tensors that one op or joint span saves, and their names."""

    owner: int  # index of the (first) op in the segment
    cls: type[Any]  # the Saved class
    kept: tuple[int, ...]  # fields that some needed gradient reads
    names: tuple[str, ...]  # published name of every field
    op: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Step:
    """A `Step` runs one op or fused op, in one direction."""

    members: tuple[int, ...]  # indices in the segment
    at: int  # position of the first among all that the Sequential runs
    target: Any  # Op or FusedOp
    kind: str  # "op", "forward", "backward", "joint"
    calls: tuple[Call, ...]
    takes_call: bool = False  # the fwd or bwd of a single op takes `call`
    pure: bool = False  # a level-1 op
    live: bool = False  # it takes call.out and call.scratch
    scopes: tuple[str, ...] = ()  # for each member, the Sequential that it was written in
    writes: tuple[tuple[str, int], ...] = ()  # (name, position) of published side tensors
    rule: str = ""  # the rule that made the target, if one did

    @property
    def first(self) -> int:
        """The first of `members`."""
        return self.members[0]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForwardStep(Step):
    """A `ForwardStep` runs the forward of one op or fused op."""

    args: tuple[Args, ...]  # keyword tensors of every member
    keep: frozenset[str] = frozenset()  # joint: fields to save
    cast: Any = None  # autocast dtype of the input, or None
    takes_quantized: bool = False  # x may be a Quantized, which is dequantized otherwise


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BackwardStep(Step):
    """A `BackwardStep` runs the backward of one op or fused op."""

    # the Saved of each member, or that of a joint target, with every field None
    empty: tuple[Any, ...] = ()
    takes_dside: bool = False
    # the parameters and side inputs of the members whose gradients are needed, and their positions
    params: tuple[tuple[int, str, int], ...] = ()  # (member, name, position)
    sides: tuple[tuple[int, str, int], ...] = ()
    main: tuple[tuple[int, str], ...] = ()  # (member, parameter) whose gradients go to main_grad
    dx: bool = False  # the gradient of x is needed
    delayed: BackwardStep | None = None  # the part that waits for backward_dw


MAX_SLOT_MAPS = 64  # of a segment, since a saved shape may change at each call


class Const(NamedTuple):
    """A `Const` is a field of a Saved that is no tensor."""

    value: Any


class QuantizedSlots(NamedTuple):
    """A `QuantizedSlots` is a field of a Saved that is quantized: its form, and the number of each component."""

    form: QuantizedForm
    slots: tuple[int, ...]


class SlotMap(list[Any]):
    """A `SlotMap` lists, for each kept field in the order of `Segment.kept`, the number of its tensor among those that
    autograd saves, a `QuantizedSlots`, or a `Const` (None for None).

    Its values are those of the fields, with a `QuantizedForm` for what is quantized, and behind them the components.

    constants: the values that are no tensors, then None.  values_of: all values, from (*tensors, *constants)
    forms: (field, form) of what is quantized

    It fits another call if the types of its kept values are `kinds`, those that `tensors_of` gives are distinct
    tensors, each (k, j) of `duplicates` is one tensor, and `fixed_of` gives `fixed`.
    """

    def __init__(self, numbers: Sequence[int | None], values: Sequence[Any]) -> None:
        """values: see above.  numbers: of their tensors, None for a value that is no tensor"""
        each = [*zip(numbers, values, strict=True)]
        self.forms = [(k, v) for k, v in enumerate(values) if type(v) is QuantizedForm]
        fields = len(values) - sum(len(form.components) for _, form in self.forms)
        super().__init__([Const(v) if n is None and v is not None else n for n, v in each[:fields]])
        components = iter(cast("Sequence[int]", numbers[fields:]))
        for k, form in self.forms:
            self[k] = QuantizedSlots(form, (*itertools.islice(components, len(form.components)),))
        first: dict[int, int] = {}
        tensors = [(k, n) for k, n in enumerate(numbers) if n is not None]
        self.duplicates = [(k, first[n]) for k, n in tensors if first.setdefault(n, k) != k]
        self.kinds = [*map(type, values)]
        self.tensors_of = _getter([*first.values()])
        self.fixed_of = _getter([k for k, n in enumerate(numbers) if n is None])
        self.fixed = self.fixed_of(values)
        self.constants = (*[v for n, v in each if n is None and v is not None], None)
        places = itertools.count(len(first))
        self.values_of = _getter(
            [n if n is not None else -1 if v is None else next(places) for n, v in each]
        )

    def with_quantized(self, values: list[Any]) -> list[Any]:
        """The kept fields, made of all values."""
        components = iter(values[len(self) :])
        for k, form in self.forms:
            values[k] = form.of(itertools.islice(components, len(form.components)))
        return values[: len(self)]


def _getter(places: Sequence[int]) -> Callable[[Any], Any]:
    """A function that returns the items of a sequence at these places, as a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return itemgetter(slice(places[0], places[0] + 1 or None) if places else slice(0))


@dataclass(eq=False)
class Segment:
    """A `Segment` is a run of ops that is one autograd node ("node"), or runs outside of one ("plain", "call").

    plain  differentiable torch: alias ops, ops over DTensors, level-1 ops under torch.compile, everything under
           `fo.reference()`
    call   through the op's own `__call__`: it has hooks or an overridden forward
    """

    kind: str
    start: int
    stop: int
    ops: tuple[Op[Any], ...]
    names: tuple[str, ...]
    reads: tuple[str, ...] = ()  # side inputs, the first tensors of the node after x
    params: tuple[tuple[int, str], ...] = ()  # (op, parameter) of the tensors after those
    last_reads: tuple[str, ...] = ()  # the `reads` that nothing reads after the segment
    exports: tuple[str, ...] = ()  # published side tensors that leave the segment
    export_positions: tuple[int, ...] = ()
    forward: tuple[ForwardStep, ...] = ()
    backward: tuple[BackwardStep, ...] = ()
    slots: tuple[Slot, ...] = ()
    size: int = 0  # tensors in the node, inputs and published ones
    needs_grad: bool = False
    device: str = "cpu"  # device type
    autocast: bool = False  # autocast is on around it, and must be off inside
    checked_forward: bool = False  # the contract was checked in a forward
    checked_backward: bool = False  # every gradient and its shape were checked in a backward
    number: int = 0  # in the table that traced code reads
    bypasses_autograd: bool = field(init=False)  # some gradients are not returned to autograd
    # names under which calls published saved tensors, by what they depend on
    saved_names: dict[Any, Any] = field(default_factory=dict)
    kept: tuple[tuple[int, int], ...] = field(init=False)  # (owner, field) of all that is saved
    # by the numbers of the saved tensors of the kept fields, and the values of the others
    slot_maps: dict[tuple[Any, ...], SlotMap] = field(default_factory=dict)
    last_slot_map: SlotMap | None = None  # of the last call
    random: bool = field(init=False)  # its backward rounds stochastically
    builtin: bool = field(init=False)  # all ops and fused ops are built into fuseops
    # its ops are built in and change no state that kernels depend on, and kernels may run on its device
    quiet: bool = field(init=False)
    # whether its calls may be recorded and replayed (`run.repeats`), but for a backward that bypasses autograd, and the
    # records
    repeatable: bool = field(init=False)
    repeats: Any = field(init=False, default=None)
    op_dicts: tuple[dict[str, Any], ...] = field(init=False)
    versions: list[object] = field(init=False)  # of these, at its last call
    inputs: int = field(init=False)  # how many tensors the node takes besides x
    # (op, dict, name) under which each tensor of `params` is registered; None if some input is another tensor than the
    # registered or published one
    registered: tuple[tuple[Op[Any], str, str], ...] | None = field(init=False)
    path: str | None = None  # the prefix of its profiler ranges, while it is profiled
    # copies of it for profiles, by path, and for other gradients that go through autograd
    variants: dict[Any, Segment] = field(init=False, default_factory=dict)
    held: tuple[int, ...] = field(init=False)  # positions of the inputs that its ops name in `held`
    # its forward and backward as generated functions (`run.steps`), once they are made
    fwd: Callable[..., Any] | None = field(init=False, default=None)
    bwd: Callable[..., Any] | None = field(init=False, default=None)
    aliases: bool = field(init=False)  # all ops are alias ops, which launch no kernel
    # the `reads`, by position, in whose place an op computes with a local tensor
    local_reads: tuple[tuple[int, Local], ...] = field(init=False)
    # the name under which a Tap that is its only op publishes x
    tap: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.op_dicts = tuple([op.__dict__ for op in self.ops])
        self.versions = [*map(dict_version, self.op_dicts)]
        self.bypasses_autograd = any(s.main or s.delayed is not None for s in self.backward)
        self.random = any(c.rounds_at_random for step in self.backward for c in step.calls)
        self.kept = tuple((slot.owner, k) for slot in self.slots for k in slot.kept)
        self.local_reads = self._local_reads()
        run = [*self.ops, *(step.target for step in (*self.forward, *self.backward))]
        self.builtin = all(map(is_builtin, run))
        known = self.builtin and not self.bypasses_autograd
        self.quiet = known and (INTERPRET or self.device != "cpu")
        self.repeatable = (
            (self.builtin and self.device != "meta" and self.path is None)
            and all(op.across_ranks.group is None for op in self.ops)
            and not any(c.rounds_at_random for step in self.forward for c in step.calls)
        )
        self.inputs = len(self.reads) + len(self.params)
        own = enumerate(self.params, len(self.reads))
        self.held = tuple(at for at, (i, name) in own if name in self.ops[i].held)
        owners = [
            (op, kind, name)
            for op, name in ((self.ops[i], name) for i, name in self.params)
            for kind in ("_parameters", "_buffers")
            if name in op.__dict__[kind] and not op._local
        ]
        plain = not self.local_reads and len(owners) == len(self.params)
        self.registered = tuple(owners) if plain else None
        self.aliases = all(op.alias for op in self.ops)
        alone = self.kind == "plain" and len(self.exports) == 1 and len(self.ops) == 1
        self.tap = self.exports[0] if alone and type(self.ops[0]) is Tap else None

    def forget(self) -> None:
        """Have the contract checked anew, and replay no earlier call: an op was written to."""
        self.versions, self.repeats = [*map(dict_version, self.op_dicts)], None
        self.checked_forward = self.checked_backward = False

    def variant(self, key: Any, **changes: Any) -> Segment:
        """The copy of it with these changes, which is made once for a key."""
        found = self.variants.get(key)
        if found is None:
            found = self.variants[key] = replace(self, **changes)
        return found

    def _local_reads(self) -> tuple[tuple[int, Local], ...]:
        result: dict[int, Local] = {}
        for step in self.forward:
            for i, args in zip(step.members, step.args, strict=True):
                local = self.ops[i]._local
                result |= {
                    at: local[keyword]
                    for keyword, at in args
                    if keyword in local and at < len(self.reads)
                }
        return tuple(result.items())

    def slot_map(self, numbers: tuple[int | None, ...], values: Sequence[Any]) -> SlotMap:
        """The `SlotMap` of a call whose kept fields are the saved tensors of these numbers, or these values."""
        key = tuple([v if n is None else n for n, v in zip(numbers, values, strict=True)])
        result = self.slot_maps.get((numbers, key))
        if result is None:
            if len(self.slot_maps) >= MAX_SLOT_MAPS:
                self.slot_maps.clear()
            result = self.slot_maps[numbers, key] = SlotMap(numbers, values)
        self.last_slot_map = result
        return result
