"""Estimates of the time of an op on another machine, from its arithmetic and bytes, for dry runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fuseops.kernels.registry import register_flops
from fuseops.observe.memory import dense_tensors, named_arguments
from fuseops.observe.travel import TRAVEL
from fuseops.words import dtype_name

from .hardware import Hardware

DRY_ERROR = 0.1  # relative: recorded steps were within it of their dry runs
NO_WORK = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"})


class Roofline:
    """A `Roofline` estimates the seconds of an op from its operations and bytes."""

    def __init__(self, hardware: Hardware) -> None:
        from torch.utils.flop_counter import flop_registry

        register_flops()
        self._hardware, self._flops = hardware, flop_registry

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any) -> float:
        inputs, outputs = list(dense_tensors((args, kwargs))), list(dense_tensors(out))
        if str(func) == TRAVEL:
            return self._hardware.network_seconds(args[2])
        if func._schema.name.partition("::")[2] in NO_WORK:
            return 0.0
        # an op without output elements reads no input
        works = not outputs or any(t.numel() for t in outputs)
        nbytes = sum(t.nbytes for t in (*inputs, *outputs)) if works else 0
        dtype = dtype_name(inputs[0].dtype) if inputs else "float32"
        if "scaled_dot_product" in str(func):
            flops = _attention_flops(func, args, kwargs)
            return self._hardware.op_seconds(flops, nbytes, dtype, attention=True)
        flops = self._operations(func, out, args, kwargs)
        moves = not flops and func.namespace == "aten" and _is_transposing(inputs, outputs)
        return self._hardware.op_seconds(flops, nbytes, dtype, transposing=moves)

    def _operations(self, func: Any, out: Any, args: tuple[Any, ...], kwargs: Any) -> float:
        """FLOP by the formula that is registered for an op; 0 without one, or where it does not take the call."""
        formula = self._flops.get(func._overloadpacket)
        try:
            return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=out))
        except Exception:
            return 0.0


def _is_transposing(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> bool:
    """Whether contiguous results are made of inputs that are not all contiguous."""
    return all(t.is_contiguous() for t in outputs) and not all(t.is_contiguous() for t in inputs)


def _attention_flops(func: Any, args: tuple[Any, ...], kwargs: Any) -> float:
    """FLOP of attention for all kernels; torch's formula takes CUDA's only, and counts what a mask excludes."""
    named = named_arguments(func, args, kwargs)
    batch, heads, queries, width = named["query"].shape
    keys = named["key"].shape[-2]
    products = 10 if "backward" in str(func) else 4
    flops = float(products * batch * heads * queries * keys * width)
    return flops / 2 if named.get("is_causal") else flops
