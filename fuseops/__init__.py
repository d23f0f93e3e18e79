"""fuseops: compose a model from small ops; fuse, explain and offload what they save."""

__version__ = "0.1.0"

from . import kernels as kernels
from . import offload as offload
from . import ops as ops
from . import recipes as recipes
from .errors import FuseOpsError as FuseOpsError
from .errors import FusionMissError as FusionMissError
from .errors import SideInputError as SideInputError
from .run.config import checkpoint_contexts as checkpoint_contexts
from .run.config import configure as configure
from .run.config import from_environment as _from_environment
from .run.config import fusion as fusion
from .run.config import recipe as recipe
from .run.config import reference as reference
from .run.config import rules as rules
from .run.debug import debug as debug
from .explain import Explanation as Explanation
from .explain import FusionPlan as FusionPlan
from .explain import explain as explain
from .explain import plans as plans
from .plan.records import Miss as Miss
from .plan.records import SavedTensor as SavedTensor
from .rules.rule import Conditions as Conditions
from .rules.rule import Rule as Rule
from .rules.rule import maybe as maybe
from .rules.rule import require as require
from .layers.sequential import Residual as Residual
from .layers.sequential import Sequential as Sequential
from .layers import MoE as MoE
from .ops.cross_entropy import linear_cross_entropy as linear_cross_entropy
from .ops.linear_loss import linear_loss as linear_loss
from .ops.op import Call as Call
from .ops.op import FusedOp as FusedOp
from .ops.op import Grads as Grads
from .ops.op import Op as Op
from .ops.op import Out as Out
from .ops.routing import Routing as Routing
from .ops.stored import masters as masters
from .ops.stored import quantized_init as quantized_init
from .ops.weights import weights_changed as weights_changed
from .recipes import quantize as quantize
from . import testing as testing

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


_from_environment()
