"""Whether FP8 can pay for a layer: predicted times of its GEMMs and of the passes that quantize their operands.

The rates are those of `benchmarks/results/fp8_h200.json` (one H200, settled), as a peak that shrinks with the axis that
a GEMM sums over and with the rows of a group: rate = peak * L / (L + l) * M / (M + m). They are within an eighth of
what was measured from 512 rows a group and 768 features on; ratios over bf16 are, on narrower layers too. Passes go at
0.8 of a copy. A layer is judged by a whole step of training, whichever gradients a call asks for, so that an evaluation
and a recomputation compute what training does.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from .recipe import Roles

LEAST = 1.05  # below it FP8 would cost accuracy for nothing
MICRO_BATCHES = 8  # that kept weights are quantized for
BANDWIDTH = 3.3e12  # bytes a second
LAUNCH = 4e-6  # seconds of a pass, however little it moves
MEASURED = 512  # rows a group: of fewer nothing is known, and GEMMs wait for memory
MOST_ROWS = 1 << 24


class Rate(NamedTuple):
    """A rate is the speed of one kind of GEMM: FLOP a second at most, and where the summed axis and the rows of a
    group halve it.
    """

    peak: float
    axis: int
    rows: int

    def seconds(self, rows: float, n: int, k: int, summed: float, group: float) -> float:
        share = summed / (summed + self.axis) * group / (group + self.rows)
        return 2.0 * rows * n * k / (self.peak * share)


HIGH = {"mm": Rate(690e12, 30, 50), "wgrad": Rate(690e12, 100, 0)}
BLOCKS = {"mm": Rate(1090e12, 230, 25), "wgrad": Rate(1090e12, 250, 0)}
TENSORS = {"mm": Rate(1250e12, 230, 25), "wgrad": Rate(1250e12, 250, 0)}


class Gemm(NamedTuple):
    """A `Gemm` holds the shape of a linear op's weight: `groups` matrices (n, k)."""

    groups: int
    n: int
    k: int


class LinearRun(NamedTuple):
    """A `LinearRun` lists linear ops that are quantized together or not at all. Two that one fused op runs have a gated
    activation between them, whose passes write codes.
    """

    gemms: tuple[Gemm, ...]
    roles: Roles


class Gain(NamedTuple):
    """A gain is the predicted time of a layer under a recipe and in bf16.

    ops      names of its linear ops
    rows     of a call
    ratio    how many times faster a step of training is in FP8
    nbytes   moved by the passes that quantize, in such a step
    fewest   rows from which on it gains; None: never
    """

    ops: tuple[str, ...]
    rows: int
    ratio: float
    nbytes: int
    fewest: int | None

    @property
    def pays(self) -> bool:
        return self.fewest is not None and self.rows >= self.fewest


def gain_of(layer: LinearRun, names: tuple[str, ...], rows: int) -> Gain:
    """The prediction for a layer over so many rows."""
    nbytes, _ = _passes(layer, rows)
    return Gain(names, rows, ratio(layer, rows), int(nbytes), fewest_rows(layer))


def ratio(layer: LinearRun, rows: int) -> float:
    """How many times faster a forward and backward are in FP8."""
    if rows <= 0:
        return 0.0
    nbytes, launches = _passes(layer, rows)
    rates = BLOCKS if _by_block(layer.roles) else TENSORS
    low = _gemms(layer, rows, rates) + max(nbytes, 0) / BANDWIDTH + launches * LAUNCH
    return _gemms(layer, rows, HIGH) / low


@functools.cache
def fewest_rows(layer: LinearRun) -> int | None:
    """From how many rows on FP8 pays. More rows are never worse."""
    if ratio(layer, MOST_ROWS) < LEAST:
        return None
    low, high = MEASURED * max(gemm.groups for gemm in layer.gemms) - 1, MOST_ROWS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if ratio(layer, middle) >= LEAST else (middle, high)
    return high


def _by_block(roles: Roles) -> bool:
    return roles.input is not None and roles.input.block is not None


def _gemms(layer: LinearRun, rows: int, rates: dict[str, Rate]) -> float:
    """Seconds of forward, input gradient and weight gradient of every op."""
    total = 0.0
    for groups, n, k in layer.gemms:
        group = rows / groups
        wgrad = HIGH["wgrad"] if layer.roles.high_wgrad else rates["wgrad"]
        total += rates["mm"].seconds(rows, n, k, k, group)
        total += rates["mm"].seconds(rows, n, k, n, group)
        total += wgrad.seconds(rows, n, k, group, group)
    return total


def _passes(layer: LinearRun, rows: int) -> tuple[float, float]:
    """(bytes, launches) beyond those of high precision: what quantizes x, dy and weights."""
    roles, gemms = layer.roles, layer.gemms
    by_block = _by_block(roles)
    # to know the amax: two bytes an element, half of them from the cache
    again = 0 if by_block else 1
    weights = sum(math.prod(gemm) for gemm in gemms)
    if roles.weights == "none":
        nbytes, launches = weights * (6.0 + 2 * again), 2.0 * len(gemms)
    else:
        nbytes, launches = weights * (4.0 + again) / MICRO_BATCHES, len(gemms) / MICRO_BATCHES
    if len(gemms) == 1:
        (_, n, k) = gemms[0]
        return nbytes + rows * (n + k) * (4 + again), launches + 2
    first, last = gemms[0], gemms[-1]
    # x is quantized in the forward and again in the backward, dy once, in both layouts
    nbytes += rows * (first.k * (6 + 2 * again) + last.n * (4 + again))
    if by_block:  # SwiGLU writes 5 bytes for 6, its backward 11 for 12
        return nbytes - 2 * rows * last.k, launches + 3
    return nbytes + rows * (last.k * (3 + again) * 2 + first.n * (4 + again)), launches + 2 * len(
        gemms
    ) + 4
