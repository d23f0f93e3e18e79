"""InjectLoss backpropagates an auxiliary loss that is never added to the training loss."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops.arguments import check_numbers
from fuseops.errors import ShapeError

from .op import Call, Grads, Op, Out, check_names


class InjectLossSaved(NamedTuple):
    scale: Tensor | None  # ()


class InjectLoss(Op[InjectLossSaved]):
    """y = x; the backward gives the side tensor `name`, a scalar loss, the gradient `scale`.

    As if scale * loss were added to the training loss. So the loss need not be returned through plain blocks,
    checkpoints and pipeline stages.
    scale: a tensor () on the device, 1 at first. Each forward saves the current one for its backward, so assign a new
    one (`set_scale`) instead of writing to it.
    """

    saves_for = {"x": ()}
    held = ("scale",)

    scale: Tensor

    def __init__(self, name: str = "router_loss") -> None:
        super().__init__()
        check_names("InjectLoss", name=name)
        self.reads = (name,)
        self.scale = torch.ones(())  # no buffer: DDP would write to it

    def extra_repr(self) -> str:
        return repr(self.reads[0])

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        before, self.scale = self.scale, fn(self.scale)
        if before.is_meta:  # `to_empty`: no state_dict will fill it
            self.scale = torch.ones_like(self.scale)
        return self

    def set_scale(self, scale: float | Tensor) -> None:
        """Set the weight of the loss for later forwards: a number, or a () tensor on the device.

        Raises ShapeError for a tensor of another shape, FuseOpsError for what is no finite number.
        """
        if isinstance(scale, Tensor):
            if scale.dim():
                raise ShapeError(
                    f"InjectLoss expects a scale of shape (), got {tuple(scale.shape)}."
                )
            self.scale = scale.detach()
        else:
            check_numbers("InjectLoss", scale=scale)
            self.scale = torch.full_like(self.scale, scale)

    def fwd(self, x: Tensor, *, scale: Tensor, **side: Tensor) -> Out:
        loss = side[self.reads[0]]
        if torch.is_grad_enabled() and loss.requires_grad:  # plain torch, where bwd is not called
            y: Tensor = _Inject.apply(x, loss, scale)  # type: ignore[no-untyped-call]
            return Out(y, InjectLossSaved(scale))
        return Out(x, InjectLossSaved(scale))

    def bwd(self, saved: InjectLossSaved, dy: Tensor, *, call: Call) -> Grads:
        return Grads(dy, side={self.reads[0]: saved.scale})


class _Inject(torch.autograd.Function):
    """An `_Inject` is the autograd node of an `InjectLoss` that runs as plain differentiable torch."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2].to(inputs[1].dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return dy, scale.clone(), None
