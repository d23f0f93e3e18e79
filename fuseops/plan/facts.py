"""What a plan depends on besides the ops and the cover, and the needs and kept fields that follow from it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from fuseops.ops.paths import path_of
from fuseops.ops.scopes import Settings
from fuseops.recipes import Recipe, Roles

from .chain import Chain

NOTHING: frozenset[str] = frozenset()


class Facts(NamedTuple):
    """`Facts` hold everything about a call that its plan depends on, besides the ops and the cover."""

    settings: Settings
    x_needs: bool  # does the input of the run want a gradient
    grads: frozenset[tuple[int, str]]  # (op, parameter) pairs that want one
    side_grads: frozenset[str]  # side inputs of the run that want one
    modes: tuple[str, ...]  # of each op: "" (in a node), "plain" or "call"
    notes: tuple[str, ...]  # why, where a mode is not ""
    compute: torch.dtype | None  # autocast dtype
    device: torch.device
    live: frozenset[str]  # side names read after the run, or returned
    offset: int  # of the run in its Sequential: spans count from there
    roles: tuple[Roles | None, ...]  # formats of each op's operands; None: high precision
    compiling: bool = False


def roles_of(chain: Chain, recipe: Recipe | None, modes: Sequence[str]) -> tuple[Roles | None, ...]:
    """What a recipe says of every op that multiplies, or quantizes, in a node."""
    found: list[Roles | None] = []
    for op, name, mode in zip(chain.ops, chain.names, modes, strict=True):
        given = None
        if recipe is not None and (op.multiplies or op.quantizes) and not mode:
            given = recipe.roles_of(op, path_of(op) or name)
        found.append(None if given is None or given.high else given)
    return tuple(found)


def needs_of(chain: Chain, facts: Facts) -> tuple[frozenset[str], ...]:
    """Which gradients each op must give: fixed before apply, along the chain."""
    x_needs, sides = facts.x_needs, set(facts.side_grads)
    result = []
    for i, op in enumerate(chain.ops):
        wanted = {name for name in chain.parameters[i] if (i, name) in facts.grads}
        wanted |= {keyword for keyword, name in chain.reads[i] if name in sides}
        if x_needs:
            wanted.add("x")
        result.append(frozenset(wanted))
        if wanted:
            x_needs = True
            sides |= {name for keyword, name in chain.writes[i] if keyword not in op.integers}
        else:
            sides -= {name for _, name in chain.writes[i]}
    return tuple(result)


def kept_fields(
    saves_for: Mapping[str, tuple[str, ...]] | None, fields: tuple[str, ...], needs: frozenset[str]
) -> frozenset[str]:
    """Saved fields that some needed gradient reads; a need that is not listed reads all."""
    if not needs:
        return NOTHING
    if saves_for is None:
        return frozenset(fields)
    return frozenset(name for need in needs for name in saves_for.get(need, fields))
