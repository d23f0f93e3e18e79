"""Tests for ops and rules of your own.  `fuseops.testing.strategies` draws cases, and needs hypothesis."""

import importlib
from typing import TYPE_CHECKING, Any

from .contract import assert_bwd_is_vjp
from .fused import assert_fused_matches_unfused, bisect
from .shadowed import assert_no_rule_is_shadowed

if TYPE_CHECKING:
    from . import strategies as strategies

__all__ = [
    "assert_bwd_is_vjp",
    "assert_fused_matches_unfused",
    "assert_no_rule_is_shadowed",
    "bisect",
    "strategies",
]


def __getattr__(name: str) -> Any:
    if name == "strategies":
        return importlib.import_module(".strategies", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
