"""Activations are plain, gated, or scaled by a probability a row. Each saves its inputs; the maths is in the kernels.

Gated ones take `[gate | up]` on the last axis, the gate first (the opposite of `torch.nn.functional.glu`); with
interleave = b, gate and up alternate in blocks of b columns.
"""

from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from fuseops import kernels as K
from fuseops.arguments import shown
from fuseops.errors import FuseOpsError, ShapeError
from fuseops.kernels.activation import Form

from .checks import check_probs, refuse_inplace
from .op import Call, Grads, Op, Out, S, Shape

APPROXIMATE = ("none", "tanh")


class ActivationSaved(NamedTuple):
    x: Tensor | None
    form: Form | None = None  # of the forward: attributes may change before the backward


class ScaledActivationSaved(NamedTuple):
    x: Tensor | None  # (R, F), or (R, 2F) where it is gated
    probs: Tensor | None  # (R,)
    form: Form | None = None  # as above


class _Act(Op[S]):
    """An `_Act` is an activation of a kind, one of `kernels.activation.KINDS`, with its options."""

    floats = True
    kind: str
    # the kernels' arguments after `kind`: interleave, alpha, limit, offset
    options: tuple[Any, ...] = ()

    def out_shape(self, shape: Shape) -> Shape:
        if self.kind not in K.GATES:
            return shape
        step = 2 * max(self.options[0] if self.options else 0, 1)
        if not shape or shape[-1] % step:
            raise ShapeError(
                f"{type(self).__name__} expects [gate | up] on the last axis, a multiple of {step}, got shape "
                f"{tuple(shape)}."
            )
        return (*shape[:-1], shape[-1] // 2)


class Activation(_Act[ActivationSaved]):
    """y = act(x), elementwise, or gated.   (..., F) -> (..., F), or (..., 2F) -> (..., F)

    A member of the family sets `kind`.
    """

    saves_for = {"x": ("x", "form")}

    def fwd(self, x: Tensor) -> Out:
        form = form_of(self)
        return Out(K.act_fwd(x, *form), ActivationSaved(x, form))

    def bwd(self, saved: ActivationSaved, dy: Tensor) -> Grads:
        form = saved.form or form_of(self)  # a rule of a user may save x alone
        return Grads(K.act_bwd(dy, saved.x, *form))  # type: ignore[arg-type]


class ScaledActivation(_Act[ScaledActivationSaved]):
    """y = act(x) * probs, one probability a row, with one rounding.   x (R, F) or (R, 2F), probs (R,) -> (R, F)

    A member of the family sets `kind` and `options`, as of `Activation`.
    """

    reads = ("probs",)
    saves_for = {"x": ("x", "probs", "form"), "probs": ("x", "form")}

    def __init__(self, *, probs: str = "probs") -> None:
        """probs: the name of the side input."""
        super().__init__()
        self.rename(probs=probs)

    def extra_repr(self) -> str:
        return ", ".join(self.renamed())

    def fwd(self, x: Tensor, *, probs: Tensor) -> Out:
        check_probs(type(self).__name__, x, probs)
        form = form_of(self)
        return Out(K.scaled_act_fwd(x, probs, *form), ScaledActivationSaved(x, probs, form))

    def bwd(self, saved: ScaledActivationSaved, dy: Tensor, *, call: Call) -> Grads:
        x, probs, form = saved
        kind, *options = form or form_of(self)  # as above
        # probs itself is not saved then, and its gradient does not read it
        if "x" not in call.needs:
            return Grads(side={"probs": K.act_dprobs(dy, x, kind, *options)})  # type: ignore[arg-type]
        wanted = "probs" in call.needs
        dx, dprobs, _ = K.scaled_act_bwd(dy, x, probs, kind, wanted, False, *options)  # type: ignore[arg-type]
        return Grads(dx, side={"probs": dprobs} if wanted else None)


def form_of(act: Any) -> Form:
    """The kernels' arguments for an activation: its kind and options."""
    return (act.kind, *act.options)


class SiLU(Activation, nn.SiLU):
    """y = x * sigmoid(x) (arXiv 1702.03118)."""

    kind: ClassVar[str] = "silu"  # type: ignore[misc]

    def __init__(self, inplace: bool = False) -> None:
        refuse_inplace("SiLU", inplace)
        nn.SiLU.__init__(self)


class ReLU(Activation, nn.ReLU):
    """y = max(x, 0)."""

    kind: ClassVar[str] = "relu"  # type: ignore[misc]

    def __init__(self, inplace: bool = False) -> None:
        refuse_inplace("ReLU", inplace)
        nn.ReLU.__init__(self)


class Approximated:
    """An `Approximated` is an activation whose kind follows its attribute `approximate`, "none" or "tanh"."""

    approximate: str
    kinds: ClassVar[tuple[str, str]]  # for "none" and for "tanh"

    @property
    def kind(self) -> str:
        check_approximate(type(self).__name__, self.approximate)
        plain, tanh = self.kinds
        return tanh if self.approximate == "tanh" else plain

    @kind.setter
    def kind(self, kind: str) -> None:
        self.approximate = APPROXIMATE[self.kinds.index(kind)]


class GELU(Approximated, Activation, nn.GELU):
    """y = x * Phi(x), Phi the normal distribution's (arXiv 1606.08415, section 2).

    approximate="tanh": 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), which is TransformerEngine's GELU.
    """

    kinds = ("gelu", "gelu_tanh")

    def __init__(self, approximate: str = "none") -> None:
        check_approximate("GELU", approximate)
        nn.GELU.__init__(self, approximate)


class QGELU(Activation):
    """y = x * sigmoid(1.702 x), the quick form of GELU (arXiv 1606.08415, section 2)."""

    kind: ClassVar[str] = "qgelu"  # type: ignore[misc]

    def __init__(self) -> None:
        super().__init__()


class SReLU(Activation):
    """y = max(x, 0)^2, the squared ReLU (Primer, arXiv 2109.08668)."""

    kind: ClassVar[str] = "srelu"  # type: ignore[misc]

    def __init__(self) -> None:
        super().__init__()


class ScaledSReLU(ScaledActivation):
    """y = max(x, 0)^2 * probs, one probability a row.   x (R, F), probs (R,) -> (R, F)"""

    kind: ClassVar[str] = "srelu"  # type: ignore[misc]


ACTS = SiLU | GELU | QGELU | ReLU | SReLU
"""Activations without a gate in rules: one kernel computes dx and sums dbias."""


def check_approximate(op: str, approximate: str) -> None:
    """Raise FuseOpsError unless it is "none" or "tanh", as of torch's GELU."""
    if approximate not in APPROXIMATE:
        raise FuseOpsError(f"{op}: approximate is {shown(approximate)}, expected 'none' or 'tanh'.")
