"""Precision recipes and quantized tensors.

scaling    a format
quantized  a tensor in a format; carrier (its gradient), validate (its components)
operands   quantizes tensors for GEMMs; scales (state of delayed scaling), store (cache of quantized weights)
gemm       the GEMMs over operands
recipe     the formats of each operand of an op; micro, delayed, by_role
gain       the predicted speedup; numerics (measured errors)
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
