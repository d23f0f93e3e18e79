"""The gated activations, each plain and scaled by a probability a row.

SwiGLU, ClampedSwiGLU, SiTUGLU, GEGLU, QGEGLU, GLU, ReGLU and SReGLU.
"""

import math
from collections.abc import Callable
from typing import Any

from fuseops.arguments import check_integers, check_numbers, check_positive

from .activations import Activation, Approximated, ScaledActivation, check_approximate


class _Gated:
    """A `_Gated` gives a gated activation its constructor."""

    kind: str
    options: tuple[Any, ...]
    renamed: Callable[[], list[str]]

    def __init__(self, *, interleave: int = 0, **sides: str) -> None:
        """interleave: 0, gate and up are the halves of the last axis, the gate first (`torch.nn.functional.glu` has it
        second); b, they alternate in blocks of b columns (1 in the weights of gpt-oss).
        sides: of a scaled one, the name of the side input: probs="p2".
        """
        super().__init__(**sides)
        self._set_options(interleave)

    def _set_options(self, interleave: int, *rest: float) -> None:
        check_integers(type(self).__name__, 0, interleave=interleave)
        self.options = (interleave, *rest)

    def _option_repr(self) -> list[str]:
        return []

    def extra_repr(self) -> str:
        interleave = [f"interleave={self.options[0]}"] if self.options[0] else []
        return ", ".join([*self._option_repr(), *interleave, *self.renamed()])


class _GELUGated(Approximated, _Gated):
    kinds = ("geglu", "geglu_tanh")

    def __init__(self, approximate: str = "none", *, interleave: int = 0, **sides: str) -> None:
        """approximate: "none" or "tanh", as of GELU.  interleave, sides: as of SwiGLU."""
        check_approximate(type(self).__name__, approximate)
        super().__init__(interleave=interleave, **sides)
        self.approximate = approximate

    def _option_repr(self) -> list[str]:
        return [f"approximate={self.approximate!r}"]


class _Clamped(_Gated):
    kind = "clamped_swiglu"

    def __init__(
        self,
        limit: float = 7.0,
        *,
        alpha: float = 1.702,
        offset: float = 1.0,
        interleave: int = 0,
        **sides: str,
    ) -> None:
        """limit, alpha, offset: of the formula.  interleave, sides: as of SwiGLU."""
        check_numbers(type(self).__name__, alpha=alpha, offset=offset)
        if not (isinstance(limit, float) and limit == math.inf):  # no limit
            check_positive(type(self).__name__, limit=limit)
        super().__init__(interleave=interleave, **sides)
        self._set_options(interleave, float(alpha), float(limit), float(offset))

    def _option_repr(self) -> list[str]:
        _, alpha, limit, offset = self.options
        return [f"limit={limit}, alpha={alpha}, offset={offset}"]


class _SiTU(_Gated):
    kind = "situglu"

    def __init__(
        self, beta1: float = 4.0, beta2: float = 25.0, *, interleave: int = 0, **sides: str
    ) -> None:
        """beta1, beta2: of the formula, finite and above 0.  interleave, sides: as of SwiGLU."""
        check_positive(type(self).__name__, beta1=beta1, beta2=beta2)
        super().__init__(interleave=interleave, **sides)
        self._set_options(interleave, float(beta1), float(beta2))

    def _option_repr(self) -> list[str]:
        return ["beta1={}, beta2={}".format(*self.options[1:])]


class SwiGLU(_Gated, Activation):
    """y = silu(gate) * up (arXiv 2002.05202).   x = [gate | up] (..., 2F) -> (..., F)"""

    kind = "swiglu"


class GLU(_Gated, Activation):
    """y = sigmoid(gate) * up (arXiv 1612.08083).   x = [gate | up] (..., 2F) -> (..., F)

    The gate is the first half, as of the whole family and of te.ops; `torch.nn.GLU` has it second.
    """

    kind = "glu"


class GEGLU(_GELUGated, Activation):
    """y = gelu(gate) * up (arXiv 2002.05202).   x = [gate | up] (..., 2F) -> (..., F)"""


class QGEGLU(_Gated, Activation):
    """y = gate * sigmoid(1.702 gate) * up: GEGLU by the quick form of GELU.   x = [gate | up] (..., 2F) -> (..., F)"""

    kind = "qgeglu"


class ReGLU(_Gated, Activation):
    """y = max(gate, 0) * up (arXiv 2002.05202).   x = [gate | up] (..., 2F) -> (..., F)"""

    kind = "reglu"


class SReGLU(_Gated, Activation):
    """y = max(gate, 0)^2 * up.   x = [gate | up] (..., 2F) -> (..., F)"""

    kind = "sreglu"


class ClampedSwiGLU(_Clamped, Activation):
    """y = h sigmoid(alpha h) (clamp(up, -limit, limit) + offset), h = min(gate, limit), as in gpt-oss.

    x = [gate | up] (..., 2F) -> (..., F). At a limit itself the gradient passes, as in `torch.clamp` before torch 2.15.
    """


class SiTUGLU(_SiTU, Activation):
    """y = beta1 tanh(gate / beta1) sigmoid(gate) * beta2 tanh(up / beta2), as in Kimi K3 and te.ops: SwiGLU bounded by
    beta1 beta2.   x = [gate | up] (..., 2F) -> (..., F)
    """


class ScaledSwiGLU(_Gated, ScaledActivation):
    """y = silu(gate) * up * probs, one probability a row.   x (R, 2F), probs (R,) -> (R, F)"""

    kind = "swiglu"


class ScaledGLU(_Gated, ScaledActivation):
    """y = sigmoid(gate) * up * probs.   x (R, 2F), probs (R,) -> (R, F)"""

    kind = "glu"


class ScaledGEGLU(_GELUGated, ScaledActivation):
    """y = gelu(gate) * up * probs.   x (R, 2F), probs (R,) -> (R, F)"""


class ScaledQGEGLU(_Gated, ScaledActivation):
    """y = gate * sigmoid(1.702 gate) * up * probs.   x (R, 2F), probs (R,) -> (R, F)"""

    kind = "qgeglu"


class ScaledReGLU(_Gated, ScaledActivation):
    """y = max(gate, 0) * up * probs.   x (R, 2F), probs (R,) -> (R, F)"""

    kind = "reglu"


class ScaledSReGLU(_Gated, ScaledActivation):
    """y = max(gate, 0)^2 * up * probs.   x (R, 2F), probs (R,) -> (R, F)"""

    kind = "sreglu"


class ScaledClampedSwiGLU(_Clamped, ScaledActivation):
    """y = ClampedSwiGLU(x) * probs, one probability a row.   x (R, 2F), probs (R,) -> (R, F)"""


class ScaledSiTUGLU(_SiTU, ScaledActivation):
    """y = SiTUGLU(x) * probs, one probability a row.   x (R, 2F), probs (R,) -> (R, F)"""


GATED = SwiGLU | ClampedSwiGLU | SiTUGLU | GEGLU | QGEGLU | GLU | ReGLU | SReGLU
"""Gated activations in rules; those that a probability scales are in `SCALED_GATED`."""

SCALED_GATED = (
    ScaledSwiGLU | ScaledClampedSwiGLU | ScaledSiTUGLU | ScaledGEGLU | ScaledQGEGLU | ScaledGLU
    | ScaledReGLU | ScaledSReGLU
)  # fmt: skip
