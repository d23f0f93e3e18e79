"""These ops connect branches and change shapes: Tap, Add, Swap, Identity, Reshape."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseops.arguments import check_integers, several
from fuseops.errors import ShapeError

from .op import Call, Grads, NothingSaved, Op, Out, S, Shape, check_names, numel


class Alias(Op[S]):
    """An `Alias` is an op whose y is (a view of) x. It runs outside the autograd node, so y may be written in place."""

    saves_for = {"x": ()}

    @property
    def alias(self) -> bool:
        return True


class Identity(Alias[NothingSaved], nn.Identity):
    """y = x."""

    takes_quantized = True

    def fwd(self, x: Tensor) -> Out:
        return Out(x, NothingSaved())

    def bwd(self, saved: NothingSaved, dy: Tensor) -> Grads:
        return Grads(dy)


class Tap(Alias[NothingSaved]):
    """y = x, and x is published as a side tensor under `name`, for an `Add` (or any reader) further down."""

    cut_before = True
    takes_quantized = True

    def __init__(self, name: str = "residual") -> None:
        super().__init__()
        check_names("Tap", name=name)
        self.writes = (name,)

    def extra_repr(self) -> str:
        return repr(self.writes[0])

    def out_shapes(
        self, shape: Shape, sides: Mapping[str, Shape]
    ) -> tuple[Shape, Mapping[str, Shape]]:
        return shape, {self.writes[0]: shape}

    def fwd(self, x: Tensor) -> Out:
        return Out(x, NothingSaved(), {self.writes[0]: x})

    def bwd(
        self, saved: NothingSaved, dy: Tensor | None, *, dside: dict[str, Tensor | None]
    ) -> Grads:
        published = tap_gradient(dside)
        return Grads(published if dy is None else dy if published is None else dy + published)


def tap_gradient(dside: Mapping[str, Tensor | None]) -> Tensor | None:
    """The gradient of the side tensor of a span's one Tap, which may have been renamed."""
    return next(iter(dside.values()), None)


class AddSaved(NamedTuple):
    # of x and of the side tensor, where they differ; they cost no memory
    dtypes: tuple[torch.dtype, torch.dtype] | None


class Add(Op[AddSaved]):
    """y = x + the side tensor `name`; under mixed dtypes torch's promotion decides, as for `x + other`."""

    saves_for = {"x": ("dtypes",)}

    def __init__(self, name: str = "residual") -> None:
        super().__init__()
        check_names("Add", name=name)
        self.reads = (name,)

    def extra_repr(self) -> str:
        return repr(self.reads[0])

    def operand(self, x: Tensor, other: Tensor) -> Tensor:
        """The side tensor.  Raises ShapeError unless it has the shape of x."""
        if other.shape != x.shape:
            raise ShapeError(
                f"Add({self.reads[0]!r}) expects a side tensor of shape {tuple(x.shape)}, got {tuple(other.shape)}."
            )
        return other

    def fwd(self, x: Tensor, **side: Tensor) -> Out:
        other = self.operand(x, side[self.reads[0]])
        alike = x.dtype is other.dtype
        return Out(x + other, AddSaved(None if alike else (x.dtype, other.dtype)))

    def bwd(self, saved: AddSaved, dy: Tensor) -> Grads:
        if saved.dtypes is None:
            return Grads(dy, side={self.reads[0]: dy})
        own, others = saved.dtypes
        return Grads(dy.to(own), side={self.reads[0]: dy.to(others)})


class Swap(Alias[NothingSaved]):
    """y = the side tensor `read`, and x is published as `write`: between two branches of one tensor in one sequence.

    Tap("tokens"), one branch, Swap("tokens", "first"), the other branch, Add("first").
    """

    cut_before = True
    takes_quantized = True  # and publishes it

    def __init__(self, read: str, write: str) -> None:
        super().__init__()
        check_names("Swap", read=read, write=write)
        self.reads, self.writes = (read,), (write,)

    def extra_repr(self) -> str:
        return f"{self.reads[0]!r}, {self.writes[0]!r}"

    def out_shapes(
        self, shape: Shape, sides: Mapping[str, Shape]
    ) -> tuple[Shape, Mapping[str, Shape]]:
        return sides.get(self.reads[0], shape), {self.writes[0]: shape}

    def fwd(self, x: Tensor, **side: Tensor) -> Out:
        return Out(side[self.reads[0]], NothingSaved(), {self.writes[0]: x})

    def bwd(
        self, saved: NothingSaved, dy: Tensor | None, *, dside: dict[str, Tensor | None]
    ) -> Grads:
        return Grads(dside[self.writes[0]], side={self.reads[0]: dy})


class ReshapeSaved(NamedTuple):
    shape: torch.Size | None  # of x; not a tensor, so it costs no memory


class Reshape(Alias[ReshapeSaved]):
    """y = x.reshape(shape), with at most one -1."""

    saves_for = {"x": ("shape",)}

    def __init__(self, *shape: int | tuple[int, ...]) -> None:
        super().__init__()
        sizes: Any = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        for size in several(
            sizes, object, "Reshape(*shape)", "sizes, integers, at most one of them -1"
        ):
            check_integers("Reshape", -1, shape=size)
        self.shape = tuple(map(int, sizes))
        if self.shape.count(-1) > 1:
            raise ShapeError(f"Reshape{self.shape}: at most one size may be -1.")

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.shape))

    def out_shape(self, shape: Shape) -> Shape:
        known, given = numel(tuple(n for n in self.shape if n != -1)), numel(shape)
        rest = -1 in self.shape
        size = given // max(known, 1) if rest else 1
        if known * size != given or (rest and not known):  # of no elements: any size would do
            raise ShapeError(f"Reshape{self.shape} does not fit x of shape {tuple(shape)}.")
        return tuple(size if n == -1 else n for n in self.shape)

    def fwd(self, x: Tensor) -> Out:
        return Out(x.reshape(self.shape), ReshapeSaved(x.shape))

    def bwd(self, saved: ReshapeSaved, dy: Tensor, *, call: Call) -> Grads:
        return Grads(dy.reshape(saved.shape))  # type: ignore[arg-type]
