"""Launchers of every kernel. Ops and fused ops call these and never look at the device."""

from .grouped import grouped_bias_bwd as grouped_bias_bwd
from .grouped import grouped_mm as grouped_mm
from .grouped import grouped_wgrad as grouped_wgrad
from .grouped import scaled_grouped_mm as scaled_grouped_mm
from .grouped import scaled_grouped_wgrad as scaled_grouped_wgrad
from .reference import accumulator as accumulator
from .reference import act_bias_bwd as act_bias_bwd
from .reference import act_bwd as act_bwd
from .reference import act_fwd as act_fwd
from .reference import column_sum as column_sum
from .reference import dropout_mask as dropout_mask
from .reference import expert_quantize as expert_quantize
from .reference import grouped_bias as grouped_bias
from .reference import grouped_quantize as grouped_quantize
from .reference import quantize as quantize
from .reference import rms_norm_bwd as rms_norm_bwd
from .reference import rms_norm_fwd as rms_norm_fwd
from .reference import scaled_mm as scaled_mm
from .reference import scaled_swiglu_bwd as scaled_swiglu_bwd
from .reference import scaled_swiglu_fwd as scaled_swiglu_fwd
from .reference import swiglu_bwd as swiglu_bwd
from .reference import swiglu_dprobs as swiglu_dprobs
from .reference import swiglu_fwd as swiglu_fwd
