"""Numerical statistics of quantization, collected inside `fuseops.debug()`.

Each operand has its amax, its flushed share (codes that are zero where x is not) and its saturated share (codes that
the format's largest value clipped). Each GEMM has its error relative to the product of the operands before they were
quantized, in the norm of the whole tensor. A statistic is the maximum over all calls, and stays on the device until it
is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops import torch_private
from fuseops.plain import PLAIN

from .quantized import Quantized, dequantize_layout


class OpName(NamedTuple):
    """An `OpName` names an op in statistics and tells it from others of that name.

    path  in the model, or the name in its Sequential where that is not known
    op    its id
    """

    path: str = ""
    op: int = 0


UNNAMED = OpName()


class OperandNumbers(NamedTuple):
    """`OperandNumbers` are the amax, flushed and saturated shares of one GEMM operand, the maxima over all calls."""

    op: str
    role: str  # "input", "weight", "grad_output"
    amax: float
    flushed: float
    saturated: float

    def __str__(self) -> str:
        lost = f"{self.flushed:.2%} flushed, {self.saturated:.2%} saturated"
        return f"{self.op} {self.role}: amax {self.amax:.3g}, {lost}"


class GemmError(NamedTuple):
    """A `GemmError` is the relative error of one quantized GEMM of an op, the maximum over all calls."""

    op: str
    gemm: str  # "forward", "input gradient", "weight gradient"
    error: float

    def __str__(self) -> str:
        return f"{self.op} {self.gemm}: relative error {self.error:.2e}"


class QuantizationStats:
    """`QuantizationStats` collect the statistics of operands and GEMMs, by the path of the op.

    active  those that are collected now, process-wide: CUDA backwards run in their own thread. Mostly None, so hot
            paths test it before they call `active_stats`
    """

    active: ClassVar[QuantizationStats | None] = None

    def __init__(self) -> None:
        self.names: dict[str, list[OpName]] = {}  # by path, in the order in which the ops ran first
        self.operand_stats: dict[tuple[OpName, str], Tensor] = {}
        self.gemm_errors: dict[tuple[OpName, str], Tensor] = {}
        # by op: whether its kept weight differs from a fresh one
        self.stale: dict[OpName, Tensor] = {}
        # by storage of the codes, while it lives: the tensor that was quantized
        self.originals: dict[int, tuple[torch_private.WeakStorage, Tensor]] = {}

    def operands(self) -> list[OperandNumbers]:
        """The statistics of every quantized operand. Waits for the device."""
        found = self.operand_stats.items()
        return [OperandNumbers(self._label(op), role, *t.tolist()) for (op, role), t in found]

    def gemms(self) -> list[GemmError]:
        """The error of every quantized GEMM. Waits for the device."""
        found = self.gemm_errors.items()
        return [GemmError(self._label(op), gemm, t.item()) for (op, gemm), t in found]

    def stale_weights(self) -> list[str]:
        """The ops whose kept weight differs from a fresh one. Waits for the device."""
        return [self._label(op) for op, stale in self.stale.items() if stale]

    def _label(self, op: OpName) -> str:
        """The path of an op, with a number where several ops have it."""
        same = self.names[op.path]
        return op.path if len(same) == 1 else f"{op.path} #{same.index(op) + 1}"

    # --- called where operands are quantized and multiplied

    def record_quantized(self, q: Any, x: Any) -> None:
        """Remember the original of q, which was quantized from x: x (R, K) or a weight itself, or the original of x."""
        source = self.original_of(x)
        if source is None or not isinstance(q, Quantized):
            return
        for expired in [key for key, (storage, _) in self.originals.items() if storage.expired()]:
            del self.originals[expired]
        for layout in (q.row, q.col):
            if layout is not None:
                storage = layout.data.untyped_storage()
                weak = torch_private.WeakStorage(storage)
                self.originals[torch_private.storage_key(storage)] = weak, source

    def original_of(self, operand: Any) -> Tensor | None:
        """The high-precision tensor that an operand was quantized from; None where that was not recorded."""
        if not isinstance(operand, Quantized):
            return operand.detach() if type(operand) in PLAIN and not operand.is_meta else None
        layout = operand.row or operand.col
        key = torch_private.storage_key(layout.data.untyped_storage())  # type: ignore[union-attr]
        return self.originals[key][1] if key in self.originals else None

    def record_operand(self, op: OpName, role: str, q: Any) -> None:
        """Update the statistics of an operand."""
        x = self.original_of(q)
        if x is None or not isinstance(q, Quantized) or (q.row is None and role != "weight"):
            return
        layout = "col" if q.row is None else "row"
        dequantized = dequantize_layout(q, layout).float().abs()
        codes = K.codes_values(getattr(q, layout).data, q.scaling.of(layout).data).abs()
        codes = codes[..., : dequantized.shape[-1]]
        if layout == "col":
            codes, dequantized = codes.mT, dequantized.mT
        size = x.float().abs().reshape(codes.shape)
        valid = ~size.isnan()
        if q.offs is not None:  # rows of padding do not count
            rows = torch.arange(len(size), device=size.device)
            valid &= (rows < q.offs[-1])[:, None]
        size, count = size.where(valid, 0.0), valid.sum().clamp(min=1)
        # values up to half a step above the largest code round to it
        largest, nearest = q.scaling.of(layout).largest
        flushed = valid & (codes == 0) & (size != 0)
        saturated = valid & (codes == largest) & ((size / nearest > dequantized) | size.isinf())
        amax = size.amax() if size.numel() else size.sum()
        measured = torch.stack([amax, flushed.sum() / count, saturated.sum() / count])
        self._update_max(self.operand_stats, op, (op, role), measured)

    def record_gemm(
        self, op: OpName, gemm: str, result: Tensor, exact: Callable[..., Tensor], *operands: Any
    ) -> None:
        """Update the relative error of a GEMM.   exact: multiplies the originals of the operands"""
        originals = [self.original_of(operand) for operand in operands]
        if any(original is None for original in originals):
            return
        expected = exact(*originals).float()
        norm = _norm(expected).clamp(min=torch.finfo(torch.float64).tiny)
        error = _norm(result.float() - expected) / norm
        self._update_max(self.gemm_errors, op, (op, gemm), error)

    def record_stale_weight(self, op: OpName, kept: Quantized, fresh: Quantized) -> None:
        """Record whether a kept weight differs from one that is quantized now."""
        if self.original_of(fresh) is None:
            return
        pairs = zip(kept.components().values(), fresh.components().values(), strict=True)
        differs = [(a.view(torch.uint8) != b.view(torch.uint8)).any() for a, b in pairs]
        self._update_max(self.stale, op, op, torch.stack(differs).any().float())

    def _update_max(
        self, maxima: dict[Any, Tensor], op: OpName, key: Any, measured: Tensor
    ) -> None:
        same = self.names.setdefault(op.path, [])
        if op not in same:
            same.append(op)
        maxima[key] = torch.maximum(maxima[key], measured) if key in maxima else measured


def _norm(t: Tensor) -> Tensor:
    """The norm in float64: squares of gradients below 1e-19 are zero in float32."""
    norm: Tensor = torch.linalg.vector_norm(t, dtype=torch.float64)
    return norm


def active_stats() -> QuantizationStats | None:
    """The statistics to update; None in compiled code and in a CUDA graph, which collect none."""
    stats = QuantizationStats.active
    if stats is None or torch.compiler.is_compiling():
        return None
    if torch.cuda.is_available() and torch_private.is_capturing():
        return None
    return stats
