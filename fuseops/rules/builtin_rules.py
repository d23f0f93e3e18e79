"""The built-in rules, in order of priority. Joint rules match first, forward and backward ones in the gaps they leave."""

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
    no_low_rank,
    one_norm_axis,
    same_groups,
    same_side_inputs,
    same_top_k,
    single_bias,
    x_is_2d,
)
from .rule import OneOrMore, Rule, maybe

UNSCALED = GATED | ACTS
SCALED = SCALED_GATED | ScaledSReLU
EXPERTS = (GroupedLinear, SCALED | UNSCALED, GroupedLinear)
SAME_EXPERTS = (same_groups, same_side_inputs, act_widths, no_low_rank)
DENSE = (Linear, maybe(Bias), UNSCALED, Linear)
NORM = RMSNorm | LayerNorm
NORMED = (maybe(Add), maybe(Tap), NORM)

# fmt: off
JOINT = (
    Rule("routed_mlp",  (Permute, *EXPERTS, maybe(Combine)),          RoutedMLP,  "joint", (same_top_k, *SAME_EXPERTS)),
    Rule("grouped_mlp", EXPERTS,                                      GroupedMLP, "joint", (*SAME_EXPERTS, x_is_2d)),
    Rule("norm_mlp",    (*NORMED, *DENSE),                            DenseMLP,   "joint", (one_norm_axis, single_bias, act_widths)),
    Rule("mlp",         DENSE,                                        DenseMLP,   "joint", (single_bias, act_widths)),
    Rule("norm_linear", (*NORMED, Linear),                            NormLinear, "joint", (one_norm_axis,)),
)
FORWARD = (
    Rule("add_norm",    (maybe(Linear), Add, Tap, NORM),              AddNorm,    "forward", (one_norm_axis,)),
    Rule("linear_add",  (Linear, maybe(ConstantScale), Add),          LinearAdd,  "forward", (no_bias,)),
    Rule("linear_scale", (Linear, ConstantScale),                     LinearAdd,  "forward", (no_bias,)),
    Rule("linear_act",  (Linear, maybe(Bias), ACTS),                  LinearAct,  "forward", (single_bias,)),
)
BACKWARD = (
    Rule("norm_add",    (Add, Tap, NORM),                             NormAdd,    "backward", (one_norm_axis,)),
    Rule("bias_act",    (Bias, ACTS),                                 BiasAct,    "backward"),
    Rule("act_linear",  (Linear, UNSCALED),                          BiasAct,    "backward"),
    Rule("scale_linear", (Linear, ConstantScale),                     ScaleLinear, "backward", (no_bias,)),
    Rule("tap_linear",  (Tap, Linear),                                TapLinear,  "backward"),
)
# fmt: on

BUILTIN_RULES = JOINT + FORWARD + BACKWARD

ELEMENTWISE = Activation | ScaledActivation | Bias | ConstantScale | Add
POINTWISE = Rule(
    "pointwise", (OneOrMore(ELEMENTWISE),), Pointwise, "joint", (one_kernel,), last=True
)
"""A rule that is off unless a model asks for it."""
