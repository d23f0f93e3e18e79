"""What ops refuse alike: inputs of a wrong width or of too many axes; and `inplace`."""

from typing import Any

from torch import Tensor, nn

from fuseops.errors import FuseOpsError, ShapeError

from .op import Op, Shape


def check_width(op: nn.Module, shape: Shape, expected: int) -> None:
    """Raise ShapeError unless the last axis is `expected` wide."""
    if not shape or shape[-1] != expected:
        raise ShapeError(
            f"{type(op).__name__} expects x with {expected} features on the last axis, got shape {tuple(shape)}."
        )


def check_rows(op: Op[Any], x: Tensor) -> None:
    """Raise ShapeError unless x has one axis of rows and one of features."""
    if x.dim() != 2:
        raise ShapeError(
            f"{type(op).__name__} expects x of two axes (rows, features), got shape {tuple(x.shape)}: "
            "flatten the others."
        )


def refuse_inplace(op: str, inplace: bool) -> None:
    """Raise FuseOpsError for `inplace=True`, which torch's modules of that name take."""
    if inplace:
        raise FuseOpsError(
            f"{op}(inplace=True): an op never writes its input, which may be saved. Leave it out."
        )
