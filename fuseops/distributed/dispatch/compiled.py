"""Custom ops by which torch.compile sees a dispatcher: four, with data-dependent sizes.

They find the dispatcher by its number. Compiled code takes all rows that C tokens may have, C K.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dispatcher import UNKNOWN, dispatcher_of, within_capacity

Dispatched = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("fuseops::expert_dispatch", mutates_args=())
def dispatch(
    x: Tensor, experts: Tensor, weights: Tensor, number: int, capacity_factor: float
) -> Dispatched:
    """x, experts, weights, slots, arrivals of `Dispatcher.dispatch`.   capacity_factor: 0 is none"""
    dispatcher = dispatcher_of(number)
    if capacity_factor:
        experts = within_capacity(dispatcher, experts, capacity_factor)
    dispatcher.gradients = UNKNOWN
    got = dispatcher.dispatch(x, experts, weights).wait()
    return got.x, got.experts, got.weights, got.slots, got.arrivals


@dispatch.register_fake
def _(
    x: Tensor, experts: Tensor, weights: Tensor, number: int, capacity_factor: float
) -> Dispatched:
    dispatcher = dispatcher_of(number)
    tokens, k = torch.library.get_ctx().new_dynamic_size(), experts.shape[1]
    return (
        x.new_empty(tokens, x.shape[1]),
        experts.new_empty(tokens, k, dtype=torch.int32),
        weights.new_empty(tokens, k),
        experts.new_empty(x.shape[0], dispatcher.world, dtype=torch.int32),
        dispatcher.no_arrivals(x),
    )


@torch.library.custom_op("fuseops::expert_collect", mutates_args=())
def collect(y: Tensor, slots: Tensor, arrivals: Tensor, number: int) -> Tensor:
    """`Dispatcher.collect`."""
    return dispatcher_of(number).collect(y, slots, arrivals)


collect.register_fake(lambda y, slots, *_: y.new_empty(slots.shape[0], y.shape[1]))


@torch.library.custom_op("fuseops::expert_dispatch_bwd", mutates_args=())
def dispatch_bwd(
    dx: Tensor,
    dweights: Tensor | None,
    experts: Tensor,
    slots: Tensor,
    arrivals: Tensor,
    number: int,
) -> tuple[Tensor, Tensor]:
    """`Dispatcher.dispatch_bwd`; the second result is empty if dweights is None."""
    dx, home_weights = dispatcher_of(number).dispatch_bwd(dx, dweights, experts, slots, arrivals)
    return dx, dx.new_empty(0) if home_weights is None else home_weights


@dispatch_bwd.register_fake
def _(dx: Tensor, dweights: Tensor | None, experts: Tensor, slots: Tensor, *_: Any) -> Any:
    home_weights = dx.new_empty(0) if dweights is None else dweights.new_empty(experts.shape)
    return dx.new_empty(slots.shape[0], dx.shape[1]), home_weights


def _save_dispatch(ctx: Any, inputs: Any, output: Any) -> None:
    _, experts, _, ctx.number, _ = inputs
    ctx.save_for_backward(experts, *output[3:])


def _dispatch_backward(ctx: Any, dx: Tensor, _ids: Any, dweights: Tensor, *_: Any) -> Any:
    dx, dweights = dispatch_bwd(dx, dweights, *ctx.saved_tensors, ctx.number)
    return dx, None, dweights, None, None


dispatch.register_autograd(_dispatch_backward, setup_context=_save_dispatch)


@torch.library.custom_op("fuseops::expert_collect_bwd", mutates_args=())
def collect_bwd(dy: Tensor, slots: Tensor, arrivals: Tensor, tokens: int, number: int) -> Tensor:
    """`Dispatcher.collect_bwd`."""
    return dispatcher_of(number).collect_bwd(dy, slots, arrivals, tokens)


collect_bwd.register_fake(lambda dy, slots, arrivals, tokens, _: dy.new_empty(tokens, dy.shape[1]))


def _save_collect(ctx: Any, inputs: Any, output: Any) -> None:
    y, slots, arrivals, ctx.number = inputs
    ctx.tokens = y.shape[0]
    ctx.save_for_backward(slots, arrivals)


def _collect_backward(ctx: Any, dy: Tensor) -> Any:
    return collect_bwd(dy, *ctx.saved_tensors, ctx.tokens, ctx.number), None, None, None


collect.register_autograd(_collect_backward, setup_context=_save_collect)
