"""Experts and feed-forward layers of torchtitan by fuseops, through torchtitan's own overrides.

    --override.imports fuseops.integrations.torchtitan.grouped_experts fuseops.integrations.torchtitan.feed_forward

Parameters, their names (w1, w2, w3), their sharding and their checkpoints stay torchtitan's, as do routers and token
dispatchers. A layer computes `[w1 | w3]` as one product: the two are copied together in each call. A feed-forward in
another form than is known here (one physical w13, weights that DTensor computes with) runs as torchtitan's own, and the
log says why.
"""

from __future__ import annotations

import functools
import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torchtitan.config import derive, override
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.moe import GroupedExperts

from fuseops import ops, torch_private
from fuseops.layers import Sequential

log = logging.getLogger("fuseops.fusion")
_MLP = "_fuseops_mlp"  # in a module's `__dict__`, where it is no child: it has no parameters of its own


@dataclass(kw_only=True, slots=True)
class ExpertsConfig(GroupedExperts.Config):  # type: ignore[misc]
    """The config of `FusedExperts`: that of GroupedExperts under a name of its own."""


@dataclass(kw_only=True, slots=True)
class FeedForwardConfig(FeedForward.Config):  # type: ignore[misc]
    """The config of `FusedFeedForward`: that of FeedForward under a name of its own."""


class FusedExperts(GroupedExperts):  # type: ignore[misc]
    """torchtitan's GroupedExperts, its MLP by fuseops.   (R, D), (E,) tokens of each expert -> (R, D)"""

    Config = ExpertsConfig  # under the name by which torchtitan finds it

    def _by_fuseops(self, x: Tensor, counts: Tensor, *_: Any, **__: Any) -> Tensor:
        w1, w2, w3 = (_local(_weight(self, number)).bfloat16() for number in (1, 2, 3))
        offs = torch.cumsum(counts, 0, dtype=torch.int32)
        given = {"fc1.weight": torch.cat([w1, w3], 1), "fc2.weight": w2}
        y = functional_call(_mlp(self, given), given, (x.bfloat16(),), {"offs": offs})
        return y.type_as(x)

    # later versions dispatch in `forward`, and compute in a method of its own
    if "_experts_forward" in vars(GroupedExperts):
        _experts_forward = _by_fuseops
    else:
        forward = _by_fuseops


class FusedFeedForward(FeedForward):  # type: ignore[misc]
    """torchtitan's FeedForward by fuseops.   (..., D) -> (..., D)"""

    Config = FeedForwardConfig

    def forward(self, x: Tensor) -> Tensor:
        reason = _why_not(self)
        if reason is not None:
            _tell(reason)
            return super().forward(x)
        given = {
            "fc1.weight": torch.cat([self.w1.weight, self.w3.weight]),
            "fc2.weight": self.w2.weight,
        }
        return functional_call(_mlp(self, given), given, (x,))


def _why_not(layer: Any) -> str | None:
    """Why a feed-forward layer runs as torchtitan's own, or None."""
    children = [getattr(layer, name, None) for name in ("w1", "w2", "w3")]
    for name, child in zip(("w1", "w2", "w3"), children, strict=True):
        weight = getattr(child, "weight", None)
        if weight is None:
            return f"it has no {name}.weight"
        if torch_private.is_dtensor(type(weight)):
            return f"{name}.weight is a DTensor, whose layout is torchtitan's to keep"
        if getattr(child, "bias", None) is not None:
            return f"{name} has a bias"
        if child._forward_hooks or child._forward_pre_hooks:  # type: ignore[union-attr]
            return f"{name} has hooks"
    act = getattr(layer, "activation_fn", None)
    return None if act is None else f"its activation is {type(act).__name__}"


@functools.cache
def _tell(reason: str) -> None:
    log.warning("a FeedForward runs as torchtitan's own: %s", reason)


def _weight(module: nn.Module, number: int) -> Any:
    """w1, w2 or w3, which later versions name by their axes too."""
    return next(p for name, p in module._parameters.items() if name.startswith(f"w{number}"))


def _local(weight: Any) -> Tensor:
    return weight.to_local() if torch_private.is_dtensor(type(weight)) else weight


def _mlp(module: nn.Module, weights: dict[str, Tensor]) -> Sequential:
    """The MLP that a layer's weights are given to: one for as long as their shapes stay."""
    fc1, fc2 = weights["fc1.weight"], weights["fc2.weight"]
    shapes = fc1.shape, fc2.shape
    known = module.__dict__.get(_MLP)
    if known is None or known[0] != shapes:
        groups = fc1.shape[:-2]
        make: Any = ops.GroupedLinear if groups else ops.Linear
        products = [
            make(*groups, w.shape[-1], w.shape[-2], bias=False, device="meta") for w in (fc1, fc2)
        ]
        mlp = Sequential({"fc1": products[0], "act": ops.SwiGLU(), "fc2": products[1]})
        known = module.__dict__[_MLP] = shapes, mlp
    return known[1]


def _override(name: str, target: Any, description: str) -> Any:
    """torchtitan's decorator, which takes a name in some versions."""
    named = "name" in inspect.signature(override).parameters
    given = {"target": target, "exact": True, "description": description}
    return override(f"fuseops_{name}", **given) if named else override(**given)


@_override("grouped_experts", GroupedExperts.Config, "The experts' MLP by fuseops.")
def grouped_experts(cfg: Any) -> Any:
    """A config of GroupedExperts made one of `FusedExperts`."""
    return derive(cfg, FusedExperts.Config)


@_override("feed_forward", FeedForward.Config, "The feed-forward layer by fuseops.")
def feed_forward(cfg: Any) -> Any:
    """A config of FeedForward made one of `FusedFeedForward`."""
    return derive(cfg, FusedFeedForward.Config)
