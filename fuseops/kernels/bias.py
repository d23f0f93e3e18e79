"""Bias, one vector or one a group, and its gradient.

Maths: y = x + bias;  grouped: y[r] = x[r] + bias[g(r)] * probs[r].
dbias[g] = sum of probs[r] * dy[r] over the rows of g, dprobs[r] = sum of dy[r] * bias[g(r)].
Sums are float32 in two stages of fixed order, so they repeat bit for bit.
Shapes: x and dy (R, N), bias (N,) or (E, N), offs (E,) int32 row ends on the device, probs (R,).
Layout: rows may be strided. Rows at or beyond offs[-1] are padding: zeros in y and dprobs, nothing
taken from dy.
Hardware: sm_80 and later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops.kernels import tiles
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.groups import group_of_row, num_groups
from fuseops.kernels.launch import device, launch, pdl_chain, pdl_overlap
from fuseops.kernels.registry import Cases, floats, ints, kernel_op, on_meta
from fuseops.kernels.tiles import (
    accumulator,
    as_rows,
    cdiv,
    check_shape,
    check_spec,
    pointers,
    pow2,
    upcast,
)


def _bias_fwd(x: Tensor, bias: Tensor) -> Tensor:
    return (upcast(x) + upcast(bias)).to(x.dtype)


def _bias_bwd(dy: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    rows = dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])
    given = rows.dtype
    if given is torch.float32 and (dtype is given or dtype is None):
        return torch.sum(rows, 0)
    total = rows.sum(0, dtype=accumulator(dy.dtype))
    return total if dtype is None else total.to(dtype)


def _grouped_bias_fwd(x: Tensor, bias: Tensor, offs: Tensor, probs: Tensor | None = None) -> Tensor:
    group, valid = _group_of_row(offs, x.shape[0])
    shift = upcast(bias)[group]
    shift = shift if probs is None else shift * probs[:, None].to(shift.dtype)
    return (upcast(x) + shift).masked_fill(~valid, 0.0).to(x.dtype)


def _grouped_bias_bwd(
    dy: Tensor, offs: Tensor, probs: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    group, valid = _group_of_row(offs, dy.shape[0])
    grad = upcast(dy).masked_fill(~valid, 0.0)
    scaled = grad
    if probs is not None:
        scaled = grad * probs[:, None].masked_fill(~valid, 0.0).to(grad.dtype)
    dbias = grad.new_zeros(offs.shape[0], dy.shape[1]).index_add(0, group, scaled)
    return dbias, grad.new_empty(0) if bias is None else (grad * upcast(bias)[group]).sum(1)


def _group_of_row(offs: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(group of every row, the last one for padding; (R, 1) whether it has one)."""
    group = group_of_row(offs, rows)
    return group.clamp(max=offs.shape[0] - 1), (group < offs.shape[0]).unsqueeze(-1)


SUM_TILE = 2048  # partial sums that a program of the second stage adds at a time
CHUNK = 128  # rows of one group that a program of its first stage adds, at most


def _bwd_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Small programs that read one line of memory of many rows, or larger ones that load ahead; for few
    rows tall tiles of half a line, so many that one program a block of columns sums all rows.
    """
    n = dims[-1]
    return [
        tiles.column_tile(n, itemsize, 4096, 1, 16, 2, most=128),
        tiles.column_tile(n, itemsize, 8192, 4, 4, 4),
        tiles.column_tile(n, itemsize, 16384, 1, 1, 8, most=64),
        tiles.column_tile(n, itemsize, 4096, 1, 1, 2, most=64),
    ]


def _bwd_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    many, _, few, fewest = _bwd_candidates(dims, itemsize)
    return fewest if rows <= 64 else few if rows <= 4096 else many


def _grouped_bwd_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """One line of memory of a row, and one warp, so that many programs wait for memory at once."""
    return [{"BLOCK_R": 32, "BLOCK_N": pow2(dims[-1], most=128 // itemsize), "num_warps": 1}]


FWD = Space("bias_fwd", tiles.wide_candidates, tiles.wide_default(1))
GROUPED_FWD = Space("grouped_bias_fwd", tiles.wide_candidates, tiles.wide_default(0))
BWD = Space("bias_bwd", _bwd_candidates, _bwd_default)
GROUPED_BWD = Space("grouped_bias_bwd", _grouped_bwd_candidates)


def _cases(*, grouped: bool, backward: bool) -> Cases:
    for dtype in tiles.FLOATS:
        for n in (2048, 100):
            x, bias = on_meta(8192, n, dtype=dtype), on_meta(*(64,) * grouped, n, dtype=dtype)
            offs, probs = ints(64), floats(8192)
            if not grouped:
                yield (x,) if backward else (x, bias)
            elif not backward:
                yield from ((x, bias, offs), (x, bias, offs, probs))
            else:
                yield from ((x, offs), (x, offs, probs), (x, offs, probs, bias))


@kernel_op(twin=_bias_fwd, fuses=True, cases=lambda: _cases(grouped=False, backward=False))
def bias_fwd(x: Tensor, bias: Tensor) -> Tensor:
    """x + bias."""
    check_shape("bias", bias, x.shape[-1:])
    return _forward(x, bias.contiguous(), None, None)


@kernel_op(twin=_grouped_bias_fwd, cases=lambda: _cases(grouped=True, backward=False))
def grouped_bias_fwd(x: Tensor, bias: Tensor, offs: Tensor, probs: Tensor | None = None) -> Tensor:
    """x + bias[group] (* probs); padding rows become zero."""
    check_spec({"x": x}, "x (R, N)")
    check_shape("bias", bias, (len(offs), x.shape[1]))
    return _forward(x, bias.contiguous(), offs.contiguous(), probs)


@kernel_op(twin=_bias_bwd, fuses=True, cases=lambda: _cases(grouped=False, backward=True))
def bias_bwd(dy: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """dbias, float32 or rounded once to `dtype`: dy summed over all axes but the last."""
    dy, dtype = as_rows(dy), dtype or torch.float32
    rows, n = dy.shape
    config = dict(BWD.pick(rows, (n,), dy))
    blocks = cdiv(n, config["BLOCK_N"])
    programs = tiles.row_programs(rows, blocks, config, dy)
    whole = programs == 1  # its sums are those of all rows
    partial = torch.empty(programs, n, dtype=dtype if whole else torch.float32, device=dy.device)
    launch(
        device("bias").bias_bwd_kernel, (blocks, programs), dy, partial, rows, n, dy.stride(0),
        **pdl_chain(dy.device)[0], AT_ONCE=tiles.rows_at_once(config, dy.itemsize), **config,
    )  # fmt: skip
    return sum_partials(partial, dtype)


@kernel_op(twin=_grouped_bias_bwd, cases=lambda: _cases(grouped=True, backward=True))
def grouped_bias_bwd(
    dy: Tensor, offs: Tensor, probs: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(dbias (E, N) float32, dprobs (R,) float32 if bias is given, else empty)."""
    check_spec({"dy": dy}, "dy (R, N)")
    dy, offs = as_rows(dy), offs.contiguous()
    (rows, n), groups = dy.shape, len(offs)
    config = GROUPED_BWD.pick(rows, (n,), dy)
    blocks, chunks = cdiv(n, config["BLOCK_N"]), rows // CHUNK + groups
    partial = torch.empty(chunks, n, dtype=torch.float32, device=dy.device)
    y = partial.new_empty(groups, n)
    dots = partial.new_empty(blocks, rows if bias is not None else 0)
    first, then = pdl_chain(dy.device)
    launch(
        device("bias").grouped_bias_bwd_kernel, (blocks * chunks,),
        dy, offs, row_factors(probs, dy), *pointers(dy, bias),
        partial, y, dots, rows, n, groups, dy.stride(0),
        SCALED=probs is not None, NEED_DPROBS=bias is not None, CHUNK=CHUNK, **first,
        BLOCK_E=pow2(groups, least=32), AT_ONCE=tiles.rows_at_once(config, dy.itemsize), **config,
    )  # fmt: skip
    dprobs = dots.new_empty(dots.shape[1])
    block_s = pow2(cdiv(4 * rows, CHUNK * groups), least=8, most=32)  # some groups are larger
    block_n = pow2(n, most=SUM_TILE // block_s)
    block_d = pow2(blocks, most=128)
    block_r = SUM_TILE // block_d
    launch(
        device("bias").group_sum_kernel,
        (groups * cdiv(n, block_n) + cdiv(len(dprobs), block_r),),
        partial, offs, y, dots, dprobs, n, groups, blocks, rows, CHUNK=CHUNK, **then,
        BLOCK_S=block_s, BLOCK_N=block_n, BLOCK_D=block_d, BLOCK_R=block_r, num_warps=2,
    )  # fmt: skip
    return y, dprobs


def sum_partials(
    partial: Tensor, dtype: torch.dtype = torch.float32, offs: Tensor | None = None
) -> Tensor:
    """(S, N) float32 partial sums -> (N,), in a fixed order.

    offs: the N columns are rows in groups; what lies at or beyond offs[-1] need not be written, and is zero.
    """
    return sum_all_partials(partial[None], dtype, offs)[0]


def sum_all_partials(
    partial: Tensor, dtype: torch.dtype, offs: Tensor | None = None
) -> list[Tensor]:
    """`sum_partials` of each of partial (0 to 2, S, N), in one launch."""
    count, splits, n = partial.shape
    if count == splits == 1 and partial.dtype == dtype and offs is None:
        return [partial[0, 0]]
    if not count:
        return []
    sums = [torch.empty(n, dtype=dtype, device=partial.device) for _ in range(count)]
    block_s = pow2(splits, least=8, most=256)
    block_n = pow2(n, most=SUM_TILE // block_s)
    launch(
        device("reduce").column_sums_kernel, (cdiv(n, block_n), count),
        partial, *pointers(partial, offs), sums[0], sums[-1], splits, n, num_groups(offs),
        GROUPS=offs is not None, BLOCK_S=block_s, BLOCK_N=block_n, **pdl_overlap(partial.device), num_warps=4,
    )  # fmt: skip
    return sums


def row_factors(probs: Tensor | None, x: Tensor) -> Tensor:
    """The factors of the rows of x for a kernel; without probs any tensor."""
    if probs is None:
        return x
    check_shape("probs", probs, x.shape[:-1])
    return probs.to(torch.float32).contiguous()


def _forward(x: Tensor, bias: Tensor, offs: Tensor | None, probs: Tensor | None) -> Tensor:
    x2, n = as_rows(x), x.shape[-1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    groups = num_groups(offs) or 1
    config = (FWD if offs is None else GROUPED_FWD).pick(len(x2), (n,), x)
    launch(
        device("bias").bias_fwd_kernel, tiles.tile_grid(len(x2), n, config),
        x2, bias, x if offs is None else offs, row_factors(probs, x), y,
        len(x2), n, groups, x2.stride(0),
        GROUPED=offs is not None, SCALED=probs is not None, BLOCK_E=pow2(groups),
        **pdl_overlap(x.device), **config,
    )  # fmt: skip
    return y
