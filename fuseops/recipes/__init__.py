"""Precision recipes and quantized tensors.

scaling (a format), quantized (a tensor in one), fits (whether it is one), carrier (of its gradient), operands (from
tensors), scales (state of those that follow steps), store (weights that are kept), gemm (their products), recipe (who
gets what; micro, delayed, by_role), gain (where that pays), numbers (what it does to them).
"""

from .by_role import ByName, ByRole
from .delayed import DelayedScaling
from .micro import MXFP8BlockScaling, NVFP4BlockScaling
from .operands import Operand, columns_follow, operand, quantize, weight_operand
from .quantized import Layout, Quantized
from .recipe import Float8BlockScaling, Float8CurrentScaling, Recipe, Roles
from .scaling import Scaling

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
