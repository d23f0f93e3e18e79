"""Precision recipes and quantized tensors."""

from .quantized import COL as COL
from .quantized import HIGH as HIGH
from .quantized import ROW as ROW
from .quantized import Format as Format
from .quantized import Quantized as Quantized
from .quantized import Roles as Roles
from .recipe import Float8BlockScaling as Float8BlockScaling
from .recipe import Float8CurrentScaling as Float8CurrentScaling
from .recipe import Recipe as Recipe
