"""Plans of several ranks: those that share the host memory of a machine, and those that recompute together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import nn

from fuseops.arguments import instance_of
from fuseops.errors import FuseOpsError
from fuseops.machine import machine_id

from .plan import OffloadPlan, plan_profile, plan_with_dropped
from .recompute import process_groups_of


def shares(budget: int, needs: Sequence[int]) -> list[int]:
    """Max-min fair shares of a budget: no rank gets more than it needs while others need more, and the rest is divided
    equally.   needs: bytes, one or more
    """
    found, left = [0] * len(needs), budget
    for n, k in enumerate(sorted(range(len(needs)), key=needs.__getitem__)):
        found[k] = min(needs[k], left // (len(needs) - n))
        left -= found[k]
    return [share + left // len(needs) for share in found]


def gather_on_machine(mine: Any, group: dist.ProcessGroup) -> tuple[list[Any], int]:
    """All-gather among the ranks of a group on this machine.   -> their values in rank order, the index of this one"""
    me = machine_id(), dist.get_rank(group)
    here = {rank: value for rank, value in _all_gather((me, mine), group) if rank[0] == me[0]}
    return list(here.values()), list(here).index(me)


def share_host(plan: OffloadPlan, group: dist.ProcessGroup) -> OffloadPlan:
    """The plan of this rank where `plan.limits.host` is what all ranks of `group` on one machine have together.

    A rank whose plan needs less leaves the rest to the others; one that needs more than its share is planned again for
    that. `limits.host` of the result is the share: pass it to `Scheduler(host=...)`. A collective: every rank of the
    group calls it, with plans for the same budget.

    Raises FuseOpsError for a plan without a budget.
    """
    _check_shared("share_host", plan, group)
    budget = plan.limits.host
    if budget is None:
        raise FuseOpsError(
            "share_host(plan, group): the plan has no budget of host memory to share. Plan with host=, "
            "what the ranks of a machine have together."
        )
    needs, me = gather_on_machine(plan.after.host, group)
    limits = replace(plan.limits, host=shares(budget, needs)[me])
    if plan.after.host <= (limits.host or 0):
        return replace(plan, limits=limits)
    return plan_profile(plan.profile, plan.hardware, limits, plan.settings, layers=plan.layers)


def regenerated_by_sending(plan: OffloadPlan) -> frozenset[tuple[str, str]]:
    """The groups that a plan recomputes with transfers between ranks, or may.   -> kind, name of the layer"""
    return frozenset((g.kind, g.name) for g in plan.dropped if g.kind in ("dispatch", "module"))


def share_decisions(plan: OffloadPlan, group: dist.ProcessGroup) -> OffloadPlan:
    """The plan of this rank, in which all ranks of a group recompute the same layers and dispatch the same tokens
    again, those of any of their plans, so that each waits for the same transfers. A collective: every rank of the group
    calls it.
    """
    _check_shared("share_decisions", plan, group)
    mine = regenerated_by_sending(plan)
    every = frozenset[tuple[str, str]]().union(*_all_gather(mine, group))
    whole = {name for kind, name in every if kind == "module"}
    every = frozenset((kind, n) for kind, n in every if kind == "module" or n not in whole)
    return plan if every == mine else plan_with_dropped(plan, every)


def check_same_decisions(regenerated: Sequence[str], model: nn.Module) -> None:
    """Raise FuseOpsError on every rank of a group where their recomputations differ. A collective.

    regenerated: names of layers that are recomputed, and of tensors that are dispatched again
    """
    for group in process_groups_of(model):
        decisions = _all_gather(sorted(regenerated), group)
        odd = next((rank for rank, theirs in enumerate(decisions) if theirs != decisions[0]), None)
        if odd is not None:
            one = sorted({*decisions[0]} ^ {*decisions[odd]})[0]
            raise FuseOpsError(
                f"ranks {dist.get_global_rank(group, 0)} and {dist.get_global_rank(group, odd)} run experts or layers "
                f"together, and one of their plans makes {one!r} again, the other does not: each would wait for what "
                "the other never sends. Pass plans through offload.share_decisions(plan, group)."
            )


def _check_shared(caller: str, plan: object, group: object) -> None:
    instance_of(plan, OffloadPlan, f"{caller}(plan, ...)", "an OffloadPlan")
    expected = "a process group, such as torch.distributed.group.WORLD"
    instance_of(group, dist.ProcessGroup, f"{caller}(plan, group)", expected)


def _all_gather(mine: object, group: dist.ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group)
    return found
