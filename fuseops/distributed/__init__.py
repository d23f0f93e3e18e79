"""Many GPUs on torch.distributed: styles for `parallelize_module`, and stages of pipelines.

tensor        tensor and sequence parallelism: ColwiseParallel, RowwiseParallel, SequenceParallel, tp_plan
pipeline      stages whose weight gradients wait for a zero-bubble schedule: dw_builder
"""

from .pipeline import delay_weight_gradients as delay_weight_gradients
from .pipeline import dw_builder as dw_builder
from .tensor import ColwiseParallel as ColwiseParallel
from .tensor import Replicated as Replicated
from .tensor import RowwiseParallel as RowwiseParallel
from .tensor import SequenceParallel as SequenceParallel
from .tensor import shard_placement as shard_placement
from .tensor import split_halves as split_halves
from .tensor import tp_plan as tp_plan

__all__ = [
    "ColwiseParallel",
    "Replicated",
    "RowwiseParallel",
    "SequenceParallel",
    "delay_weight_gradients",
    "dw_builder",
    "shard_placement",
    "split_halves",
    "tp_plan",
]


def __dir__() -> list[str]:
    return __all__
