"""The gated activations: SwiGLU, ClampedSwiGLU, GEGLU, ReGLU and SReGLU, each also scaled by a probability a row."""

from typing import Any

from fuseops.errors import FuseOpsError

from .activations import Activation, Approximated, ScaledActivation, check_approximate


class _Gated:
    """Constructor of a gated activation."""

    kind: str
    options: tuple[Any, ...]

    def __init__(self, *, interleave: int = 0) -> None:
        """interleave: 0, gate and up are the halves of the last axis, the gate first (`torch.nn.functional.glu` has it
        second); b, they alternate in blocks of b columns (1 in the weights of gpt-oss).
        """
        super().__init__()
        self._set_options(interleave)

    def _set_options(self, interleave: int, *rest: float) -> None:
        if interleave < 0:
            raise FuseOpsError(
                f"{type(self).__name__}: interleave is {interleave}, expected 0 or the columns of a block."
            )
        self.options = (interleave, *rest)

    def extra_repr(self) -> str:
        return f"interleave={self.options[0]}" if self.options[0] else ""


class _GELUGated(Approximated, _Gated):
    kinds = ("geglu", "geglu_tanh")

    def __init__(self, approximate: str = "none", *, interleave: int = 0) -> None:
        """approximate: "none" or "tanh", as of GELU.  interleave: as of SwiGLU."""
        check_approximate(type(self).__name__, approximate)
        super().__init__(interleave=interleave)
        self.approximate = approximate

    def extra_repr(self) -> str:
        rest = super().extra_repr()
        return f"approximate={self.approximate!r}" + (f", {rest}" if rest else "")


class _Clamped(_Gated):
    kind = "clamped_swiglu"

    def __init__(
        self,
        limit: float = 7.0,
        *,
        alpha: float = 1.702,
        offset: float = 1.0,
        interleave: int = 0,
    ) -> None:
        """limit, alpha, offset: of the formula.  interleave: as of SwiGLU."""
        if not limit > 0:
            raise FuseOpsError(f"{type(self).__name__}: limit is {limit}, expected more than 0.")
        super().__init__()
        self._set_options(interleave, float(alpha), float(limit), float(offset))

    def extra_repr(self) -> str:
        interleave, alpha, limit, offset = self.options
        return f"limit={limit}, alpha={alpha}, offset={offset}" + (
            f", interleave={interleave}" if interleave else ""
        )


class SwiGLU(_Gated, Activation):
    """y = silu(gate) * up (arXiv 2002.05202).   x = [gate | up] (..., 2F) -> (..., F)"""

    kind = "swiglu"


class GEGLU(_GELUGated, Activation):
    """y = gelu(gate) * up (arXiv 2002.05202).   x = [gate | up] (..., 2F) -> (..., F)"""


class ReGLU(_Gated, Activation):
    """y = max(gate, 0) * up (arXiv 2002.05202).   x = [gate | up] (..., 2F) -> (..., F)"""

    kind = "reglu"


class SReGLU(_Gated, Activation):
    """y = max(gate, 0)^2 * up.   x = [gate | up] (..., 2F) -> (..., F)"""

    kind = "sreglu"


class ClampedSwiGLU(_Clamped, Activation):
    """y = h sigmoid(alpha h) (clamp(up, -limit, limit) + offset), h = min(gate, limit), as in gpt-oss.

    x = [gate | up] (..., 2F) -> (..., F)
    """


class ScaledSwiGLU(_Gated, ScaledActivation):
    """y = silu(gate) * up * probs, one probability a row.   x (R, 2F), probs (R,) -> (R, F)"""

    kind = "swiglu"


class ScaledGEGLU(_GELUGated, ScaledActivation):
    """y = gelu(gate) * up * probs.   x (R, 2F), probs (R,) -> (R, F)"""


class ScaledReGLU(_Gated, ScaledActivation):
    """y = max(gate, 0) * up * probs.   x (R, 2F), probs (R,) -> (R, F)"""

    kind = "reglu"


class ScaledSReGLU(_Gated, ScaledActivation):
    """y = max(gate, 0)^2 * up * probs.   x (R, 2F), probs (R,) -> (R, F)"""

    kind = "sreglu"


class ScaledClampedSwiGLU(_Clamped, ScaledActivation):
    """ClampedSwiGLU times probs, one probability a row.   x (R, 2F), probs (R,) -> (R, F)"""
