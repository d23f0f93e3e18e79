"""The predicted speedup of FP8 for a layer, from the times of its GEMMs and of the passes that quantize their operands.

The rates are fitted to `benchmarks/results/fp8_h200.json` (one H200, settled): rate = peak * L / (L + l) * M / (M + m),
where L is the length of the summed axis, M the rows of a group, and l and m the lengths that halve the peak. They are
within an eighth of the measured ones from 512 rows a group and 768 features on; speedups over bf16 are also on narrower
layers. Passes run at 0.8 of the bandwidth of a copy. The prediction is always of a whole training step, whichever
gradients a call asks for, so that an evaluation and a recomputation choose the precision that training does.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from .recipe import Roles

MIN_SPEEDUP = 1.05  # a smaller one is not worth the accuracy that FP8 costs
MICRO_BATCHES = 8  # assumed micro-batches a step, over which kept weights are quantized once
BANDWIDTH = 3.3e12  # bytes a second
LAUNCH_SECONDS = 4e-6  # the least time of a pass
MIN_GROUP_ROWS = 512  # smaller groups were not measured, and their GEMMs are bound by memory
MAX_ROWS = 1 << 24


class Rate(NamedTuple):
    """A `Rate` is the speed of one kind of GEMM."""

    peak: float  # FLOP a second
    half_axis: int  # the length of the summed axis at which the rate is half the peak
    half_rows: int  # the rows of a group at which it is

    def seconds(self, rows: float, n: int, k: int, summed: float, group: float) -> float:
        share = summed / (summed + self.half_axis) * group / (group + self.half_rows)
        return 2.0 * rows * n * k / (self.peak * share)


BF16_RATES = {"mm": Rate(690e12, 30, 50), "wgrad": Rate(690e12, 100, 0)}
BLOCK_RATES = {"mm": Rate(1090e12, 230, 25), "wgrad": Rate(1090e12, 250, 0)}
TENSOR_RATES = {"mm": Rate(1250e12, 230, 25), "wgrad": Rate(1250e12, 250, 0)}


class Gemm(NamedTuple):
    """A `Gemm` holds the shape of a linear op's weight: `groups` matrices (n, k)."""

    groups: int
    n: int
    k: int


class LinearRun(NamedTuple):
    """A `LinearRun` lists linear ops that are quantized together or not at all. The two of a fused MLP have a gated
    activation between them, whose kernels write quantized operands.
    """

    gemms: tuple[Gemm, ...]
    roles: Roles


class Gain(NamedTuple):
    """A `Gain` is the predicted speedup of a layer under a recipe over bf16.

    ops       names of its linear ops
    rows      of a call
    speedup   time of a training step in bf16 over that in FP8
    nbytes    moved by the quantizing passes of such a step
    min_rows  rows from which on FP8 pays; None: never
    sent      whether the rows come from all ranks: FP8 is used for any number then
    """

    ops: tuple[str, ...]
    rows: int
    speedup: float
    nbytes: int
    min_rows: int | None
    sent: bool = False

    @property
    def used(self) -> bool:
        return self.min_rows is not None and (self.sent or self.rows >= self.min_rows)


def gain_of(layer: LinearRun, names: tuple[str, ...], rows: int) -> Gain:
    """The prediction for a layer over this many rows."""
    nbytes, _ = _passes(layer, rows)
    return Gain(names, rows, speedup(layer, rows), int(nbytes), min_rows_to_gain(layer))


def speedup(layer: LinearRun, rows: int) -> float:
    """The time of a forward and backward in bf16 over that in FP8."""
    if rows <= 0:
        return 0.0
    nbytes, launches = _passes(layer, rows)
    rates = BLOCK_RATES if _by_block(layer.roles) else TENSOR_RATES
    low = _gemms(layer, rows, rates) + max(nbytes, 0) / BANDWIDTH + launches * LAUNCH_SECONDS
    return _gemms(layer, rows, BF16_RATES) / low


@functools.cache
def min_rows_to_gain(layer: LinearRun) -> int | None:
    """The number of rows from which on FP8 pays, None for never. The speedup never falls with more rows."""
    if speedup(layer, MAX_ROWS) < MIN_SPEEDUP:
        return None
    low, high = MIN_GROUP_ROWS * max(gemm.groups for gemm in layer.gemms) - 1, MAX_ROWS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if speedup(layer, middle) >= MIN_SPEEDUP else (middle, high)
    return high


def _by_block(roles: Roles) -> bool:
    return roles.input is not None and roles.input.block is not None


def _gemms(layer: LinearRun, rows: int, rates: dict[str, Rate]) -> float:
    """The seconds of the forward, input gradient and weight gradient of every op."""
    total = 0.0
    for groups, n, k in layer.gemms:
        group = rows / groups
        wgrad = BF16_RATES["wgrad"] if layer.roles.high_wgrad else rates["wgrad"]
        total += rates["mm"].seconds(rows, n, k, k, group)
        total += rates["mm"].seconds(rows, n, k, n, group)
        total += wgrad.seconds(rows, n, k, group, group)
    return total


def _passes(layer: LinearRun, rows: int) -> tuple[float, float]:
    """(bytes, launches) of the passes that quantize x, dy and the weights."""
    roles, gemms = layer.roles, layer.gemms
    by_block = _by_block(roles)
    # the amax pass of tensor scales reads two bytes an element, half of them from the cache
    extra = 0 if by_block else 1
    weights = sum(math.prod(gemm) for gemm in gemms)
    if roles.weights == "none":
        nbytes, launches = weights * (6.0 + 2 * extra), 2.0 * len(gemms)
    else:
        nbytes, launches = weights * (4.0 + extra) / MICRO_BATCHES, len(gemms) / MICRO_BATCHES
    if len(gemms) == 1:
        (_, n, k) = gemms[0]
        return nbytes + rows * (n + k) * (4 + extra), launches + 2
    first, last = gemms[0], gemms[-1]
    # x is quantized in the forward and again in the backward, dy once, in both layouts
    nbytes += rows * (first.k * (6 + 2 * extra) + last.n * (4 + extra))
    if by_block:  # SwiGLU writes 5 bytes for 6, its backward 11 for 12
        return nbytes - 2 * rows * last.k, launches + 3
    return nbytes + rows * (last.k * (3 + extra) * 2 + first.n * (4 + extra)), launches + 2 * len(
        gemms
    ) + 4
