"""The cover of a run of ops says which rules fire, with a reason for every rule that does not fire.  Pure logic."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fuseops.errors import FuseOpsError, FusionMissError
from fuseops.ops.op import Op
from fuseops.ops.scopes import Settings
from fuseops.recipes import Recipe, Roles
from fuseops.rules.builtin_rules import BUILTIN_RULES
from fuseops.rules.rule import Conditions, Match, Rule, RunPosition, match, require

from .chain import Chain, Sides
from .records import Miss, Overlap

Reason = str | None


class Site(NamedTuple):
    """A `Site` is a place where the pattern of a rule matches; positions in the run."""

    rule: Rule
    start: int
    stop: int

    @property
    def ops(self) -> range:
        return range(self.start, self.stop)

    def miss(self, reason: str, offset: int) -> Miss:
        """Why it does not fire; positions in the whole Sequential."""
        return Miss(self.rule.name, (self.start + offset, self.stop + offset), reason)


class NearMatch(NamedTuple):
    """A `NearMatch` is a place where the pattern of a rule almost matches."""

    site: Site  # of what does match
    miss: Miss
    near_miss: bool  # for an op that is nearly what the rule wants


class Scan(NamedTuple):
    """A scan holds the matches of all rules in a run of ops, which no shape is needed for."""

    candidates: tuple[Site, ...]  # in the order that the cover tries them
    # the longest prefix of a rule that matches nowhere; ops that are nearly what it wants
    near: tuple[NearMatch, ...]
    offset: int  # of the run in its Sequential


class Cover(NamedTuple):
    """A `Cover` holds the sites of a run whose rules fire, and the misses of the others."""

    joint: tuple[Site, ...]
    forward: tuple[Site, ...]
    backward: tuple[Site, ...]
    misses: tuple[Miss, ...]


def scan(
    ops: Sequence[Op[Any]], rules: Iterable[Rule], place: RunPosition, settings: Settings
) -> Scan:
    """The sites at which rules match, and those that match almost."""
    wanted = _insisted(settings)
    candidates: list[Site] = []
    near: list[NearMatch] = []
    for rule in rules:
        matches = [match(rule, ops, start, place) for start in range(len(ops))]
        candidates += [Site(rule, i, i + n) for i, m in enumerate(matches) for n in m.lengths]
        for i in _nearest(matches, least=1 if rule.name in wanted else 2):
            site, obstacle = Site(rule, i, i + max(matches[i].prefix, 1)), matches[i].obstacle
            near.append(NearMatch(site, site.miss(obstacle.why, place.offset), obstacle.near_miss))
    return Scan(tuple(candidates), tuple(near), place.offset)


def _nearest(matches: Sequence[Match], least: int) -> list[int]:
    """Where the longest prefix of a pattern that matched nowhere begins, and all that is nearly what it wants (an op
    that overrides a method, has hooks, or is of another class of that name; one out of sight): neither a longer prefix
    nor a match elsewhere may hide it.

    least: ops of such a prefix. One alone is no sign that anybody wants a rule.
    """
    starts = []
    if not any(m.lengths for m in matches):
        longest = max(range(len(matches)), key=lambda start: matches[start].prefix, default=0)
        starts += [longest] if matches and matches[longest].prefix >= least else []
    told = {matches[start].obstacle.why for start in starts}
    for start, m in enumerate(matches):
        if m.obstacle.near_miss and m.obstacle.why not in told:
            starts.append(start)
            told.add(m.obstacle.why)
    return starts


DIRECTIONS = {
    "joint": ("forward", "backward"),
    "forward": ("forward",),
    "backward": ("backward",),
}
"""By the kind of a rule, the directions in which it runs its ops."""

Taken = dict[str, dict[int, Site]]  # direction -> op -> the site that runs it there


def choose(scanned: Scan, reasons: Sequence[Reason]) -> Cover:
    """Rules of the user first, then the built-in ones in the gaps, and then those that come last: of each the joint
    ones, then forward and backward ones where those left room. Leftmost first, all rules in order at each position.
    """
    able = [c for c, reason in zip(scanned.candidates, reasons, strict=True) if reason is None]
    taken: Taken = {"forward": {}, "backward": {}}
    chosen: dict[str, list[Site]] = {kind: [] for kind in DIRECTIONS}
    for turn, kind in itertools.product(range(3), DIRECTIONS):
        mine = [c for c in able if c.rule.kind == kind and _turn(c.rule) == turn]
        for c in sorted(mine, key=lambda c: c.start):
            if not any(_there(c, i, taken) for i in c.ops):
                chosen[kind].append(c)
                for direction in DIRECTIONS[kind]:
                    taken[direction] |= dict.fromkeys(c.ops, c)
    against = {c: r for c, r in zip(scanned.candidates, reasons, strict=True) if r is not None}
    misses = [c.miss(r, scanned.offset) for c, r in against.items() if not _said(c, r, against)]
    misses += _overlaps(able, taken, scanned.offset)
    misses += [n.miss for n in scanned.near if n.near_miss or not _covered(n.site, taken)]
    joint, forward, backward = map(tuple, chosen.values())
    return Cover(joint, forward, backward, tuple(misses))


def _there(c: Site, i: int, taken: Taken) -> list[Site]:
    """The sites that run an op in a direction in which this one would, the last of them first."""
    ways = reversed(DIRECTIONS[c.rule.kind])
    return [taken[direction][i] for direction in ways if i in taken[direction]]


def _turn(rule: Rule) -> int:
    return 2 if rule.last else int(rule in BUILTIN_RULES)


OFF = ("fusion is off", "disabled")


def _said(c: Site, reason: str, against: Mapping[Site, str]) -> bool:
    """Whether the reason is said of a part of a site, where it lies; or of a longer one, where it lies in settings."""
    if reason in OFF:
        return any(_within(c, longer) for longer in against)
    return any(reason == other and _within(part, c) for part, other in against.items())


def _covered(site: Site, taken: Taken) -> bool:
    """Whether rules that run as it would have fused all of these ops, so that nobody asks for another one."""
    ways = DIRECTIONS[site.rule.kind]
    ran = ({taken[direction].get(i) for direction in ways} for i in site.ops)
    return all(len(sites) == 1 and None not in sites for sites in ran)


def _overlaps(able: Sequence[Site], taken: Taken, offset: int) -> Iterator[Overlap]:
    fired = {id(c) for sites in taken.values() for c in sites.values()}
    for c in able:
        # what is within a longer one is said of that, or that fired
        if id(c) not in fired and not any(_within(c, longer) for longer in able):
            winner = next(there[0] for i in c.ops if (there := _there(c, i, taken)))
            span = f"{winner.start + offset}:{winner.stop + offset}"
            yield Overlap(*c.miss(f"overlaps {span} of {winner.rule.name}", offset))


def _within(c: Site, other: Site) -> bool:
    """Whether another site of the same rule has all its ops, and more."""
    inside = other.start <= c.start and c.stop <= other.stop
    return inside and other.rule is c.rule and other is not c


def reasons_against(
    scanned: Scan,
    chain: Chain,
    settings: Settings,
    conditions: Callable[[int, int], Conditions],
) -> tuple[Reason, ...]:
    """Why each candidate may not fire, None where it may."""
    answers: list[Reason] = []
    for c in scanned.candidates:
        if not settings.fusion:
            answers.append(OFF[0])
        elif c.rule.name in settings.disable:
            answers.append(OFF[1])
        elif clash := _clash(chain.writes[c.start : c.stop]):
            answers.append(clash)
        elif c.rule.kind != "forward" and (delayed := _delayed(chain.ops[c.start : c.stop])):
            answers.append(delayed)
        elif not c.rule.when:
            answers.append(None)
        else:
            ops = chain.ops[c.start : c.stop]
            answers.append(c.rule.reason_against(ops, conditions(c.start, c.stop)))
    return tuple(answers)


def _clash(writes: Sequence[Sides]) -> Reason:
    """A fused op publishes by keyword; ops of two Sequentials may have one keyword for two tensors."""
    keywords = [keyword for pairs in writes for keyword, _ in pairs]
    twice = next((keyword for keyword in keywords if keywords.count(keyword) > 1), None)
    return None if twice is None else f"two of its ops publish {twice!r}"


def in_precision(
    scanned: Scan,
    ops: Sequence[Op[Any]],
    reasons: Sequence[Reason],
    recipe: Recipe | None,
    roles: Sequence[Roles | None],
) -> tuple[Reason, ...]:
    """The answers under a recipe: where it applies to an op of the span, the fused op has to say that it takes one,
    and all that multiply have to have the same formats.

    roles: of every op.
    """
    if recipe is None:
        return tuple(reasons)
    answers = []
    for c, reason in zip(scanned.candidates, reasons, strict=True):
        members, formats = ops[c.start : c.stop], roles[c.start : c.stop]
        if reason is None and any(formats):
            takes = getattr(c.rule.build(*members), "recipes", False)
            reason = require(
                takes, f"runs in high precision only, the recipe is {type(recipe).__name__}"
            )
            found = {f for f, op in zip(formats, members, strict=True) if op.multiplies}
            reason = reason or require(
                len(found) == 1, "the recipe gives its ops formats that differ"
            )
        answers.append(reason)
    return tuple(answers)


def _delayed(ops: Sequence[Op[Any]]) -> Reason:
    """A fused backward has one pass over what the gradients share; a delayed part would run it twice."""
    return next((f"{type(op).__name__} delays {list(op.delays)}" for op in ops if op.delays), None)


# --- what settings forbid --------------------------------------------------------------------------------------------


def _insisted(settings: Settings) -> frozenset[str]:
    """The rules that have to fire, by name."""
    return settings.strict if isinstance(settings.strict, frozenset) else frozenset()


def check_names(settings: Settings, rules: Iterable[Rule]) -> None:
    """Raise when `strict` or `disable` names a rule that does not exist."""
    known = {rule.name for rule in rules}
    unknown = (settings.disable | _insisted(settings)) - known
    if unknown and known:
        raise FuseOpsError(
            f"no rule is called {sorted(unknown)}; the rules in scope are {sorted(known)}."
        )


def check_strict(
    found: Sequence[Miss], scanned: Scan, reasons: Sequence[str | None], settings: Settings
) -> None:
    """Raise FusionMissError for a miss that strict mode forbids.

    By name: a condition or overlap miss of those rules. True: a condition miss of any rule. Near misses never raise.
    """
    if settings.strict is True:
        pairs = zip(scanned.candidates, reasons, strict=True)
        misses = [c.miss(why, scanned.offset) for c, why in pairs if why is not None]
    else:
        names, near = _insisted(settings), {n.miss for n in scanned.near}
        misses = [m for m in found if m.rule in names and m not in near]
    if misses:
        rule, (start, stop), reason = misses[0]
        raise FusionMissError(f"rule {rule!r} did not fire at {start}:{stop}: {reason}")
