"""Recomputation of whole layers: the forward runs in a checkpoint while a scheduler is attached."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuseops.errors import FuseOpsError
from fuseops.observe.untouched import buffer_versions, written_buffer
from fuseops.run.config import checkpoint_contexts

from .nesting import without_wrapper


class RecomputedForward:
    """A `RecomputedForward` replaces `module.forward` by one in a checkpoint, which recomputes what it saves.
    The scheduler's hooks are outside, so that the inputs can still be offloaded.
    A copy or a pickle of the module is not recomputed.
    Raises FuseOpsError where the forward writes buffers, which a second one would write again, or read changed.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module, self.enabled = path, module, True
        self.inner: Callable[..., Any] | None = module.__dict__.get("forward")
        module.__dict__["forward"] = self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "enabled": False}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.inner or type(self.module).forward.__get__(self.module)
        # another scheduler's recomputes it already
        nested = isinstance(forward, RecomputedForward) and forward.enabled
        if not self.enabled or nested or not torch.is_grad_enabled():
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
        """Restore the forward of the module, also from below later wrappers."""
        self.enabled, own = False, self.module.__dict__
        own["forward"] = without_wrapper(own.get("forward"), self)
        if own["forward"] is None:
            del own["forward"]
