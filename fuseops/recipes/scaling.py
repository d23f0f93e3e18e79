"""How a tensor is quantized, as a value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fuseops.errors import FuseOpsError
from fuseops.words import dtype_name

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
VECTOR, SQUARE, COLUMN = (1, 128), (128, 128), (128, 1)  # (rows, columns) that share one scale
BLOCKS = (VECTOR, SQUARE, None)


@dataclass(frozen=True)
class Scaling:
    """The format of one operand of a GEMM.

    data     dtype of the codes, torch.float8_e4m3fn or torch.float8_e5m2
    block    (rows, columns) that share one scale: (1, 128) along the axis that a product sums, (128, 128) of a weight;
             None: one scale a tensor, or one a group where rows are grouped. Scales of blocks are powers of two
    columns  those of the transposed copy that a weight gradient reads: (128, 128), the codes of the rows shifted to one
             exponent a square; (128, 1), quantized directly; None: the scales of the rows
    Raises FuseOpsError for another dtype or another block.
    """

    data: torch.dtype = E4M3
    block: tuple[int, int] | None = VECTOR
    columns: tuple[int, int] | None = SQUARE

    def __post_init__(self) -> None:
        if self.data not in (E4M3, E5M2):
            raise FuseOpsError(
                f"Scaling(data={self.data}): expected torch.float8_e4m3fn or torch.float8_e5m2."
            )
        if self.block not in BLOCKS:
            raise FuseOpsError(f"Scaling(block={self.block}): expected one of {BLOCKS}.")
        wanted = (SQUARE, COLUMN) if self.block == VECTOR else (self.block,)
        if self.columns not in wanted:
            raise FuseOpsError(
                f"Scaling(block={self.block}, columns={self.columns}): expected one of {wanted}."
            )

    def __str__(self) -> str:
        grain = "tensor" if self.block is None else "x".join(map(str, self.block))
        return f"{dtype_name(self.data)}[{grain}]"
