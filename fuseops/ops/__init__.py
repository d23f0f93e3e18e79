"""The op catalogue. One file a family; `op.py` is the contract."""

from .activations import GELU as GELU
from .activations import SiLU as SiLU
from .activations import SReLU as SReLU
from .elementwise import ConstantScale as ConstantScale
from .elementwise import Dropout as Dropout
from .glu import ScaledSwiGLU as ScaledSwiGLU
from .glu import SwiGLU as SwiGLU
from .grouped_linear import GroupedLinear as GroupedLinear
from .linear import Bias as Bias
from .linear import Linear as Linear
from .norms import RMSNorm as RMSNorm
from .structure import Add as Add
from .structure import Identity as Identity
from .structure import Reshape as Reshape
from .structure import Tap as Tap
