"""The carrier of a quantized tensor is the autograd tensor that gets its gradient: a shape and a dtype without values.

A carrier is one NaN, expanded: two bytes for a tensor of any size, and a computation that reads it by mistake gives
NaN. Its gradient is that of the high-precision tensor, in that dtype: autograd would round the gradient of FP8 codes to
FP8, and would keep alive components that are freed or moved on their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fuseops.errors import FuseOpsError


def carrier_of(
    x: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Tensor:
    """A carrier shaped as x that passes its gradient on to x.   dtype, device: by default those of x"""
    carrier: Tensor = _Carrier.apply(x, dtype or x.dtype, device or x.device)  # type: ignore[no-untyped-call]
    return carrier


def attach_carrier(carrier: Tensor, values: Tensor) -> Tensor:
    """`values` as a tensor whose gradient goes to the carrier, which has their shape and dtype."""
    attached: Tensor = _AttachCarrier.apply(carrier, values)  # type: ignore[no-untyped-call]
    return attached


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this shape without memory for its values, as a carrier that needs no gradient."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(tuple(shape))


INSTEAD_OF_WRITING = (
    "Initialise weights inside of the scope, at whose end they are quantized; later load them by load_state_dict, or "
    "write to the weight's float32 master, which is in its place in fo.masters(model)."
)


_DATA: Any = nn.Parameter.data  # torch's descriptor


class CarrierParameter(nn.Parameter):
    """A `CarrierParameter` is the Parameter of a weight that exists as codes only: every method that would write values
    raises FuseOpsError. Torch refuses most of them for other reasons, and with `zero_` writes the one NaN there is.
    """

    owner: Callable[[], str] = staticmethod(lambda: "an op")  # the name of one that reads it
    # none: autograd and kernels see a Parameter
    __torch_function__ = nn.Parameter.__torch_function__

    @classmethod
    def of(cls, parameter: Tensor, owner: Callable[[], str]) -> CarrierParameter:
        """The same Parameter, as a carrier."""
        _refuse_writes()
        found = cast("CarrierParameter", parameter)
        found.__class__ = cls
        found.owner = owner
        return found

    def detach(self) -> Tensor:
        return CarrierParameter.of(super().detach(), self.owner)

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        _DATA.__set__(self, values)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As what torch pickles: the op that it is unpickled into makes it a carrier again."""
        plain: Any = nn.Parameter(_DATA.__get__(self), self.requires_grad)
        return plain.__reduce_ex__(protocol)


def _refusing(method: str) -> Callable[..., Any]:
    def refuse(self: CarrierParameter, *_: Any, **__: Any) -> Any:
        raise FuseOpsError(
            f"{method} on the weight {tuple(self.shape)} of {self.owner()}, which lives in FP8 (fo.quantized_init): "
            f"its Parameter holds no values to write. {INSTEAD_OF_WRITING}"
        )

    return refuse


_WRITE_NO_VALUES = frozenset({"detach_", "rename_", "requires_grad_", "share_memory_"})
_OPERATORS = "add and floordiv lshift mod mul or pow rshift sub truediv xor"  # such as +=


@functools.cache
def _refuse_writes() -> None:
    """Give the class its refusing methods, with the first carrier: `import fuseops` need not wait for them."""
    for method in (
        *[name for name in dir(Tensor) if name.endswith("_") and not name.endswith("__")],
        *[f"__i{name}__" for name in _OPERATORS.split()],
        "__setitem__",
    ):
        if method not in _WRITE_NO_VALUES:
            setattr(CarrierParameter, method, _refusing(method))


class _Carrier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        ctx.source = x.dtype, x.device
        return placeholder(x.shape, dtype, device)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dtype, device = ctx.source
        return dy.to(device=device, dtype=dtype), None, None


class _AttachCarrier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None
