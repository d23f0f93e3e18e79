"""What a port and a feature are.  A port is a stock model beside the same model built of fuseops; a feature is a way of
training it.  The matrix runs every port under every feature, alone and in pairs, and compares the two models.

Everything is in float64, unless a feature says otherwise: equality is then equality of the maths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

Tensors = Mapping[str, Tensor]


class Port(Protocol):
    """One model, twice. Parameters and gradients are compared under the stock model's state_dict keys."""

    name: str
    lora: tuple[str, ...]  # names of the linear layers that get an adapter, of both models

    def stock(self) -> nn.Module:
        """The stock model, the same weights at every call."""

    def ported(self) -> nn.Module:
        """The model of fuseops ops, with the stock model's weights."""

    def batch(self, index: int) -> Any:
        """Micro-batch number `index`, the same at every call."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """(outputs, loss) of either model. Everything that the training step adds to the loss is in it."""

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The layers that are checkpointed, sharded or compiled, of either model."""

    def experts(self, model: nn.Module) -> list[nn.Parameter]:
        """The expert weights of either model, for features that freeze or adapt them."""

    def to_stock(self, tensors: Tensors) -> dict[str, Tensor]:
        """State_dict or gradients of the ported model under the stock keys. Missing keys stay missing."""

    def to_ported(self, tensors: Tensors) -> dict[str, Tensor]:
        """The way back."""


class Step(NamedTuple):
    """What one training step gave, under stock keys."""

    outputs: tuple[Tensor, ...]  # one a micro-batch
    losses: tuple[Tensor, ...]
    grads: dict[str, Tensor | None]


def _same(port: Port, model: nn.Module) -> nn.Module:
    return model


@dataclass(frozen=True)
class Feature:
    """One row and one column of the table."""

    name: str
    # wraps or changes a model before its step; of two features the one of the lower order does first:
    # weights, then wrappers, then compile
    prepare: Callable[[Port, nn.Module], nn.Module] = _same
    order: int = 0
    # entered for the forward
    around: Callable[[nn.Module], AbstractContextManager[Any]] = lambda model: nullcontext()
    # how the forward is called
    call: Callable[[nn.Module, Callable[[nn.Module], Any]], Any] | None = None
    # entered for each micro-batch, told whether it is the last
    synchronised: Callable[[nn.Module, bool], AbstractContextManager[Any]] = lambda m, last: (
        nullcontext()
    )
    micro_batches: int = 1
    ranks: int = 1
    on_stock: bool = True  # False where only fuseops has it: the stock model then runs without
    rounds_to: torch.dtype = torch.float64  # the coarsest dtype that it computes in
    # compared with the ported model with fusion off, under the same features
    changes_numerics: bool = False
