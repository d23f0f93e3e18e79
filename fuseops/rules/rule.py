"""A fusion is one line of data: pattern, fused op, conditions. A condition answers None or a reason."""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch

from fuseops.errors import FuseOpsError
from fuseops.ops.checks import check_flags
from fuseops.ops.op import FusedOp, Op, check_names
from fuseops.recipes import Recipe

KINDS = ("joint", "forward", "backward")


@dataclass(frozen=True)
class Maybe:
    """A `Maybe` is an optional element of a pattern."""

    wanted: Any


def maybe(wanted: Any) -> Maybe:
    """Optional: `(Linear, maybe(Bias), SiLU | GELU)` matches with and without the Bias."""
    return Maybe(wanted)


@dataclass(frozen=True)
class Some:
    """A `Some` is a pattern of its own: several ops in a row, each of the wanted types or of level 1, or one of level
    1.
    """

    wanted: Any


def require(holds: bool, reason: str) -> str | None:
    """For conditions: None when it holds, else the reason."""
    return None if holds else reason


class Conditions(NamedTuple):
    """`Conditions` are what a rule's condition sees besides the ops. It never sees tensor values.

    shape       of the span's input; k is its last axis, rows the product of the others
    n           last axis of the span's output
    dtype       the compute dtype: autocast's, else the input's
    recipe      the precision recipe in force, or None
    needs       which gradients anyone wants, a set of names for each op
    training    the mode of the first op
    reads       of each op its side inputs: (keyword of its fwd, name in the plan) pairs
    sides       shapes of side tensors by their names in the plan, as far as they are known
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
    last     it is tried after the built-in rules, on what those left
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
        if self.kind not in KINDS:
            raise FuseOpsError(
                f"Rule {self.name!r}: kind must be one of {KINDS}, got {self.kind!r}."
            )
        if callable(self.when):
            object.__setattr__(self, "when", (self.when,))
        if isinstance(self.pattern, type | types.UnionType | Maybe | Some):
            object.__setattr__(self, "pattern", (self.pattern,))
        for what in ("pattern", "when"):
            given = getattr(self, what)
            if not isinstance(given, Iterable):
                raise FuseOpsError(
                    f"Rule {self.name!r}: {what} is {given!r:.80}, expected a tuple."
                )
        object.__setattr__(self, "pattern", tuple(self.pattern))
        for what, value in (("build", self.build), *(("a condition", c) for c in self.when)):
            if not callable(value):
                raise FuseOpsError(f"Rule {self.name!r}: {what} must be callable, got {value!r}.")
        if not any(not isinstance(element, Maybe) for element in self.pattern):
            raise FuseOpsError(
                f"Rule {self.name!r}: the pattern needs at least one op that is not optional."
            )
        for element in self.pattern:
            for t in types_of(element):
                if not (isinstance(t, type) and issubclass(t, Op)):
                    raise FuseOpsError(
                        f"Rule {self.name!r}: {t!r} in its pattern is not a subclass of fuseops.Op."
                    )

    def reason_against(self, ops: tuple[Op[Any], ...], c: Conditions) -> str | None:
        """The first condition's reason, or None when all hold.  Raises TypeError for an answer of another kind."""
        for condition in self.when:
            which = f"condition {getattr(condition, '__name__', condition)}"
            try:
                answer = condition(ops, c)
            except Exception as error:
                error.add_note(
                    f"in {which} of rule {self.name!r}, which is asked (ops, conditions)"
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
    """The op types that an element of a pattern accepts."""
    wanted = element.wanted if isinstance(element, Maybe | Some) else element
    return get_args(wanted) if isinstance(wanted, types.UnionType) else (wanted,)


_DEFINING = ("fwd", "bwd", "forward", "Saved")


def _overridden(cls: type, wanted: type) -> str | None:
    changed = (
        n for n in _DEFINING if hasattr(wanted, n) and getattr(cls, n) is not getattr(wanted, n)
    )
    return next(changed, None)


class Obstacle(NamedTuple):
    """An obstacle is the reason why a pattern does not match at an op."""

    why: str
    nearly: bool = False  # something of the wanted name: its user looks for a fused span


def _obstacle(op: Any, element: Any, at: str) -> Obstacle | None:
    """None if `op` is what `element` of a pattern wants.  at: what a sentence calls the op."""
    closest = None
    wanted = types_of(element)
    for t in wanted:
        if isinstance(op, t):
            changed = _overridden(type(op), t)
            if changed is None:
                return None
            closest = f"{at}: {type(op).__name__} overrides {changed}"
        elif type(op).__name__ == t.__name__:
            closest = f"{at} is {t.__name__}: same name, other class object"
    if closest:
        return Obstacle(closest, nearly=True)
    return Obstacle(f"{at} is {type(op).__name__}, wanted {_names(wanted)}")


def _names(wanted: Sequence[type]) -> str:
    return " | ".join(t.__name__ for t in wanted)


class RunEnd(NamedTuple):
    """A `RunEnd` says what follows a run of ops."""

    why: str  # it ends there
    hidden: str = ""  # class of the plain module, or of the first op of the border, that follows


class RunPosition(NamedTuple):
    """A `RunPosition` says where a run of ops stands in its Sequential, for the reasons of misses."""

    opaque: Sequence[str | None]  # of each op, why no rule may match it
    end: RunEnd
    offset: int = 0  # of its first op in the whole Sequential: sentences and spans count from there


class Match(NamedTuple):
    """A `Match` says how far a pattern matches from one start."""

    lengths: tuple[int, ...]  # of the runs that match here, the longest first
    prefix: int  # ops matched before the obstacle
    obstacle: Obstacle


def match(rule: Rule, ops: Sequence[Any], start: int, place: RunPosition) -> Match:
    """Match the rule at `start`, a position in the run."""
    if isinstance(rule.pattern[0], Some):
        return _match_some(rule.pattern[0], ops, start, place)
    best = Match((), -1, Obstacle(""))

    def walk(element: int, position: int) -> int | None:
        nonlocal best
        if element == len(rule.pattern):
            return position - start
        wanted = rule.pattern[element]
        obstacle = _obstacle_at(ops, position, wanted, place)
        if obstacle is None and (length := walk(element + 1, position + 1)) is not None:
            return length
        if isinstance(wanted, Maybe):
            return walk(element + 1, position)
        if obstacle is not None and position - start > best.prefix:
            best = Match((), position - start, obstacle)
        return None

    length = walk(0, start)
    return best if length is None else Match((length,), length, Obstacle(""))


def _match_some(some: Some, ops: Sequence[Any], start: int, place: RunPosition) -> Match:
    """Every run from `start` on: what a longer one may not, or another rule has taken, leaves shorter ones."""
    stop, obstacle = start, None
    while obstacle is None:
        obstacle = _obstacle_at(ops, stop, some, place)
        stop += obstacle is None
    least = 1 if stop > start and ops[start].pure else 2
    lengths = tuple(range(stop - start, least - 1, -1))
    return Match(lengths, stop - start, Obstacle("") if lengths else obstacle)


def _obstacle_at(
    ops: Sequence[Any], position: int, wanted: Any, place: RunPosition
) -> Obstacle | None:
    if position >= len(ops):
        types = types_of(wanted)
        named = any(t.__name__ == place.end.hidden for t in types)
        return Obstacle(f"{place.end.why}, wanted {_names(types)}", nearly=named)
    at, op = f"op {place.offset + position}", ops[position]
    level_1 = isinstance(wanted, Some) and op.pure and not op.writes
    found = None if level_1 else _obstacle(op, wanted, at)
    if found is None and (opaque := place.opaque[position]) is not None:
        return Obstacle(f"{at}: {type(op).__name__} {opaque}", nearly=True)
    return found
