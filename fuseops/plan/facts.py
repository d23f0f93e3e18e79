"""What a plan depends on besides the ops and the cover, and the needs and kept fields that follow from it."""

from collections.abc import Mapping
from typing import NamedTuple

import torch

from fuseops.ops.scopes import Settings

from .chain import Chain

NOTHING: frozenset[str] = frozenset()


class Facts(NamedTuple):
    """Everything about a call that its plan depends on, besides the ops and the cover."""

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
    compiling: bool = False


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
