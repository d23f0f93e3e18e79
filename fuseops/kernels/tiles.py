"""What launchers share: views as rows, tile configurations, split counts and argument checks."""

from __future__ import annotations

from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels.configs import Config
from fuseops.kernels.launch import num_sms


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def pow2(n: int, most: int = 1 << 30, least: int = 1) -> int:
    """n rounded up to a power of two within bounds."""
    return max(least, min(most, 1 << max(n - 1, 0).bit_length()))


def as_rows(x: Tensor, dims: int = 1) -> Tensor:
    """(R, N) view of a tensor whose last `dims` axes are the columns; copied only where no such view exists."""
    if dims > 1:
        x = x.flatten(-dims)
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    x = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(x.shape[:-1].numel(), x.shape[-1])
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def require(condition: bool, message: str) -> None:
    """Raise a FuseOpsError unless the condition holds."""
    if not condition:
        raise FuseOpsError(message)


def tile_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Elementwise tiles: one or more rows of at most 2048 columns, 8 to 32 elements a thread."""
    n = pow2(dims[-1], most=1024 if itemsize == 4 else 2048)
    sizes = ((1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8))
    return [_tile(max(total // n, 1), n, warps) for total, warps in sizes if total >= n]


def tile_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """Small tiles while there are few rows, 16 elements a thread otherwise."""
    wide = [
        c for c in tile_candidates(dims, itemsize) if c["BLOCK_R"] * c["BLOCK_N"] >= 2048
    ] or tile_candidates(dims, itemsize)
    return wide[0]


def row_loop_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """A program owns whole rows and walks over their columns, loads STAGES steps ahead."""
    n = pow2(dims[-1], most=1024)
    sizes = ((1024, 4, 1), (2048, 4, 1), (2048, 8, 1), (1024, 4, 3), (2048, 4, 3))
    return [
        {**_tile(max(total // n, 1), n, warps), "STAGES": stages} for total, warps, stages in sizes
    ]


def row_loop_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """One row of up to 1024 columns by four warps."""
    return row_loop_candidates(dims, itemsize)[0]


def column_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """A program owns a block of columns and walks over its rows, loads STAGES steps ahead.

    Four warps hold 16 bytes a lane of one row: sums over rows stay in a thread.
    """
    n = pow2(dims[-1], most=2048 // itemsize)
    choices = ((8, 3, 4), (8, 5, 2))
    return [
        {**_tile(rows, n, 4), "STAGES": stages, "PER_SM": per_sm}
        for rows, stages, per_sm in choices
    ]


def column_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """The first candidate."""
    return column_candidates(dims, itemsize)[0]


def tile_grid(rows: int, n: int, config: Config) -> tuple[int]:
    """One program a tile."""
    return (cdiv(rows, config["BLOCK_R"]) * cdiv(n, config["BLOCK_N"]),)


def row_splits(rows: int, num_columns: int, config: Config, like: Tensor) -> tuple[int, int]:
    """(number of chunks, rows of each) so that column blocks times chunks fill the device PER_SM
    times, which is taken out of the configuration.
    """
    wanted = max(config.pop("PER_SM") * num_sms(like.device) // max(num_columns, 1), 1)
    each = cdiv(cdiv(max(rows, 1), wanted), config["BLOCK_R"]) * config["BLOCK_R"]
    return cdiv(rows, each), each


def _tile(block_r: int, block_n: int, num_warps: int) -> Config:
    return {"BLOCK_R": block_r, "BLOCK_N": block_n, "num_warps": num_warps}
