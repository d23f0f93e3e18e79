"""What models are composed with: Sequential and Residual, and layers that are Sequentials: MoE."""

from .moe import MoE as MoE
from .sequential import Residual as Residual
from .sequential import Sequential as Sequential

__all__ = [
    "MoE",
    "Residual",
    "Sequential",
]


def __dir__() -> list[str]:
    return __all__
