"""Overrides of torchtitan that run its experts, token dispatch, feed-forward layers and head's loss by fuseops.

    --override.imports fuseops.integrations.torchtitan.routed_experts fuseops.integrations.torchtitan.feed_forward \\
        fuseops.integrations.torchtitan.chunked_loss

Parameters, their names, sharding and checkpoints, and routers stay torchtitan's. Two versions of its classes are
supported: `RoutedExperts` and FeedForward with `w13` (2, F, D), which is `[gate | up]` without a copy; and the older
`GroupedExperts` (override `grouped_experts`, behind torchtitan's own dispatcher) and FeedForward with w1 and w3, which
each call concatenates. Any other module runs as torchtitan's own, and the log has the reason.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torchtitan.config import derive, override
from torchtitan.models.common.feed_forward import FeedForward

from fuseops import ops, torch_private
from fuseops.distributed.dispatch import ExpertCollect, ExpertDispatch
from fuseops.distributed.dispatch.choose import choose
from fuseops.errors import FuseOpsError
from fuseops.layers import Sequential

log = logging.getLogger("fuseops.fusion")
STOCK = "torchtitan"  # a `dispatcher`: the one of torchtitan's config
_CACHE = "_fuseops"  # key in a module's `__dict__`: its Sequential, no child, and the shapes that it was built for


def _import_optional(module: str, name: str) -> Any:
    """A class or function of torchtitan; None in versions that do not have it."""
    try:
        return getattr(importlib.import_module(f"torchtitan.{module}"), name, None)
    except ImportError:
        return None


GroupedExperts: Any = _import_optional("models.common.moe", "GroupedExperts")
RoutedExperts: Any = _import_optional("models.common.moe", "RoutedExperts")
if RoutedExperts is not None and "w13" not in RoutedExperts.Config.__dataclass_fields__:
    RoutedExperts = None  # this one wraps GroupedExperts, which has an override
ChunkedLossWrapper: Any = _import_optional("components.loss", "ChunkedLossWrapper")


# --- shared by the overrides


def _override(name: str, target: Any, description: str) -> Any:
    """torchtitan's `override`, which takes a name in some versions."""
    named = "name" in inspect.signature(override).parameters
    options = {"target": target, "exact": True, "description": description}
    return override(f"fuseops_{name}", **options) if named else override(**options)


@functools.cache
def _warn_fallback(module_name: str, reason: str) -> None:
    log.warning("a %s runs as torchtitan's own: %s", module_name, reason)


def _to_local(weight: Any) -> Tensor:
    return weight.to_local() if torch_private.is_dtensor(type(weight)) else weight


def _mlp(module: nn.Module, weights: dict[str, Tensor]) -> Sequential:
    """The Sequential that computes a layer's MLP with these weights; cached while their shapes stay."""
    fc1, fc2 = weights["fc1.weight"], weights["fc2.weight"]
    shapes = fc1.shape, fc2.shape
    cached = module.__dict__.get(_CACHE)
    if cached is None or cached[0] != shapes:
        children = {
            "fc1": _grouped_or_linear(fc1),
            "act": ops.SwiGLU(),
            "fc2": _grouped_or_linear(fc2),
        }
        cached = module.__dict__[_CACHE] = shapes, Sequential(children)
    return cached[1]


def _grouped_or_linear(weight: Tensor) -> Any:
    *groups, out, width = weight.shape
    make: Any = ops.GroupedLinear if groups else ops.Linear
    return make(*groups, width, out, bias=False, device="meta")


def _child_reason(child: Any, kind: str) -> str | None:
    """Why a child is not a `kind` whose weight may be used without calling it, or None."""
    weight = getattr(child, "weight", None)
    if weight is None:
        return "has no weight"
    if type(child).__name__ != kind:
        return f"is a {type(child).__name__}"
    if type(weight) is not nn.Parameter and not torch_private.is_dtensor(type(weight)):
        return f"has a weight that is a {type(weight).__name__}"
    if getattr(child, "bias", None) is not None:
        return "has a bias"
    if child._forward_hooks or child._forward_pre_hooks:
        return "has hooks"
    return None


def _activation_reason(layer: Any) -> str | None:
    act = getattr(layer, "activation_fn", None)
    inner = getattr(act, "fn", act)  # in some versions inside of a module
    name = type(inner).__name__
    return None if act is None or name in ("SwiGLU", "FusedSwiGLU") else f"its activation is {name}"


# --- feed-forward


@dataclass(kw_only=True, slots=True)
class FeedForwardConfig(FeedForward.Config):  # type: ignore[misc]
    """The config of `FusedFeedForward`: that of FeedForward under a name of its own."""


class FusedFeedForward(FeedForward):  # type: ignore[misc]
    """torchtitan's FeedForward, run by fuseops.   (..., D) -> (..., D)"""

    Config = FeedForwardConfig  # under the name by which torchtitan finds it

    def forward(self, x: Tensor) -> Tensor:
        packed = getattr(self, "w13", None) is not None
        reason = _unsupported_reason(self, ("w13", "w2") if packed else ("w1", "w2", "w3"))
        if reason is not None:
            _warn_fallback("FeedForward", reason)
            return super().forward(x)
        if packed:
            fc1 = self.w13.weight.flatten(0, 1)
        else:
            fc1 = torch.cat([self.w1.weight, self.w3.weight])
        weights = {"fc1.weight": fc1, "fc2.weight": self.w2.weight}
        return functional_call(_mlp(self, weights), weights, (x,))


def _unsupported_reason(layer: Any, names: tuple[str, ...]) -> str | None:
    """Why a feed-forward layer has to run as torchtitan's own, or None."""
    for name in names:
        child = getattr(layer, name, None)
        reason = _child_reason(child, "Linear")
        if reason is None and torch_private.is_dtensor(type(child.weight)):  # type: ignore[union-attr]
            reason = "has a DTensor for a weight, whose layout is torchtitan's to keep"
        if reason is None and name == "w13" and child.weight.dim() != 3:  # type: ignore[union-attr]
            reason = "is interleaved, and no stack of gate and up"
        if reason is not None:
            return f"{name} {reason}"
    return _activation_reason(layer)


@_override("feed_forward", FeedForward.Config, "The feed-forward layer by fuseops.")
def feed_forward(cfg: Any) -> Any:
    """Derive a `FusedFeedForward` config from one of FeedForward."""
    return derive(cfg, FusedFeedForward.Config)


# --- experts


if RoutedExperts is not None:

    @dataclass(kw_only=True, slots=True)
    class RoutedExpertsConfig(RoutedExperts.Config):  # type: ignore[misc]
        """The config of `FusedRoutedExperts`: that of RoutedExperts, `dispatcher` and `capacity`."""

        dispatcher: str | None = None
        capacity: float = 1.5

    class FusedRoutedExperts(RoutedExperts):  # type: ignore[misc]
        """torchtitan's RoutedExperts, run by fuseops with its dispatch.   x (T, D), scores, ids (T, K) -> (T, D)

        dispatcher: as of `fuseops.distributed.ExpertParallel`, over the "ep" axis of torchtitan's sparse mesh; it
            replaces torchtitan's local and all-to-all dispatchers. With "torchtitan", and with any other dispatcher in
            the config, tokens travel by torchtitan's and fuseops runs the experts only.
        capacity: as of `ExpertParallel`, for the dispatchers that have a capacity.
        """

        Config = RoutedExpertsConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.dispatcher, self.capacity = config.dispatcher, config.capacity

        def forward(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
            reason = next(
                (
                    f"{name} {why}"
                    for name in ("w13", "w2")
                    if (why := _child_reason(getattr(self, name, None), "GroupedLinear"))
                ),
                _activation_reason(self),
            )
            if reason is not None:
                _warn_fallback("RoutedExperts", reason)
                return super().forward(x, scores, ids, counts)
            weights = {
                "fc1.weight": _to_local(self.w13.weight).flatten(1, 2).bfloat16(),
                "fc2.weight": _to_local(self.w2.weight).bfloat16(),
            }
            stock = self.token_dispatcher
            replaceable = type(stock).__name__ in (
                "LocalTokenDispatcher",
                "AllToAllTokenDispatcher",
            )
            if self.dispatcher != STOCK and replaceable:
                side = {"experts": ids.to(torch.int32), "weights": scores}
                layer = _experts(self, weights, stock)
                return functional_call(layer, weights, (x.bfloat16(),), side).type_as(x)
            rows, counts, metadata = stock.dispatch(x, scores, ids, counts)
            side = {"offs": torch.cumsum(counts, 0, dtype=torch.int32)}
            y = functional_call(_mlp(self, weights), weights, (rows.bfloat16(),), side)
            return stock.combine(y.type_as(rows), metadata, x)

    def _experts(module: Any, weights: dict[str, Tensor], stock: Any) -> Sequential:
        """The Sequential that dispatches tokens and runs the experts; cached while the shapes stay."""
        fc1, fc2 = weights["fc1.weight"], weights["fc2.weight"]
        count, top_k = stock.num_experts, stock.top_k
        shapes = fc1.shape, fc2.shape, top_k
        cached = module.__dict__.get(_CACHE)
        if cached is None or cached[0] != shapes:
            dispatch, after = _build_dispatch(module, count, top_k, len(fc1))
            children = {
                "dispatch": dispatch,
                "permute": ops.Permute(top_k),
                "fc1": _grouped_or_linear(fc1),
                "act": ops.ScaledSwiGLU(),
                "fc2": _grouped_or_linear(fc2),
                "combine": ops.Combine(top_k),
                **after,
            }
            cached = module.__dict__[_CACHE] = shapes, Sequential(children)
        return cached[1]

    def _build_dispatch(
        module: Any, count: int, top_k: int, local: int
    ) -> tuple[Any, dict[str, Any]]:
        """The dispatch op for `count` experts, `local` of them on this rank, and the ops behind Combine."""
        if local == count:
            return ops.Dispatch(count), {}
        mesh = _import_optional("distributed.spmd_types", "spmd_sparse_mesh")()
        mesh = None if mesh is None else mesh["ep"]
        if mesh is None or mesh.size() * local != count:
            raise FuseOpsError(
                f"RoutedExperts has {local} of {count} experts on this rank, and torchtitan's sparse mesh "
                f"{'is not there' if mesh is None else f'has {mesh.size()} ranks of experts'}: shard w13 and w2 by "
                "experts alone, or take the override with dispatcher='torchtitan'."
            )
        limits = {"capacity": module.capacity, "tokens": 0}
        dispatcher = choose(module.dispatcher, mesh, count, top_k, **limits)
        return ExpertDispatch(dispatcher), {"collect": ExpertCollect(dispatcher)}

    @_override("routed_experts", RoutedExperts.Config, "Experts and token dispatch by fuseops.")
    def routed_experts(cfg: Any, *, dispatcher: str | None = None, capacity: float = 1.5) -> Any:
        """Derive a `FusedRoutedExperts` config from one of RoutedExperts, with its two options."""
        return derive(cfg, FusedRoutedExperts.Config, dispatcher=dispatcher, capacity=capacity)


if GroupedExperts is not None:

    @dataclass(kw_only=True, slots=True)
    class ExpertsConfig(GroupedExperts.Config):  # type: ignore[misc]
        """The config of `FusedExperts`: that of GroupedExperts under a name of its own."""

    class FusedExperts(GroupedExperts):  # type: ignore[misc]
        """torchtitan's GroupedExperts, run by fuseops.   (R, D), (E,) tokens of each expert -> (R, D)"""

        Config = ExpertsConfig

        def _fused_forward(self, x: Tensor, counts: Tensor, *_: Any, **__: Any) -> Tensor:
            w1, w2, w3 = (_to_local(_weight(self, number)).bfloat16() for number in (1, 2, 3))
            offs = torch.cumsum(counts, 0, dtype=torch.int32)
            weights = {"fc1.weight": torch.cat([w1, w3], 1), "fc2.weight": w2}
            y = functional_call(_mlp(self, weights), weights, (x.bfloat16(),), {"offs": offs})
            return y.type_as(x)

        # later versions dispatch in `forward` and compute in `_experts_forward`
        if "_experts_forward" in vars(GroupedExperts):
            _experts_forward = _fused_forward
        else:
            forward = _fused_forward

    def _weight(module: nn.Module, number: int) -> Any:
        """w1, w2 or w3; later versions append axes to the name."""
        return next(p for name, p in module._parameters.items() if name.startswith(f"w{number}"))

    @_override("grouped_experts", GroupedExperts.Config, "The experts' MLP by fuseops.")
    def grouped_experts(cfg: Any) -> Any:
        """Derive a `FusedExperts` config from one of GroupedExperts."""
        return derive(cfg, FusedExperts.Config)


# --- the loss


if ChunkedLossWrapper is not None:

    @dataclass(kw_only=True, slots=True)
    class ChunkedLossConfig(ChunkedLossWrapper.Config):  # type: ignore[misc]
        """The config of `FusedChunkedLoss`: that of ChunkedLossWrapper under a name of its own."""

    class FusedChunkedLoss(ChunkedLossWrapper):  # type: ignore[misc]
        """torchtitan's chunked cross entropy as one `ops.LinearCrossEntropy`, which makes gradients in the forward.

        pred (T, D) hidden states, labels (T,) -> the sum of the losses over `global_valid_tokens`, and no metrics.
        """

        Config = ChunkedLossConfig

        def __call__(
            self, pred: Any, labels: Any, global_valid_tokens: Tensor | None = None, **more: Any
        ) -> tuple[Tensor, dict[str, Tensor]]:
            reason = _unsupported_loss_reason(self, pred, more)
            if reason is not None:
                _warn_fallback("ChunkedLossWrapper", reason)
                return super().__call__(pred, labels, global_valid_tokens, **more)
            loss = _head_loss(self.lm_head, pred, labels)
            return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}

    def _unsupported_loss_reason(loss: Any, pred: Any, more: dict[str, Any]) -> str | None:
        if type(loss.loss_fn).__name__ != "CrossEntropyLoss":
            return f"the loss of a chunk is a {type(loss.loss_fn).__name__}"
        if type(pred) is not Tensor or more:
            return "it takes more than one plain tensor of hidden states"
        size = _import_optional("distributed.spmd_types", "spmd_mesh_size")
        if size is not None and size("tp") > 1:
            return "the head is spread over ranks by its vocabulary"
        names = {cls.__name__ for cls in type(loss.lm_head).__mro__}
        if "Linear" not in names or getattr(loss.lm_head, "bias", None) is not None:
            return f"the head is a {type(loss.lm_head).__name__}, or has a bias"
        return None

    def _head_loss(head: Any, x: Tensor, labels: Tensor) -> Tensor:
        """The sum of the losses, computed inside of the head's call, where FSDP2 has gathered its weight."""

        def forward(x: Tensor) -> Tensor:
            vocabulary, width = head.weight.shape
            op = ops.LinearCrossEntropy(width, vocabulary, reduction="sum", device="meta")
            return functional_call(op, {"weight": head.weight}, (x,), {"targets": labels})

        before = head.__dict__.get("forward")
        head.__dict__["forward"] = forward
        try:
            return head(x)
        finally:
            if before is None:
                del head.__dict__["forward"]
            else:
                head.__dict__["forward"] = before

    @_override("chunked_loss", ChunkedLossWrapper.Config, "The head's cross entropy by fuseops.")
    def chunked_loss(cfg: Any) -> Any:
        """Derive a `FusedChunkedLoss` config from one of ChunkedLossWrapper."""
        return derive(cfg, FusedChunkedLoss.Config)
