"""Types of tensors whose operations torch shows to nobody: its own, and the Parameter of a weight held as codes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from .errors import FuseOpsError

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


PARAMETERS = frozenset((nn.Parameter, CarrierParameter))
PLAIN = PARAMETERS | {Tensor}
PLAIN_OR_NONE = PLAIN | {type(None)}
