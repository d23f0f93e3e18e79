"""A fusion rule is one line of data: pattern, fused op, conditions. A condition returns None or a reason."""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, get_args

import torch

from fuseops.arguments import check_flags, instance_of, is_one_of, several, shown
from fuseops.errors import FuseOpsError
from fuseops.ops.op import FusedOp, Op, check_names
from fuseops.recipes import Recipe

KINDS = ("joint", "forward", "backward")
NAMES: set[str] = set()
"""The names of all rules that were made in this process, by which settings may speak of them."""


@dataclass(frozen=True)
class Maybe:
    """A `Maybe` is an optional element of a pattern."""

    wanted: Any


def maybe(wanted: Any) -> Maybe:
    """An optional element: `(Linear, maybe(Bias), SiLU | GELU)` matches with and without the Bias.

    Raises FuseOpsError for what is no type of op, and no union of some.
    """
    _check_types("fo.maybe(wanted)", wanted)
    return Maybe(wanted)


@dataclass(frozen=True)
class OneOrMore:
    """A `OneOrMore` is a whole pattern: it matches consecutive ops, each of the wanted types or of level 1.
    One op alone must be of level 1.
    """

    wanted: Any


def require(holds: bool, reason: str) -> str | None:
    """The result of a condition: None when it holds, else the reason.

    Raises FuseOpsError for another answer than True or False, as of arguments in the other order, and for a reason that
    is no text.
    """
    instance_of(holds, (int, torch.SymBool), "fo.require(holds=...)", "True or False")
    instance_of(reason, str, "fo.require(reason=...)", "a sentence: why the rule may not fire")
    return None if holds else reason


class Conditions(NamedTuple):
    """`Conditions` hold what a condition of a rule reads besides the ops. They never hold tensor values.

    shape       of the span's input; k is its last axis, rows the product of the others
    n           last axis of the span's output
    dtype       the compute dtype: autocast's, else the input's
    recipe      the precision recipe in force, or None
    needs       the gradients that are needed, a set of names for each op
    training    the mode of the first op
    reads       the side inputs of each op: (keyword of its fwd, name in the plan) pairs
    sides       known shapes of side tensors, by their names in the plan
    compiling   whether torch.compile traces the call
    """

    shape: tuple[int, ...]
    k: int
    n: int
    rows: int
    dtype: torch.dtype
    device: torch.device
    recipe: Recipe | None
    needs: tuple[frozenset[str], ...]
    training: bool
    reads: tuple[tuple[tuple[str, str], ...], ...] = ()
    sides: Mapping[str, tuple[int, ...]] = {}
    compiling: bool = False


Condition = Callable[[tuple[Op[Any], ...], Conditions], str | None]


@dataclass(frozen=True)
class Rule:
    """A rule replaces a run of ops by one fused op.

    kind     "joint" (forward and backward together), "forward" or "backward"; all patterns are in sequence order
    pattern  op types, unions of them (`SiLU | GELU`), and `maybe(...)` of either
    build    build(*ops) -> FusedOp, called with the matched ops
    when     conditions cond(ops, c: Conditions) -> None or the reason why it may not fire
    last     whether it is tried after the built-in rules, on the ops that those leave
    """

    name: str
    pattern: tuple[Any, ...]
    build: Callable[..., FusedOp]
    kind: str = "forward"
    when: tuple[Condition, ...] = ()
    last: bool = False

    def __post_init__(self) -> None:
        check_names("Rule", name=self.name)
        check_flags(f"Rule {self.name!r}", last=self.last)
        if not is_one_of(self.kind, KINDS):
            raise FuseOpsError(
                f"Rule {self.name!r}: kind must be one of {KINDS}, got {shown(self.kind)}."
            )
        if callable(self.when):
            object.__setattr__(self, "when", (self.when,))
        if isinstance(self.pattern, type | types.UnionType | Maybe | OneOrMore):
            object.__setattr__(self, "pattern", (self.pattern,))
        where = f"Rule {self.name!r}:"
        conditions = several(self.when, Callable, f"{where} when", "functions of (ops, conditions)")
        object.__setattr__(self, "when", conditions)
        pattern = several(self.pattern, object, f"{where} pattern", "types of ops, in their order")
        object.__setattr__(self, "pattern", pattern)
        instance_of(self.build, Callable, f"{where} build", "a function of the ops that match")
        if not any(not isinstance(element, Maybe) for element in self.pattern):
            raise FuseOpsError(
                f"Rule {self.name!r}: the pattern needs at least one op that is not optional."
            )
        for element in self.pattern:
            _check_types(f"{where} its pattern", element)
        NAMES.add(self.name)

    def reason_against(self, ops: tuple[Op[Any], ...], c: Conditions) -> str | None:
        """The reason of the first condition that fails, None if all hold.  Raises TypeError if one returns neither."""
        for condition in self.when:
            which = f"condition {getattr(condition, '__name__', condition)}"
            try:
                answer = condition(ops, c)
            except Exception as error:
                error.add_note(
                    f"in {which} of rule {self.name!r}, which is called with (ops, conditions)"
                )
                raise
            if answer is not None:
                if not isinstance(answer, str):
                    raise TypeError(
                        f"rule {self.name!r}: {which} answered "
                        f"{answer!r}; a condition answers None (it holds) or the reason as a string: "
                        "use fo.require(holds, reason)."
                    )
                return answer
        return None


def types_of(element: Any) -> tuple[type, ...]:
    """The op types that an element of a pattern matches."""
    wanted = element.wanted if isinstance(element, Maybe | OneOrMore) else element
    return get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)


_DEFINING = ("fwd", "bwd", "forward", "Saved")


def _overridden(cls: type, wanted: type) -> str | None:
    """The name of a method by which a subclass of the wanted type computes something else, None if there is none."""
    changed = (
        n for n in _DEFINING if hasattr(wanted, n) and getattr(cls, n) is not getattr(wanted, n)
    )
    return next(changed, None)


def _check_types(what: str, element: Any) -> None:
    """Raise FuseOpsError for an element of a pattern that is not made of types of ops."""
    for t in types_of(element):
        if not (isinstance(t, type) and issubclass(t, Op)):
            raise FuseOpsError(
                f"{what} expects types of ops, as Linear or SiLU | GELU, got {shown(t)}, which is not a subclass of "
                "fuseops.Op."
            )


class Obstacle(NamedTuple):
    """An `Obstacle` is the reason why a pattern does not match at an op."""

    why: str
    near_miss: bool = False  # the op has the wanted type or name, so its user may expect fusion


def _obstacle(op: Any, element: Any, at: str) -> Obstacle | None:
    """The reason why an op does not match an element of a pattern, None if it does.   at: the op in messages"""
    near_miss_reason = None
    wanted = types_of(element)
    for t in wanted:
        if isinstance(op, t):
            changed = _overridden(type(op), t)
            if changed is None:
                return None
            near_miss_reason = f"{at}: {type(op).__name__} overrides {changed}"
        elif type(op).__name__ == t.__name__:
            near_miss_reason = f"{at} is {t.__name__}: same name, other class object"
    if near_miss_reason:
        return Obstacle(near_miss_reason, near_miss=True)
    return Obstacle(f"{at} is {type(op).__name__}, wanted {_names(wanted)}")


def _names(wanted: Sequence[type]) -> str:
    return " | ".join(t.__name__ for t in wanted)


class RunEnd(NamedTuple):
    """A `RunEnd` says why a run of ops ends, and what follows it."""

    why: str
    # class name of the plain module, or of the first op of the border, behind it
    next_type: str = ""


class RunPosition(NamedTuple):
    """A `RunPosition` is the position of a run of ops in its Sequential, for the reasons of misses."""

    opaque: Sequence[str | None]  # for each op, the reason why no rule may match it, or None
    end: RunEnd
    offset: int = 0  # of its first op in the whole Sequential, in which messages and spans count


class Match(NamedTuple):
    """A `Match` is the result of matching a pattern from one start."""

    lengths: tuple[int, ...]  # of the spans that match here, the longest first
    prefix: int  # ops matched before the obstacle
    obstacle: Obstacle


def match(rule: Rule, ops: Sequence[Any], start: int, run: RunPosition) -> Match:
    """Match the pattern of a rule from position `start` of the run."""
    if isinstance(rule.pattern[0], OneOrMore):
        return _match_repeated(rule.pattern[0], ops, start, run)
    misses: list[tuple[int, Obstacle]] = []
    stop = _matched_until(rule.pattern, ops, start, run, misses)
    farthest, obstacle = max(misses, key=itemgetter(0), default=(start - 1, Obstacle("")))
    if stop is None:
        return Match((), farthest - start, obstacle)
    return Match((stop - start,), stop - start, obstacle)


def _matched_until(
    pattern: Sequence[Any],
    ops: Sequence[Any],
    position: int,
    run: RunPosition,
    misses: list[tuple[int, Obstacle]],
) -> int | None:
    """Where the ops from `position` on that match a pattern end, or None.   misses: gets what was in the way"""
    if not pattern:
        return position
    wanted, rest = pattern[0], pattern[1:]
    obstacle = _obstacle_at(ops, position, wanted, run)
    if obstacle is None:
        stop = _matched_until(rest, ops, position + 1, run, misses)
        if stop is not None:
            return stop
    # another op in the place of an optional one is no obstacle, unless it is nearly that one
    optional = isinstance(wanted, Maybe)
    if obstacle is not None and (obstacle.near_miss or not optional):
        misses.append((position, obstacle))
    return _matched_until(rest, ops, position, run, misses) if optional else None


def _match_repeated(element: OneOrMore, ops: Sequence[Any], start: int, run: RunPosition) -> Match:
    """Match every length from `start` on: a shorter span may fire where a longer one is refused or overlaps another."""
    stop, obstacle = start, None
    while obstacle is None:
        obstacle = _obstacle_at(ops, stop, element, run)
        stop += obstacle is None
    least = 1 if stop > start and ops[start].pure else 2
    lengths = tuple(range(stop - start, least - 1, -1))
    return Match(lengths, stop - start, obstacle)


def _obstacle_at(
    ops: Sequence[Any], position: int, wanted: Any, run: RunPosition
) -> Obstacle | None:
    if position >= len(ops):
        types = types_of(wanted)
        named = any(t.__name__ == run.end.next_type for t in types)
        return Obstacle(f"{run.end.why}, wanted {_names(types)}", near_miss=named)
    at, op = f"op {run.offset + position}", ops[position]
    level_1 = isinstance(wanted, OneOrMore) and op.pure and not op.writes
    found = None if level_1 else _obstacle(op, wanted, at)
    if found is None and (opaque := run.opaque[position]) is not None:
        return Obstacle(f"{at}: {type(op).__name__} {opaque}", near_miss=True)
    return found
