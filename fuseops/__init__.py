"""fuseops: compose a model from small ops; fuse, explain and offload what they save."""

from typing import TYPE_CHECKING, Never

__version__ = "0.1.0"

from . import kernels, offload, ops, recipes
from .errors import FuseOpsError, FusionMissError, SideInputError
from .run.config import checkpoint_contexts, configure
from .run.config import from_environment as _from_environment
from .run.config import fusion, recipe, reference, rules
from .run.debug import debug
from .explain import Explanation, FusionPlan, explain, plans
from .plan.records import Miss, SavedTensor
from .rules.rule import Conditions, Rule, maybe, require
from .layers.sequential import Residual, Sequential
from .layers import MoE
from .ops.cross_entropy import linear_cross_entropy
from .ops.linear_loss import linear_loss
from .ops.op import Call, FusedOp, Grads, Op, Out
from .ops.routing import Routing
from .ops.stored import masters, quantized_init
from .ops.te_names import no_attribute as _no_attribute
from .ops.weights import weights_changed
from .recipes import quantize
from . import testing

__all__ = [
    "Call",
    "Conditions",
    "Explanation",
    "FuseOpsError",
    "FusedOp",
    "FusionMissError",
    "FusionPlan",
    "Grads",
    "Miss",
    "MoE",
    "Op",
    "Out",
    "Residual",
    "Routing",
    "Rule",
    "SavedTensor",
    "Sequential",
    "SideInputError",
    "checkpoint_contexts",
    "configure",
    "debug",
    "explain",
    "fusion",
    "kernels",
    "linear_cross_entropy",
    "linear_loss",
    "masters",
    "maybe",
    "offload",
    "ops",
    "plans",
    "quantize",
    "quantized_init",
    "recipe",
    "recipes",
    "reference",
    "require",
    "rules",
    "testing",
    "weights_changed",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]  # not the parts that it is made of


if not TYPE_CHECKING:  # which would take every name for one that is here

    def __getattr__(name: str) -> Never:
        raise _no_attribute(__name__, name, tuple(ops.__all__))


_from_environment()
