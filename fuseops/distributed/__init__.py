"""Many ranks, on torch.distributed: what `parallelize_module` and `fully_shard` need to know of fuseops' layers.

experts.py   the style that spreads experts over a mesh, and FSDP2 beside it
dispatch/    how tokens travel to their experts
"""

from .dispatch import check_overflow as check_overflow
from .experts import ExpertParallel as ExpertParallel
