"""The cover of a run of ops: the rules that fire, and for each other rule that matches the reason why not. Pure."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fuseops.errors import FuseOpsError, FusionMissError
from fuseops.ops.op import FusedOp, Op
from fuseops.ops.scopes import Settings
from fuseops.recipes import Recipe, Roles
from fuseops.rules.builtin_rules import BUILTIN_RULES
from fuseops.rules.rule import Conditions, Match, Rule, RunPosition, match, require

from .chain import Chain, Sides
from .records import Miss, Overlap

Reason = str | None


class RuleMatch(NamedTuple):
    """A `RuleMatch` is a span of the run that the pattern of a rule matches."""

    rule: Rule
    start: int
    stop: int

    @property
    def ops(self) -> range:
        return range(self.start, self.stop)

    def fused(self, ops: Sequence[Op[Any]]) -> FusedOp:
        """What the rule builds from its ops.   ops: of the run.  Raises FuseOpsError if that is no fused op."""
        made = self.rule.build(*ops[self.start : self.stop])
        if not isinstance(made, FusedOp):
            raise FuseOpsError(
                f"rule {self.rule.name!r}: build must return a FusedOp, got {type(made).__name__}."
            )
        return made

    def miss(self, reason: str, offset: int) -> Miss:
        """The miss for this reason.   offset: of the run in the Sequential, in which misses count"""
        return Miss(self.rule.name, (self.start + offset, self.stop + offset), reason)


class NearMiss(NamedTuple):
    """A `NearMiss` is a span that the pattern of a rule almost matches."""

    candidate: RuleMatch  # the ops that do match
    miss: Miss
    near_miss: bool  # for an op that is nearly what the rule wants


class Scan(NamedTuple):
    """A `Scan` holds the matches of all rules in a run of ops. It needs no shapes."""

    candidates: tuple[RuleMatch, ...]  # in the order in which the cover tries them
    near_misses: tuple[NearMiss, ...]
    offset: int  # of the run in its Sequential


class Cover(NamedTuple):
    """A `Cover` holds the candidates that fire, and the misses of the others."""

    joint: tuple[RuleMatch, ...]
    forward: tuple[RuleMatch, ...]
    backward: tuple[RuleMatch, ...]
    misses: tuple[Miss, ...]


def scan(
    ops: Sequence[Op[Any]], rules: Iterable[Rule], run: RunPosition, settings: Settings
) -> Scan:
    """Match all rules at all positions of a run."""
    wanted = _required_rules(settings)
    candidates: list[RuleMatch] = []
    near_misses: list[NearMiss] = []
    for rule in rules:
        matches = [match(rule, ops, start, run) for start in range(len(ops))]
        candidates += [RuleMatch(rule, i, i + n) for i, m in enumerate(matches) for n in m.lengths]
        for i in _near_miss_starts(matches, least=1 if rule.name in wanted else 2):
            (why, almost), stop = matches[i].obstacle, i + max(matches[i].prefix, 1)
            prefix = RuleMatch(rule, i, stop)
            near_misses.append(NearMiss(prefix, prefix.miss(why, run.offset), almost))
    return Scan(tuple(candidates), tuple(near_misses), run.offset)


def _near_miss_starts(matches: Sequence[Match], least: int) -> list[int]:
    """The starts of the near misses of a pattern: of its longest prefix, if it matched nowhere, and of every op that
    almost has the wanted type (it overrides a method, has hooks, is of another class of that name, or lies behind the
    run), which neither a longer prefix nor a match elsewhere hides.

    least: the least number of ops of such a prefix, since a single one does not show that fusion is expected
    """
    starts = []
    if not any(m.lengths for m in matches):
        longest = max(range(len(matches)), key=lambda start: matches[start].prefix)
        starts += [longest] if matches[longest].prefix >= least else []
    reported = {matches[start].obstacle.why for start in starts}
    for start, m in enumerate(matches):
        if m.obstacle.near_miss and m.obstacle.why not in reported:
            starts.append(start)
            reported.add(m.obstacle.why)
    return starts


DIRECTIONS = {
    "joint": ("forward", "backward"),
    "forward": ("forward",),
    "backward": ("backward",),
}
"""The directions in which a rule runs its ops, by its kind."""

Occupied = dict[str, dict[int, RuleMatch]]  # direction -> op -> the candidate that runs it


def choose(scanned: Scan, reasons: Sequence[Reason]) -> Cover:
    """Choose the candidates that fire, greedily: rules of the user, then built-in ones, then those with `last`. Of each
    of these the joint rules go first, then forward and backward ones in the gaps; within a kind the leftmost candidate
    goes first, and at one position the first rule.
    """
    allowed = [c for c, reason in zip(scanned.candidates, reasons, strict=True) if reason is None]
    occupied: Occupied = {"forward": {}, "backward": {}}
    chosen: dict[str, list[RuleMatch]] = {kind: [] for kind in DIRECTIONS}
    for priority, kind in itertools.product(range(3), DIRECTIONS):
        matching = [c for c in allowed if c.rule.kind == kind and _priority(c.rule) == priority]
        for c in sorted(matching, key=lambda c: c.start):
            if not any(_occupants(c, i, occupied) for i in c.ops):
                chosen[kind].append(c)
                for direction in DIRECTIONS[kind]:
                    occupied[direction] |= dict.fromkeys(c.ops, c)
    refused = {c: r for c, r in zip(scanned.candidates, reasons, strict=True) if r is not None}
    misses = [
        c.miss(r, scanned.offset) for c, r in refused.items() if not _is_reported(c, r, refused)
    ]
    misses += _overlaps(allowed, occupied, scanned.offset)
    near = scanned.near_misses
    misses += [n.miss for n in near if n.near_miss or not _already_fused(n.candidate, occupied)]
    joint, forward, backward = map(tuple, chosen.values())
    return Cover(joint, forward, backward, tuple(misses))


def _occupants(c: RuleMatch, i: int, occupied: Occupied) -> list[RuleMatch]:
    """The candidates that already run an op in a direction in which this one would, the backward one first."""
    directions = reversed(DIRECTIONS[c.rule.kind])
    return [occupied[direction][i] for direction in directions if i in occupied[direction]]


def _priority(rule: Rule) -> int:
    """0 for a rule of the user, 1 for a built-in one, 2 for one that goes last."""
    return 2 if rule.last else int(rule in BUILTIN_RULES)


FUSION_OFF, DISABLED = SETTINGS_REASONS = "fusion is off", "disabled"


def _is_reported(c: RuleMatch, reason: str, refused: Mapping[RuleMatch, str]) -> bool:
    """Whether another miss reports this one: of a part of the span for the same reason, or of a longer span if settings
    are the reason.
    """
    if reason in SETTINGS_REASONS:
        return any(_is_part_of(c, longer) for longer in refused)
    return any(reason == other and _is_part_of(part, c) for part, other in refused.items())


def _already_fused(candidate: RuleMatch, occupied: Occupied) -> bool:
    """Whether one candidate already runs all of these ops in its directions, so that a near miss is no news."""
    directions = DIRECTIONS[candidate.rule.kind]
    runners = ({occupied[direction].get(i) for direction in directions} for i in candidate.ops)
    return all(len(sites) == 1 and None not in sites for sites in runners)


def _overlaps(allowed: Sequence[RuleMatch], occupied: Occupied, offset: int) -> Iterator[Overlap]:
    fired = {id(c) for sites in occupied.values() for c in sites.values()}
    for c in allowed:
        # a part of a longer candidate is reported with that one, or that one fired
        if id(c) not in fired and not any(_is_part_of(c, longer) for longer in allowed):
            winner = next(occupants[0] for i in c.ops if (occupants := _occupants(c, i, occupied)))
            span = f"{winner.start + offset}:{winner.stop + offset}"
            yield Overlap(*c.miss(f"overlaps {span} of {winner.rule.name}", offset))


def _is_part_of(c: RuleMatch, other: RuleMatch) -> bool:
    """Whether another candidate of the same rule contains this one."""
    inside = other.start <= c.start and c.stop <= other.stop
    return inside and other.rule is c.rule and other is not c


def reasons_against(
    scanned: Scan,
    chain: Chain,
    settings: Settings,
    conditions: Callable[[int, int], Conditions],
) -> tuple[Reason, ...]:
    """The reason why each candidate may not fire, None if it may."""

    def reason_against(c: RuleMatch) -> Reason:
        if not settings.fusion:
            return FUSION_OFF
        if c.rule.name in settings.disable:
            return DISABLED
        ops = chain.ops[c.start : c.stop]
        why = _duplicate_keyword(chain.writes[c.start : c.stop])
        if why is None and c.rule.kind != "forward":
            why = _delayed(ops)
        return why or c.rule.reason_against(ops, conditions(c.start, c.stop))

    return tuple(map(reason_against, scanned.candidates))


def _duplicate_keyword(writes: Sequence[Sides]) -> Reason:
    """A fused op publishes by keyword, so its ops may not publish two tensors under one, as of two Sequentials."""
    keywords = [keyword for pairs in writes for keyword, _ in pairs]
    duplicate = next((keyword for keyword in keywords if keywords.count(keyword) > 1), None)
    return None if duplicate is None else f"two of its ops publish {duplicate!r}"


def reasons_under_recipe(
    scanned: Scan,
    ops: Sequence[Op[Any]],
    reasons: Sequence[Reason],
    recipe: Recipe | None,
    roles: Sequence[Roles | None],
) -> tuple[Reason, ...]:
    """`reasons_against` extended by a recipe: where it applies to an op of the span, the fused op must support recipes,
    and all ops with GEMMs must have equal formats.

    roles: of every op
    """
    if recipe is None:
        return tuple(reasons)
    answers = []
    for c, reason in zip(scanned.candidates, reasons, strict=True):
        members, formats = ops[c.start : c.stop], roles[c.start : c.stop]
        if reason is None and any(formats):
            reason = require(
                c.fused(ops).recipes,
                f"runs in high precision only, the recipe is {type(recipe).__name__}",
            )
            distinct = {f for f, op in zip(formats, members, strict=True) if op.multiplies}
            reason = reason or require(
                len(distinct) == 1, "the recipe gives its ops formats that differ"
            )
        answers.append(reason)
    return tuple(answers)


def _delayed(ops: Sequence[Op[Any]]) -> Reason:
    """A fused backward computes all gradients in one pass, which a delayed gradient would run twice."""
    return next((f"{type(op).__name__} delays {list(op.delays)}" for op in ops if op.delays), None)


# --- strict mode --------------------------------------------------------------------------------------------


def _required_rules(settings: Settings) -> frozenset[str]:
    """The names of the rules that strict mode requires to fire."""
    return settings.strict if isinstance(settings.strict, frozenset) else frozenset()


def check_names(settings: Settings, rules: Iterable[Rule]) -> None:
    """Raise FuseOpsError when `strict` or `disable` names a rule that does not exist."""
    known = {rule.name for rule in rules}
    unknown = (settings.disable | _required_rules(settings)) - known
    if unknown and known:
        raise FuseOpsError(
            f"no rule is called {sorted(unknown)}; the rules in scope are {sorted(known)}."
        )


def check_strict(
    found: Sequence[Miss], scanned: Scan, reasons: Sequence[str | None], settings: Settings
) -> None:
    """Raise FusionMissError for a miss that strict mode forbids.

    strict by name: condition and overlap misses of these rules. strict=True: condition misses of any rule. Near misses
    never raise.
    """
    if settings.strict is True:
        pairs = zip(scanned.candidates, reasons, strict=True)
        misses = [c.miss(why, scanned.offset) for c, why in pairs if why is not None]
    else:
        required, near_misses = _required_rules(settings), {n.miss for n in scanned.near_misses}
        misses = [m for m in found if m.rule in required and m not in near_misses]
    if misses:
        rule, (start, stop), reason = misses[0]
        raise FusionMissError(f"rule {rule!r} did not fire at {start}:{stop}: {reason}")
