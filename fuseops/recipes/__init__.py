"""Precision recipes and quantized tensors.

scaling (a format), quantized (a tensor in one), fits (whether it is one), carrier (of its gradient), operands (from
tensors), scales (state of those that follow steps), store (weights that are kept), gemm (their products), recipe (who
gets what; micro, delayed, by_role), gain (where that pays), numbers (what it does to them).
"""

from .by_role import ByName as ByName
from .by_role import ByRole as ByRole
from .delayed import DelayedScaling as DelayedScaling
from .micro import MXFP8BlockScaling as MXFP8BlockScaling
from .micro import NVFP4BlockScaling as NVFP4BlockScaling
from .operands import Operand as Operand
from .operands import columns_follow as columns_follow
from .operands import operand as operand
from .operands import quantize as quantize
from .operands import weight_operand as weight_operand
from .quantized import Layout as Layout
from .quantized import Quantized as Quantized
from .recipe import Float8BlockScaling as Float8BlockScaling
from .recipe import Float8CurrentScaling as Float8CurrentScaling
from .recipe import Recipe as Recipe
from .recipe import Roles as Roles
from .scaling import Scaling as Scaling

__all__ = [
    "ByName",
    "ByRole",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Layout",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "Operand",
    "Quantized",
    "Recipe",
    "Roles",
    "Scaling",
    "columns_follow",
    "operand",
    "quantize",
    "weight_operand",
]


def __dir__() -> list[str]:
    return __all__
