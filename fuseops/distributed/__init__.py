"""Many GPUs on torch.distributed: styles for `parallelize_module`, helpers for FSDP2, and pipeline stages.

experts       expert parallelism: ExpertParallel; dispatch sends tokens to the ranks of their experts
fsdp          FSDP2 with experts on a mesh of their own; clipping and optimizers over two meshes
gather        FSDP2 all-gathers of weights as FP8 codes: quantized_gather
tensor        tensor and sequence parallelism: ColwiseParallel, RowwiseParallel, SequenceParallel, tp_plan
overlap       rules that overlap a collective with the GEMM next to it: overlap_rules
pipeline      stages that delay weight gradients for a zero-bubble schedule: dw_builder
pairs         a forward and the backward of another micro-batch in alternation: overlap_pairs
"""

from .dispatch import check_overflow
from .experts import ExpertParallel
from .fsdp import clip_grad_norm_, expert_placement, param_groups
from .gather import quantized_gather
from .overlap import overlap_rules
from .pairs import overlap_pairs
from .pipeline import delay_weight_gradients, dw_builder
from .tensor import (
    ColwiseParallel,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    shard_placement,
    split_halves,
    tp_plan,
)

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "Replicated",
    "RowwiseParallel",
    "SequenceParallel",
    "check_overflow",
    "clip_grad_norm_",
    "delay_weight_gradients",
    "dw_builder",
    "expert_placement",
    "overlap_pairs",
    "overlap_rules",
    "param_groups",
    "quantized_gather",
    "shard_placement",
    "split_halves",
    "tp_plan",
]


def __dir__() -> list[str]:
    return __all__
