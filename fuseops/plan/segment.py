"""Segments are the executable form of a plan: flat steps over positions, fixed before a call runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from fuseops.kernels.registry import INTERPRET
from fuseops.ops.local import Local
from fuseops.ops.op import Call, Op
from fuseops.ops.structure import Tap

Args = tuple[tuple[str, int], ...]  # (keyword, position in the node's tensors)


def is_own(op: Any) -> bool:
    """Whether an op, or fused op, is fuseops' own: its code reads nothing but what it is given and its attributes."""
    return type(op).__module__.startswith("fuseops.") and not getattr(op, "pure", False)


class Slot(NamedTuple):
    """A slot says which tensors one op or joint span saves, and their names."""

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
    live: bool = False  # wants call.out and call.scratch
    scopes: tuple[str, ...] = ()  # of every member, the Sequential that it was written in
    writes: tuple[tuple[str, int], ...] = ()  # (name, position) of published side tensors
    rule: str = ""  # that made the target, if one did

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
    codes: bool = False  # x may be a Quantized; what that stands for, otherwise


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BackwardStep(Step):
    """A `BackwardStep` runs the backward of one op or fused op."""

    # the Saved of each member, or that of a joint target, with every field None
    empty: tuple[Any, ...] = ()
    takes_dside: bool = False
    # what is needed of every member's parameters and side inputs, and its position
    params: tuple[tuple[int, str, int], ...] = ()  # (member, name, position)
    sides: tuple[tuple[int, str, int], ...] = ()
    main: tuple[tuple[int, str], ...] = ()  # (member, parameter) whose gradients go to main_grad
    dx: bool = False  # somebody needs the gradient of x
    later: BackwardStep | None = None  # the part that waits for backward_dw


MOST_ROWS = 64  # of a segment: a saved shape may be another at each call


class Const(NamedTuple):
    """A `Const` is a field of a Saved that is no tensor."""

    value: Any


class Rows(list[Any]):
    """`Rows` say where each kept field is among the tensors that autograd saves, in the order of `Segment.kept`: the
    number of its tensor, or what it is where it is none.

    constants: those that are none, and then None.  values_of: all of it, out of (*tensors, *constants)

    Another call saves alike if its kept values have these `kinds`, those that `tensors_of` gives are different tensors,
    each of `again` is one of them again (k is j), and `fixed_of` gives `fixed`.
    """

    def __init__(self, numbers: Sequence[int | None], values: Sequence[Any]) -> None:
        """values: what is kept.  numbers: of each the number of its tensor, None for what is none"""
        each = [*zip(numbers, values, strict=True)]
        super().__init__([Const(v) if n is None and v is not None else n for n, v in each])
        first: dict[int, int] = {}
        tensors = [(k, n) for k, n in enumerate(numbers) if n is not None]
        self.again = [(k, first[n]) for k, n in tensors if first.setdefault(n, k) != k]
        self.kinds = [*map(type, values)]
        self.tensors_of = _getter([*first.values()])
        self.fixed_of = _getter([k for k, n in enumerate(numbers) if n is None])
        self.fixed = self.fixed_of(values)
        self.constants = (*[v for n, v in each if n is None and v is not None], None)
        places = itertools.count(len(first))
        self.values_of = _getter(
            [n if n is not None else -1 if v is None else next(places) for n, v in each]
        )


def _getter(places: Sequence[int]) -> Callable[[Any], Any]:
    """The values at these places, in a sequence."""
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
    ends: tuple[str, ...] = ()  # of them: those that nobody reads after the segment
    exports: tuple[str, ...] = ()  # published side tensors that leave the segment
    export_positions: tuple[int, ...] = ()
    forward: tuple[ForwardStep, ...] = ()
    backward: tuple[BackwardStep, ...] = ()
    slots: tuple[Slot, ...] = ()
    size: int = 0  # tensors in the node, inputs and published ones
    needs_grad: bool = False
    device: str = "cpu"  # device type
    autocast: bool = False  # autocast is on around it, and must be off inside
    checked_forward: bool = False  # a forward kept the contract
    checked_backward: bool = False  # a backward gave every gradient, of the right shape
    number: int = 0  # in the table that traced code reads
    elsewhere: bool = field(init=False)  # some gradients do not go through autograd
    # names of what calls published, by what they depend on
    saved_names: dict[Any, Any] = field(default_factory=dict)
    kept: tuple[tuple[int, int], ...] = field(init=False)  # (owner, field) of all that is saved
    # where the fields of every Saved are among the saved tensors, by the number of the tensor that each kept one is
    distinct: dict[tuple[Any, ...], Rows] = field(default_factory=dict)
    last_rows: Rows | None = None  # those of the last call
    random: bool = field(init=False)  # its backward rounds at random
    own: bool = field(init=False)  # fuseops knows what its ops do: all of them are fuseops' own
    # and none of them changes what kernels depend on, which may run on the device
    quiet: bool = field(init=False)
    # its calls may be written down, and done again (`run.repeats`), and what is
    repeatable: bool = field(init=False)
    repeats: Any = field(init=False, default=None)
    inputs: int = field(init=False)  # how many tensors the node takes besides x
    # where the tensors of `params` are registered, by the name of a dict of each op; None where some inputs are not as
    # they are registered or published
    registered: tuple[tuple[Op[Any], str, str], ...] | None = field(init=False)
    path: str | None = None  # it runs in ranges of a profile, which are named below this path
    # as it runs in a profile, by path, and with other gradients that go through autograd
    variants: dict[Any, Segment] = field(init=False, default_factory=dict)
    # its steps forward and backward as functions, once they are written (`run.steps`)
    fwd: Callable[..., Any] | None = field(init=False, default=None)
    bwd: Callable[..., Any] | None = field(init=False, default=None)
    aliases: bool = field(init=False)  # nothing but alias ops, which call no kernel
    # of `reads`, by position: those that an op computes with another tensor in the place of
    local_reads: tuple[tuple[int, Local], ...] = field(init=False)
    # the name under which a Tap, which stands alone, publishes x
    tap: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.elsewhere = any(step.main or step.later is not None for step in self.backward)
        roles = [call.precision.roles for step in self.backward for call in step.calls]
        self.random = any(of is not None and of.random for of in roles)
        self.kept = tuple((slot.owner, k) for slot in self.slots for k in slot.kept)
        self.local_reads = self._local_reads()
        run = [*self.ops, *(step.target for step in (*self.forward, *self.backward))]
        self.own = all(map(is_own, run))
        self.quiet = self.own and not self.elsewhere and (INTERPRET or self.device != "cpu")
        self.repeatable = (
            (self.own and not self.elsewhere and self.device != "meta" and self.path is None)
            and all(op.together is None for op in self.ops)
            and not any(c.precision.roles for step in self.forward for c in step.calls)
        )
        self.inputs = len(self.reads) + len(self.params)
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

    def _local_reads(self) -> tuple[tuple[int, Local], ...]:
        found: dict[int, Local] = {}
        for step in self.forward:
            for i, args in zip(step.members, step.args, strict=True):
                local = self.ops[i]._local
                found |= {
                    at: local[keyword]
                    for keyword, at in args
                    if keyword in local and at < len(self.reads)
                }
        return tuple(found.items())

    def rows(self, numbers: tuple[int | None, ...], values: Sequence[Any]) -> Rows:
        """The rows of a call whose kept fields are the saved tensors of these numbers, or these values."""
        key = tuple([v if n is None else n for n, v in zip(numbers, values, strict=True)])
        found = self.distinct.get((numbers, key))
        if found is None:
            if len(self.distinct) >= MOST_ROWS:
                self.distinct.clear()
            found = self.distinct[numbers, key] = Rows(numbers, values)
        self.last_rows = found
        return found
