"""Many ranks, on torch.distributed: what `parallelize_module` and `fully_shard` need to know of fuseops' layers.

experts.py   the style that spreads experts over a mesh
fsdp.py      FSDP2 beside them, on a mesh of its own; clipping and optimizers over two meshes
dispatch/    how tokens travel to their experts
"""

from .dispatch import check_overflow as check_overflow
from .experts import ExpertParallel as ExpertParallel
from .fsdp import clip_grad_norm_ as clip_grad_norm_
from .fsdp import expert_placement as expert_placement
from .fsdp import param_groups as param_groups

__all__ = [
    "ExpertParallel",
    "check_overflow",
    "clip_grad_norm_",
    "expert_placement",
    "param_groups",
]


def __dir__() -> list[str]:
    return __all__
