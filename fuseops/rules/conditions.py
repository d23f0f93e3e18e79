"""The conditions of the built-in rules: each returns None, or the reason why the rule may not fire."""

from typing import Any

from fuseops.kernels import GATES
from fuseops.ops.grouped_linear import GroupedLinear
from fuseops.ops.linear import Bias, Linear
from fuseops.ops.norms import LayerNorm, RMSNorm
from fuseops.ops.permute import Combine, Permute

from .rule import Conditions, require

Ops = tuple[Any, ...]


def same_groups(ops: Ops, c: Conditions) -> str | None:
    fc1, fc2 = (op for op in ops if isinstance(op, GroupedLinear))
    return require(
        fc1.num_groups == fc2.num_groups,
        f"fc1 has {fc1.num_groups} groups, fc2 has {fc2.num_groups}",
    )


def no_low_rank(ops: Ops, c: Conditions) -> str | None:
    """Low-rank weights, which multiply in high precision, are refused under a recipe. An op of another library may
    declare `down` and have none.
    """
    low = any(getattr(op, "down", None) is not None for op in ops if isinstance(op, GroupedLinear))
    return require(c.recipe is None or not low, "low-rank weights multiply in high precision")


def act_widths(ops: Ops, c: Conditions) -> str | None:
    first, last = (i for i, op in enumerate(ops) if isinstance(op, Linear | GroupedLinear))
    fc1, act, fc2 = ops[first], ops[last - 1], ops[last]
    halves = 1 + (act.kind in GATES)
    return require(
        fc1.out_features == halves * fc2.in_features,
        f"fc1 gives {fc1.out_features} features, fc2 takes {halves} x {fc2.in_features}",
    )


def same_top_k(ops: Ops, c: Conditions) -> str | None:
    ks = [op.top_k for op in ops if isinstance(op, Permute | Combine)]
    return require(len(set(ks)) == 1, f"Permute has top_k {ks[0]}, Combine has {ks[-1]}")


def same_side_inputs(ops: Ops, c: Conditions) -> str | None:
    """Ops that read a side input by one keyword, such as offs and probs, read one tensor."""
    names: dict[str, str] = {}
    for sides in c.reads:
        for keyword, name in sides:
            if names.setdefault(keyword, name) != name:
                return f"its ops read two tensors as {keyword!r}: {names[keyword]!r} and {name!r}"
    return None


def x_is_2d(ops: Ops, c: Conditions) -> str | None:
    return require(
        len(c.shape) == 2, f"x has {len(c.shape)} axes, the fused op takes (rows, width)"
    )


def single_bias(ops: Ops, c: Conditions) -> str | None:
    linear = next(op for op in ops if isinstance(op, Linear))
    twice = linear.bias is not None and any(isinstance(op, Bias) for op in ops)
    return require(not twice, "the Linear has a bias of its own, and a Bias follows")


def one_norm_axis(ops: Ops, c: Conditions) -> str | None:
    axes = next(len(op.normalized_shape) for op in ops if isinstance(op, RMSNorm | LayerNorm))
    return require(axes == 1, f"the norm goes over {axes} axes, the fused op takes one")


def no_bias(ops: Ops, c: Conditions) -> str | None:
    return require(ops[0].bias is None, "the Linear has a bias, and its GEMM adds one tensor")
