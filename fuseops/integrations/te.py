"""Conversion of weights between TransformerEngine's keys for grouped linear layers and those of fuseops.

Of `GroupedLinear` with E groups:

    TransformerEngine   weight0 .. weight<E-1> (out, in), bias0 .. (out,), and `_extra_state` of its quantizers;
                        with a single grouped parameter weight (E, out, in), bias (E, out), which is fuseops' own form
    in fuseops          weight (E, out, in), bias (E, out)

A `GroupedLinear` loads either by itself; these functions are for whole checkpoints, gradients and optimizer state.
Both keep `[gate | up]` with the gate first (`glu_interleave_size` of None), and nothing is transposed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from fuseops.arguments import several
from fuseops.errors import FuseOpsError
from fuseops.ops import GroupedLinear
from fuseops.ops.checks import check_state

_PART = re.compile(r"((?:.*\.)?(?:weight|bias))(0|[1-9]\d*)")


def to_fuseops(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` under fuseops' keys: groups are stacked, `_extra_state` is dropped, other keys pass through.

    Raises FuseOpsError when a group between two others is missing, or groups differ in shape.
    """
    check_state("te.to_fuseops", tensors)
    out: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _PART.fullmatch(name):
            parts.setdefault(match[1], {})[int(match[2])] = tensor
        elif name.rpartition(".")[2] != "_extra_state":
            out[name] = tensor
    return out | {name: _stacked(name, found) for name, found in parts.items()}


def _stacked(name: str, parts: dict[int, Tensor]) -> Tensor:
    missing = sorted(set(range(max(parts) + 1)) - parts.keys())
    shapes = sorted({tuple(part.shape) for part in parts.values()})
    if missing:
        raise FuseOpsError(
            f"to_fuseops: {name} is made of {max(parts) + 1} groups, and {name}{missing[0]} is missing. "
            "Give all shards of a checkpoint at once."
        )
    if len(shapes) > 1:
        raise FuseOpsError(f"to_fuseops: the groups of {name} differ in shape: {shapes}.")
    return torch.stack([parts[e] for e in range(len(parts))])


def to_te(tensors: Mapping[str, Tensor], grouped: nn.Module | Iterable[str]) -> dict[str, Tensor]:
    """The inverse of `to_fuseops`: views of `tensors` under TransformerEngine's keys, without `_extra_state`.

    grouped: the model, or the paths of its grouped linear layers (a key alone does not say whether it is one).
    """
    check_state("te.to_te", tensors)
    if isinstance(grouped, nn.Module):
        grouped = [path for path, op in grouped.named_modules() if isinstance(op, GroupedLinear)]
    expected = "the model, or paths of its grouped linear layers"
    paths = several(grouped, str, "te.to_te(grouped=...)", expected)
    names = {f"{path}.{kind}".lstrip(".") for path in paths for kind in ("weight", "bias")}
    out: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in names:
            out |= {f"{name}{e}": part for e, part in enumerate(tensor.unbind())}
        else:
            out[name] = tensor
    return out
