"""Activations. Each saves its input and nothing else; the maths lives in the kernel of that `kind`."""

from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from fuseops import kernels as K
from fuseops.errors import FuseOpsError

from .op import Grads, Op, Out


class ActivationSaved(NamedTuple):
    x: Tensor | None


class Activation(Op[ActivationSaved]):
    """y = act(x), elementwise. A member of the family sets `kind`, one of `kernels.reference.KINDS`."""

    saves_for = {"x": ("x",)}
    kind: str

    def fwd(self, x: Tensor) -> Out:
        return Out(K.act_fwd(x, self.kind), ActivationSaved(x))

    def bwd(self, saved: ActivationSaved, dy: Tensor) -> Grads:
        return Grads(K.act_bwd(dy, saved.x, self.kind))  # type: ignore[arg-type]


class SiLU(Activation, nn.SiLU):
    """y = x * sigmoid(x)."""

    kind: ClassVar[str] = "silu"  # type: ignore[misc]

    def __init__(self, inplace: bool = False) -> None:
        if inplace:
            raise FuseOpsError(
                "SiLU(inplace=True): an op never writes its input, which may be saved. Leave it out."
            )
        nn.SiLU.__init__(self)


class GELU(Activation, nn.GELU):
    """y = x * Phi(x); approximate="tanh" is the reference system's."""

    def __init__(self, approximate: str = "none") -> None:
        if approximate not in ("none", "tanh"):
            raise FuseOpsError(f"GELU(approximate={approximate!r}): expected 'none' or 'tanh'.")
        nn.GELU.__init__(self, approximate)
        self.kind = "gelu" if approximate == "none" else "gelu_tanh"


class SReLU(Activation):
    """y = max(x, 0)^2."""

    kind: ClassVar[str] = "srelu"  # type: ignore[misc]
