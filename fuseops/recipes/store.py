"""The cache of an op's quantized weight, which GEMMs share until the weight may have changed.

A store belongs to one op and caches its live Parameter only, no other tensor (`functional_call`, a parametrization,
experts that are packed for the call). Cached layouts are never saved for a backward, copied or pickled. An entry is
valid for one Parameter in one storage at one version, which every in-place write bumps. Three events tell of writes
that bump no version: the step of any `torch.optim.Optimizer`, FSDP2's all-gather of a parameter from changed shards,
and `fuseops.weights_changed`.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fuseops import torch_private
from fuseops.plain import PARAMETERS, PLAIN

from .operands import weight_operand
from .quantized import Quantized
from .recipe import Roles
from .scales import OptimizerSteps, ScaleFn, watch_optimizers
from .scaling import Scaling


class StoredLayout:
    """A `StoredLayout` is one layout of a quantized weight, made on one stream and safe to read on others."""

    def __init__(self, weight: Quantized) -> None:
        self.weight = weight
        where = weight.device
        self.index: int | None = where.index if where.type == "cuda" else None
        if self.index is not None:
            self.ready = torch.cuda.current_stream(self.index).record_event()
            self.streams = {torch_private.current_stream(self.index)}

    def on_current_stream(self) -> Quantized:
        """The weight, after the current stream waits until it is made."""
        if self.index is not None:
            key = torch_private.current_stream(self.index)
            if key not in self.streams:
                stream = torch.cuda.current_stream(self.index)
                stream.wait_event(self.ready)
                for part in self.weight.components().values():
                    part.record_stream(stream)
                self.streams.add(key)
        return self.weight


class WeightStore:
    """A `WeightStore` keeps the quantized weight of one op."""

    def __init__(self, parameters: Any) -> None:
        """parameters: the live dict of the op's parameters by name, or of those that another module lends it."""
        self.parameters = parameters
        self.stored: Any = None  # the `StoredWeight` of a weight that exists as codes only
        self.source: weakref.ref[nn.Parameter] | None = None  # the Parameter that was quantized
        self.stamp: tuple[Any, ...] | None = None  # its storage and version then
        self.storage: Any = None  # a WeakStorage: its address is not reused while it is held
        self.kept: dict[str, StoredLayout] = {}  # by layout, "row" or "col"
        watch_optimizers()

    def read(
        self,
        weight: Tensor,
        roles: Roles,
        layout: str,
        both: bool,
        scale_fn: ScaleFn | None = None,
    ) -> Quantized:
        """The quantized weight in one layout, "row" or "col", from the cache where it is valid.

        roles: of the op, whose `weights` is "step" or "unshard".
        both: quantize the other layout in the same pass, since it will be read too.
        """
        scaling: Scaling = roles.weight  # type: ignore[assignment]
        if self.stored is not None and self._owns(weight):
            return self.stored.read(layout, self.parameters["weight"])
        source = self._live_parameter(weight)
        if source is None:
            one = {"row": layout == "row", "col": layout == "col"}
            return weight_operand(weight, scaling, **one, scale_fn=scale_fn)
        stamp = _stamp(source, roles)
        if stamp != self.stamp or self.source is None or self.source() is not source:
            self.drop()
            self.source, self.stamp = weakref.ref(source), stamp
            self.storage = torch_private.WeakStorage(source.untyped_storage())
        kept = self.kept.get(layout)
        if kept is None:
            kept = self._quantize(weight, scaling, layout, both, scale_fn)
            if roles.weights == "unshard":
                _unshard_stores[self] = id(source)
        return kept.on_current_stream()

    def drop(self) -> None:
        """Empty the cache."""
        self.kept.clear()
        self.source = self.stamp = self.storage = None
        _unshard_stores.pop(self, None)

    @property
    def parameter(self) -> nn.Parameter | None:
        """The op's weight where it is a Parameter, which can be cached."""
        source = self.parameters.get("weight")
        return source if type(source) in PARAMETERS else None

    @property
    def nbytes(self) -> int:
        """The bytes in the cache."""
        parts = [t for kept in self.kept.values() for t in kept.weight.components().values()]
        return sum({t.data_ptr(): t.nbytes for t in parts}.values())  # both may have one scale

    def _owns(self, weight: Tensor) -> bool:
        source = self.parameters.get("weight")
        return weight is source or (type(weight) in PLAIN and _aliases(weight, source))

    def _live_parameter(self, weight: Tensor) -> nn.Parameter | None:
        """The op's Parameter if `weight` is it, or an alias of it, and it can be cached."""
        source = self.parameters.get("weight")
        if type(source) not in PARAMETERS or type(weight) not in PLAIN or source.is_inference():
            return None
        if weight is not source and not _aliases(weight, source):
            return None
        if source.is_cuda and torch_private.is_capturing():
            return None  # the graph quantizes what it finds at each replay
        return source

    def _quantize(
        self, weight: Tensor, scaling: Scaling, layout: str, both: bool, scale_fn: ScaleFn | None
    ) -> StoredLayout:
        both = both and not self.kept
        row, col = both or layout == "row", both or layout == "col"
        with torch.inference_mode(False), torch.no_grad():
            q = weight_operand(weight.detach(), scaling, row=row, col=col, scale_fn=scale_fn)
        for name, wanted in (("row", row), ("col", col)):
            if wanted:
                self.kept[name] = StoredLayout(q.only(name == "row", name == "col"))
        torch_private.watch_fsdp(_on_gathered, _on_freed)
        return self.kept[layout]


def kept_bytes(shape: tuple[int, ...], scaling: Scaling, layouts: int) -> int:
    """The bytes of one or two layouts of a weight (N, K) or (E, N, K), with their scales."""
    n, k = shape[-2:]
    groups = math.prod(shape[:-2])
    if scaling.block is None and scaling.colwise is None:  # both share the scale
        return groups * (n * k * layouts + 4)
    sizes = {"row": (n, k), "col": (k, n)}
    return groups * sum(scaling.of(name).nbytes(*sizes[name]) for name in list(sizes)[:layouts])


def _stamp(source: nn.Parameter, roles: Roles) -> tuple[Any, ...]:
    """A key that changes whenever the parameter, its format or what gives its scale may have changed."""
    # optimizers skip a frozen parameter, unless it still has a gradient; a delayed scale follows each step
    stepped = source.requires_grad or source.grad is not None or roles.delayed is not None
    steps = OptimizerSteps.count if stepped else None
    location = torch_private.storage_key(source.untyped_storage()), source.storage_offset()
    shard = _shards.get(source) if _shards.data else None
    made_by = roles.weight, roles.delayed
    return *location, source.shape, source.stride(), source._version, steps, shard, made_by


def _aliases(weight: Tensor, source: Tensor) -> bool:
    """Whether a weight that a saved-tensor hook returned is the present memory of the parameter."""
    return (
        weight.data_ptr() == source.data_ptr()
        and weight.dtype is source.dtype
        and weight.shape == source.shape
        and weight.stride() == source.stride()
    )


# --- writes that bump no version

_unshard_stores: weakref.WeakKeyDictionary[WeightStore, int] = weakref.WeakKeyDictionary()
"""By store with the policy "unshard", the `id` of the Parameter whose freeing empties it."""
_shards: Any = WeakIdKeyDictionary()
"""By Parameter, the versions of the shards that FSDP2 gathered it from."""


def _on_gathered(parameter: Tensor, shard: Any) -> None:
    _shards[parameter] = shard


def _on_freed(parameter: Tensor) -> None:
    for store in [store for store, source in _unshard_stores.items() if source == id(parameter)]:
        store.drop()
