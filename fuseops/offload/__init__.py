"""Where saved tensors live between forward and backward: on the device, or in host memory until
they are needed.

A scope decides for the tensors that autograd saves inside it; scopes nest, and the innermost
decides:

    with offload.to_host(root=model) as moved:
        loss = model(x).sum()
    loss.backward()
    print(moved.report())

    scopes        scopes; nesting (enter and leave in order)
    which stay    marks, policy, reasons; arguments (what users pass)
    a scheduler   scheduler, layers (its hooks), recompute; schedule (when bytes move), order, transfers
    a tensor      records (what stands for it in the graph), storages, codes (rounded on the link); report
    lanes/        what copies bytes: streams, the CPU, a simulated clock
    planning/     what to move, decided beforehand
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
