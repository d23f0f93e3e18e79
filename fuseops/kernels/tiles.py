"""Helpers of launchers: views as rows, the dtype of sums, tile configurations, split counts and argument checks."""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels.configs import Config
from fuseops.kernels.launch import num_sms

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that GEMMs, and sums of their results, read and write."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or wider if the input is."""
    return torch.promote_types(dtype, torch.float32)


def upcast(t: Tensor) -> Tensor:
    """t in the dtype of its sums, `accumulator`."""
    return t.to(accumulator(t.dtype))


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
    # a clone: rows of one element count as contiguous whatever their strides say
    return x if x.stride(1) == 1 else x.clone(memory_format=torch.contiguous_format)


def as_heads(x: Tensor, dims: int = 1) -> Tensor:
    """(A, H, N) view of a tensor whose last `dims` axes are the columns; copied only where no such view exists.

    Rows may have two strides, as heads of queries in one tensor with keys and values.
    """
    if dims > 1:
        x = x.flatten(-dims)
    if x.dim() > 2 and x.numel() and x.stride(-1) == 1 and not x.is_contiguous():
        *lead, n = x.shape
        for split in range(len(lead) - 1, 0, -1):
            with contextlib.suppress(RuntimeError):  # no such view
                return x.view(math.prod(lead[:split]), math.prod(lead[split:]), n)
    return as_rows(x).unsqueeze(1)


def pointers(like: Tensor, *given: Tensor | None) -> list[Tensor]:
    """Contiguous tensors for the pointers of a kernel; `like`, which it does not read, in place of None."""
    return [like if t is None else t.contiguous() for t in given]


def require(condition: bool, message: str) -> None:
    """Raise a FuseOpsError unless the condition holds."""
    if not condition:
        raise FuseOpsError(message)


def check_shape(name: str, t: Tensor | None, shape: Sequence[int]) -> None:
    """Raise a FuseOpsError unless a tensor, if given, has this shape."""
    if t is not None and t.shape != tuple(shape):
        raise FuseOpsError(f"{name} is {tuple(t.shape)}, expected {tuple(shape)}.")


SPEC_PATTERN = r"(\w+) \(([^)]*)\)(?: (\w+))?"  # a name, axes and maybe a dtype
SPEC_DTYPES = {"int": (torch.int32, torch.int64), "int32": (torch.int32,), "int64": (torch.int64,)}
SPEC_DTYPES["float32"] = (torch.float32,)


def check_spec(given: Mapping[str, Any], wanted: str, **sizes: int) -> None:
    """Raise FuseOpsError for a tensor that does not match its spec, as in "x (R, K), offs (E,) int32".

    A letter is one size in all tensors: that in `sizes`, or of the first tensor that has it. `int` is int32 or int64.
    None matches any spec.
    """
    for name, letters, dtype in _parse_spec(wanted):
        t = given[name]
        if t is None:
            continue
        shape = tuple([sizes.get(a, n) for a, n in zip(letters, t.shape, strict=False)])
        if (
            len(letters) != t.dim()
            or shape != t.shape
            or (dtype and t.dtype not in SPEC_DTYPES[dtype])
        ):
            axes = "".join(f"{sizes.get(a, a)}, " for a in letters)
            axes = axes if len(letters) == 1 else axes[:-2]
            actual = f"{t.dtype if dtype else ''}{tuple(t.shape)}"
            raise FuseOpsError(f"{name} is {actual}, expected {dtype}({axes.rstrip()}).")
        sizes |= zip(letters, shape, strict=True)


@functools.cache
def _parse_spec(wanted: str) -> list[tuple[str, list[str], str]]:
    """(name, axes, dtype) of each tensor of a spec."""
    return [
        (name, re.findall(r"\w+", axes), kind)
        for name, axes, kind in re.findall(SPEC_PATTERN, wanted)
    ]


def wide_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Elementwise tiles of 2048 elements, 8 or 16 a thread: few programs that still fill every multiprocessor (programs
    of 1024 start more slowly than memory moves).
    """
    choices = ((2048, 4), (2048, 8), (512, 8))
    return [
        _tile(2048 // n, n, warps)
        for elements, warps in choices
        for n in [pow2(dims[-1], most=min(elements, 4096 // itemsize))]
    ]


def wide_default(index: int) -> Callable[..., Config]:
    """A default: the wide candidate at this index."""
    return lambda rows, dims, itemsize: wide_candidates(dims, itemsize)[index]


def row_loop_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Tiles of programs that own whole rows and loop over columns, loads STAGES steps ahead. At most an eighth of the
    lanes of a step are idle.
    """
    width, n = dims[-1], pow2(dims[-1], most=1024)
    while n > 256 and 8 * (cdiv(width, n) * n - width) > width:
        n //= 2
    sizes = ((1024, 4, 3), (1024, 4, 1), (2048, 8, 1))
    return [
        {**_tile(max(total // n, 1), n, warps), "STAGES": stages} for total, warps, stages in sizes
    ]


def column_tile(
    width: int, itemsize: int, nbytes: int, stages: int, per_sm: int, warps: int, most: int = 2048
) -> Config:
    """A tile of `nbytes`, at most `most` of them of one row, of a kernel that loops over rows."""
    n = pow2(width, most=most // itemsize)
    return {
        **_tile(max(nbytes // itemsize // n, 1), n, warps), "STAGES": stages, "PER_SM": per_sm
    }  # fmt: skip


def tile_grid(rows: int, n: int, config: Config) -> tuple[int]:
    """The grid of one program for each tile."""
    return (cdiv(rows, config["BLOCK_R"]) * cdiv(n, config["BLOCK_N"]),)


def row_splits(rows: int, config: Config, like: Tensor) -> tuple[int, int]:
    """(number of chunks, rows of each) so that the chunks fill the device PER_SM times (popped from `config`)."""
    rows_each = max(cdiv(rows, _programs_a_column_block(1, config, like)), config["BLOCK_R"])
    return cdiv(rows, rows_each), rows_each


def row_programs(rows: int, num_columns: int, config: Config, like: Tensor) -> int:
    """The number of programs that loop over blocks of rows, so that with the column blocks they fill the device PER_SM
    times (popped from `config`): as few as need no more iterations.
    """
    blocks = cdiv(rows, config["BLOCK_R"])
    return cdiv(blocks, max(cdiv(blocks, _programs_a_column_block(num_columns, config, like)), 1))


def _programs_a_column_block(num_columns: int, config: Config, like: Tensor) -> int:
    return max(config.pop("PER_SM") * num_sms(like.device) // max(num_columns, 1), 1)


def rows_at_once(config: Config, itemsize: int) -> int:
    """The number of rows of a tile in different threads, each of which holds 16 bytes of a row."""
    threads_a_row = max(config["BLOCK_N"] * itemsize // 16, 1)
    return min(config["BLOCK_R"], max(32 * config["num_warps"] // threads_a_row, 1))


def _tile(block_r: int, block_n: int, num_warps: int) -> Config:
    return {"BLOCK_R": block_r, "BLOCK_N": block_n, "num_warps": num_warps}
