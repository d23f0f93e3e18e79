"""Gated activations. The gate is the FIRST half of the last axis (the opposite of `torch.nn.functional.glu`)."""

from typing import Any, NamedTuple

from torch import Tensor

from fuseops import kernels as K
from fuseops.errors import ShapeError

from .op import Call, Grads, Op, Out, Shape
from .routing import check_probs


class SwiGLUSaved(NamedTuple):
    x: Tensor | None  # (..., 2F)


class ScaledSwiGLUSaved(NamedTuple):
    x: Tensor | None  # (R, 2F)
    probs: Tensor | None  # (R,)


def halved(op: Op[Any], shape: Shape) -> Shape:
    """Shape after a gated activation.  Raises ShapeError for an odd width."""
    if not shape or shape[-1] % 2:
        raise ShapeError(
            f"{type(op).__name__} expects [gate | up] on the last axis, got shape {tuple(shape)}."
        )
    return (*shape[:-1], shape[-1] // 2)


class SwiGLU(Op[SwiGLUSaved]):
    """y = silu(gate) * up.   (..., 2F) -> (..., F)"""

    saves_for = {"x": ("x",)}

    def out_shape(self, shape: Shape) -> Shape:
        return halved(self, shape)

    def fwd(self, x: Tensor) -> Out:
        return Out(K.act_fwd(x, "swiglu"), SwiGLUSaved(x))

    def bwd(self, saved: SwiGLUSaved, dy: Tensor) -> Grads:
        return Grads(K.act_bwd(dy, saved.x, "swiglu"))  # type: ignore[arg-type]


class ScaledSwiGLU(Op[ScaledSwiGLUSaved]):
    """y = swiglu(x) * probs, one probability a row.   x (R, 2F), probs (R,) -> (R, F)"""

    reads = ("probs",)
    saves_for = {"x": ("x", "probs"), "probs": ("x",)}

    def out_shape(self, shape: Shape) -> Shape:
        return halved(self, shape)

    def fwd(self, x: Tensor, *, probs: Tensor) -> Out:
        check_probs("ScaledSwiGLU", x, probs)
        return Out(K.scaled_act_fwd(x, probs, "swiglu"), ScaledSwiGLUSaved(x, probs))

    def bwd(self, saved: ScaledSwiGLUSaved, dy: Tensor, *, call: Call) -> Grads:
        x, probs = saved
        if (
            "x" not in call.needs
        ):  # probs itself is not saved then, and its gradient does not read it
            return Grads(side={"probs": K.act_dprobs(dy, x, "swiglu")})  # type: ignore[arg-type]
        wanted = "probs" in call.needs
        dx, dprobs, _ = K.scaled_act_bwd(dy, x, probs, "swiglu", wanted)  # type: ignore[arg-type]
        return Grads(dx, side={"probs": dprobs} if wanted else None)
