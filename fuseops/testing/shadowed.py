"""Detection of shadowed rules: those that never fire, because an earlier one always takes their ops."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from fuseops.arguments import several
from fuseops.rules.rule import Maybe, Rule, types_of

Types = tuple[type, ...]


def expansions(rule: Rule) -> Iterator[Types]:
    """Every sequence of op types that the pattern of a rule matches, longest first."""
    choices: list[list[tuple[Any, ...]]] = []
    for element in rule.pattern:
        spelled = [(t,) for t in types_of(element)]
        choices.append([*spelled, ()] if isinstance(element, Maybe) else spelled)
    found = {sum(parts, ()): None for parts in itertools.product(*choices)}
    return iter(sorted(found, key=len, reverse=True))


def shadowing_rule(rules: Sequence[Rule], rule: Rule, types: Types) -> Rule | None:
    """The rule that always takes ops of these types from `rule`, or None.

    That is an earlier rule of the same kind that matches from the same op, or a joint rule that matches
    anywhere in them; and which has no condition, or covers exactly these ops under conditions that
    `rule` has as well.
    """
    for other in rules:
        if other is rule:
            continue
        first = next(r for r in rules if r is other or r is rule)
        earlier = other.kind == rule.kind and first is other
        joint = other.kind == "joint" and rule.kind != "joint"
        starts = (0,) if earlier else range(len(types)) if joint else ()
        for start, other_types in itertools.product(starts, expansions(other)):
            part = types[start : start + len(other_types)]
            fits = len(part) == len(other_types) and all(map(issubclass, part, other_types))
            demanded = part == types and set(other.when) <= set(rule.when)
            if fits and (not other.when or demanded):
                return other
    return None


def assert_no_rule_is_shadowed(rules: Sequence[Rule]) -> None:
    """Check a table, first rule first: every rule must have ops that no other rule always takes from it.

    Raises AssertionError that names the dead rules and those that shadow them.
    """
    rules = several(rules, Rule, "assert_no_rule_is_shadowed(rules)", "fuseops.Rules")
    dead = []
    for rule in rules:
        shadows = [shadowing_rule(rules, rule, types) for types in expansions(rule)]
        if all(s is not None for s in shadows):
            by = ", ".join(dict.fromkeys(repr(s.name) for s in shadows if s is not None))
            dead.append(f"rule {rule.name!r} can never fire: {by} takes all that it matches")
    names = [rule.name for rule in rules]
    dead += [f"two rules are called {n!r}" for n in dict.fromkeys(names) if names.count(n) > 1]
    if dead:
        raise AssertionError("\n".join(dead))
