"""A `Scaling` is a quantized format: the dtypes of codes and scales, and the blocks that share a scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, cast

import torch

from fuseops.arguments import check_integers, is_one_of, shown
from fuseops.errors import FuseOpsError
from fuseops.words import dtype_name

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
E2M1 = torch.float4_e2m1fn_x2
VECTOR, SQUARE, COLUMN = (1, 128), (128, 128), (128, 1)  # (rows, columns) that share one scale
Block = tuple[int, int]


class Family(NamedTuple):
    """A `Family` holds the formats whose scales have one dtype.

    data         dtypes of the codes
    columns      {block of the rows: possible blocks of the columns}
    has_gemm     whether `fuseops.kernels.fp8_mm` and its like multiply the codes
    micro_block  elements in a block of `fuseops.kernels.quantize_micro`; plain torch quantizes others
    """

    data: tuple[torch.dtype, ...]
    columns: Mapping[Block | None, tuple[Block | None, ...]]
    has_gemm: bool = False
    micro_block: int = 0


FAMILIES: Mapping[torch.dtype, Family] = {
    torch.float32: Family(
        (E4M3, E5M2), {VECTOR: (SQUARE, COLUMN), SQUARE: (SQUARE,), None: (None,)}, has_gemm=True
    ),
    E8M0: Family((E4M3, E5M2), {(1, 32): ((32, 1),), (32, 32): ((32, 32),)}, micro_block=32),
    E4M3: Family((E2M1,), {(1, 16): ((16, 1),), (16, 16): ((16, 16),)}, micro_block=16),
}


@dataclass(frozen=True)
class Scaling:
    """A `Scaling` is the format of one operand of a GEMM.

    data     dtype of the codes, torch.float8_e4m3fn or torch.float8_e5m2
    block    (rows, columns) that share one scale: (1, 128) along the axis that a GEMM sums, (128, 128) of a weight;
             None: one scale a tensor, or one a group where rows are grouped
    columns  block of the transposed copy that a weight gradient reads: (128, 128), the codes of the rows shifted to one
             exponent a square; (128, 1), quantized from high precision; None: the scales of the rows
    scale    dtype of the scales: torch.float32; torch.float8_e8m0fnu, whose blocks are (1, 32), with columns (32, 1),
             or (32, 32); torch.float8_e4m3fn with a second, float32 scale a tensor or a group, codes float4_e2m1fn_x2,
             two a byte, and blocks (1, 16), with columns (16, 1), or (16, 16). The last two have no shifted columns
    hadamard    columns are quantized after a random Hadamard transform over 16 tokens; with E4M3 scales only
    stochastic  codes are rounded stochastically, which keeps the mean; with E4M3 scales only
    powers   whether float32 scales are powers of two; by default those of blocks are, and those of tensors are not.
             Columns in squares need them, since they shift codes by powers of two
    epsilon  the lower bound of the amax of a float32 scale
    colwise  another format for the columns, which are quantized in it from high precision; `columns` has no effect then

    Derived from these:
    family            the formats with scales of this dtype
    has_defaults      powers, epsilon and colwise are the defaults, which kernels write (else plain torch quantizes)
    gemm_kind         the name of such scales in `fuseops.kernels.fp8_mm` and its like, None where none multiplies
                      the codes
    rounds_at_random  whether one of the layouts is stochastic
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
    has_defaults: bool = field(init=False, repr=False, compare=False)
    gemm_kind: str | None = field(init=False, repr=False, compare=False)
    rounds_at_random: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.colwise, Scaling | None):
            raise FuseOpsError(
                f"Scaling: colwise is {shown(self.colwise)}, expected a Scaling or None."
            )
        if not isinstance(self.epsilon, int | float):
            raise FuseOpsError(f"Scaling: epsilon is {shown(self.epsilon)}, expected a number.")
        self._check("scale", tuple(FAMILIES))
        for flag in ("hadamard", "stochastic"):
            self._check(flag, (False, True))
        self._check("powers", (None, False, True))
        usual, free = self._usual_powers, self.scale is torch.float32
        if self.powers is None:
            object.__setattr__(self, "powers", usual)
        default = self.powers == usual and not self.epsilon and self.colwise is None
        kind = "tensor" if self.block is None else "block"
        object.__setattr__(self, "family", FAMILIES[self.scale])
        object.__setattr__(self, "has_defaults", default)
        object.__setattr__(self, "gemm_kind", kind if self.family.has_gemm else None)
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
        self._check("hadamard", (False,) if self.is_square else both)
        self._check("stochastic", both)

    def _check(self, name: str, known: tuple[Any, ...]) -> None:
        given = getattr(self, name)
        if not is_one_of(given, known):
            beside = "" if name == "scale" else f" beside scales of {shown(self.scale)}"
            raise FuseOpsError(
                f"Scaling: {name} is {shown(given)}, expected {name} to be one of {known}{beside}."
            )

    @property
    def _usual_powers(self) -> bool:
        """The default of `powers`."""
        return self.scale is E8M0 or (self.scale is torch.float32 and self.block is not None)

    def matches(self, other: Scaling) -> bool:
        """Whether the formats are equal but for the block of the columns."""
        names = [f.name for f in fields(self) if f.compare and f.name != "columns"]
        return self is other or all(getattr(self, n) == getattr(other, n) for n in names)

    def of(self, layout: str) -> Scaling:
        """The format of one layout, "row" or "col"."""
        return self if self.colwise is None or layout == "row" else self.colwise

    @property
    def is_square(self) -> bool:
        """Whether blocks are squares, as of a weight, whose transpose then has the same codes."""
        return self.block is not None and self.block[0] > 1

    @property
    def is_micro(self) -> bool:
        """Whether the blocks are those of the micro kernels (`quantize_micro`, `micro_mm`)."""
        return self.block is not None and self.code_block[1] == self.family.micro_block

    @property
    def code_block(self) -> Block:
        """The block in the codes of either layout, (rows, summed axis)."""
        rows, columns = cast("Block", self.block)
        return min(rows, columns), max(rows, columns)

    def nbytes(self, rows: int, k: int) -> int:
        """The bytes of codes (rows, k), which are summed along k, and of their scales."""
        check_integers("Scaling.nbytes", 0, rows=rows, k=k)
        if self.block is None:
            return rows * k + 4
        high, wide = self.code_block
        scales = -(-rows // high) * -(-k // wide) * self.scale.itemsize
        return rows * -(-k // self.codes_per_byte) + scales + 4 * (self.scale is E4M3)

    @property
    def largest(self) -> tuple[float, float]:
        """The largest code, and the factor up to which larger values still round to it."""
        if self.data is E2M1:
            return 6.0, 7 / 6
        form = torch.finfo(self.data)
        return form.max, 1 + form.eps * 2 / 7

    @property
    def codes_per_byte(self) -> int:
        """The number of codes in a byte."""
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
