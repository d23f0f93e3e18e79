"""The module part of a Sequential: children, and the edits of `torch.nn.Sequential`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self, overload

from torch import nn

from fuseops.ops import scopes
from fuseops.ops.structure import Add, Tap


def _no_module(parent: nn.Module, name: str, given: Any) -> TypeError:
    if isinstance(given, type):
        return TypeError(
            f"{type(parent).__name__}: child {name!r} is the class {given.__name__}, expected a module, an instance: "
            f"{given.__name__}(...)."
        )
    return TypeError(
        f"{type(parent).__name__}: child {name!r} is of type {type(given).__name__} where a module goes, expected an "
        f"nn.Module. Pass modules one by one, {type(parent).__name__}(*modules), or in one dict by name."
    )


class Composed(nn.Sequential):
    """A `Composed` gives a Sequential its children, the edits of `torch.nn.Sequential`, and its configuration."""

    planned_forward: Any  # the forward that splicing may replace
    _runner: Any = None
    _settings: int = 0  # token of the settings from fuseops.configure
    _settings_layer: Any = None  # which keeps the token valid

    def __init__(self, *args: Any, **named: Any) -> None:
        if len(args) == 1 and isinstance(args[0], Mapping) and not named:
            super().__init__()
            for name, module in args[0].items():
                self.add_module(name, module)
        else:
            super().__init__(*args)
        for name, module in named.items():
            self.add_module(name, module)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a child.  Raises TypeError for a child that is no module."""
        if not isinstance(module, nn.Module):
            raise _no_module(self, name, module)
        if "_parameters" not in module.__dict__:
            raise TypeError(
                f"{type(self).__name__}: child {name!r} was not initialised: call super().__init__() in "
                f"{type(module).__name__}.__init__."
            )
        super().add_module(name, module)

    def _planned(self) -> list[tuple[str, nn.Module]]:
        """(name, module) of everything that runs, in order."""
        return list(self._modules.items())

    def _planned_modules(self) -> tuple[nn.Module, ...]:
        return tuple(self._modules.values())

    def _like(self, children: Iterable[tuple[str, nn.Module]]) -> Self:
        """A Sequential of this class over other children, with this one's configuration."""
        new = type(self).__new__(type(self))
        nn.Module.__init__(new)
        for name, module in children:
            new.add_module(name, module)
        for key, value in self.__dict__.items():
            if key in ("_settings", scopes.LAYER, "training") or isinstance(value, (Tap, Add)):
                new.__dict__[key] = value
        return new

    @overload
    def __getitem__(self, idx: slice) -> Self: ...
    @overload
    def __getitem__(self, idx: int | str) -> Any: ...

    def __getitem__(self, idx: Any) -> Any:
        """A child by position or name, or a Sequential of this class over a slice."""
        if isinstance(idx, slice):
            return self._like(list(self._modules.items())[idx])
        if isinstance(idx, str):
            return self._modules[idx]
        return super().__getitem__(idx)

    def __setitem__(self, idx: Any, module: nn.Module) -> None:
        """Replace a child, by position or by a name that is there."""
        if not isinstance(idx, str):
            super().__setitem__(idx, module)
            return
        if idx not in self._modules:
            raise KeyError(
                f"{idx!r}: there are {[*self._modules]}. append and insert add children."
            )
        setattr(self, idx, module)

    def __delitem__(self, idx: Any) -> None:
        """By position, after which the others are numbered anew as in `torch.nn.Sequential`, or by name."""
        if not isinstance(idx, str):
            super().__delitem__(idx)
            return
        del self._modules[idx]

    def __add__(self, other: Any) -> Self:
        if not isinstance(other, nn.Sequential):
            raise TypeError(
                f"can only add a Sequential to a Sequential, got {type(other).__name__}"
            )
        return self._like((str(i), m) for i, m in enumerate([*self, *other]))

    def __mul__(self, other: int) -> Self:
        if not isinstance(other, int) or other <= 0:
            wrong = ValueError if isinstance(other, int) else TypeError
            raise wrong(f"a Sequential is repeated a positive number of times, got {other!r}")
        return self._like((str(i), m) for i, m in enumerate(list(self) * other))

    def __rmul__(self, other: int) -> Self:
        return self * other

    def __getstate__(self) -> dict[str, Any]:
        return scopes.portable(super().__getstate__())  # type: ignore[no-untyped-call]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(scopes.restored(state))  # type: ignore[no-untyped-call]
