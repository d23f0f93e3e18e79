"""Queries of traced code to the planner, which runs outside of the trace.

Arguments and answers are constants. Answers are numbers, and lists of words in one string: dynamo does not trace into
either.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import starmap
from typing import Any, NamedTuple

import torch

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.ops.object_table import TABLE, object_at
from fuseops.ops.op import NON_CONFIG_ATTRS
from fuseops.ops.router import Router
from fuseops.plan.key import CallFacts, OpFacts, ParameterFacts, PlanKey, op_facts
from fuseops.plan.segment import Segment, is_builtin
from fuseops.rules.builtin_rules import BUILTIN_RULES

from .run import Run
from .runner import Runner
from .steps import write_backward, write_forward

UNREAD = "-"  # place of an op that never changes, so that traced code reads nothing of it


def _words(items: Iterable[Any]) -> str:
    return "\n".join(map(str, items))


@torch_private.assume_constant_result
def query(runner: int, what: str, *about: Any) -> Any:
    """Call the method `what` of `TraceQueries`; dynamo takes the result for a constant.   runner: its address"""
    return getattr(TraceQueries(object_at(runner)), what)(*about)


class UnknownRows:
    """An `UnknownRows` is an unknown number of rows: a condition that reads it raises TypeError."""

    __hash__ = None  # type: ignore[assignment]

    def __mul__(self, other: Any) -> UnknownRows:
        return self

    __rmul__ = __floordiv__ = __mul__

    def __eq__(self, other: object) -> bool:
        raise TypeError("not known")

    def __bool__(self) -> bool:
        raise TypeError("not known")


class RowlessInput(NamedTuple):
    """A `RowlessInput` takes the place of x where conditions are evaluated for an unknown number of rows."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


class TraceQueries:
    """A `TraceQueries` answers queries of traced code about one runner.

    Arguments: the index of a piece of the runner, of an op in it, of a segment in a plan; entries and plans by number.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def _run(self, piece: int) -> Run:
        run: Any = self.runner.pieces[piece][1]
        return run

    def _own_attributes(self, piece: int, op: int) -> dict[str, Any]:
        """The attributes of an op that not every nn.Module has; none of an op that is not fuseops' own."""
        found = self._run(piece).ops[op]
        if not is_builtin(found):
            return {}
        return {n: value for n, value in found.__dict__.items() if n not in NON_CONFIG_ATTRS}

    def reads(self) -> str:
        return _words(self.runner.reads)

    def writes(self) -> str:
        return _words(self.runner.writes)

    def pieces(self, returns: tuple[str, ...]) -> int:
        """The number of pieces.  Raises SideInputError where `returns` cannot be given."""
        return len(self.runner.live_after(returns))

    def module_index(self, piece: int) -> int | None:
        """The index of a plain module among the flat children, None for a run of ops."""
        found = self.runner.pieces[piece][1]
        return None if isinstance(found, Run) else int(self.runner.places[id(found)])

    def module_sides(self, piece: int) -> str:
        """The side inputs of a module: keyword and name alternate."""
        return _words(word for pair in self.runner.piece_reads[piece] for word in pair)

    def live_after(self, piece: int, returns: tuple[str, ...]) -> str:
        """The side names that are read after a piece."""
        return _words(self.runner.live_after(returns)[piece])

    def op_places(self, piece: int) -> str:
        """The places of the ops of a run among the flat children."""
        return _words(self.runner.places.get(id(op), UNREAD) for op in self._run(piece).ops)

    def first_of_each_class(self, piece: int) -> str:
        """The first op of each class."""
        ops = reversed([*enumerate(self._run(piece).ops)])
        return _words({type(op): i for i, op in ops if id(op) in self.runner.places}.values())

    def has_swap(self, piece: int) -> bool:
        return self._run(piece).plans.swaps

    def takes_local_x(self, piece: int) -> bool:
        return self._run(piece).chain.local

    def layout_op(self, piece: int) -> int | None:
        """The first op that declares the layout of its input over ranks."""
        ops = enumerate(self._run(piece).ops)
        return next((i for i, op in ops if op._layout is not None), None)

    def accepted_width(self, piece: int, axes: int, unchanged: tuple[bool, ...]) -> int | None:
        """The width of x that every op of a run accepts with any number of rows, None where that is not known.

        axes: of x.  unchanged: whether the attributes of each op are those outside of the trace
        """
        run = self._run(piece)
        width = _width(run)
        if (
            width is None
            or run.plans.swaps
            or not (axes and all(unchanged) and all(map(is_builtin, run.ops)))
        ):
            return None
        shape: Any = (*[UnknownRows()] * (axes - 1), width)
        try:
            for op in run.ops:
                shape = op.out_shape(shape)
        except (FuseOpsError, TypeError):
            return None
        return width

    def outside(self, piece: int) -> str:
        return _words(self._run(piece).chain.outside)

    def parameters(self, piece: int, op: int) -> str:
        return _words(self._run(piece).chain.parameters[op])

    def parametrized(self, piece: int) -> bool:
        """Whether an op has child modules, as a parametrized one has."""
        return any(op._modules for op in self._run(piece).ops)

    def owner_dict(self, piece: int, op: int, name: str) -> str:
        """The dict of an op that holds the tensor of a keyword of `fwd`, "" where none does.

        Traced code reads the dict, since dynamo would trace the `__getattr__` of an op that has one.
        """
        own = self._run(piece).ops[op].__dict__
        return next((owner for owner in ("_parameters", "_buffers") if name in own[owner]), "")

    def alias(self, piece: int, op: int) -> bool | None:
        """Whether an op is an alias op, None where traced code has to read that itself."""
        found = self._run(piece).ops[op]
        return bool(found.alias) if is_builtin(found) else None

    def guard_on(self, *about: Any) -> None:
        """Do nothing: dynamo guards on the arguments."""

    def attributes_of_kind(self, piece: int, op: int, kind: str) -> str:
        """The attributes of an op that are of one `_kind`."""
        return _words(
            n for n, value in self._own_attributes(piece, op).items() if _kind(value) == kind
        )

    def attribute(self, piece: int, op: int, name: str, place: int | None = None) -> Any:
        """An attribute, or the item at a place of one."""
        found = self._own_attributes(piece, op)[name]
        return found if place is None else found[place]

    def attribute_equals(self, piece: int, op: int, name: str, value: Any) -> bool:
        """Whether an attribute is this constant.   value: of a mapping its items, which traced code can hold"""
        found = self._own_attributes(piece, op)[name]
        return bool((tuple(found.items()) if isinstance(found, dict) else found) == value)

    def attribute_is(self, piece: int, op: int, name: str, address: int) -> bool:
        return id(self._own_attributes(piece, op)[name]) == address

    def entry(
        self,
        piece: int,
        modes: tuple[tuple[bool, bool] | None, ...],
        parameters: tuple[tuple[tuple[Any, ...] | None, ...], ...],
        call: tuple[Any, ...],
    ) -> int:
        """The number of the cache entry of a key.

        modes: (training, alias) of every op, None for one that never changes.  parameters: the values of the
        `ParameterFacts` of every op.  call: the values of the `CallFacts`
        """
        run = self._run(piece)
        ops = [
            facts if mode is None else facts._replace(training=mode[0], alias=mode[1])
            for facts, mode in zip(starmap(OpFacts, op_facts(run.ops)), modes, strict=True)
        ]
        known = [tuple([p if p is None else ParameterFacts(*p) for p in own]) for own in parameters]
        key = PlanKey(tuple(ops), tuple(known), CallFacts(*call))
        return run.register(run.plans.entry_of_key(key))

    def depends_on_symbols(self, piece: int, entry: int, dtype: torch.dtype, axes: int) -> bool:
        """Whether the plan of an entry depends on a size that may be symbolic."""
        return self._reasons(piece, entry, dtype, axes) is None

    def _reasons(
        self, piece: int, entry: int, dtype: torch.dtype, axes: int
    ) -> tuple[str | None, ...] | None:
        """Why each candidate may not fire; None where that depends on the number of rows."""
        known, run = TABLE[entry], self._run(piece)
        if not (known.scan.candidates or known.gated):
            return ()
        width = _width(run)
        if known.gated or run.chain.outside or width is None:
            return None
        if any(site.rule not in BUILTIN_RULES for site in known.scan.candidates):
            return None  # a user's condition may read the shape
        shape = (*[UnknownRows()] * (axes - 1), width)
        x: Any = RowlessInput(shape, dtype, known.facts.key.call.device)
        try:
            return run.plans.reasons(known, x, {})
        except TypeError:
            return None

    def plan(
        self,
        piece: int,
        entry: int,
        reasons: tuple[str | None, ...] | None,
        dtype: torch.dtype,
        axes: int,
    ) -> int:
        """The number of the plan of an entry for this outcome of its conditions."""
        run = self._run(piece)
        if reasons is None:
            reasons = self._reasons(piece, entry, dtype, axes)
        plan = run.plans.plan_of_outcome(TABLE[entry], reasons)  # type: ignore[arg-type]
        for segment in plan.segments:
            if not segment.number:
                segment.number = run.register(segment)
                write_forward(segment), write_backward(segment)  # which dynamo cannot trace
        return run.register(plan)

    def segments(self, plan: int) -> int:
        return len(TABLE[plan].segments)

    def segment_mode(self, plan: int, k: int, unchanged: tuple[bool, ...]) -> str:
        """How a segment runs: as a "tap", a "call", "traced" or "opaque"."""
        seg: Segment = TABLE[plan].segments[k]
        if seg.tap is not None:
            return "tap"
        if seg.kind == "call":
            return "call"
        over_ranks = seg.local_reads or any(op._local for op in seg.ops)
        return (
            "opaque"
            if seg.kind == "node" and seg.builtin and all(unchanged) and not over_ranks
            else "traced"
        )

    def segment_field(self, plan: int, k: int, name: str) -> Any:
        """A number or a name in a field of a segment, or a list of names."""
        found = getattr(TABLE[plan].segments[k], name)
        return _words(found) if isinstance(found, tuple) else found

    def segment_params(self, plan: int, k: int) -> str:
        """The parameters of a segment: index of the op in the run, and name, alternate."""
        seg: Segment = TABLE[plan].segments[k]
        return _words(word for i, name in seg.params for word in (seg.start + i, name))


def _width(run: Run) -> int | None:
    """The input width of a run, None where its first op does not declare one."""
    first = next((op for op in run.ops if not op.alias), run.ops[0])
    width = first.dim if isinstance(first, Router) else getattr(first, "in_features", None)
    widths = getattr(first, "normalized_shape", None) or (width,)
    return widths[0] if len(widths) == 1 else None


def _kind(value: Any) -> str:
    """How traced code compares an attribute. Floats, alone or in a tuple, may be symbols to dynamo."""
    if type(value) is float:
        return "number"
    if _constant(value):
        return "constant"
    if type(value) is tuple:
        return "mixed" if all(type(v) in (bool, int, str, float) for v in value) else "other"
    if type(value) is dict:
        return "mapping" if all(map(_constant, value.values())) else "other"
    if isinstance(value, torch.Tensor):  # ops take tensors by keyword
        return "tensor"
    return "other" if isinstance(value, list | set | frozenset | dict) else "object"


def _constant(value: Any) -> bool:
    """Whether an attribute is a constant to dynamo, which guards on its value. A mesh is one: torch 2.11 cannot trace
    its identity.
    """
    if isinstance(value, tuple):
        return all(map(_constant, value)) and not any(type(item) is float for item in value)
    plain = type(value) in (bool, int, str) or type(value).__name__ == "DeviceMesh"
    return value is None or plain or isinstance(value, torch.dtype)
