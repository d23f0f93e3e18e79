"""How a grouped GEMM is launched.

Everything but addresses and row counts is decided once for a kind of call (shapes of the weight,
strides, dtypes, alignment, rows to a power of two) and kept as a `Plan`, which keeps its launches in
turn: a call makes the output and looks both up. What a caller gives as `check` raises for operands that
nothing can take, and returns the others as plans want them. It reads nothing that the key of the plan
does not hold, so operands of a known kind are not checked again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuseops.kernels import configs
from fuseops.kernels.grouped_paths import MM_SPACES, SWIGLU_SPACES, WGRAD_SPACES, swiglu_path
from fuseops.kernels.grouped_paths import mm_path as mm_path
from fuseops.kernels.grouped_paths import wgrad_path as wgrad_path
from fuseops.kernels.launch import Prepared, device, num_sms
from fuseops.kernels.permute import gather_rows
from fuseops.kernels.plans import (
    Again,
    Plan,
    kept,
    kind,
    misaligned,
    places,
    planned,
    rows_kind,
    way,
)
from fuseops.kernels.recorder import depends
from fuseops.kernels.tiles import cdiv, pow2

TILE_ROWS = (64, 128, 256)  # the row blocks a tile table knows

Check = Callable[..., tuple[Any, ...]]


def launch_tiles(offs: Tensor, rows: int, check: Check | None = None) -> Tensor:
    """The table of `group_tiles`."""
    groups, where = offs.numel(), offs.data_ptr()
    key = "tiles", offs.device, kind(offs), where % 16
    plan = planned.now.get(key)
    if plan is None:
        if check is not None:
            return launch_tiles(*check(offs, rows))
        plan = planned.now[key] = _tiles_plan(offs)
    tiles = offs.new_empty(table_size(rows, groups))
    plan((where, tiles.data_ptr(), rows), offs, tiles, rows, groups)
    return tiles


def _tiles_plan(offs: Tensor) -> Plan:
    kernel, block = device("grouped_mm").group_tiles_kernel, pow2(len(offs))
    prepared = Prepared(kernel, not misaligned(offs), BLOCK_E=block, num_warps=4)
    return Plan("", lambda *operands: prepared((len(offs),), *operands))


def launch_mm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offs: Tensor,
    tiles: Tensor,
    index: Tensor | None,
    y: Tensor | None = None,
    check: Check | None = None,
) -> Tensor:
    """The output of `grouped_mm`, in y if given."""
    rows = x.shape[0] if index is None else index.numel()
    where = places(x, weight, bias, offs, tiles, index, y)
    key = (
        "mm", x.device, x.dtype, x.shape[-1], x.stride(), kind(weight), kind(bias), kind(offs),
        tiles.dtype, tiles.shape[0] - table_size(rows, offs.numel()), way(index), rows_kind(rows),
        where[0], precision(x), None if y is None else (*way(y), y.shape[1:], y.shape[0] - rows),
    )  # fmt: skip
    plan = planned.now.get(key)
    if plan is None:
        if check is not None:
            return launch_mm(*check(x, weight, bias, offs, tiles, index, y))
        if not rows or not weight.shape[1]:
            return x.new_empty(rows, weight.shape[1]) if y is None else y
        plan = planned.now[key] = _mm_plan(x, weight, bias, offs, tiles, index, y)
    if index is not None and plan.path != "gather":
        copied = gather_rows.launcher(x, index, offs)
        return launch_mm(copied, weight, bias, offs, tiles, None, y)
    if y is None:
        y = x.new_empty(rows, weight.shape[1])
    plan((*where, y.data_ptr(), rows), x, weight, bias, offs, tiles, index, y, None, None)
    return y


def launch_swiglu(
    x: Tensor,
    weight: Tensor,
    probs: Tensor | None,
    offs: Tensor,
    tiles: Tensor,
    index: Tensor | None,
    need_h: bool,
) -> tuple[Tensor, Tensor]:
    """The outputs of `grouped_swiglu` for operands that `swiglu_path` has a path for."""
    rows, n = x.shape[0] if index is None else index.numel(), weight.shape[1]
    where = places(x, weight, probs, offs, tiles, index)
    key = (
        "swiglu", x.device, x.dtype, x.shape[-1], x.stride(), kind(weight), probs is None, kind(offs),
        way(index), rows_kind(rows), need_h, where[0],
    )  # fmt: skip
    plan = planned.now.get(key)
    if plan is None:
        plan = planned.now[key] = _swiglu_plan(x, weight, offs, tiles, probs, index, need_h)
    h, a = x.new_empty(rows if need_h else 0, n), x.new_empty(rows, n // 2)
    y = h if need_h else a
    where = *where, y.data_ptr(), a.data_ptr(), rows
    plan(where, x, weight, None, offs, tiles, index, y, a, probs)
    return h, a


def _swiglu_plan(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    tiles: Tensor,
    probs: Tensor | None,
    index: Tensor | None,
    need_h: bool,
) -> Plan:
    path = swiglu_path(x, weight, index)
    rows, (groups, n, k) = (x if index is None else index).shape[0], weight.shape
    config = SWIGLU_SPACES[path].pick(rows, (groups, n, k), x)
    aligned = not misaligned(x, weight, probs, offs, tiles, index)
    return ring_plan(
        path, config, x, weight, aligned, SWIGLU=True, HAS_PROBS=probs is not None, KEEPS=need_h
    )


def _mm_plan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offs: Tensor,
    tiles: Tensor,
    index: Tensor | None,
    y: Tensor | None,
) -> Plan:
    path = "pointer" if misaligned(y) else mm_path(x, weight, bias, index)
    rows, (groups, n, k) = (x if index is None else index).shape[0], weight.shape
    config = MM_SPACES[path].pick(rows, (groups, n, k), x)
    aligned = not misaligned(x, weight, bias, offs, tiles, index, y)
    if path in ("gather", "pingpong"):
        return ring_plan(path, config, x, weight, aligned, HAS_BIAS=bias is not None)
    return _triton_plan(path, config, x, weight, aligned, HAS_BIAS=bias is not None)


def _grid(
    config: configs.Config, per_sm: int, x: Tensor, weight: Tensor
) -> Callable[[int], tuple[tuple[int], tuple[int, ...]]]:
    """(grid, sizes that the kernels take) of a number of rows."""
    (groups, n, k), stride, block_m = weight.shape, x.stride(0), config["BLOCK_M"]
    num_n, most = cdiv(n, config["BLOCK_N"]), per_sm * num_sms(x.device)

    def sizes(rows: int) -> tuple[tuple[int], tuple[int, ...]]:
        programs = min(most, (rows // block_m + groups) * num_n)
        return (programs,), (first_entry(rows, groups, block_m), rows, groups, n, k, stride)

    return sizes


def ring_plan(
    path: str, config: configs.Config, x: Tensor, weight: Tensor, aligned: bool, **hooks: bool
) -> Plan:
    """Of the Gluon kernel, with the hooks of its epilogue."""
    module, transposed = device("grouped_pingpong"), weight.stride(2) != 1
    hooks = {"HAS_BIAS": False, "SWIGLU": False, "HAS_PROBS": False, "KEEPS": True, **hooks}
    config = {"SLOTS": 0, "PART": config["BLOCK_M"] // (1 + config["COOPERATIVE"]), **config}
    part = config.pop("PART")
    prepared = Prepared(
        module.grouped_mm_pingpong_kernel, aligned, GATHER=path == "gather", TRANSPOSED=transposed,
        **hooks, **config, num_warps=4, maxnreg=168,
    )  # fmt: skip
    block_m, block_n, stride_x = config["BLOCK_M"], config["BLOCK_N"], x.stride(0)
    sizes, (groups, n, k) = _grid(config, 1, x, weight), weight.shape
    inner = n if transposed else k
    w_shape = groups * n * k // inner, inner
    w_block = [64 if transposed else block_n // (1 + hooks["SWIGLU"]), 64]
    y_block = [part, 64]
    x_of = kept(lambda x: module.Descriptor(x, x.shape, (stride_x, 1), [block_m, 64]))
    w_of = kept(lambda w: module.Descriptor(w, w_shape, (inner, 1), w_block))
    y_of = kept(lambda y: module.Descriptor(y, y.shape, y.stride(), y_block))
    h_of = kept(lambda h: module.Descriptor(h, h.shape, h.stride(), y_block))

    def run(
        x: Any,
        weight: Any,
        bias: Any,
        offs: Any,
        tiles: Any,
        index: Any,
        y: Any,
        act: Any,
        probs: Any,
        h: Any = None,
        sums: Any = None,
    ) -> Again | None:
        grid, numbers = sizes(y.shape[0])
        left, index = (x_of(x), offs) if index is None else (x, index)
        bias, probs, out = (y if bias is None else bias), (y if probs is None else probs), y_of(y)
        act = y if act is None else act
        hidden, sums = (out if h is None else h_of(h)), (probs if sums is None else sums)
        return prepared(
            grid, y, left, index, w_of(weight), out, bias, act, probs, hidden, sums,
            offs, tiles, *numbers,
        )  # fmt: skip

    return Plan(path, run, cdiv(n, block_n))


def _triton_plan(
    path: str, config: configs.Config, x: Tensor, weight: Tensor, aligned: bool, **hooks: bool
) -> Plan:
    """Of the Triton kernel, with descriptors or pointers."""
    module, transposed = device("grouped_mm"), weight.stride(2) != 1
    config, sizes = dict(config), _grid(config, config["PER_SM"], x, weight)
    del config["PER_SM"]
    prepared = Prepared(
        module.grouped_mm_kernel, aligned, **hooks, TRANSPOSED=transposed, TMA=path == "tma",
        PRECISION=precision(x), **config,
    )  # fmt: skip
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    w_strides, w_block = list(weight.stride()), [1, block_n, block_k]
    if transposed:
        w_block = [1, block_k, block_n]

    def run(
        x: Any,
        weight: Any,
        bias: Any,
        offs: Any,
        tiles: Any,
        index: Any,
        y: Any,
        act: Any,
        probs: Any,
    ) -> Again | None:
        grid, numbers = sizes(y.shape[0])
        operands = (x, weight, y)
        if path == "tma":
            operands = (
                module.describe(x, [block_m, block_k]),
                module.describe(weight.transpose(1, 2) if transposed else weight, w_block),
                module.describe_ragged(y, [block_m, block_n // config["SUBTILES"]]),
            )
        bias = y if bias is None else bias
        return prepared(grid, y, *operands, bias, offs, tiles, *numbers, *w_strides)

    return Plan(path, run)


def launch_wgrad(
    dw: Tensor,
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    tiles: Tensor,
    accumulate: bool,
    dy_index: Tensor | None,
    x_index: Tensor | None,
    check: Check | None = None,
) -> Tensor:
    """dw, with the weight gradient written to it or, in float32, added."""
    if dy_index is not None and x_index is not None:
        x, x_index = gather_rows.launcher(x, x_index, offs), None
    rows = dy.shape[0] if dy_index is None else dy_index.numel()
    others = x.shape[0] if x_index is None else x_index.numel()
    index = x_index if dy_index is None else dy_index
    where = places(dw, dy, x, offs, tiles, index)
    key = (
        "wgrad", x.device, x.dtype, dy.dtype, dy.shape[-1], x.shape[-1], dy.stride(), x.stride(),
        kind(dw), kind(offs), tiles.dtype, tiles.shape[0] - table_size(rows, offs.numel()),
        rows - others, accumulate, way(dy_index), way(x_index), rows_kind(rows), where[0], precision(x),
    )  # fmt: skip
    plan = planned.now.get(key)
    if plan is None:
        if check is not None:
            return launch_wgrad(*check(dw, dy, x, offs, tiles, accumulate, dy_index, x_index))
        if not rows or not dw.numel():
            return dw if accumulate else dw.zero_()
        plan = _wgrad_plan(dw, dy, x, offs, tiles, accumulate, dy_index, x_index, rows)
        planned.now[key] = plan
    if index is not None and plan.path != "gather":
        dy = dy if dy_index is None else gather_rows.launcher(dy, dy_index, offs)
        x = x if x_index is None else gather_rows.launcher(x, x_index, offs)
        return launch_wgrad(dw, dy, x, offs, tiles, accumulate, None, None)
    plan((*where, rows), dw, dy, x, offs, tiles, index, rows)
    return dw


def _wgrad_plan(
    dw: Tensor,
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    tiles: Tensor,
    accumulate: bool,
    dy_index: Tensor | None,
    x_index: Tensor | None,
    rows: int,
) -> Plan:
    path = wgrad_path(dy, x, dy_index, x_index)
    n, k, groups = dy.shape[1], x.shape[1], len(offs)
    config = dict(WGRAD_SPACES[path].pick(rows, (groups, n, k), x))
    block_m, most = config["BLOCK_M"], config.pop("PER_SM", 1) * num_sms(x.device)
    aligned = not misaligned(dw, dy, x, offs, tiles, dy_index if x_index is None else x_index)
    strides = dy.stride(0), x.stride(0)

    if path in ("gather", "pingpong"):
        module = device("grouped_wgrad_pingpong")
        # the gathered operand is the left one; otherwise the wider one the right, whose tiles are wide,
        # but float32 is stored by pointers, which a transposed tile scatters
        narrow = n > k and dw.dtype != torch.float32
        swap = narrow if path == "pingpong" else x_index is not None
        prepared = Prepared(
            module.grouped_wgrad_pingpong_kernel, aligned, GATHER=path == "gather",
            TRANSPOSED=swap, ACCUMULATE=accumulate, **config, num_warps=4, maxnreg=168,
        )  # fmt: skip
        m, width = (k, n) if swap else (n, k)
        grid = (min(most, groups * cdiv(m, block_m) * cdiv(width, 256)),)
        a_of, b_of = kept(module.describe_rows), kept(module.describe_rows)
        dw_of = kept(module.describe_weight)
        by_pointer, numbers = dw.dtype == torch.float32, (groups, m, width, strides[swap])

        def run_rings(
            dw: Any, dy: Any, x: Any, offs: Any, tiles: Any, index: Any, rows: int
        ) -> Again | None:
            a, b = (x, dy) if swap else (dy, x)
            left, index = (a_of(a), offs) if index is None else (a, index)
            out = dw if by_pointer else dw_of(dw)
            return prepared(grid, dw, left, index, b_of(b), out, offs, tiles, rows, *numbers)

        return Plan(path, run_rings)

    module, block_n, block_k = device("grouped_mm"), config["BLOCK_N"], config["BLOCK_K"]
    prepared = Prepared(
        module.grouped_wgrad_kernel, aligned, ACCUMULATE=accumulate, TMA=path == "tma",
        PRECISION=precision(x), **config,
    )  # fmt: skip
    grid = (min(most, groups * cdiv(n, block_m) * cdiv(k, block_n)),)

    def run(dw: Any, dy: Any, x: Any, offs: Any, tiles: Any, index: Any, rows: int) -> Again | None:
        operands = (dy, x, dw)
        if path == "tma":
            operands = (
                module.describe_ragged(dy, [block_k, block_m]),
                module.describe_ragged(x, [block_k, block_n]),
                dw
                if accumulate
                else module.describe(dw, [1, block_m, block_n // config["SUBTILES"]]),
            )
        return prepared(grid, dw, *operands, offs, tiles, rows, groups, n, k, *strides)

    return Plan(path, run)


def table_size(rows: int, groups: int) -> int:
    """Length of a tile table."""
    return 3 + 4 * groups + rows // 64 + rows // 128 + rows // 256


def first_entry(rows: int, groups: int, block_m: int) -> int:
    """Where the entries of this row block begin in a tile table."""
    smaller = TILE_ROWS[: TILE_ROWS.index(block_m)]
    return 2 + groups + sum(rows // block + groups for block in smaller)


def count_place(rows: int, groups: int, block_m: int) -> int:
    """Where the number of row blocks of this size stands in a tile table."""
    last = TILE_ROWS[-1]
    return table_size(rows, groups) - 1 if block_m == last else TILE_ROWS.index(block_m)


def precision(like: Tensor) -> str:
    """What float32 operands are rounded to: `torch.backends.cuda.matmul.allow_tf32` decides."""
    if like.dtype == torch.float32:
        depends("a setting of torch")
    exact = like.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return "ieee" if exact else "tf32"
