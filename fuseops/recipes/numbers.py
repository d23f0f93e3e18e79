"""What quantization does to numbers, measured while somebody watches: `fuseops.debug()`.

Of operands, where they are quantized: amax, and the shares of codes that are zero where x is not (flushed), and that
stand for less than x because the format ends there (saturated). Of GEMMs: the error of the result against the same
product of the operands as they were, in the norm of the whole tensor. The largest of all calls counts. Everything stays
on the device until it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops import torch_private
from fuseops.kernels.registry import PLAIN

from .quantized import Quantized, values


class OperandNumbers(NamedTuple):
    """`OperandNumbers` are the amax and the lost codes of one operand of a GEMM, the largest of all calls."""

    op: str
    role: str  # "input", "weight", "grad_output"
    amax: float
    flushed: float
    saturated: float

    def __str__(self) -> str:
        lost = f"{self.flushed:.2%} flushed, {self.saturated:.2%} saturated"
        return f"{self.op} {self.role}: amax {self.amax:.3g}, {lost}"


class GemmError(NamedTuple):
    """A `GemmError` is the error that quantized operands make in one GEMM of an op, the largest of all calls."""

    op: str
    gemm: str  # "forward", "input gradient", "weight gradient"
    error: float

    def __str__(self) -> str:
        return f"{self.op} {self.gemm}: relative error {self.error:.2e}"


class Numbers:
    """`Numbers` hold what was measured of operands and GEMMs, by the path of the op."""

    def __init__(self) -> None:
        self.of_operands: dict[tuple[str, str], Tensor] = {}
        self.of_gemms: dict[tuple[str, str], Tensor] = {}
        self.stale: dict[str, Tensor] = {}  # kept weights that are not what their weight gives
        # what codes were made of, as long as they live
        self.originals: dict[int, tuple[torch_private.WeakStorage, Tensor]] = {}

    def operands(self) -> list[OperandNumbers]:
        """Of every operand that was quantized. Waits for the device."""
        return [OperandNumbers(*key, *t.tolist()) for key, t in self.of_operands.items()]

    def gemms(self) -> list[GemmError]:
        """Of every GEMM of quantized operands. Waits for the device."""
        return [GemmError(*key, t.item()) for key, t in self.of_gemms.items()]

    # --- called where things happen

    def quantized(self, q: Any, x: Any) -> None:
        """x (R, K), or a weight, became q; of one that was quantized already, its original is that of the other."""
        source = self.original(x)
        if source is None or not isinstance(q, Quantized):
            return
        for ended in [key for key, (storage, _) in self.originals.items() if storage.expired()]:
            del self.originals[ended]
        for layout in (q.row, q.col):
            if layout is not None:
                storage = layout.data.untyped_storage()
                weak = torch_private.WeakStorage(storage)
                self.originals[torch_private.storage_key(storage)] = weak, source

    def original(self, operand: Any) -> Tensor | None:
        """What an operand was made of; None where nobody saw it."""
        if not isinstance(operand, Quantized):
            return operand.detach() if type(operand) in PLAIN and not operand.is_meta else None
        layout = operand.row or operand.col
        key = torch_private.storage_key(layout.data.untyped_storage())  # type: ignore[union-attr]
        return self.originals[key][1] if key in self.originals else None

    def measure(self, op: str, role: str, q: Any) -> None:
        """Note the numbers of an operand in its role."""
        x = self.original(q)
        if x is None or not isinstance(q, Quantized) or (q.row is None and role != "weight"):
            return
        layout = "col" if q.row is None else "row"
        stands = values(q, layout).float().abs()
        codes = K.codes_values(getattr(q, layout).data, q.scaling.of(layout).data).abs()
        codes = codes[..., : stands.shape[-1]]
        if layout == "col":
            codes, stands = codes.mT, stands.mT
        size = x.float().abs().reshape(codes.shape)
        there = ~size.isnan()
        if q.offs is not None:  # not in padding
            rows = torch.arange(len(size), device=size.device)
            there &= (rows < q.offs[-1])[:, None]
        size, count = size.where(there, 0.0), there.sum().clamp(min=1)
        # the last code stands for what is up to half a step beyond it
        largest, nearest = q.scaling.of(layout).largest
        flushed = there & (codes == 0) & (size != 0)
        saturated = there & (codes == largest) & ((size / nearest > stands) | size.isinf())
        amax = size.amax() if size.numel() else size.sum()
        measured = torch.stack([amax, flushed.sum() / count, saturated.sum() / count])
        _largest(self.of_operands, (op, role), measured)

    def compare(
        self, op: str, gemm: str, result: Tensor, exact: Callable[..., Tensor], *t: Any
    ) -> None:
        """Note the error of a GEMM; `exact` multiplies what its operands were."""
        high = [self.original(operand) for operand in t]
        if any(operand is None for operand in high):
            return
        wanted = exact(*high).float()
        norm = _norm(wanted).clamp(min=torch.finfo(torch.float64).tiny)
        _largest(self.of_gemms, (op, gemm), _norm(result.float() - wanted) / norm)

    def check_kept(self, op: str, kept: Quantized, fresh: Quantized) -> None:
        """Note whether the codes of a kept weight are not those that its weight gives now."""
        if self.original(fresh) is None:
            return
        pairs = zip(kept.components().values(), fresh.components().values(), strict=True)
        differs = [(a.view(torch.uint8) != b.view(torch.uint8)).any() for a, b in pairs]
        _largest(self.stale, op, torch.stack(differs).any().float())


def _norm(t: Tensor) -> Tensor:
    """In float64: squares of gradients below 1e-19 are zero in float32."""
    found: Tensor = torch.linalg.vector_norm(t, dtype=torch.float64)
    return found


def _largest(found: dict[Any, Tensor], key: Any, measured: Tensor) -> None:
    found[key] = torch.maximum(found[key], measured) if key in found else measured


class Measuring:
    """`Measuring` knows who measures operands, in the whole process: backwards on CUDA run in a thread of their own.

    Who asks at every step asks for `Measuring.numbers` first, which calls nothing: mostly nobody does.
    """

    numbers: Numbers | None = None


def watching() -> Numbers | None:
    """Who measures now: nobody in compiled code, nor in a CUDA graph."""
    numbers = Measuring.numbers
    if numbers is None or torch.compiler.is_compiling():
        return None
    if torch.cuda.is_available() and torch_private.is_capturing():
        return None
    return numbers


def watch(numbers: Numbers | None) -> Numbers | None:
    """Have `numbers` measure from now on.   -> who did before"""
    before, Measuring.numbers = Measuring.numbers, numbers
    return before
