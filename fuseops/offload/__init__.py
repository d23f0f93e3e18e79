"""Offload: saved tensors are kept on the device until the backward, or moved to host memory until they are read.

A scope decides about the tensors that autograd saves inside it; scopes nest, and the innermost decides:

    with offload.to_host(root=model) as moved:
        loss = model(x).sum()
    loss.backward()
    print(moved.report())

    scopes        scopes; nesting (open and close in order)
    which stay    marks, policy, reasons; nodes (known from earlier steps)
    a scheduler   scheduler, layers (its hooks), recompute; schedule (when bytes move), order, transfers
    a tensor      records (its handle in the graph), storages, codes (rounded on the link); report
    lanes/        copies of bytes: on streams, on the CPU, on a simulated clock
    planning/     plans of what to move
"""

from .marks import mark_module, mark_not_offload, mark_offload, start_offload
from .planning.hardware import Hardware
from .planning.pipeline import plan_pipeline
from .planning.plan import OffloadPlan, plan
from .planning.planner import Limits
from .planning.together import share_decisions, share_host
from .planning.turns import Pipeline
from .policy import Candidate, Policy
from .report import Entry, Report
from .scheduler import Scheduler
from .scopes import disabled, dispatch_again, keep, recompute, to_host

__all__ = [
    "Candidate",
    "Entry",
    "Hardware",
    "Limits",
    "OffloadPlan",
    "Pipeline",
    "Policy",
    "Report",
    "Scheduler",
    "disabled",
    "dispatch_again",
    "keep",
    "mark_module",
    "mark_not_offload",
    "mark_offload",
    "plan",
    "plan_pipeline",
    "recompute",
    "share_decisions",
    "share_host",
    "start_offload",
    "to_host",
]


def __dir__() -> list[str]:
    return __all__
