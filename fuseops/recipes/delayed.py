"""Delayed scaling: FP8 with one scale a tensor, computed from the amaxes of earlier steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fuseops.arguments import shown
from fuseops.errors import FuseOpsError

from .recipe import POLICIES, Recipe, Roles, number, option
from .scaling import E4M3, E5M2, Scaling

ALGORITHMS = ("max", "most_recent")


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """`DelayedScaling` is FP8 with one float32 scale a tensor (or group), computed from the amaxes of earlier steps.

    scale = max(format) / amax / 2^margin, data = cast(x * scale) clamped to the format's range. An op's first step
    uses the tensor's own amax. An amax that is zero or not finite leaves the scale unchanged. Amaxes are recorded in
    training, and enter the history when the optimizer with the op's parameters steps, or at `fuseops.weights_changed`.
    (Any optimizer advances ops without trained parameters, and all ops if it updates copies of their parameters.)
    State and history are buffers of the ops.

    amax_history_len: the number L of steps in the history.
    amax_compute_algo: "max" of the history, "most_recent", or a function of the history (L, 3, G), latest first, that
        returns the amaxes (3, G).
    group: name of a process group (`group.group_name`) over whose ranks amaxes are reduced by max; its ranks must hold
        the same ops and step together. None: each rank has its own scales.
    fwd: format of inputs and weights; bwd: of gradients; weights: how long quantized ones are kept, as in
    `Float8BlockScaling`.
    Raises FuseOpsError for another value of any of them, and in compiled code, which can keep no state.
    """

    margin: int = number(0, 0)
    amax_history_len: int = number(1024, 1)
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    group: str | None = None
    weights: str = option(*POLICIES)
    fwd: torch.dtype = option(E4M3, E5M2)
    bwd: torch.dtype = option(E5M2, E4M3)

    def __post_init__(self) -> None:
        super().__post_init__()
        algorithm = self.amax_compute_algo
        if not callable(algorithm) and algorithm not in ALGORITHMS:
            raise FuseOpsError(
                f"DelayedScaling(amax_compute_algo={shown(algorithm)}): expected one of {ALGORITHMS}, or a function."
            )
        if self.group is not None and not isinstance(self.group, str):
            raise FuseOpsError(
                f"DelayedScaling(group={shown(self.group)}): expected the name of a process group, group.group_name."
            )

    def roles(self) -> Roles:
        forward, backward = Scaling(self.fwd, None, None), Scaling(self.bwd, None, None)
        return Roles(forward, forward, backward, weights=self.weights, delayed=self)

    def amax_of(self, history: Tensor) -> Tensor:
        """The amaxes that the next scales are computed from.   (L, 3, G) -> (3, G)"""
        if callable(self.amax_compute_algo):
            return self.amax_compute_algo(history)
        return history.amax(0) if self.amax_compute_algo == "max" else history[0]
