"""Comparison of tensors within a tolerance, and the message where they differ."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops.words import dtype_name

# Tolerances in units of the dtype's epsilon. Half types: a fused op keeps an intermediate in float32
# that unfused ops round, a unit or two at each op. Wider types differ by the order of sums, over the
# hundreds of terms of a test.
UNITS = {torch.bfloat16: 4.0, torch.float16: 4.0, torch.float32: 64.0, torch.float64: 64.0}


class Difference(NamedTuple):
    """A `Difference` describes two tensors that should be equal and are not."""

    name: str
    text: str  # what differs, with the worst element
    worst: float  # largest distance of elements; infinite where there is none (None, shape, NaN)

    def __str__(self) -> str:
        return f"{self.name}: {self.text}"


def _dtypes(found: Iterable[Tensor]) -> set[torch.dtype]:
    """The dtypes that a computation with these tensors involves."""
    dtypes = {t.dtype for t in found}
    devices = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    dtypes |= {torch.get_autocast_dtype(d) for d in devices if torch.is_autocast_enabled(d)}
    return dtypes & UNITS.keys()


def tolerance(found: Iterable[Tensor]) -> float:
    """The relative tolerance for rounding, by the coarsest dtype involved."""
    return max((UNITS[d] * torch.finfo(d).eps for d in _dtypes(found)), default=0.0)


def ulp(found: Iterable[Tensor]) -> float:
    """One unit in the last place of the coarsest dtype involved."""
    return max((torch.finfo(d).eps for d in _dtypes(found)), default=0.0)


def is_floating(t: Tensor) -> bool:
    """Whether a tensor can have a gradient: it is of floats or complex numbers."""
    return t.is_floating_point() or t.is_complex()


def largest(found: Iterable[Tensor | None]) -> float:
    """The largest finite magnitude in tensors of floats or complex numbers, 0 where there is none."""
    finite = (t.detach()[t.isfinite()].abs() for t in found if t is not None and is_floating(t))
    return max((float(t.max()) for t in finite if t.numel()), default=0.0)


def describe(t: Any) -> str:
    if not isinstance(t, Tensor):
        return str(t)
    return f"{dtype_name(t.dtype)}{list(t.shape)}"


def _as_float64(t: Tensor) -> Tensor:
    """A tensor in float64, a complex one with an axis of two parts behind its own."""
    return (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t).to(torch.float64)


def difference(
    name: str,
    got: Tensor | None,
    expected: Tensor | None,
    tol: float,
    labels: tuple[str, str] = ("fused", "unfused"),
    atol: float = 0.0,
) -> Difference | None:
    """None where `got` equals `expected` within `tol` of an element's own and the mean magnitude.

    NaN equals NaN, an infinity only itself.  labels: names of the two in the message.
    atol: absolute tolerance, say for the rounding of terms that cancel.
    """
    if got is None and expected is None:
        return None
    if (
        got is None
        or expected is None
        or (got.shape, got.dtype) != (expected.shape, expected.dtype)
    ):
        text = f"{labels[0]} gives {describe(got)}, {labels[1]} gives {describe(expected)}"
        return Difference(name, text, float("inf"))
    a, b = (_as_float64(t.detach()) for t in (got, expected))
    unequal = (a != b) & ~(a.isnan() & b.isnan())
    if not unequal.any():
        return None
    distance = (a - b).abs()
    size = torch.where(b.isfinite(), b.abs(), 0.0)
    allowed = tol * (size + size.mean()) + atol
    excess = torch.where(unequal, torch.nan_to_num(distance - allowed, nan=torch.inf), -torch.inf)
    worst = excess.argmax()
    if excess.flatten()[worst] <= 0:
        return None
    x, y, d, limit = (float(t.flatten()[worst]) for t in (a, b, distance, allowed))
    at = tuple(int(i) for i in torch.unravel_index(worst, a.shape))
    text = (
        f"{describe(got)}, worst element {at}: {labels[0]} {x:.6g}, "
        f"{labels[1]} {y:.6g}, difference {d:.3g}, allowed {limit:.3g}"
    )
    return Difference(name, text, float(torch.nan_to_num(distance, nan=torch.inf).max()))
