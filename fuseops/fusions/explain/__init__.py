"""Plans as people read them: a forward under observation, then text, HTML with a drawing, or JSON.

a forward   plans (`explain`), observe (which module runs), saved (what it saves), gemms (on which kernels)
its plan    assemble, rehearse (the peak of a step), fusion_plan
pages       text, html, drawing; layout is what they share
"""

from .fusion_plan import FusionPlan as FusionPlan
from .plans import explain as explain
from .plans import plan_of as plan_of
from .plans import plans as plans
