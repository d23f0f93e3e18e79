"""Ranks of one machine that share its host memory."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from fuseops.errors import FuseOpsError
from fuseops.offload.arguments import one_of

from .plan import OffloadPlan, plan_profile


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
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (socket.gethostname(), dist.get_rank(group), mine), group)
    here = [(rank, said) for name, rank, said in found if name == socket.gethostname()]
    ranks = [rank for rank, _ in here]
    return [said for _, said in here], ranks.index(dist.get_rank(group))


def share_host(plan: OffloadPlan, group: dist.ProcessGroup) -> OffloadPlan:
    """The plan of this rank where `plan.limits.host` is what all ranks of `group` on one machine have together.

    A rank whose plan needs less leaves the rest to the others; one that needs more than its share is planned again for
    that. `limits.host` of the result is the share: pass it to `Scheduler(host=...)`. A collective: every rank of the
    group calls it, with plans for the same budget.

    Raises FuseOpsError for a plan without a budget.
    """
    one_of(plan, OffloadPlan, "share_host(plan, ...)", "an OffloadPlan")
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
