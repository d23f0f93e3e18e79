"""Conditions of the built-in rules: each answers None, or the reason why the rule may not fire."""

from typing import Any

from .rule import Conditions, require

Ops = tuple[Any, ...]


def same_groups(ops: Ops, c: Conditions) -> str | None:
    fc1, _, fc2 = ops
    return require(
        fc1.num_groups == fc2.num_groups,
        f"fc1 has {fc1.num_groups} groups, fc2 has {fc2.num_groups}",
    )


def glu_widths(ops: Ops, c: Conditions) -> str | None:
    fc1, _, fc2 = ops
    wanted = 2 * fc2.in_features
    return require(
        fc1.out_features == wanted,
        f"fc1 gives {fc1.out_features} features, fc2 takes 2 x {wanted // 2}",
    )


def no_biases(ops: Ops, c: Conditions) -> str | None:
    biased = [name for name, op in (("fc1", ops[0]), ("fc2", ops[2])) if op.bias is not None]
    return require(not biased, f"{' and '.join(biased)} has a bias")


def no_recipe(ops: Ops, c: Conditions) -> str | None:
    return require(
        c.recipe is None, f"runs in high precision only, the recipe is {type(c.recipe).__name__}"
    )


def one_bias(ops: Ops, c: Conditions) -> str | None:
    return require(
        len(ops) == 2 or ops[0].bias is None, "the Linear has a bias of its own, and a Bias follows"
    )
