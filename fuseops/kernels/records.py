"""A record declares the arguments of an op once; the functions of the op take the record.

    @dataclass
    class Product(Arguments):
        x: Tensor
        ...

    def _grouped_mm(p: Product) -> Tensor: ...

    @kernel_op(twin=_grouped_mm, ...)
    @of_fields(Product)
    def grouped_mm(p: Product) -> Tensor: ...

Callers of `grouped_mm` and of its twin, and its schema, have the fields as arguments: grouped_mm(x, weight, offs,
bias=b), grouped_mm(*p).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import (
    Any,
    Concatenate,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    get_type_hints,
    overload,
)

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class Arguments:
    """`Arguments` are a dataclass whose fields are the arguments of an op, in their order."""

    def __iter__(self) -> Iterator[Any]:
        return iter(vars(self).values())


class _OfFields(Protocol[P]):
    """An `_OfFields` replaces a function's last argument, a record, by its fields, after up to two tensors."""

    @overload
    def __call__(self, function: Callable[[Any], R]) -> Callable[P, R]: ...

    @overload
    def __call__(
        self, function: Callable[[Tensor, Any], R]
    ) -> Callable[Concatenate[Tensor, P], R]: ...

    @overload
    def __call__(
        self, function: Callable[[Tensor, Tensor, Any], R]
    ) -> Callable[Concatenate[Tensor, Tensor, P], R]: ...


@functools.cache
def _parameters(record: Any) -> tuple[inspect.Parameter, ...]:
    """The fields of a record as parameters, with resolved types."""
    types, given = get_type_hints(record), inspect.signature(record).parameters.values()
    return tuple([field.replace(annotation=types[field.name]) for field in given])


def of_fields(record: Callable[P, Arguments | NamedTuple]) -> _OfFields[P]:
    """Decorate a function whose last argument is a record: the record's fields become its arguments.

    record: a dataclass of Arguments, or a NamedTuple, which Python constructs faster
    """

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        *own, _ = function.__code__.co_varnames[: function.__code__.co_argcount]
        before = len(own)

        @functools.wraps(function)
        def flat(*args: Any, **kwargs: Any) -> Any:
            return function(*args[:before], record(*args[before:], **kwargs))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        tensors = [inspect.Parameter(name, kind, annotation=Tensor) for name in own]
        returns = function.__annotations__["return"]
        flat.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*tensors, *_parameters(record)],
            return_annotation=eval(returns, function.__globals__)
            if isinstance(returns, str)
            else returns,
            __validate_parameters__=False,
        )
        return flat

    return cast("_OfFields[P]", decorated)


def flattened(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes a record as `of_fields` makes it, and any other, or one made so already, as it is."""
    types = [t for name, t in getattr(function, "__annotations__", {}).items() if name != "return"]
    if not types or hasattr(function, "__wrapped__"):
        return function
    record: Any = types[-1]
    if isinstance(record, str):  # as modules are that postpone annotations
        record = function.__globals__.get(record)
    is_arguments = isinstance(record, type) and issubclass(record, Arguments)
    return of_fields(record)(function) if is_arguments or hasattr(record, "_fields") else function
