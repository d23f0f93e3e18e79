"""Ranks that share the host memory of a machine, and those that send to each other what a plan has them make again."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from fuseops.errors import FuseOpsError
from fuseops.offload.arguments import instance_of

from .plan import OffloadPlan, dropping, plan_profile
from .recompute import groups_of


def shares(budget: int, needs: Sequence[int]) -> list[int]:
    """What each of several has of one budget: no more than it needs where others need more, else an equal part of what
    is left.  needs: bytes, one or more
    """
    found, left = [0] * len(needs), budget
    for n, k in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        found[k] = min(needs[k], left // (len(needs) - n))
        left -= found[k]
    return [share + left // len(needs) for share in found]


def of_this_machine(mine: Any, group: dist.ProcessGroup) -> tuple[list[Any], int]:
    """What the ranks of a group on this machine have to say, in their order, and which of them this one is."""
    me = socket.gethostname(), dist.get_rank(group)
    here = {who: what for who, what in _said((me, mine), group) if who[0] == me[0]}
    return list(here.values()), list(here).index(me)


def share_host(plan: OffloadPlan, group: dist.ProcessGroup) -> OffloadPlan:
    """The plan of this rank where `plan.limits.host` is what all ranks of `group` on one machine have together.

    A rank whose plan needs less leaves the rest to the others; one that needs more than its share is planned again for
    that. `limits.host` of the result is the share: pass it to `Scheduler(host=...)`. A collective: every rank of the
    group calls it, with plans for the same budget.

    Raises FuseOpsError for a plan without a budget.
    """
    instance_of(plan, OffloadPlan, "share_host(plan, ...)", "an OffloadPlan")
    budget = plan.limits.host
    if budget is None:
        raise FuseOpsError(
            "share_host(plan, group): the plan has no budget of host memory to share. Plan with host=, "
            "what the ranks of a machine have together."
        )
    needs, me = of_this_machine(plan.after.host, group)
    limits = plan.limits._replace(host=shares(budget, needs)[me])
    if plan.after.host <= (limits.host or 0):
        return replace(plan, limits=limits)
    return plan_profile(plan.profile, plan.hardware, limits, plan.settings, layers=plan.layers)


Again = frozenset[tuple[str, str]]
"""(kind, name of the layer) of what is made again by sending."""


def sent_again(plan: OffloadPlan) -> Again:
    """What a plan makes again that other ranks may take part in."""
    return frozenset((g.kind, g.name) for g in plan.dropped if g.kind in ("dispatch", "module"))


def share_decisions(plan: OffloadPlan, group: dist.ProcessGroup) -> OffloadPlan:
    """The plan of this rank where the layers that one rank of a group recomputes, and the tokens that it dispatches
    again, are those of all of them: each then waits for the same transfers. A collective: every rank of the group calls
    it.
    """
    instance_of(plan, OffloadPlan, "share_decisions(plan, ...)", "an OffloadPlan")
    mine = sent_again(plan)
    every = frozenset[tuple[str, str]]().union(*_said(mine, group))
    whole = {name for kind, name in every if kind == "module"}
    every = frozenset((kind, n) for kind, n in every if kind == "module" or n not in whole)
    return plan if every == mine else dropping(plan, every)


def check_alike(made_again: Sequence[str], model: nn.Module) -> None:
    """Raise FuseOpsError on every rank of a group where they make different things again. A collective.

    made_again: names of layers that are recomputed, and of tensors that are dispatched again
    """
    for group in groups_of(model):
        said = _said(sorted(made_again), group)
        odd = next((rank for rank, other in enumerate(said) if other != said[0]), None)
        if odd is not None:
            one = sorted({*said[0]} ^ {*said[odd]})[0]
            raise FuseOpsError(
                f"ranks {dist.get_global_rank(group, 0)} and {dist.get_global_rank(group, odd)} run experts or layers "
                f"together, and one of their plans makes {one!r} again, the other does not: each would wait for what "
                "the other never sends. Pass plans through offload.share_decisions(plan, group)."
            )


def _said(mine: object, group: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group)
    return found
