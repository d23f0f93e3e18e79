"""Recomputing a whole layer: its forward under a checkpoint, as long as a scheduler says so."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuseops import torch_private
from fuseops.run.config import checkpoint_contexts


class Recomputed:
    """Stands in for `module.forward` from now on: what it saves is dropped, and made again in the backward.
    The scheduler's hooks are outside, so that its inputs can still leave.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before: Callable[..., Any] | None = module.__dict__.get("forward")
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.before or type(self.module).forward.__get__(self.module)
        if not torch.is_grad_enabled() or torch_private.in_backward():
            return forward(*args, **kwargs)
        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=checkpoint_contexts, **kwargs
        )

    def remove(self) -> None:
        """Give the module its own forward back."""
        if self.before is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.before
