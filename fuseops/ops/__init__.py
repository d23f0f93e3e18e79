"""The op catalogue: one file a family.

the contract      op; scopes (settings of a call), names and paths (of saved tensors)
families          linear, grouped_linear, norms, activations, glu, elementwise, structure, rope, quantize, collectives
the head's loss   cross_entropy (and its loss_options), vocab_parallel (weights over ranks), linear_loss (one's own)
tokens, experts   routing, router, permute, inject
what ops share    checks, splits (are the ends of groups right), tiles (of a call's grouped GEMMs), local (of DTensors,
                  what an op computes with), halves (of gated MLPs that are sharded)
weights           packing (one Parameter a group), grouped_state_dict, weights (quantized ones that a recipe keeps),
                  stored (those that live in a format)
"""

from .activations import GELU as GELU
from .activations import QGELU as QGELU
from .activations import ReLU as ReLU
from .activations import ScaledSReLU as ScaledSReLU
from .activations import SiLU as SiLU
from .activations import SReLU as SReLU
from .collectives import AllGather as AllGather
from .collectives import AllReduce as AllReduce
from .collectives import ReduceScatter as ReduceScatter
from .cross_entropy import LinearCrossEntropy as LinearCrossEntropy
from .elementwise import ConstantScale as ConstantScale
from .elementwise import Dropout as Dropout
from .glu import GEGLU as GEGLU
from .glu import GLU as GLU
from .glu import QGEGLU as QGEGLU
from .glu import ClampedSwiGLU as ClampedSwiGLU
from .glu import ReGLU as ReGLU
from .glu import ScaledClampedSwiGLU as ScaledClampedSwiGLU
from .glu import ScaledGEGLU as ScaledGEGLU
from .glu import ScaledGLU as ScaledGLU
from .glu import ScaledQGEGLU as ScaledQGEGLU
from .glu import ScaledReGLU as ScaledReGLU
from .glu import ScaledSiTUGLU as ScaledSiTUGLU
from .glu import ScaledSReGLU as ScaledSReGLU
from .glu import ScaledSwiGLU as ScaledSwiGLU
from .glu import SiTUGLU as SiTUGLU
from .glu import SReGLU as SReGLU
from .glu import SwiGLU as SwiGLU
from .grouped_linear import GroupedLinear as GroupedLinear
from .inject import InjectLoss as InjectLoss
from .linear import Bias as Bias
from .linear import Linear as Linear
from .norms import L2Norm as L2Norm
from .norms import LayerNorm as LayerNorm
from .norms import RMSNorm as RMSNorm
from .permute import Combine as Combine
from .permute import Dispatch as Dispatch
from .permute import Permute as Permute
from .quantize import Quantize as Quantize
from .rope import RoPE as RoPE
from .router import Router as Router
from .structure import Add as Add
from .structure import Identity as Identity
from .structure import Reshape as Reshape
from .structure import Swap as Swap
from .structure import Tap as Tap

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
