"""Recomputing a whole layer: its forward under a checkpoint, as long as a scheduler says so."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuseops.errors import FuseOpsError
from fuseops.observe.untouched import buffer_versions, written_buffer
from fuseops.run.config import checkpoint_contexts

from .nesting import unlinked


class Recomputed:
    """Stands in for `module.forward` from now on: what it saves is dropped, and made again in the backward.
    The scheduler's hooks are outside, so that its inputs can still leave.
    A copy or a pickle of the module is not recomputed.
    Raises FuseOpsError where the forward writes buffers: a second one would write them once more, or read other values.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module, self.on = path, module, True
        self.inner: Callable[..., Any] | None = module.__dict__.get("forward")
        module.__dict__["forward"] = self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "on": False}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.inner or type(self.module).forward.__get__(self.module)
        twice = isinstance(forward, Recomputed) and forward.on  # that of another scheduler does it
        if not self.on or twice or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        before = {} if torch.compiler.is_compiling() else buffer_versions(self.module)
        out = checkpoint(
            forward, *args, use_reentrant=False, context_fn=checkpoint_contexts, **kwargs
        )
        if before and (name := written_buffer(before, buffer_versions(self.module))):
            raise FuseOpsError(
                f"the plan recomputes {self.path or 'the model'}, whose forward writes its buffer {name!r}: the second "
                'forward would do it once more. Plan "offload" or "keep" for what it saves, or "recompute" for layers '
                "in it that write none."
            )
        return out

    def remove(self) -> None:
        """Give the module its own forward back, whatever came around it since."""
        self.on, own = False, self.module.__dict__
        own["forward"] = unlinked(own.get("forward"), self)
        if own["forward"] is None:
            del own["forward"]
