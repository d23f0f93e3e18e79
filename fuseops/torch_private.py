"""Every private torch name that fuseops uses, in one place, so that a torch release can be checked at a glance.

`tests/test_torch_private.py` fails when one of them is gone.
"""

from collections.abc import Callable
from typing import Any

import torch


def in_backward() -> bool:
    """True while autograd executes a backward in this thread (a recomputation, for a forward that asks)."""
    return bool(torch._C._current_graph_task_id() != -1)


def top_saved_tensor_hooks() -> tuple[object, object] | None:
    """The innermost (pack, unpack) pair of `torch.autograd.graph.saved_tensors_hooks`, or None."""
    pair: tuple[object, object] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return pair


def pop_saved_tensor_hooks() -> None:
    """Take the innermost pair off this thread's stack."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


def push_saved_tensor_hooks(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
    """Put a pair back on this thread's stack."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def inside_functorch() -> bool:
    """True inside a `torch.func` transform (grad, vjp, vmap, ...)."""
    return bool(torch._C._are_functorch_transforms_active())


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without the pass over all arguments that only `torch.func` transforms need."""
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply


def assume_constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.assume_constant_result`, without importing dynamo (half a second) for it."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def is_fake(t: torch.Tensor) -> bool:
    """A fake tensor: shapes without data."""
    return isinstance(t, torch._subclasses.FakeTensor)


def storage_id(tensor: torch.Tensor) -> int:
    """Identifies the storage of a tensor while it lives; `data_ptr` does not (0 on meta)."""
    return int(tensor.untyped_storage()._cdata)
