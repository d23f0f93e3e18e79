"""The facts that a plan depends on besides ops and cover, and the needs and kept fields that follow from them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fuseops.ops.paths import path_of
from fuseops.ops.scopes import Settings
from fuseops.recipes import Recipe, Roles

from .chain import Chain
from .key import PlanKey


class Facts(NamedTuple):
    """`Facts` hold everything about a call that its plan depends on, besides the ops and the cover."""

    key: PlanKey
    settings: Settings
    modes: tuple[str, ...]  # of each op: "" (in a node), "plain" or "call"
    notes: tuple[str, ...]  # the reason of each mode that is not ""
    offset: int  # of the run in its Sequential, in which spans count
    needs: tuple[frozenset[str], ...]  # the gradients that each op must give
    roles: tuple[Roles | None, ...]  # formats of each op's operands; None: high precision


def roles_of(chain: Chain, recipe: Recipe | None, modes: Sequence[str]) -> tuple[Roles | None, ...]:
    """The formats of each op in a node that multiplies or quantizes; None for other ops and for high precision."""
    result: list[Roles | None] = []
    for op, name, mode in zip(chain.ops, chain.names, modes, strict=True):
        roles = None
        if recipe is not None and (op.multiplies or op.quantizes) and not mode:
            roles = recipe.checked_roles_of(op, path_of(op) or name)
        result.append(None if roles is None or roles.is_high_precision else roles)
    return tuple(result)


def needs_of(chain: Chain, key: PlanKey, modes: Sequence[str]) -> tuple[frozenset[str], ...]:
    """The gradients that each op must give, propagated along the chain before the node is applied.

    modes: as of `Facts`. What an op gives through its own `__call__` may want a gradient whatever the op is made of,
    since hooks add tensors of their own to it, or compute its parameters.
    """
    call, parameters = key.call, key.parameters
    x_needs, sides = call.x_needs, {name for name, *_, wanted in call.sides if wanted}
    result = []
    for i, op in enumerate(chain.ops):
        own = zip(chain.parameters[i], parameters[i], strict=True)
        wanted = {name for name, p in own if p is not None and p.needs}
        wanted |= {keyword for keyword, name in chain.reads[i] if name in sides}
        if x_needs:
            wanted.add("x")
        result.append(frozenset(wanted))
        if wanted or (call.grad and modes[i] == "call"):
            x_needs = True
            sides |= {name for keyword, name in chain.writes[i] if keyword not in op.integers}
    return tuple(result)


def kept_fields(
    saves_for: Mapping[str, tuple[str, ...]] | None, fields: tuple[str, ...], needs: frozenset[str]
) -> frozenset[str]:
    """The saved fields that the needed gradients read; one that `saves_for` does not list reads all."""
    return frozenset(name for need in needs for name in (saves_for or {}).get(need, fields))
