"""Plans as people read them: a forward under observation, then text, HTML with a drawing, or JSON.

a forward   plans (`explain`)
its plan    assemble, explanation (of one Sequential, of a model)
pages       text, html, drawing; layout is what they share; charts (images of bars)
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
