"""State dicts hold grouped parameters in either form: packed, or one tensor a group.

packed       weight (E, out, in), bias (E, out)
per group    weight0 .. weight<E-1> (out, in), bias0 .. (out,), as TransformerEngine keeps them
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor


class Grouped(Protocol):
    """A `Grouped` is an op with one parameter a group, or all of them packed into one."""

    num_groups: int

    def registered(self, name: str) -> tuple[str, ...]: ...


def parts_in(tensors: Mapping[str, Any], stem: str) -> dict[int, str]:
    """The keys `<stem><e>` of `tensors`, by e."""
    pattern = re.compile(re.escape(stem) + r"(0|[1-9]\d*)")
    found = ((pattern.fullmatch(key), key) for key in tensors)
    return {int(match[1]): key for match, key in found if match}


def load_packed_or_parts(
    op: Grouped,
    load: Callable[..., None],
    state_dict: Mapping[str, Any],
    prefix: str,
    local_metadata: Mapping[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Convert a state dict to the form that `op` has, and call `nn.Module._load_from_state_dict` (`load`) with it.

    TransformerEngine's `_extra_state`, the state of its own quantizers, is ignored.
    """
    mine = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
    mine.pop(f"{prefix}_extra_state", None)
    absent: list[str] = []
    for name in ("weight", "bias"):
        parts, whole = parts_in(mine, prefix + name), prefix + name in mine
        if whole and parts:
            errors.append(f"{prefix}{name} is there packed and by group ({parts[min(parts)]}).")
        elif parts and op.registered(name) == (name,):
            absent += _pack(op, mine, prefix + name, parts, errors)
        elif whole and op.registered(name) != (name,):
            _unpack(op, mine, prefix + name, errors)
    not_found: list[str] = []
    load(mine, prefix, local_metadata, strict, not_found, unexpected, errors)
    replaced = {key.rstrip("0123456789") for key in absent}
    missing += [key for key in not_found if key not in replaced] + absent


def _pack(
    op: Grouped, tensors: dict[str, Any], stem: str, parts: dict[int, str], errors: list[str]
) -> list[str]:
    """Replace the parts by one tensor.   -> keys of missing parts"""
    wanted = {e: tensors.pop(key) for e, key in parts.items() if e < op.num_groups}
    absent = [f"{stem}{e}" for e in range(op.num_groups) if e not in wanted]
    shapes = {tuple(part.shape) for part in wanted.values()}
    if len(shapes) > 1:
        errors.append(f"{stem}0 to {stem}{op.num_groups - 1} differ in shape: {sorted(shapes)}.")
    elif not absent:
        tensors[stem] = torch.stack([wanted[e] for e in range(op.num_groups)])
    return absent


def _unpack(op: Grouped, tensors: dict[str, Any], stem: str, errors: list[str]) -> None:
    whole: Tensor = tensors.pop(stem)
    if whole.dim() == 0 or len(whole) != op.num_groups:
        errors.append(
            f"{stem} has shape {tuple(whole.shape)}, expected {op.num_groups} groups on the first axis."
        )
        return
    tensors.update({f"{stem}{e}": part for e, part in enumerate(whole.unbind())})
