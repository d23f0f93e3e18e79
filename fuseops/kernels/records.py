"""Ops of many arguments: a record tells each argument once, and their functions take it.

    @dataclass
    class Product(Operands):
        x: Tensor
        ...

    @of_fields(Product)
    def _grouped_mm(p: Product) -> Tensor: ...

    @kernel_op(twin=_grouped_mm, ...)
    @of_fields(Product)
    def grouped_mm(p: Product) -> Tensor: ...

What calls `grouped_mm`, and its schema, see the fields: grouped_mm(x, weight, offs, bias=b), grouped_mm(*p).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import NoneType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, get_type_hints, overload

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class Operands:
    """`Operands` are a dataclass whose fields are the arguments of an op, in their order."""

    def __iter__(self) -> Iterator[Any]:
        return iter(vars(self).values())


class _OfFields(Protocol[P]):
    """An `_OfFields` makes a function of the fields of a record, behind a tensor that is no part of it or not."""

    @overload
    def __call__(self, function: Callable[[Any], R]) -> Callable[P, R]: ...

    @overload
    def __call__(
        self, function: Callable[[Tensor, Any], R]
    ) -> Callable[Concatenate[Tensor, P], R]: ...


def of_fields(record: Callable[P, Operands]) -> _OfFields[P]:
    """Decorate a function whose last argument is a record: the fields of that become its arguments."""
    fields, types = inspect.signature(record).parameters.values(), get_type_hints(record)

    def flattened(function: Callable[..., Any]) -> Callable[..., Any]:
        own = [*inspect.signature(function).parameters.values()][:-1]
        before, hints = len(own), types | get_type_hints(function)

        @functools.wraps(function)
        def flat(*args: Any, **kwargs: Any) -> Any:
            return function(*args[:before], record(*args[before:], **kwargs))

        returns = hints["return"]
        flat.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(annotation=hints[p.name]) for p in (*own, *fields)],
            return_annotation=None if returns is NoneType else returns,
        )
        return flat

    return cast("_OfFields[P]", flattened)
