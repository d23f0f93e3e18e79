"""Quantized weights are kept between the GEMMs that read them, until the weight may be another.

A store belongs to one op, and knows the op's live Parameter: of any other tensor (`functional_call`, a parametrization,
experts that are packed for the call) it keeps nothing. What it holds is never saved for a backward, copied or pickled.
What is kept holds for one Parameter in one storage at one version, which every write in place moves on. Writes that
move no version are announced: by the step of any `torch.optim.Optimizer`, by FSDP2 when it gathers a parameter from
shards that have changed, or by `fuseops.weights_changed`.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fuseops import torch_private
from fuseops.kernels.registry import PLAIN

from .operands import weight_operand
from .quantized import Quantized
from .scales import See, Steps, watch_optimizers
from .scaling import Scaling

POLICIES = ("none", "step", "unshard")
"""How long quantized weights are kept: not at all, until the weights change, or until FSDP2 frees them, too."""


class StoredLayout:
    """A `StoredLayout` is a weight with one layout, made on one stream and safe to read on others."""

    def __init__(self, weight: Quantized) -> None:
        self.weight = weight
        where = weight.device
        self.index: int | None = where.index if where.type == "cuda" else None
        if self.index is not None:
            self.made = torch.cuda.current_stream(self.index).record_event()
            self.streams = {torch_private.current_stream(self.index)}

    def here(self) -> Quantized:
        """The weight, for the current stream."""
        if self.index is not None:
            key = torch_private.current_stream(self.index)
            if key not in self.streams:
                stream = torch.cuda.current_stream(self.index)
                stream.wait_event(self.made)
                for part in self.weight.components().values():
                    part.record_stream(stream)
                self.streams.add(key)
        return self.weight


class WeightStore:
    """A `WeightStore` keeps the quantized weight of one op."""

    def __init__(self, parameters: Any) -> None:
        """parameters: of the op, by name, as they are at any time; those of a module that lends them, too."""
        self.parameters = parameters
        self.stored: Any = None  # what the weight lives in, instead
        self.source: weakref.ref[nn.Parameter] | None = None  # what the layouts were made of
        self.stamp: tuple[Any, ...] | None = None  # where it was then, and which version of it
        self.place: Any = None  # a WeakStorage, so that no other storage is taken for it
        self.kept: dict[str, StoredLayout] = {}  # by layout, "row" or "col"
        watch_optimizers()

    def read(
        self,
        weight: Tensor,
        scaling: Scaling,
        layout: str,
        policy: str,
        both: bool,
        see: See | None = None,
    ) -> Quantized:
        """The weight with one layout, "row" or "col": the kept one, or one that is kept from now on.

        policy: "step" or "unshard".  both: the other layout will be read too, so it is made in the same pass.
        """
        if self.stored is not None and self._is(weight):
            return self.stored.read(layout, self.parameters["weight"])
        source = self._live(weight)
        if source is None:
            one = {"row": layout == "row", "col": layout == "col"}
            return weight_operand(weight, scaling, **one, see=see)
        stamp = _stamp(source, scaling)
        if stamp != self.stamp or self.source is None or self.source() is not source:
            self.drop()
            self.source, self.stamp = weakref.ref(source), stamp
            self.place = torch_private.WeakStorage(source.untyped_storage())
        kept = self.kept.get(layout)
        if kept is None:
            kept = self._made(weight, scaling, layout, both, see)
            if policy == "unshard":
                _open[self] = id(source)
        return kept.here()

    def drop(self) -> None:
        """Let go of everything that is kept."""
        self.kept.clear()
        self.source = self.stamp = self.place = None
        _open.pop(self, None)

    @property
    def parameter(self) -> nn.Parameter | None:
        """The op's own weight as it is now, where that is a Parameter, of which something may be kept."""
        source = self.parameters.get("weight")
        return source if type(source) is nn.Parameter else None

    @property
    def nbytes(self) -> int:
        """The bytes of what is kept."""
        return sum(kept.weight.nbytes for kept in self.kept.values())

    def _is(self, weight: Tensor) -> bool:
        source = self.parameters.get("weight")
        return weight is source or (type(weight) in PLAIN and _aliases(weight, source))

    def _live(self, weight: Tensor) -> nn.Parameter | None:
        """The op's Parameter, if that is what the weight is, and something may be kept of it."""
        source = self.parameters.get("weight")
        if type(source) is not nn.Parameter or type(weight) not in PLAIN or source.is_inference():
            return None
        if weight is not source and not _aliases(weight, source):
            return None
        if source.is_cuda and torch_private.is_capturing():
            return None  # the graph quantizes what it finds at each replay
        return source

    def _made(
        self, weight: Tensor, scaling: Scaling, layout: str, both: bool, see: See | None
    ) -> StoredLayout:
        both = both and not self.kept
        row, col = both or layout == "row", both or layout == "col"
        with torch.inference_mode(False), torch.no_grad():
            q = weight_operand(weight.detach(), scaling, row=row, col=col, see=see)
        for name, wanted in (("row", row), ("col", col)):
            if wanted:
                self.kept[name] = StoredLayout(q.only(name == "row", name == "col"))
        torch_private.watch_fsdp(_gathered, _freed)
        return self.kept[layout]


def kept_bytes(shape: tuple[int, ...], scaling: Scaling, layouts: int) -> int:
    """Bytes of that many layouts of a weight (N, K) or (E, N, K), with their scales."""
    n, k = shape[-2:]
    groups = math.prod(shape[:-2])
    if scaling.block is None and scaling.colwise is None:  # both share the scale
        return groups * (n * k * layouts + 4)
    sizes = {"row": (n, k), "col": (k, n)}
    return groups * sum(scaling.of(name).nbytes(*sizes[name]) for name in list(sizes)[:layouts])


def _stamp(source: nn.Parameter, scaling: Scaling) -> tuple[Any, ...]:
    """What changes when a parameter does."""
    # optimizers leave alone what is frozen, but for one that has a gradient left
    steps = Steps.taken if source.requires_grad or source.grad is not None else None
    place = torch_private.storage_key(source.untyped_storage()), source.storage_offset()
    shard = _shards.get(source) if _shards.data else None
    return *place, source.shape, source.stride(), source._version, steps, shard, scaling


def _aliases(weight: Tensor, source: Tensor) -> bool:
    """Whether a saved weight that came back through a hook is the parameter itself, as it is now."""
    return (
        weight.data_ptr() == source.data_ptr()
        and weight.dtype is source.dtype
        and weight.shape == source.shape
        and weight.stride() == source.stride()
    )


# --- writes that move no version

_open: weakref.WeakKeyDictionary[WeightStore, int] = weakref.WeakKeyDictionary()
"""Stores that let go of what they keep when FSDP2 frees the Parameter with this `id`."""
_shards: Any = WeakIdKeyDictionary()
"""By Parameter, which versions of its shard FSDP2 gathered it from."""


def _gathered(parameter: Tensor, shard: Any) -> None:
    _shards[parameter] = shard


def _freed(parameter: Tensor) -> None:
    for store in [store for store, source in _open.items() if source == id(parameter)]:
        store.drop()
