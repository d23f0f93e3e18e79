"""Delayed scaling is FP8 with one scale a tensor, of the amaxes of the steps before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError

from .recipe import Recipe, Roles, number, option
from .scaling import E4M3, E5M2, Scaling
from .store import POLICIES

ALGORITHMS = ("max", "most_recent")


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """`DelayedScaling` is FP8 with one float32 scale a tensor (a group, when grouped), of the amaxes of earlier steps.

    scale = max(format) / amax / 2^margin, data = cast(x * scale) clamped to the format's range. An op's first step
    takes the tensor's own amax. An amax that is zero or not finite leaves the scale as it is. The amaxes of a step are
    noted in training, and become part of the history when the optimizer that holds the op's parameters steps (any
    optimizer, where it has none to train, or where copies of them are stepped), or when `fuseops.weights_changed` is
    called; state and history are buffers of the ops.

    amax_history_len: steps that count.  amax_compute_algo: "max" of them, "most_recent", or a function of the history
        (L, 3, G), latest first, that gives amaxes (3, G).
    group: name of a process group (`group.group_name`) over whose ranks the amaxes of a step are the largest of all;
        its ranks hold the same ops and step together. None: each rank has scales of its own.
    fwd: format of inputs and weights; bwd: of gradients; weights: how long quantized ones are kept, as of
    `Float8BlockScaling`.
    Raises FuseOpsError for another value of any of them. Compiled code keeps no state, and refuses it.
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
                f"DelayedScaling(amax_compute_algo={algorithm!r}): expected one of {ALGORITHMS}, or a function."
            )
        if self.group is not None and not isinstance(self.group, str):
            raise FuseOpsError(
                f"DelayedScaling(group={self.group!r:.80}): expected the name of a process group, group.group_name."
            )

    def roles(self) -> Roles:
        forward, backward = Scaling(self.fwd, None, None), Scaling(self.bwd, None, None)
        return Roles(forward, forward, backward, weights=self.weights, delayed=self)

    def amax_of(self, history: Tensor) -> Tensor:
        """(L, 3, G) -> (3, G)"""
        if callable(self.amax_compute_algo):
            return self.amax_compute_algo(history)
        return history.amax(0) if self.amax_compute_algo == "max" else history[0]
