"""Parameters that are DTensors, read as the part that this rank holds: rules fuse over it as over any tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.torch_private import is_dtensor


def local_part(parameter: Any, averages_over: int) -> Any:
    """This rank's part of a DTensor, whose gradient goes back as one, divided by `averages_over`; others unchanged."""
    if parameter is None or not is_dtensor(type(parameter)):
        return parameter
    return LocalPart.apply(parameter, averages_over)  # type: ignore[no-untyped-call]


def gradient_of(parameter: Any, part: Tensor, averages_over: int) -> Any:
    """A gradient as its parameter is: that of a part of a DTensor is a DTensor, divided by `averages_over`.

    Raises FuseOpsError where the parameter is sharded further by now, so that its part is no longer what was read.
    """
    if not is_dtensor(type(parameter)):
        return part
    if parameter.to_local().shape != part.shape:
        raise FuseOpsError(
            f"a delayed gradient of shape {tuple(part.shape)} belongs to a parameter of which this rank holds "
            f"{tuple(parameter.to_local().shape)} by now (FSDP2 has reduced its gradients at the end of the "
            "backward): leave delay_wgrad off."
        )
    return _like(part, averages_over, parameter.device_mesh, parameter.placements, parameter)


class LocalPart(torch.autograd.Function):
    """The part of a DTensor that this rank holds. Its placements are shards, so that of the gradient is one alike."""

    @staticmethod
    def forward(ctx: Any, whole: Any, averages_over: int) -> Tensor:
        ctx.whole = whole.device_mesh, whole.placements, whole.shape, whole.stride()
        ctx.averages_over = averages_over
        local: Tensor = whole._local_tensor
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, dpart: Tensor) -> Any:
        mesh, placements, shape, stride = ctx.whole
        return _from_local(dpart, ctx.averages_over, mesh, placements, shape, stride), None


def _like(part: Tensor, averages_over: int, mesh: Any, placements: Any, whole: Any) -> Any:
    return _from_local(part, averages_over, mesh, placements, whole.shape, whole.stride())


def _from_local(
    part: Tensor, averages_over: int, mesh: Any, placements: Any, shape: Any, stride: Any
) -> Any:
    from torch.distributed.tensor import DTensor

    if averages_over != 1:
        part = part / averages_over
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
