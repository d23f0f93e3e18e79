"""Quantization to FP8 (e4m3, e5m2): per tensor, per row, in vectors of 128 and in squares of 128 x
128.

Maths: inv = limit / amax (correctly rounded; rounded down to a power of two with pow2);  q =
saturate(x * inv) rounded to nearest even;  scale = 1 / inv, so that x is about q * scale. NaN stays
NaN and does not count in amax; infinities become the ends of the range; a block of zeros has scale
1, with pow2 2^-63, the smallest that there is.
Shapes: x (R, N) -> rowwise q (R, N) and columnwise q (N, R), which is the transpose, quantized
along R.
    tensor:  scale (), amax ()                                            two reads of x
    rows:    scale (R,)                                                   one read, rowwise only
    1x128:   row scale (ceil(N/128), R), col scale (ceil(R/128), N)       one read for both layouts
    128x128: row scale (ceil(R/128), ceil(N/128)), col scale its transpose    one read for both layouts
    columns: col scale (N,)                                               two reads, columnwise only
    groups:  col scale (R//128 + E, N), vectors of 128 rows that begin anew in each group    one read
             columnwise q (N, (R//128 + E) * 128): each group begins at a multiple of 128
Layout: rows of x may be strided. A layout that is not wanted is an empty tensor.
Hardware: sm_89 and later convert; older ones run the reference, as sizes and strides beyond 2^24 do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuseops.kernels import reference, tiles
from fuseops.kernels.configs import Config, Space, triton_release
from fuseops.kernels.launch import chain, device, launch, num_sms, overlap
from fuseops.kernels.registry import kernel_op, tensor_bytes
from fuseops.kernels.tiles import as_rows, cdiv, pow2, require

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = ("row", "col", "both")
MAX_WIDTH = 1 << 14
SM_89 = 89


def _square(warps: int, block_r: int = 128, block_n: int = 128) -> Config:
    return {"BLOCK_R": block_r, "BLOCK_N": block_n, "num_warps": warps}


def _vector_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    n = pow2(dims[-1], most=512, least=128)
    return [
        _square(4, 4096 // n, n),
        _square(4, 2048 // n, n),
        _square(8, 8192 // n, n),
        _square(8, 16384 // n, n),
    ]


def _square_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Rowwise: fewer registers than it would take, for more programs at once."""
    return [_square(8) | {"maxnreg": 80} if _fits(dims, itemsize) else _square(16)]


def _column_square_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Columnwise."""
    return [_square(4) if _fits(dims, itemsize) else _square(16)]


def _both_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Both layouts: three programs of four warps."""
    return [_square(4) | {"maxnreg": 168} if _fits(dims, itemsize) else _square(16)]


def _fits(dims: tuple[int, ...], itemsize: int) -> bool:
    """Whether few warps can hold a tile: rows that are aligned, of two bytes an element."""
    return dims[-1] % 16 == 0 and itemsize == 2


def _column_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Lines of 128 bytes on both sides: 64 columns of two bytes, 128 rows of one."""
    return [_square(4, 128, 64), _square(4, 128, 32)]


def _group_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Few warps, where they can hold a tile: what a program does once is done by few threads."""
    return [_square(2 if _fits(dims, itemsize) else 4, 128, 64)]


def _column_amax_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Four warps hold 16 bytes a lane of one row, loads some steps ahead."""
    n = pow2(dims[-1], most=2048 // itemsize)
    return [
        _square(4, 8, n) | {"STAGES": stages, "PER_SM": per_sm}
        for stages, per_sm in ((4, 2), (4, 3), (3, 4))
    ]


def _amax_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    n = pow2(dims[-1], most=1024)
    return [_square(8, max(8192 // n, 1), n)]


def _row_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    n = pow2(dims[-1])
    rows = max(2048 // n, 1)
    warps = pow2(rows * n // 512, most=32, least=4)
    return [_square(warps, rows, n), _square(max(warps // 2, 4), rows, n)]


AMAX = Space("amax", _amax_candidates)
TENSOR = Space("quantize_tensor", tiles.tile_candidates, tiles.tile_default)
ROWS = Space("quantize_rows", _row_candidates)
VECTORS = Space("quantize_vectors", _vector_candidates)
SQUARES = Space("quantize_squares", _square_candidates)
COLUMN_SQUARES = Space("quantize_column_squares", _column_square_candidates)
BLOCKS_BOTH = Space("quantize_blocks_both", _both_candidates)
COLUMN_BLOCKS = Space("quantize_column_blocks", _column_candidates)
COLUMN_AMAX = Space("column_amax", _column_amax_candidates)
TENSOR_BOTH = Space("quantize_tensor_both", _column_candidates)
COLUMNS = Space("quantize_columns", _column_candidates)
GROUP_BLOCKS = Space("quantize_group_blocks", _group_candidates)


def _cases(*tails: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    sizes = [
        (torch.bfloat16, 4096),
        (torch.bfloat16, 100),
        (torch.float16, 4096),
        (torch.float32, 4096),
    ]
    for dtype, n in sizes:
        for fmt in FORMATS if dtype == torch.bfloat16 else FORMATS[:1]:
            for tail in tails:
                yield (torch.empty(8192 - (n == 100), n, dtype=dtype, device="meta"), fmt, *tail)


def _group_cases() -> Iterator[tuple[Any, ...]]:
    for x, fmt, *tail in _cases((False,)):
        yield x, torch.empty(64, dtype=torch.int32, device="meta"), fmt, *tail


def _two_reads(x: Tensor, dtype: torch.dtype, layout: str = "row", pow2: bool = False) -> int:
    return 2 * tensor_bytes(x) + x.numel() * (1 + (layout == "both"))


def _column_bytes(x: Tensor, dtype: torch.dtype, pow2: bool = False) -> int:
    return 2 * tensor_bytes(x) + x.numel() + 4 * x.shape[1]


fp8_op = functools.partial(kernel_op, min_arch=SM_89)


@fp8_op(
    twin=reference.quantize_tensor,
    nbytes=_two_reads,
    cases=lambda: _cases(*((layout, False) for layout in LAYOUTS)),
)
def quantize_tensor(
    x: Tensor, dtype: torch.dtype, layout: str = "row", pow2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rowwise (R, N), columnwise (N, R), scale (), amax ()) with one scale for all."""
    x, row, col = _outputs(x, dtype, layout)
    rows, n = x.shape
    if not x.numel() or _too_large(x):
        return reference.quantize_tensor(x, dtype, layout, pow2)
    scale, amax = (x.new_empty((), dtype=torch.float32) for _ in range(2))
    config = AMAX.pick(rows, (n,), x)
    count = min(cdiv(rows, config["BLOCK_R"]) * cdiv(n, config["BLOCK_N"]), 4 * num_sms(x.device))
    partial = x.new_empty(count, dtype=torch.float32)
    first, then = chain(x.device)
    launch(
        device("quantize").amax_kernel, (count,),
        x, partial, rows, n, x.stride(0), **first, **config,
    )  # fmt: skip
    inv = _scales(partial, scale, amax, count, 1, dtype, pow2)
    together = _together(rows, layout)
    if layout != "col" and not together:
        config = TENSOR.pick(rows, (n,), x)
        launch(
            device("quantize").quantize_tensor_kernel, tiles.tile_grid(rows, n, config),
            x, inv, row, rows, n, x.stride(0), **then, **config,
        )  # fmt: skip
    if layout != "row":
        _columns(x, inv, row if together else row.new_empty(0), col, one=True)
    return row, col, scale, amax


@fp8_op(twin=reference.quantize_rows, cases=lambda: _cases((False,), (True,)))
def quantize_rows(x: Tensor, dtype: torch.dtype, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """(q (R, N), scale (R,)). Rows wider than MAX_WIDTH run the reference."""
    x, row, _ = _outputs(x, dtype, "row")
    rows, n = x.shape
    if not n or n > MAX_WIDTH or _too_large(x):
        return reference.quantize_rows(x, dtype, pow2)
    scale = x.new_empty(rows, dtype=torch.float32)
    config = ROWS.pick(rows, (n,), x)
    kernel = device("quantize").quantize_rows_kernel
    grid = (cdiv(rows, config["BLOCK_R"]),)
    launch(
        kernel, grid, x, row, scale, rows, n, x.stride(0), LIMIT=_limit(dtype), POW2=pow2, **config
    )
    return row, scale


@fp8_op(
    twin=reference.quantize_blocks,
    cases=lambda: _cases(
        *((block, layout, False) for block in (1, 128) for layout in LAYOUTS), (1, "row", True)
    ),
)
def quantize_blocks(
    x: Tensor, dtype: torch.dtype, block_rows: int, layout: str = "row", pow2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rowwise (R, N), columnwise (N, R), their scales); block_rows is 1 (vectors of 128) or 128
    (squares).
    """
    require(block_rows in (1, 128), f"block_rows is {block_rows}, expected 1 or 128.")
    x, row, col = _outputs(x, dtype, layout)
    if _too_large(x):
        return reference.quantize_blocks(x, dtype, block_rows, layout, pow2)
    rows, n = x.shape
    shapes = (
        ((cdiv(n, 128), rows), (cdiv(rows, 128), n))
        if block_rows == 1
        else ((cdiv(rows, 128), cdiv(n, 128)),) * 2
    )
    row_scale = x.new_empty(shapes[0] if layout != "col" else 0, dtype=torch.float32)
    col_scale = x.new_empty(
        (shapes[1] if block_rows == 1 else shapes[1][::-1]) if layout != "row" else 0,
        dtype=torch.float32,
    )
    form = {"LIMIT": _limit(dtype), "POW2": pow2}
    kernels = device("quantize")
    together = _together(rows, layout) if block_rows == 128 else layout == "both"
    if layout != "col" and not together:
        space, kernel = (
            (VECTORS, kernels.quantize_vectors_kernel)
            if block_rows == 1
            else (SQUARES, kernels.quantize_squares_kernel)
        )
        config = space.pick(rows, (n,), x)
        launch(
            kernel, tiles.tile_grid(rows, n, config),
            x, row, row_scale, rows, n, x.stride(0), **form, **config,
        )  # fmt: skip
    if layout != "row":
        space = COLUMN_BLOCKS if block_rows == 1 else COLUMN_SQUARES
        space = BLOCKS_BOTH if together else space
        config = space.pick(rows, (n,), x)
        launch(
            device("quantize_columns").quantize_blocks_kernel, tiles.tile_grid(rows, n, config),
            x, row, col, row_scale, col_scale, rows, n, x.stride(0), **form,
            SQUARE=block_rows == 128, ROW=together, ALIGN=_align(rows), **config,
        )  # fmt: skip
    return row, col, row_scale, col_scale


@fp8_op(twin=reference.quantize_columns, nbytes=_column_bytes, cases=lambda: _cases((False,)))
def quantize_columns(x: Tensor, dtype: torch.dtype, pow2: bool = False) -> tuple[Tensor, Tensor]:
    """(q (N, R), the transpose of x quantized with one scale a column of x, scale (N,))."""
    x, _, col = _outputs(x, dtype, "col")
    rows, n = x.shape
    if not x.numel() or _too_large(x):
        return reference.quantize_columns(x, dtype, pow2)
    scale = x.new_empty(n, dtype=torch.float32)
    config = dict(COLUMN_AMAX.pick(rows, (n,), x))
    blocks = cdiv(n, config["BLOCK_N"])
    splits, _ = tiles.row_splits(rows, blocks, config, x)
    partial = x.new_empty(splits, n, dtype=torch.float32)
    launch(
        device("quantize").column_amax_kernel, (blocks, splits),
        x, partial, rows, n, x.stride(0), **chain(x.device)[0], **config,
    )  # fmt: skip
    inv = _scales(partial, scale, torch.empty_like(scale), splits, n, dtype, pow2)
    _columns(x, inv, scale, col, one=False)
    return col, scale


@fp8_op(twin=reference.quantize_group_blocks, cases=_group_cases)
def quantize_group_blocks(
    x: Tensor, offs: Tensor, dtype: torch.dtype, pow2: bool = False
) -> tuple[Tensor, Tensor]:
    """(q (N, (R // 128 + E) * 128), scale (R // 128 + E, N)): columnwise vectors of 128 rows that begin anew in each
    group, as a weight gradient reads them.

    Columns of group g begin at (offs[g-1] // 128 + g) * 128: a box of 128 tokens never reads those of the next group,
    and no look at the counts is taken. Columns of no row, padding rows among them, are zeros, so q is an operand of
    groups that end at ``column_offs(offs)``; scales that nothing uses are those of zeros.
    """
    x = _operand(x, dtype)
    rows, n = x.shape
    require(offs.dim() == 1 and len(offs) > 0, f"offs is {tuple(offs.shape)}, expected (E,).")
    if _too_large(x) or loses_columns(x):
        return reference.quantize_group_blocks(x, offs, dtype, pow2)
    blocks = rows // 128 + len(offs)
    col = x.new_empty(n, blocks * 128, dtype=dtype)
    scale = x.new_empty(blocks, n, dtype=torch.float32)
    config = GROUP_BLOCKS.pick(rows, (n,), x)
    launch(
        device("quantize_columns").quantize_group_blocks_kernel, (blocks * cdiv(n, config["BLOCK_N"]),),
        x, offs.contiguous(), col, scale, rows, n, len(offs), x.stride(0), LIMIT=_limit(dtype),
        POW2=pow2, BLOCK_E=tiles.pow2(len(offs), least=32), **overlap(x.device), **config,
    )  # fmt: skip
    return col, scale


def _scales(
    partial: Tensor,
    scale: Tensor,
    amax: Tensor,
    splits: int,
    n: int,
    dtype: torch.dtype,
    pow2: bool,
) -> Tensor:
    """Stores scale and amax (n,) of the partial amaxes (splits, n) and gives the inverse scales."""
    inv = torch.empty_like(scale)
    block_n = tiles.pow2(n, most=32)
    launch(
        device("quantize").column_scale_kernel, (cdiv(n, block_n),),
        partial, inv, scale, amax, splits, n,
        LIMIT=_limit(dtype), POW2=pow2, **chain(inv.device)[1], BLOCK_S=128, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip
    return inv


def _columns(x: Tensor, inv: Tensor, row: Tensor, col: Tensor, one: bool) -> None:
    """The transpose of x in ``col``, with one inverse scale or one a column; with one, x in ``row``
    too unless it is empty.
    """
    rows, n = x.shape
    both = one and bool(row.numel())
    config = (TENSOR_BOTH if both else COLUMNS).pick(rows, (n,), x)
    launch(
        device("quantize_columns").quantize_columns_kernel, tiles.tile_grid(rows, n, config),
        x, inv, row, col, rows, n, x.stride(0),
        ONE=one, ROW=both, ALIGN=_align(rows), **chain(x.device)[1], **config,
    )  # fmt: skip


def _operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    require(x.dim() == 2, f"x is {tuple(x.shape)}, expected (R, N).")
    require(dtype in FORMATS, f"dtype is {dtype}, expected one of {', '.join(map(str, FORMATS))}.")
    return as_rows(x)


def _outputs(x: Tensor, dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    x = _operand(x, dtype)
    require(layout in LAYOUTS, f"layout is '{layout}', expected one of {', '.join(LAYOUTS)}.")
    row = x.new_empty(x.shape if layout != "col" else 0, dtype=dtype)
    col = x.new_empty(x.shape[::-1] if layout != "row" else 0, dtype=dtype)
    return x, row, col


def loses_columns(x: Tensor) -> bool:
    """Whether Triton's code would lose elements at the end of a group's columns, as that of 3.9 does on an H200.

    Torch makes them there, until it is known why.
    """
    return x.is_cuda and triton_release() == "3.9"


def _too_large(x: Tensor) -> bool:
    """Offsets within a tile are 32 bits."""
    return max(*x.shape, x.stride(0)) >= 1 << 24


def _align(rows: int) -> int:
    """What launches may know of the row count: 16 where that divides it, so that the transposed
    store can be wide.
    """
    return 16 if rows % 16 == 0 else 1


def _together(rows: int, layout: str) -> bool:
    """Whether one launch gives both layouts with the same scales. Not where columns are stored byte by
    byte: conversions of which bytes and words are stored are what ptxas gets wrong
    (``fuseops.kernels.aot.misread``).
    """
    return layout == "both" and _align(rows) > 1


def _limit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max
