"""What traced code is told of the planner, which runs outside of the trace: constants, by the address of a runner.

Numbers, and lists of words in one string, are what dynamo takes without a look.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import starmap
from typing import Any, NamedTuple

import torch

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.ops.op import NON_CONFIG_ATTRS
from fuseops.ops.router import Router
from fuseops.plan.key import CallFacts, OpFacts, ParameterFacts, PlanKey, op_facts
from fuseops.plan.segment import Segment, is_own
from fuseops.rules.builtin_rules import BUILTIN_RULES

from .run import Run
from .runner import Runner
from .steps import write_backward, write_forward
from .traced import TABLE, alive

STAYS = "-"  # in the place of an op of which nothing is read, since it cannot be another


def _words(items: Iterable[Any]) -> str:
    return "\n".join(map(str, items))


@torch_private.assume_constant_result
def told(runner: int, what: str, *about: Any) -> Any:
    """A constant about the runner at an address: what the method of `Told` of that name answers."""
    return getattr(Told(alive(runner)), what)(*about)


class UnknownRows:
    """An `UnknownRows` is a number of rows that is not known: a condition that reads it raises TypeError."""

    __hash__ = None  # type: ignore[assignment]

    def __mul__(self, other: Any) -> UnknownRows:
        return self

    __rmul__ = __floordiv__ = __mul__

    def __eq__(self, other: object) -> bool:
        raise TypeError("not known")

    def __bool__(self) -> bool:
        raise TypeError("not known")


class Unsized(NamedTuple):
    """An `Unsized` stands for x where conditions are asked in a trace, its rows unknown."""

    shape: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


class Told:
    """A `Told` answers the questions that traced code has for the planner."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def _run(self, piece: int) -> Run:
        run: Any = self.runner.pieces[piece][1]
        return run

    def _own(self, piece: int, op: int) -> dict[str, Any]:
        """What an op of fuseops has of its own."""
        found = self._run(piece).ops[op]
        if not is_own(found):
            return {}
        return {n: value for n, value in found.__dict__.items() if n not in NON_CONFIG_ATTRS}

    def reads(self) -> str:
        return _words(self.runner.reads)

    def writes(self) -> str:
        return _words(self.runner.writes)

    def pieces(self, returns: tuple[str, ...]) -> int:
        """How many there are, once `returns` can be had."""
        return len(self.runner.live_after(returns))

    def place(self, piece: int) -> int | None:
        """Where a module stands among those that were walked, None of a run of ops."""
        found = self.runner.pieces[piece][1]
        return None if isinstance(found, Run) else int(self.runner.places[id(found)])

    def takes(self, piece: int) -> str:
        """The side inputs of a module: keyword and name in turn."""
        return _words(word for pair in self.runner.takes[piece] for word in pair)

    def live(self, piece: int, returns: tuple[str, ...]) -> str:
        """Side names that are read after a piece."""
        return _words(self.runner.live_after(returns)[piece])

    def ops(self, piece: int) -> str:
        """Where the ops of a run stand."""
        return _words(self.runner.places.get(id(op), STAYS) for op in self._run(piece).ops)

    def kinds(self, piece: int) -> str:
        """The first op of each class."""
        ops = reversed([*enumerate(self._run(piece).ops)])
        return _words({type(op): i for i, op in ops if id(op) in self.runner.places}.values())

    def swaps(self, piece: int) -> bool:
        return self._run(piece).swaps

    def local(self, piece: int) -> bool:
        return self._run(piece).chain.local

    def laid_out(self, piece: int) -> int | None:
        """The first op that says how its input is laid out over ranks."""
        ops = enumerate(self._run(piece).ops)
        return next((i for i, op in ops if op._layout is not None), None)

    def width(self, piece: int, axes: int, same: tuple[bool, ...]) -> int | None:
        """How wide an x of so many axes is with which no op refuses its input, however many rows there are; None where
        that is not known.
        """
        run = self._run(piece)
        width = _width(run)
        if width is None or run.swaps or not (axes and all(same) and all(map(is_own, run.ops))):
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
        """Whether an op has modules, whose tensors are made of others."""
        return any(op._modules for op in self._run(piece).ops)

    def home(self, piece: int, op: int, name: str) -> str:
        """Which dict of an op holds a tensor under the name that `fwd` takes, "" where none does: traced code looks
        there, since dynamo traces the `__getattr__` of an op that has one.
        """
        own = self._run(piece).ops[op].__dict__
        return next((home for home in ("_parameters", "_buffers") if name in own[home]), "")

    def alias(self, piece: int, op: int) -> bool | None:
        """Whether an op is one, None where it is not known what that depends on."""
        found = self._run(piece).ops[op]
        return bool(found.alias) if is_own(found) else None

    def guarded(self, *about: Any) -> None:
        """What is given to it, dynamo guards on."""

    def kept(self, piece: int, op: int, kind: str) -> str:
        """The attributes of an op that are of one `_kind`."""
        return _words(n for n, value in self._own(piece, op).items() if _kind(value) == kind)

    def item(self, piece: int, op: int, name: str, place: int) -> Any:
        return self._own(piece, op)[name][place]

    def maps(self, piece: int, op: int, name: str, items: tuple[Any, ...]) -> bool:
        return tuple(self._own(piece, op)[name].items()) == items

    def attribute(self, piece: int, op: int, name: str) -> Any:
        return self._own(piece, op)[name]

    def equals(self, piece: int, op: int, name: str, value: Any) -> bool:
        return bool(self._own(piece, op)[name] == value)

    def identical(self, piece: int, op: int, name: str, address: int) -> bool:
        return id(self._own(piece, op)[name]) == address

    def entry(
        self,
        piece: int,
        modes: tuple[tuple[bool, bool] | None, ...],
        parameters: tuple[tuple[tuple[Any, ...] | None, ...], ...],
        call: tuple[Any, ...],
    ) -> int:
        """The number of the entry of a key, given in constants: (training, alias) of every op, None of one that stays
        what it is, and the values of its `ParameterFacts` and of the `CallFacts`.
        """
        run = self._run(piece)
        ops = [
            facts if mode is None else facts._replace(training=mode[0], alias=mode[1])
            for facts, mode in zip(starmap(OpFacts, op_facts(run.ops)), modes, strict=True)
        ]
        known = [tuple([p if p is None else ParameterFacts(*p) for p in own]) for own in parameters]
        return run.numbered(run.entry(PlanKey(tuple(ops), tuple(known), CallFacts(*call))))

    def conditional(self, piece: int, entry: int, dtype: torch.dtype, axes: int) -> bool:
        """Whether the plan of an entry depends on a size that may be a symbol."""
        return self._reasons(piece, entry, dtype, axes) is None

    def _reasons(
        self, piece: int, entry: int, dtype: torch.dtype, axes: int
    ) -> tuple[str | None, ...] | None:
        """Why candidates may not fire, None where that depends on how many rows there are."""
        known, run = TABLE[entry], self._run(piece)
        if not (known.scan.candidates or known.layers):
            return ()
        width = _width(run)
        if known.layers or run.chain.outside or width is None:
            return None
        if any(site.rule not in BUILTIN_RULES for site in known.scan.candidates):
            return None  # a user's condition may read the shape
        shape = (*[UnknownRows()] * (axes - 1), width)
        x: Any = Unsized(shape, dtype, known.facts.key.call.device)
        try:
            return run.reasons(known, x, {})
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
        """The number of the plan of an entry, given the outcome of its conditions."""
        run = self._run(piece)
        if reasons is None:
            reasons = self._reasons(piece, entry, dtype, axes)
        plan = run.plan_of(TABLE[entry], reasons)  # type: ignore[arg-type]
        for segment in plan.segments:
            if not segment.number:
                segment.number = run.numbered(segment)
                write_forward(segment), write_backward(segment)  # which dynamo cannot trace
        return run.numbered(plan)

    def segments(self, plan: int) -> int:
        return len(TABLE[plan].segments)

    def how(self, plan: int, k: int, same: tuple[bool, ...]) -> str:
        """How a segment runs: as a "tap", a "call", "traced" or "opaque"."""
        seg: Segment = TABLE[plan].segments[k]
        if seg.tap is not None:
            return "tap"
        if seg.kind == "call":
            return "call"
        over_ranks = seg.local_reads or any(op._local for op in seg.ops)
        return (
            "opaque"
            if seg.kind == "node" and seg.own and all(same) and not over_ranks
            else "traced"
        )

    def number(self, plan: int, k: int) -> int:
        number: int = TABLE[plan].segments[k].number
        return number

    def tap(self, plan: int, k: int) -> str:
        return str(TABLE[plan].segments[k].tap)

    def inputs(self, plan: int, k: int) -> str:
        """The side inputs of a segment."""
        return _words(TABLE[plan].segments[k].reads)

    def params(self, plan: int, k: int) -> str:
        """The parameters of a segment: position of the op in the run, and name, in turn."""
        seg: Segment = TABLE[plan].segments[k]
        return _words(word for i, name in seg.params for word in (seg.start + i, name))

    def exports(self, plan: int, k: int) -> str:
        return _words(TABLE[plan].segments[k].exports)


def _width(run: Run) -> int | None:
    """How wide the input of a run is, where its first op tells."""
    first = next((op for op in run.ops if not op.alias), run.ops[0])
    width = first.dim if isinstance(first, Router) else getattr(first, "in_features", None)
    widths = getattr(first, "normalized_shape", None) or (width,)
    return widths[0] if len(widths) == 1 else None


def _kind(value: Any) -> str:
    """How traced code compares an attribute: a float, which dynamo may hold as a symbol, alone and in a tuple."""
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
    """Whether dynamo holds an attribute as a constant, and guards on its value (of a mesh too, whose identity it does
    not trace in torch 2.11).
    """
    if isinstance(value, tuple):
        return all(map(_constant, value)) and not any(type(item) is float for item in value)
    plain = type(value) in (bool, int, str) or type(value).__name__ == "DeviceMesh"
    return value is None or plain or isinstance(value, torch.dtype)
