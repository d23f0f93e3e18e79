"""The rules, top line first. Joint rules cover first; forward and backward ones are matched in the gaps."""

from fuseops.ops.activations import GELU, SiLU, SReLU
from fuseops.ops.glu import ScaledSwiGLU
from fuseops.ops.grouped_linear import GroupedLinear
from fuseops.ops.linear import Bias, Linear
from fuseops.ops.norms import RMSNorm

from .conditions import glu_widths, no_biases, no_recipe, one_bias, same_groups
from .fused.bias_act import BiasAct
from .fused.grouped_mlp import GroupedMLP
from .fused.linear_act import LinearAct
from .fused.norm_linear import NormLinear
from .rule import Rule, maybe

# fmt: off
JOINT = (
    Rule("grouped_mlp", (GroupedLinear, ScaledSwiGLU, GroupedLinear), GroupedMLP, "joint", (same_groups, glu_widths, no_biases, no_recipe)),
)
FORWARD = (
    Rule("linear_act",  (Linear, maybe(Bias), SiLU | GELU | SReLU),   LinearAct,  "forward", (one_bias,)),
    Rule("norm_linear", (RMSNorm, Linear),                            NormLinear, "forward", (no_recipe,)),
)
BACKWARD = (
    Rule("bias_act",    (Bias, SiLU | GELU | SReLU),                  BiasAct,    "backward"),
)
# fmt: on

TABLES = JOINT + FORWARD + BACKWARD
