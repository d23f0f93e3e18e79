"""The built-in rules are tried top line first. Joint rules cover first; forward and backward ones are matched in the gaps."""

from fuseops.ops.activations import ACTS, Activation, ScaledActivation, ScaledSReLU
from fuseops.ops.elementwise import ConstantScale
from fuseops.ops.glu import GATED, SCALED_GATED
from fuseops.ops.grouped_linear import GroupedLinear
from fuseops.ops.linear import Bias, Linear
from fuseops.ops.norms import LayerNorm, RMSNorm
from fuseops.ops.permute import Combine, Permute
from fuseops.ops.structure import Add, Tap
from fuseops.rules.fused.add_norm import AddNorm, NormAdd
from fuseops.rules.fused.bias_act import BiasAct
from fuseops.rules.fused.grouped_mlp import GroupedMLP
from fuseops.rules.fused.linear_act import LinearAct
from fuseops.rules.fused.linear_add import LinearAdd, ScaleLinear, TapLinear
from fuseops.rules.fused.mlp import DenseMLP
from fuseops.rules.fused.norm_linear import NormLinear
from fuseops.rules.fused.pointwise import Pointwise, one_kernel
from fuseops.rules.fused.routed_mlp import RoutedMLP

from .conditions import (
    act_widths,
    no_bias,
    one_axis,
    one_bias,
    same_groups,
    same_sides,
    same_top_k,
    two_axes,
    whole_weights,
)
from .rule import Rule, Some, maybe

PLAIN = GATED | ACTS
SCALED = SCALED_GATED | ScaledSReLU
EXPERTS = (GroupedLinear, SCALED | PLAIN, GroupedLinear)
FIT = (same_groups, same_sides, act_widths, whole_weights)
DENSE = (Linear, maybe(Bias), PLAIN, Linear)
NORM = RMSNorm | LayerNorm
NORMED = (maybe(Add), maybe(Tap), NORM)

# fmt: off
JOINT = (
    Rule("routed_mlp",  (Permute, *EXPERTS, maybe(Combine)),          RoutedMLP,  "joint", (same_top_k, *FIT)),
    Rule("grouped_mlp", EXPERTS,                                      GroupedMLP, "joint", (*FIT, two_axes)),
    Rule("norm_mlp",    (*NORMED, *DENSE),                            DenseMLP,   "joint", (one_axis, one_bias, act_widths)),
    Rule("mlp",         DENSE,                                        DenseMLP,   "joint", (one_bias, act_widths)),
    Rule("norm_linear", (*NORMED, Linear),                            NormLinear, "joint", (one_axis,)),
)
FORWARD = (
    Rule("add_norm",    (maybe(Linear), Add, Tap, NORM),              AddNorm,    "forward", (one_axis,)),
    Rule("linear_add",  (Linear, maybe(ConstantScale), Add),          LinearAdd,  "forward", (no_bias,)),
    Rule("linear_scale", (Linear, ConstantScale),                     LinearAdd,  "forward", (no_bias,)),
    Rule("linear_act",  (Linear, maybe(Bias), ACTS),                  LinearAct,  "forward", (one_bias,)),
)
BACKWARD = (
    Rule("norm_add",    (Add, Tap, NORM),                             NormAdd,    "backward", (one_axis,)),
    Rule("bias_act",    (Bias, ACTS),                                 BiasAct,    "backward"),
    Rule("act_linear",  (Linear, PLAIN),                              BiasAct,    "backward"),
    Rule("scale_linear", (Linear, ConstantScale),                     ScaleLinear, "backward", (no_bias,)),
    Rule("tap_linear",  (Tap, Linear),                                TapLinear,  "backward"),
)
# fmt: on

BUILTIN_RULES = JOINT + FORWARD + BACKWARD

ELEMENTWISE = Activation | ScaledActivation | Bias | ConstantScale | Add
POINTWISE = Rule("pointwise", (Some(ELEMENTWISE),), Pointwise, "joint", (one_kernel,), last=True)
"""On by choice."""
