"""The reference backend: every kernel as plain differentiable torch, one file a noun.

It is the readable specification, the backend of tensors that no kernel takes (CPU, float64, subclasses), what
`fo.reference()` differentiates, the oracle of fake shapes and the oracle of the tests. Same names and arguments as the
launchers. Sums are kept in float32 (float64 for float64 inputs) with one rounding at the store.
Shapes: R rows, N columns, F gated features, E groups, K the inner size of a GEMM.
"""

from .activation import GATES as GATES
from .activation import KINDS as KINDS
from .activation import act_bwd as act_bwd
from .activation import act_bwd_bias as act_bwd_bias
from .activation import act_dprobs as act_dprobs
from .activation import act_fwd as act_fwd
from .activation import scaled_act_bwd as scaled_act_bwd
from .activation import scaled_act_fwd as scaled_act_fwd
from .add_mm import add_mm as add_mm
from .bias import bias_bwd as bias_bwd
from .bias import bias_fwd as bias_fwd
from .bias import grouped_bias_bwd as grouped_bias_bwd
from .bias import grouped_bias_fwd as grouped_bias_fwd
from .cross_entropy import linear_cross_entropy_bwd as linear_cross_entropy_bwd
from .cross_entropy import linear_cross_entropy_fwd as linear_cross_entropy_fwd
from .cross_entropy import linear_cross_entropy_grads as linear_cross_entropy_grads
from .dropout import apply_dropout as apply_dropout
from .dropout import dropout_mask as dropout_mask
from .formats import dequantize_format as dequantize_format
from .formats import quantize_format as quantize_format
from .formats import turned_in_groups as turned_in_groups
from .fp8 import dequantize as dequantize
from .fp8 import fp8_mm as fp8_mm
from .fp8 import fp8_mm_operand as fp8_mm_operand
from .fp8 import fp8_wgrad as fp8_wgrad
from .fp8 import fp8_wgrad_into as fp8_wgrad_into
from .grouped import group_tiles as group_tiles
from .grouped import grouped_dswiglu as grouped_dswiglu
from .grouped import grouped_mm as grouped_mm
from .grouped import grouped_mm_into as grouped_mm_into
from .grouped import grouped_swiglu as grouped_swiglu
from .grouped import grouped_wgrad as grouped_wgrad
from .grouped import grouped_wgrad_into as grouped_wgrad_into
from .layer_norm import add_layernorm_fwd as add_layernorm_fwd
from .layer_norm import layernorm_bwd as layernorm_bwd
from .layer_norm import layernorm_fwd as layernorm_fwd
from .norm import add_rmsnorm_fwd as add_rmsnorm_fwd
from .norm import rmsnorm_bwd as rmsnorm_bwd
from .norm import rmsnorm_fwd as rmsnorm_fwd
from .operands import by_group as by_group
from .operands import columns_in_groups as columns_in_groups
from .operands import columns_of as columns_of
from .operands import dswiglu_operand as dswiglu_operand
from .operands import permute_operand as permute_operand
from .operands import quantize_groups as quantize_groups
from .operands import quantize_matrices as quantize_matrices
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
from .precision import accumulator as accumulator
from .quantize import SMALLEST as SMALLEST
from .quantize import column_offs as column_offs
from .quantize import expert_quantize as expert_quantize
from .quantize import grouped_quantize as grouped_quantize
from .quantize import quantize_blocks as quantize_blocks
from .quantize import quantize_columns as quantize_columns
from .quantize import quantize_group_blocks as quantize_group_blocks
from .quantize import quantize_rows as quantize_rows
from .quantize import quantize_tensor as quantize_tensor
from .quantize import saturate as saturate
from .rope import apply_rope as apply_rope
from .rope import apply_rope_pair as apply_rope_pair
from .router import router_bwd as router_bwd
from .router import router_fwd as router_fwd
from .router import router_loss as router_loss
from .router import router_loss_bwd as router_loss_bwd
from .routing import expert_counts as expert_counts
from .routing import route as route
from .wide_mm import wide_mm as wide_mm
