"""What models are composed with: Sequential and Residual, and layers that are Sequentials: MoE."""

from .moe import MoE
from .sequential import Residual, Sequential

__all__ = [
    "MoE",
    "Residual",
    "Sequential",
]


def __dir__() -> list[str]:
    return __all__
