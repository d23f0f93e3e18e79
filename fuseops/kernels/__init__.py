"""Launchers of every kernel. Ops and fused ops call these and never look at the device.

Each runs its kernel where there is one for the given tensors, and its twin, plain differentiable torch, elsewhere;
`registry.KernelOp` decides. A twin is the specification, the backend of tensors that no kernel takes (CPU, float64,
subclasses), the function that `fo.reference()` differentiates, and the oracle of fake shapes and of the tests. It is
defined above its launcher, has its name with an underscore before it, and is `op.twin`. Sums are kept in float32
(float64 for float64 inputs), with one rounding at the store.
Shapes: R rows, N columns, F gated features, E groups, K the inner size of a GEMM.

    launchers       activation, add_mm, amax, bias, cross_entropy, dropout, norm, norm_operand,
                    micro, micro_gemm, operands, peers, permute, quantize, rope, router, router_losses, routing
    grouped GEMMs   grouped, grouped_glu and grouped_glu_bwd (with SwiGLU); grouped_paths (which kernel,
                    and why), grouped_launch
    FP8 GEMMs       fp8, fp8_launch; fp8_paths (which kernel, and why)
    infrastructure  registry (`@kernel_op`), records (of the arguments of an op), launch, replay (of launches
                    without their launcher), transcript (of all calls of a function), configs (block sizes),
                    tiles (helpers of launchers), triton_private
    by inductor     generated (elementwise functions, for any number of rows)
    tools           aot (compiles without a GPU), source (of a kernel, as its compiler sees it), interpreter
                    (repairs Triton's)
    in twins        groups (of rows, and of columns), scales (of FP8), formats (of recipes)
    device/         the Triton code

For kernels outside of fuseops `kernel_op`, `launch` and `Space` are public; the launchers of fuseops' own are not.
"""

from .activation import GATES as GATES
from .activation import act_bwd as act_bwd
from .activation import act_bwd_bias as act_bwd_bias
from .activation import act_dprobs as act_dprobs
from .activation import act_fwd as act_fwd
from .activation import scaled_act_bwd as scaled_act_bwd
from .activation import scaled_act_bwd_into as scaled_act_bwd_into
from .activation import scaled_act_fwd as scaled_act_fwd
from .add_mm import add_mm as add_mm
from .add_mm import wide_mm as wide_mm
from .amax import delayed_inverse as delayed_inverse
from .amax import group_amax as group_amax
from .amax import matrix_amax as matrix_amax
from .amax import quantize_groups as quantize_groups
from .amax import quantize_matrices as quantize_matrices
from .bias import bias_bwd as bias_bwd
from .bias import bias_fwd as bias_fwd
from .bias import grouped_bias_bwd as grouped_bias_bwd
from .bias import grouped_bias_fwd as grouped_bias_fwd
from .configs import Space as Space
from .cross_entropy import linear_cross_entropy_bwd as linear_cross_entropy_bwd
from .cross_entropy import linear_cross_entropy_fwd as linear_cross_entropy_fwd
from .cross_entropy import linear_cross_entropy_grads as linear_cross_entropy_grads
from .cross_entropy import logit_grads_into as logit_grads_into
from .cross_entropy import logits_with_rows as logits_with_rows
from .cross_entropy import scaled_to as scaled_to
from .dropout import apply_dropout as apply_dropout
from .formats import Format as Format
from .formats import codes_values as codes_values
from .formats import dequantize_format as dequantize_format
from .formats import hadamard as hadamard
from .formats import quantize_format as quantize_format
from .formats import random_hadamard as random_hadamard
from .formats import signs as signs
from .formats import swizzled as swizzled
from .formats import transpose_in_groups as transpose_in_groups
from .formats import unswizzled as unswizzled
from .formats import whole_inverse as whole_inverse
from .formats import whole_of_blocks as whole_of_blocks
from .fp8 import fp8_mm as fp8_mm
from .fp8 import fp8_mm_operand as fp8_mm_operand
from .fp8 import fp8_wgrad as fp8_wgrad
from .fp8 import fp8_wgrad_into as fp8_wgrad_into
from .grouped import group_tiles as group_tiles
from .grouped import grouped_mm as grouped_mm
from .grouped import grouped_mm_into as grouped_mm_into
from .grouped import grouped_wgrad as grouped_wgrad
from .grouped import grouped_wgrad_into as grouped_wgrad_into
from .grouped import one_group as one_group
from .grouped_glu import grouped_swiglu as grouped_swiglu
from .grouped_glu_bwd import grouped_dswiglu as grouped_dswiglu
from .grouped_glu_bwd import grouped_dswiglu_into as grouped_dswiglu_into
from .groups import column_offs as column_offs
from .groups import num_groups as num_groups
from .groups import padded_columns as padded_columns
from .groups import padding_mask as padding_mask
from .launch import launch as launch
from .micro import quantize_micro as quantize_micro
from .micro_gemm import micro_mm as micro_mm
from .micro_gemm import micro_wgrad as micro_wgrad
from .micro_gemm import multiplies as multiplies
from .norm import add_layernorm_fwd as add_layernorm_fwd
from .norm import add_rmsnorm_fwd as add_rmsnorm_fwd
from .norm import layernorm_bwd as layernorm_bwd
from .norm import layernorm_fwd as layernorm_fwd
from .norm import rmsnorm_bwd as rmsnorm_bwd
from .norm import rmsnorm_fwd as rmsnorm_fwd
from .norm_operand import rmsnorm_columns as rmsnorm_columns
from .norm_operand import rmsnorm_operand as rmsnorm_operand
from .operands import dswiglu_operand as dswiglu_operand
from .operands import permute_operand as permute_operand
from .operands import quantize_operand as quantize_operand
from .operands import quantize_weight as quantize_weight
from .operands import swiglu_operand as swiglu_operand
from .peers import add_sums as add_sums
from .peers import bound_rows as bound_rows
from .peers import return_sums as return_sums
from .peers import send_tokens as send_tokens
from .peers import take_tokens as take_tokens
from .peers import token_slots as token_slots
from .permute import combine_fwd as combine_fwd
from .permute import gather_rows as gather_rows
from .permute import scatter_rows as scatter_rows
from .permute import values_of_copies as values_of_copies
from .quantize import quantize_group_blocks as quantize_group_blocks
from .quantize import quantize_vectors as quantize_vectors
from .registry import kernel_op as kernel_op
from .registry import reference_only as reference_only
from .rope import apply_rope as apply_rope
from .rope import apply_rope_pair as apply_rope_pair
from .router import router_bwd as router_bwd
from .router import router_fwd as router_fwd
from .router_losses import router_loss as router_loss
from .router_losses import router_loss_bwd as router_loss_bwd
from .routing import count_once as count_once
from .routing import expert_counts as expert_counts
from .routing import route as route
from .scales import amax_of_groups as amax_of_groups
from .scales import amax_of_matrices as amax_of_matrices
from .scales import amax_of_tokens as amax_of_tokens
from .scales import by_pieces as by_pieces
from .scales import columns_in_groups as columns_in_groups
from .scales import inverse_scale as inverse_scale
from .scales import pieces as pieces
from .scales import saturate as saturate
from .scales import spread_over_groups as spread_over_groups
from .tiles import accumulator as accumulator

__all__ = ["Space", "kernel_op", "launch"]


def __dir__() -> list[str]:
    return __all__
