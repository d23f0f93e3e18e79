"""Conditions of the built-in rules: each answers None, or the reason why the rule may not fire."""

from typing import Any

from fuseops.kernels import GATES
from fuseops.ops.permute import Combine, Permute

from .rule import Conditions, require

Ops = tuple[Any, ...]


def same_groups(ops: Ops, c: Conditions) -> str | None:
    fc1, _, fc2 = expert_ops(ops)
    return require(
        fc1.num_groups == fc2.num_groups,
        f"fc1 has {fc1.num_groups} groups, fc2 has {fc2.num_groups}",
    )


def act_widths(ops: Ops, c: Conditions) -> str | None:
    fc1, act, fc2 = expert_ops(ops)
    halves = 1 + (act.kind in GATES)
    return require(
        fc1.out_features == halves * fc2.in_features,
        f"fc1 gives {fc1.out_features} features, fc2 takes {halves} x {fc2.in_features}",
    )


def same_top_k(ops: Ops, c: Conditions) -> str | None:
    ks = [op.top_k for op in ops if isinstance(op, Permute | Combine)]
    return require(len(set(ks)) == 1, f"Permute has top_k {ks[0]}, Combine has {ks[-1]}")


def same_sides(ops: Ops, c: Conditions) -> str | None:
    """Experts share their offs and their probabilities."""
    known: dict[str, str] = {}
    for sides in c.reads:
        for keyword, name in sides:
            if known.setdefault(keyword, name) != name:
                return f"its ops read two tensors as {keyword!r}: {known[keyword]!r} and {name!r}"
    return None


def expert_ops(ops: Ops) -> Ops:
    """fc1, the activation and fc2 among the ops of a span."""
    return tuple(op for op in ops if not isinstance(op, Permute | Combine))


def two_axes(ops: Ops, c: Conditions) -> str | None:
    return require(
        len(c.shape) == 2, f"x has {len(c.shape)} axes, the fused op takes (rows, width)"
    )


def one_bias(ops: Ops, c: Conditions) -> str | None:
    return require(
        len(ops) == 2 or ops[0].bias is None, "the Linear has a bias of its own, and a Bias follows"
    )


def one_axis(ops: Ops, c: Conditions) -> str | None:
    axes = len(ops[-1].normalized_shape)
    return require(axes == 1, f"the norm goes over {axes} axes, the fused op takes one")
