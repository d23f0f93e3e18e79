"""Rows of tokens to rows of experts and back: scatter, gather, and the weighted combine.

Maths: scatter  y[pos[t, k]] = x[t];  gather  y[r] = x[index[r]], the same rows by another way;
    combine  y[t] = sum over k of x[pos[t, k]] * probs[pos[t, k]], or without probs the plain sum.
Scatter reads a token's row once and writes it K times; gather reads it K times, mostly from L2 where
the rows of each group are in order of their tokens. Backwards: of scatter and gather the plain combine; of the plain
combine scatter. Sums are float32 in the order of k: they repeat bit for bit.
Shapes: x (T, N) or (R, N), index (R,) int token of each row, pos (T, K) int row of each copy (its
inverse map, each row at most once), offs (E,) int32 row ends on the device, probs (R,) float32.
Layout: rows may be strided. Rows at or beyond offs[-1] are padding: written as zeros, never read.
A copy whose pos is negative or a padding row does not exist: nothing is written or added for it.
Values of one number a copy, such as probs, are rows with N = 1 of tokens with K = 1 (``values_of_copies``).
Hardware: sm_80 and later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops.kernels import tiles
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.groups import padding_mask
from fuseops.kernels.launch import device, launch
from fuseops.kernels.registry import Cases, floats, ints, kernel_op, on_meta, tensor_bytes
from fuseops.kernels.tiles import (
    as_rows,
    cdiv,
    check_shape,
    check_spec,
    pointers,
    pow2,
    require,
    upcast,
)


def _scatter_rows(x: Tensor, pos: Tensor, offs: Tensor, rows: int) -> Tensor:
    copies = x[:, None].expand(-1, pos.shape[1], -1)
    placed = x.new_zeros(rows + 1, x.shape[1])
    return placed.index_put((_row_of_copy(pos, offs, rows),), copies)[:rows]


def _gather_rows(x: Tensor, index: Tensor, offs: Tensor) -> Tensor:
    padding = padding_mask(offs, index.shape[0])[:, 0]
    return _padded(x)[index.masked_fill(padding, x.shape[0])]


def _combine_fwd(
    x: Tensor,
    pos: Tensor,
    offs: Tensor,
    probs: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    row = _row_of_copy(pos, offs, x.shape[0])
    terms = upcast(_padded(x)[row])
    terms = terms if probs is None else terms * upcast(_padded(probs))[row][:, :, None]
    return terms.sum(1).to(dtype or x.dtype)


def _values_of_copies(values: Tensor, pos: Tensor, offs: Tensor) -> Tensor:
    return _padded(values)[_row_of_copy(pos, offs, values.shape[0])]


def _row_of_copy(pos: Tensor, offs: Tensor, rows: int) -> Tensor:
    """Row of every copy, `rows` for a copy that has none.   pos (T, K) -> (T, K) int64"""
    kept = (pos >= 0) & (pos < offs[-1].clamp(max=rows))
    return torch.where(kept, pos.long(), rows)


def _padded(x: Tensor) -> Tensor:
    """x with a row of zeros behind its last."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


MAX_BLOCK_K = 16
"""How many of a token's K rows the kernels take at once: all of them, up to this many."""


def _candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """At most 16 elements a thread: every row has an address of its own."""
    n = pow2(dims[-1], most=1024 if itemsize == 4 else 2048)
    return [
        {"BLOCK_R": max(total // n, 1), "BLOCK_N": n, "num_warps": warps}
        for total, warps in ((2048, 4), (1024, 4), (4096, 8))
    ]


SCATTER = Space("scatter_rows", _candidates)


def _gather_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """One row, or room for a fourth more than the usual share of a group; few addresses a thread."""
    n = pow2(dims[-1], most=1024 if itemsize == 4 else 2048)
    most = max(2048 // n, 4)
    return [
        {"BLOCK_R": min(max(total // n, 1), most), "BLOCK_N": n, "num_warps": 4}
        for total in (4096, 8192, 2048)
    ]


GATHER = Space("gather_rows", _gather_candidates)
COMBINE = Space("combine_fwd", _candidates)

TOKENS, EXPERTS = 8192, 64


def _cases(what: str) -> Cases:
    sizes = [(torch.bfloat16, 2048, 8), (torch.bfloat16, 4096, 2), (torch.bfloat16, 100, 4)]
    # the last: probs
    sizes += [(torch.float16, 2048, 8), (torch.float32, 2048, 8), (torch.float32, 1, 1)]
    for dtype, n, k in sizes:
        rows = TOKENS * k
        tokens, routed = (on_meta(r, n, dtype=dtype) for r in (TOKENS, rows))
        pos = ints(TOKENS, k)
        index = on_meta(rows, dtype=torch.int64)
        offs = ints(EXPERTS)
        probs = floats(rows)
        if what == "scatter":
            yield tokens, pos, offs, rows
        elif what == "gather":
            yield tokens, index, offs
        elif what == "values":
            yield probs, pos, offs
        elif n == 1:
            yield routed, pos, offs
        else:
            yield routed, pos, offs, probs
            if (dtype, n) == (torch.bfloat16, 2048):
                yield routed, pos, offs
                yield routed, pos, offs, None, torch.float32


def _gather_bytes(x: Tensor, index: Tensor, offs: Tensor) -> int:
    """Each token is read once, though a gather reads it for each of its rows."""
    return tensor_bytes((x, index, offs)) + len(index) * x.shape[1] * x.element_size()


@kernel_op(twin=_scatter_rows, cases=lambda: _cases("scatter"))
def scatter_rows(x: Tensor, pos: Tensor, offs: Tensor, rows: int) -> Tensor:
    """y[pos[t, k]] = x[t], zeros at padding rows.   x (T, N) -> y (rows, N)"""
    x2, k = _checked(x), _check_pos(pos, len(x))
    _check_rest(offs, rows)
    n = x.shape[1]
    y = x.new_empty(rows, n)
    config = SCATTER.pick(len(x), (n,), x)
    blocks = max(cdiv(len(x), config["BLOCK_R"]), 1)
    launch(
        device("permute").scatter_rows_kernel, (blocks * cdiv(n, config["BLOCK_N"]),),
        x2, *pointers(x2, pos, offs), y,
        len(x), rows, n, len(offs), blocks, x2.stride(0), **_form(k), **config,
    )  # fmt: skip
    return y


@kernel_op(twin=_gather_rows, nbytes=_gather_bytes, cases=lambda: _cases("gather"))
def gather_rows(x: Tensor, index: Tensor, offs: Tensor) -> Tensor:
    """y[r] = x[index[r]], zeros at padding rows.   x (T, N), index (R,) -> y (R, N)"""
    x2 = _checked(x)
    check_spec({"index": index}, "index (R,)")
    _check_rest(offs, len(index))
    rows, n = len(index), x.shape[1]
    y = x.new_empty(rows, n)
    config = GATHER.pick(rows, (n,), x)
    block_r = config["BLOCK_R"]
    parts = cdiv(rows, len(offs) * (block_r - block_r // 4))
    launch(
        device("permute").gather_rows_kernel, (parts * len(offs) * cdiv(n, config["BLOCK_N"]),),
        x2, *pointers(x2, index, offs), y,
        rows, n, len(offs), parts, x2.stride(0), **config,
    )  # fmt: skip
    return y


@kernel_op(twin=_combine_fwd, cases=lambda: _cases("combine"))
def combine_fwd(
    x: Tensor, pos: Tensor, offs: Tensor, probs: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """y[t] = sum over k of x[pos[t, k]] (* probs[pos[t, k]]).   x (R, N), pos (T, K) -> y (T, N)

    dtype: of y, None for that of x.
    """
    x2, k = _checked(x), _check_pos(pos, None)
    _check_rest(offs, len(x))
    if probs is not None:
        check_shape("probs", probs, (len(x),))
        require(probs.dtype == torch.float32, f"probs is {probs.dtype}, expected torch.float32.")
    tokens, n = len(pos), x.shape[1]
    y = x.new_empty(tokens, n, dtype=dtype)
    config = COMBINE.pick(tokens, (n,), x)
    launch(
        device("permute").combine_fwd_kernel, tiles.tile_grid(tokens, n, config),
        x2, *pointers(x2, pos, offs, probs), y,
        tokens, len(x), n, len(offs), x2.stride(0), **_form(k), SCALED=probs is not None, **config,
    )  # fmt: skip
    return y


@kernel_op(twin=_values_of_copies, cases=lambda: _cases("values"))
def values_of_copies(values: Tensor, pos: Tensor, offs: Tensor) -> Tensor:
    """values[pos[t, k]], zero where there is no such copy.   values (R,), pos (T, K) -> (T, K)"""
    check_spec({"values": values}, "values (R,)")
    _check_pos(pos, None)
    found = combine_fwd.launcher(values[:, None], pos.reshape(-1, 1), offs)
    return found.view(pos.shape)


def _checked(x: Tensor) -> Tensor:
    require(x.dim() == 2, f"x is {tuple(x.shape)}, expected two axes.")
    return as_rows(x)


def _form(k: int) -> dict[str, int]:
    """K, which is compiled into the kernels, and how many of the rows they take at once."""
    return {"K": k, "BLOCK_K": k if k <= MAX_BLOCK_K else MAX_BLOCK_K // 2}


def _check_pos(pos: Tensor, tokens: int | None) -> int:
    """K."""
    fits = pos.dim() == 2 and (tokens is None or len(pos) == tokens)
    require(fits, f"pos is {tuple(pos.shape)}, expected ({'T' if tokens is None else tokens}, K).")
    require(pos.shape[1] > 0, "K is 0, expected at least 1.")
    return pos.shape[1]


def _check_rest(offs: Tensor, rows: int) -> None:
    require(offs.dim() == 1 and len(offs) > 0, f"offs is {tuple(offs.shape)}, expected (E,).")
    require(0 <= rows < 1 << 31, f"there are {rows} rows, expected fewer than 2^31.")
