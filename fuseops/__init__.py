"""fuseops: compose a model from small ops; fuse, explain and offload what they save."""

__version__ = "0.1.0"

from . import offload as offload
from . import ops as ops
from . import recipes as recipes
from .errors import FuseOpsError as FuseOpsError
from .errors import FusionMissError as FusionMissError
from .errors import SideInputError as SideInputError
from .fusions.config import checkpoint_contexts as checkpoint_contexts
from .fusions.config import configure as configure
from .fusions.config import from_environment as _from_environment
from .fusions.config import fusion as fusion
from .fusions.config import recipe as recipe
from .fusions.config import reference as reference
from .fusions.config import rules as rules
from .fusions.debug import debug as debug
from .fusions.explain import FusionPlan as FusionPlan
from .fusions.explain import explain as explain
from .fusions.explain import plans as plans
from .fusions.plan import Miss as Miss
from .fusions.plan import SavedTensor as SavedTensor
from .fusions.rule import Conditions as Conditions
from .fusions.rule import Rule as Rule
from .fusions.rule import maybe as maybe
from .fusions.rule import require as require
from .fusions.sequential import Residual as Residual
from .fusions.sequential import Sequential as Sequential
from .layers import MoE as MoE
from .ops.op import Call as Call
from .ops.op import FusedOp as FusedOp
from .ops.op import Grads as Grads
from .ops.op import Op as Op
from .ops.op import Out as Out
from .ops.routing import Routing as Routing
from .recipes import quantize as quantize
from . import testing as testing

_from_environment()
