"""The op catalogue: one file a family.

the contract      op; scopes (settings of a call), names and paths (of saved tensors)
families          linear, grouped_linear, norms, activations, glu, elementwise, structure, rope, quantize, collectives
the head's loss   cross_entropy (and its loss_options), vocab_parallel (weights over ranks), linear_loss (one's own)
tokens, experts   routing, router, permute, inject
what ops share    checks, splits (are the ends of groups right), tiles (of a call's grouped GEMMs), local (of DTensors,
                  what an op computes with), halves (of gated MLPs that are sharded), code (what a `fwd` names),
                  contents (of attributes that may change), object_table (objects that traced code refers to),
                  te_names (what TransformerEngine calls an op)
weights           packing (one Parameter a group), grouped_state_dict, weights (quantized ones that a recipe keeps),
                  stored (those that live in a format)
"""

from typing import TYPE_CHECKING, Never

from .activations import GELU, QGELU, ReLU, ScaledSReLU, SiLU, SReLU
from .collectives import AllGather, AllReduce, ReduceScatter
from .cross_entropy import LinearCrossEntropy
from .elementwise import ConstantScale, Dropout
from .glu import (
    GEGLU,
    GLU,
    QGEGLU,
    ClampedSwiGLU,
    ReGLU,
    ScaledClampedSwiGLU,
    ScaledGEGLU,
    ScaledGLU,
    ScaledQGEGLU,
    ScaledReGLU,
    ScaledSiTUGLU,
    ScaledSReGLU,
    ScaledSwiGLU,
    SiTUGLU,
    SReGLU,
    SwiGLU,
)
from .grouped_linear import GroupedLinear
from .inject import InjectLoss
from .linear import Bias, Linear
from .norms import L2Norm, LayerNorm, RMSNorm
from .permute import Combine, Dispatch, Permute
from .quantize import Quantize
from .rope import RoPE
from .router import Router
from .structure import Add, Identity, Reshape, Swap, Tap
from .te_names import no_attribute as _no_attribute

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "Add",
    "AllGather",
    "AllReduce",
    "Bias",
    "ClampedSwiGLU",
    "Combine",
    "ConstantScale",
    "Dispatch",
    "Dropout",
    "GroupedLinear",
    "Identity",
    "InjectLoss",
    "L2Norm",
    "LayerNorm",
    "Linear",
    "LinearCrossEntropy",
    "Permute",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "RoPE",
    "Router",
    "SReGLU",
    "SReLU",
    "ScaledClampedSwiGLU",
    "ScaledGEGLU",
    "ScaledGLU",
    "ScaledQGEGLU",
    "ScaledReGLU",
    "ScaledSReGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "SiLU",
    "SiTUGLU",
    "Swap",
    "SwiGLU",
    "Tap",
]


def __dir__() -> list[str]:
    return __all__


if not TYPE_CHECKING:  # which would take every name for one that is here

    def __getattr__(name: str) -> Never:
        raise _no_attribute(__name__, name)
