"""A `Scaling` says how a tensor is quantized, as a value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, cast

import torch

from fuseops.errors import FuseOpsError
from fuseops.words import dtype_name

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
E2M1 = torch.float4_e2m1fn_x2
VECTOR, SQUARE, COLUMN = (1, 128), (128, 128), (128, 1)  # (rows, columns) that share one scale
Block = tuple[int, int]


class Family(NamedTuple):
    """A family is the formats whose scales have one dtype.

    data     dtypes of codes
    columns  by block of the rows, those of the columns
    codes    whether there are kernels that multiply the codes
    small    how many elements are in the blocks of `fuseops.kernels.quantize_micro`; plain torch writes others
    """

    data: tuple[torch.dtype, ...]
    columns: Mapping[Block | None, tuple[Block | None, ...]]
    codes: bool = False
    small: int = 0


FAMILIES: Mapping[torch.dtype, Family] = {
    torch.float32: Family(
        (E4M3, E5M2), {VECTOR: (SQUARE, COLUMN), SQUARE: (SQUARE,), None: (None,)}, codes=True
    ),
    E8M0: Family((E4M3, E5M2), {(1, 32): ((32, 1),), (32, 32): ((32, 32),)}, small=32),
    E4M3: Family((E2M1,), {(1, 16): ((16, 1),), (16, 16): ((16, 16),)}, small=16),
}


@dataclass(frozen=True)
class Scaling:
    """A `Scaling` is the format of one operand of a GEMM.

    data     dtype of the codes, torch.float8_e4m3fn or torch.float8_e5m2
    block    (rows, columns) that share one scale: (1, 128) along the axis that a product sums, (128, 128) of a weight;
             None: one scale a tensor, or one a group where rows are grouped
    columns  those of the transposed copy that a weight gradient reads: (128, 128), the codes of the rows shifted to one
             exponent a square; (128, 1), quantized directly; None: the scales of the rows
    scale    dtype of the scales: torch.float32; torch.float8_e8m0fnu, whose blocks are (1, 32), with columns (32, 1),
             or (32, 32); torch.float8_e4m3fn under one float32 scale a tensor or a group, with codes float4_e2m1fn_x2,
             two a byte, and blocks (1, 16), with columns (16, 1), or (16, 16). Both layouts are quantized directly
    hadamard    columns are those of the random Hadamard transform over 16 tokens; with E4M3 scales alone
    stochastic  x is rounded at random, up as often as it is far up; with E4M3 scales alone
    powers   whether float32 scales are powers of two; by default those of blocks are, and those of tensors are not.
             Columns in squares shift codes by powers of two, and are not there without
    epsilon  the smallest amax that a float32 scale is taken from, in place of smaller ones
    colwise  the format of the columns, where it is another one: they are quantized in it directly, and `columns` says
             nothing
    family, plain, kernel, rounds_at_random follow from them: what formats with these scales are like; whether its
             options are those that kernels write (plain torch writes the rest); how `fuseops.kernels.fp8_mm` and its
             like call such scales, or None where nothing multiplies codes; whether one of its layouts is rounded so
    Raises FuseOpsError for another dtype or another block.
    """

    data: torch.dtype = E4M3
    block: Block | None = VECTOR
    columns: Block | None = SQUARE
    scale: torch.dtype = torch.float32
    hadamard: bool = False
    stochastic: bool = False
    powers: bool | None = None
    epsilon: float = 0.0
    colwise: Scaling | None = None
    family: Family = field(init=False, repr=False, compare=False)
    plain: bool = field(init=False, repr=False, compare=False)
    kernel: str | None = field(init=False, repr=False, compare=False)
    rounds_at_random: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.colwise, Scaling | None):
            raise FuseOpsError(
                f"Scaling: colwise is {self.colwise!r:.80}, expected a Scaling or None."
            )
        if not isinstance(self.epsilon, int | float):
            raise FuseOpsError(f"Scaling: epsilon is {self.epsilon!r:.80}, expected a number.")
        self._check("scale", tuple(FAMILIES))
        usual, free = self._usual_powers, self.scale is torch.float32
        if self.powers is None:
            object.__setattr__(self, "powers", usual)
        plain = self.powers == usual and not self.epsilon and self.colwise is None
        kernel = "tensor" if self.block is None else "block"
        object.__setattr__(self, "family", FAMILIES[self.scale])
        object.__setattr__(self, "plain", plain)
        object.__setattr__(self, "kernel", kernel if self.family.codes else None)
        other = self.colwise is not None and self.colwise.stochastic
        object.__setattr__(self, "rounds_at_random", self.stochastic or other)
        self._check("powers", (False, True) if free else (usual,))
        if (not free and self.epsilon) or not 0 <= self.epsilon < math.inf:
            raise FuseOpsError(f"{self!r}: expected epsilon to be 0, or with float32 scales above.")
        if self.colwise is not None and self.colwise.colwise is not None:
            raise FuseOpsError(f"{self!r}: expected a colwise format that has none itself.")
        shifted = free and self.block == VECTOR and self.columns == SQUARE
        if shifted and not self.powers and self.colwise is None:
            raise FuseOpsError(
                f"{self!r}: columns in squares shift the codes of rows by powers of two; with powers=False they are of "
                f"{COLUMN} blocks."
            )
        self._check("data", self.family.data)
        self._check("block", tuple(self.family.columns))
        self._check("columns", self.family.columns[self.block])
        both = (False, True) if self.scale is E4M3 else (False,)
        self._check("hadamard", (False,) if self.square else both)
        self._check("stochastic", both)

    def _check(self, name: str, known: tuple[Any, ...]) -> None:
        if getattr(self, name) not in known:
            raise FuseOpsError(f"{self!r}: expected {name} to be one of {known}.")

    @property
    def _usual_powers(self) -> bool:
        """Whether scales are powers of two where nobody says."""
        return self.scale is E8M0 or (self.scale is torch.float32 and self.block is not None)

    def like(self, other: Scaling) -> bool:
        """Whether they differ in the blocks of columns at most."""
        names = [f.name for f in fields(self) if f.compare and f.name != "columns"]
        return self is other or all(getattr(self, n) == getattr(other, n) for n in names)

    def of(self, layout: str) -> Scaling:
        """The format of one layout, "row" or "col"."""
        return self if self.colwise is None or layout == "row" else self.colwise

    @property
    def square(self) -> bool:
        """Whether a block goes over rows too, so that it is that of a weight and its transpose has the same codes."""
        return self.block is not None and self.block[0] > 1

    @property
    def small(self) -> bool:
        """Whether it has blocks as kernels of small blocks write and multiply them."""
        return self.block is not None and self.grain[1] == self.family.small

    @property
    def grain(self) -> Block:
        """The block in the codes of either layout, whose last axis is the one that is summed."""
        rows, columns = cast("Block", self.block)
        return min(rows, columns), max(rows, columns)

    def nbytes(self, rows: int, k: int) -> int:
        """Of codes (rows, k), which are summed along k, and the scales of their blocks."""
        if self.block is None:
            return rows * k + 4
        high, wide = self.grain
        scales = -(-rows // high) * -(-k // wide) * self.scale.itemsize
        return rows * -(-k // self.packs) + scales + 4 * (self.scale is E4M3)

    @property
    def largest(self) -> tuple[float, float]:
        """The largest code, and how many times that is still rounded to it."""
        if self.data is E2M1:
            return 6.0, 7 / 6
        form = torch.finfo(self.data)
        return form.max, 1 + form.eps * 2 / 7

    @property
    def packs(self) -> int:
        """How many codes are in a byte."""
        return 2 if self.data is E2M1 else 1

    def __str__(self) -> str:
        grain = "tensor" if self.block is None else "x".join(map(str, self.block))
        scale = "" if self.scale is torch.float32 else f", {dtype_name(self.scale)}"
        how = [name for name in ("hadamard", "stochastic") if getattr(self, name)]
        if self.powers != self._usual_powers:
            how.append("powers of two" if self.powers else "any scale")
        if self.epsilon:
            how.append(f"epsilon {self.epsilon:g}")
        found = f"{dtype_name(self.data)}[{', '.join([grain + scale, *how])}]"
        return found if self.colwise is None else f"{found} with columns {self.colwise}"
