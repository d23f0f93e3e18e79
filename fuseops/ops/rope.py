"""RoPE rotates pairs of columns of each head by angles that encode the token's position."""

from typing import NamedTuple

from torch import Tensor

from fuseops import kernels as K
from fuseops.arguments import check_flags
from fuseops.errors import FuseOpsError, ShapeError
from fuseops.kernels.rope import rotary_pairs
from fuseops.kernels.tiles import upcast

from .op import Call, Grads, Op, Out


class RoPESaved(NamedTuple):
    x: Tensor | None  # (..., T, H, D)
    cos: Tensor | None  # (T, P) or (..., T, P)
    sin: Tensor | None  # the same
    interleaved: bool | None  # of the forward: the attribute may change before the backward


class RoPE(Op[RoPESaved]):
    """A `RoPE` is a rotary position embedding (arXiv 2104.09864).   x (..., T, H, D), side inputs cos and sin (T, P) or
    (..., T, P)

    A pair (a, b) of columns becomes (a cos - b sin, b cos + a sin). Pairs are columns i and P + i, as transformers has
    them, or 2 i and 2 i + 1 with `interleaved`; columns from 2 P on stay. Scaling of positions or frequencies is in
    the cos and sin that are given, (1, T, P) too where a batch shares them. Of tables with each angle twice, give one
    half: `cos[..., : D // 2]`. x may be a transposed view, and the heads of queries and keys side by side are one call.
    Computed in float32, rounded once. Raises ShapeError for other shapes.
    cos, sin: names of the side inputs.
    """

    reads = ("cos", "sin")
    saves_for = {
        "x": ("cos", "sin", "interleaved"),
        "cos": ("x", "cos", "interleaved"),
        "sin": ("x", "sin", "interleaved"),
    }
    floats = True

    def __init__(self, interleaved: bool = False, *, cos: str = "cos", sin: str = "sin") -> None:
        super().__init__()
        check_flags("RoPE", interleaved=interleaved)
        self.interleaved = interleaved
        self.rename(cos=cos, sin=sin)

    def extra_repr(self) -> str:
        return ", ".join(["interleaved=True"] * self.interleaved + self.renamed())

    def fwd(self, x: Tensor, *, cos: Tensor, sin: Tensor) -> Out:
        angles_of_x = shared_angles(x, cos), shared_angles(x, sin)
        _check(x, *angles_of_x)
        y = K.apply_rope(x, *angles_of_x, self.interleaved)
        return Out(y, RoPESaved(x, cos, sin, self.interleaved))

    def bwd(self, saved: RoPESaved, dy: Tensor, *, call: Call) -> Grads:
        x, cos, sin, interleaved = saved
        dx = None
        if "x" in call.needs:
            angles_of_x = shared_angles(dy, cos), shared_angles(dy, sin)  # type: ignore[arg-type]
            dx = K.apply_rope(dy, *angles_of_x, interleaved, True)  # type: ignore[arg-type]
        wanted = call.needs & {"cos", "sin"}
        if not wanted:
            return Grads(dx)
        angles = cos if cos is not None else sin
        found = angle_gradients(x, dy, angles, interleaved)  # type: ignore[arg-type]
        return Grads(dx, side={name: found[name] for name in wanted})


def angle_gradients(x: Tensor, dy: Tensor, angles: Tensor, interleaved: bool) -> dict[str, Tensor]:
    """The gradients of cos and sin, of which `angles` is one."""
    pairs = angles.shape[-1]
    a, b = rotary_pairs(upcast(x), pairs, interleaved)
    da, db = rotary_pairs(upcast(dy), pairs, interleaved)
    return {
        "cos": _sum_shared_axes((da * a + db * b).sum(-2), angles),
        "sin": _sum_shared_axes((db * a - da * b).sum(-2), angles),
    }


def shared_angles(x: Tensor, angles: Tensor) -> Tensor:
    """Angles (1, ..., 1, T, P), as transformers makes them for a batch, as (T, P); other shapes unchanged."""
    one = 2 < angles.dim() < x.dim() and all(n == 1 for n in angles.shape[:-2])
    return angles.reshape(angles.shape[-2:]) if one else angles


def _sum_shared_axes(gradient: Tensor, angles: Tensor) -> Tensor:
    """A gradient summed over the axes that the angles are broadcast over."""
    return gradient.sum_to_size(angles.shape).to(angles.dtype)


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ShapeError unless there is an angle for each pair of columns of each token, FuseOpsError unless floats."""
    if not cos.is_floating_point() or not sin.is_floating_point():
        raise FuseOpsError(
            f"RoPE expects cos and sin of float dtypes, got {cos.dtype} and {sin.dtype}."
        )
    fits = x.dim() >= 3 and cos.shape == sin.shape and 2 * cos.shape[-1] <= x.shape[-1]
    if not fits or cos.shape[:-1] not in (x.shape[-3:-2], x.shape[:-2]):
        raise ShapeError(
            "RoPE expects x (..., T, H, D) and cos and sin of shape (T, P) or (..., T, P), P at most D / 2; got x "
            f"{tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}. Of tables with each angle twice, as "
            "transformers makes them, give one half: cos[..., : D // 2]."
        )
