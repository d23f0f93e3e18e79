"""The modules that compose ops into models: Sequential and Residual, and MoE, a layer that is a Sequential."""

from .moe import MoE
from .sequential import Residual, Sequential

__all__ = [
    "MoE",
    "Residual",
    "Sequential",
]


def __dir__() -> list[str]:
    return __all__
