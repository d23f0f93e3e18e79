"""Explains plans: observes a forward, and shows its plans as text, HTML with a drawing, or JSON.

a forward   plans (`explain`)
its plan    assemble, explanation (of one Sequential, of a model)
pages       text, html, drawing; layout (shared by them); charts (bars and lines)
"""

from .explanation import Explanation, FusionPlan
from .plans import explain, plan_of, plans

__all__ = [
    "Explanation",
    "FusionPlan",
    "explain",
    "plan_of",
    "plans",
]


def __dir__() -> list[str]:
    return __all__
