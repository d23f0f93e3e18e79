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

from .marks import mark_module as mark_module
from .marks import mark_not_offload as mark_not_offload
from .marks import mark_offload as mark_offload
from .marks import start_offload as start_offload
from .planning.hardware import Hardware as Hardware
from .planning.pipeline import plan_pipeline as plan_pipeline
from .planning.plan import OffloadPlan as OffloadPlan
from .planning.plan import plan as plan
from .planning.planner import Limits as Limits
from .planning.together import share_decisions as share_decisions
from .planning.together import share_host as share_host
from .planning.turns import Pipeline as Pipeline
from .policy import Candidate as Candidate
from .policy import Policy as Policy
from .report import Entry as Entry
from .report import Report as Report
from .scheduler import Scheduler as Scheduler
from .scopes import disabled as disabled
from .scopes import dispatch_again as dispatch_again
from .scopes import keep as keep
from .scopes import recompute as recompute
from .scopes import to_host as to_host

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
