"""How a grouped GEMM is launched.

Everything but addresses and row counts is decided once for a kind of call (shapes of the weight,
strides, dtypes, alignment, rows to a power of two) and kept as a `Plan`: a call looks it up, makes
the output and the descriptors, and launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops.kernels import configs, grouped_paths
from fuseops.kernels.grouped_paths import MM_SPACES, SWIGLU_SPACES, WGRAD_SPACES, swiglu_path
from fuseops.kernels.grouped_paths import mm_path as mm_path
from fuseops.kernels.grouped_paths import wgrad_path as wgrad_path
from fuseops.kernels.launch import Prepared, device, num_sms, recorded
from fuseops.kernels.tiles import cdiv, pow2

MOST_DESCRIPTORS = 256  # of an operand of one kind of call
TILE_ROWS = (64, 128)  # the row blocks a tile table knows


class Plan(NamedTuple):
    """path, and what runs a call of this kind."""

    path: str
    run: Callable[..., None]


def plan_of(key: tuple[Any, ...], make: Callable[[], Plan]) -> Plan:
    """The plan of this kind of call, made anew while somebody watches or overrides configurations."""
    if recorded() or configs.disturbed() or grouped_paths.forced_path is not None:
        return make()
    plan = configs.PLANS.get(key)
    if plan is None:
        plan = configs.PLANS[key] = make()
    return plan


def launch_mm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offs: Tensor,
    tiles: Tensor,
    index: Tensor | None,
    copy: Callable[..., Tensor],
) -> Tensor:
    """The output of `grouped_mm`; x has contiguous columns, weight a contiguous axis 1 or 2.

    copy: makes the rows of x by index where no kernel gathers.
    """
    rows = (x if index is None else index).shape[0]
    key = (
        "mm", x.dtype, x.device, x.shape[1], x.stride(), weight.shape, weight.stride(),
        (rows - 1).bit_length(), bias is None,
        None if index is None else index.dtype,
        _misaligned(x, weight, bias, offs, tiles, index), precision(x),
    )  # fmt: skip
    plan = plan_of(key, lambda: _mm_plan(x, weight, bias, offs, tiles, index))
    if index is not None and plan.path != "gather":
        return launch_mm(copy(x, index, offs), weight, bias, offs, tiles, None, copy)
    y = torch.empty(rows, weight.shape[1], dtype=x.dtype, device=x.device)
    plan.run(x, weight, bias, offs, tiles, index, y, None, None)
    return y


def launch_tiles(offs: Tensor, tiles: Tensor, rows: int) -> None:
    """Fill the table of `group_tiles`."""
    groups = offs.shape[0]
    plan_of(("tiles", offs.device, groups, _misaligned(offs)), lambda: _tiles_plan(offs)).run(
        (groups,), offs, tiles, rows, groups
    )


def _tiles_plan(offs: Tensor) -> Plan:
    kernel, block = device("grouped_mm").group_tiles_kernel, pow2(len(offs))
    return Plan("", Prepared(kernel, not _misaligned(offs), BLOCK_E=block, num_warps=4))


def launch_swiglu(
    x: Tensor,
    weight: Tensor,
    offs: Tensor,
    tiles: Tensor,
    probs: Tensor | None,
    index: Tensor | None,
    need_h: bool,
) -> tuple[Tensor, Tensor]:
    """The outputs of `grouped_swiglu` for operands that `swiglu_path` has a path for."""
    rows, n = (x if index is None else index).shape[0], weight.shape[1]
    key = (
        "swiglu", x.dtype, x.device, x.shape[1], x.stride(), weight.shape, (rows - 1).bit_length(),
        probs is None, None if index is None else index.dtype, need_h,
        _misaligned(x, weight, probs, offs, tiles, index),
    )  # fmt: skip
    plan = plan_of(key, lambda: _swiglu_plan(x, weight, offs, tiles, probs, index, need_h))
    h = torch.empty(rows if need_h else 0, n, dtype=x.dtype, device=x.device)
    a = torch.empty(rows, n // 2, dtype=x.dtype, device=x.device)
    plan.run(x, weight, None, offs, tiles, index, h if need_h else a, a, probs)
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
    aligned = not _misaligned(x, weight, probs, offs, tiles, index)
    return _ring_plan(
        path, config, x, weight, aligned, SWIGLU=True, HAS_PROBS=probs is not None, KEEPS=need_h
    )


def _mm_plan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offs: Tensor,
    tiles: Tensor,
    index: Tensor | None,
) -> Plan:
    path = mm_path(x, weight, bias, index)
    rows, (groups, n, k) = (x if index is None else index).shape[0], weight.shape
    config = MM_SPACES[path].pick(rows, (groups, n, k), x)
    aligned = not _misaligned(x, weight, bias, offs, tiles, index)
    if path in ("gather", "pingpong"):
        return _ring_plan(path, config, x, weight, aligned, HAS_BIAS=bias is not None)
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


def _ring_plan(
    path: str, config: configs.Config, x: Tensor, weight: Tensor, aligned: bool, **hooks: bool
) -> Plan:
    """Of the Gluon kernel, with the hooks of its epilogue."""
    module, transposed = device("grouped_pingpong"), weight.stride(2) != 1
    hooks = {"HAS_BIAS": False, "SWIGLU": False, "HAS_PROBS": False, "KEEPS": True, **hooks}
    prepared = Prepared(
        module.grouped_mm_pingpong_kernel, aligned, GATHER=path == "gather", TRANSPOSED=transposed,
        **hooks, **config, num_warps=4, maxnreg=168,
    )  # fmt: skip
    block_m, block_n, stride_x = config["BLOCK_M"], config["BLOCK_N"], x.stride(0)
    sizes, (groups, n, k) = _grid(config, 1, x, weight), weight.shape
    inner = n if transposed else k
    w_shape = groups * n * k // inner, inner
    w_block = [64 if transposed else block_n // (1 + hooks["SWIGLU"]), 64]
    y_block = [block_m // (1 + config["COOPERATIVE"]), 64]
    x_of = _kept(lambda x: module.Descriptor(x, x.shape, (stride_x, 1), [block_m, 64]))
    w_of = _kept(lambda w: module.Descriptor(w, w_shape, (inner, 1), w_block))
    y_of = _kept(lambda y: module.Descriptor(y, y.shape, y.stride(), y_block))
    act_of = _kept(lambda a: module.Descriptor(a, a.shape, a.stride(), y_block))

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
    ) -> None:
        grid, numbers = sizes(y.shape[0])
        left, index = (x_of(x), offs) if index is None else (x, index)
        bias, probs, out = (y if bias is None else bias), (y if probs is None else probs), y_of(y)
        act, act_out = (y, out) if act is None else (act, act_of(act))
        prepared(
            grid,
            y,
            left,
            index,
            w_of(weight),
            out,
            bias,
            act,
            act_out,
            probs,
            offs,
            tiles,
            *numbers,
        )

    return Plan(path, run)


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
    ) -> None:
        grid, numbers = sizes(y.shape[0])
        operands = (x, weight, y)
        if path == "tma":
            operands = (
                module.describe(x, [block_m, block_k]),
                module.describe(weight.transpose(1, 2) if transposed else weight, w_block),
                module.describe_ragged(y, [block_m, block_n // config["SUBTILES"]]),
            )
        bias = y if bias is None else bias
        prepared(grid, y, *operands, bias, offs, tiles, *numbers, *w_strides)

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
    copy: Callable[..., Tensor],
) -> None:
    """Write or, in float32, add the weight gradient; dy and x have contiguous columns.

    copy: makes the rows by index where no kernel gathers them.
    """
    if dy_index is not None and x_index is not None:
        x, x_index = copy(x, x_index, offs), None
    index = x_index if dy_index is None else dy_index
    rows = (dy if dy_index is None else dy_index).shape[0]
    key = (
        "wgrad", x.dtype, dw.dtype, x.device, offs.shape[0], dy.shape[1], x.shape[1], dy.stride(),
        x.stride(), (rows - 1).bit_length(), accumulate, dy_index is None, x_index is None,
        None if index is None else index.dtype,
        _misaligned(dw, dy, x, offs, tiles, index), precision(x),
    )  # fmt: skip
    plan = plan_of(
        key, lambda: _wgrad_plan(dw, dy, x, offs, tiles, accumulate, dy_index, x_index, rows)
    )
    if index is not None and plan.path != "gather":
        dy = dy if dy_index is None else copy(dy, dy_index, offs)
        x = x if x_index is None else copy(x, x_index, offs)
        launch_wgrad(dw, dy, x, offs, tiles, accumulate, None, None, copy)
    else:
        plan.run(dw, dy, x, offs, tiles, index, rows)


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
    aligned = not _misaligned(dw, dy, x, offs, tiles, dy_index if x_index is None else x_index)
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
        a_of, b_of = _kept(module.describe_rows), _kept(module.describe_rows)
        dw_of = _kept(module.describe_weight)
        by_pointer, numbers = dw.dtype == torch.float32, (groups, m, width, strides[swap])

        def run_rings(
            dw: Any, dy: Any, x: Any, offs: Any, tiles: Any, index: Any, rows: int
        ) -> None:
            a, b = (x, dy) if swap else (dy, x)
            left, index = (a_of(a), offs) if index is None else (a, index)
            out = dw if by_pointer else dw_of(dw)
            prepared(grid, dw, left, index, b_of(b), out, offs, tiles, rows, *numbers)

        return Plan(path, run_rings)

    module, block_n, block_k = device("grouped_mm"), config["BLOCK_N"], config["BLOCK_K"]
    prepared = Prepared(
        module.grouped_wgrad_kernel, aligned, ACCUMULATE=accumulate, TMA=path == "tma",
        PRECISION=precision(x), **config,
    )  # fmt: skip
    grid = (min(most, groups * cdiv(n, block_m) * cdiv(k, block_n)),)

    def run(dw: Any, dy: Any, x: Any, offs: Any, tiles: Any, index: Any, rows: int) -> None:
        operands = (dy, x, dw)
        if path == "tma":
            operands = (
                module.describe_ragged(dy, [block_k, block_m]),
                module.describe_ragged(x, [block_k, block_n]),
                dw
                if accumulate
                else module.describe(dw, [1, block_m, block_n // config["SUBTILES"]]),
            )
        prepared(grid, dw, *operands, offs, tiles, rows, groups, n, k, *strides)

    return Plan(path, run)


def _kept(describe: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """`describe` that remembers the descriptors of the last addresses and row counts: weights stay
    where they are, and activations come back to where they were in the step before.
    """
    found: dict[tuple[int, int], Any] = {}

    def described(t: Tensor) -> Any:
        key = t.data_ptr(), t.shape[0]
        descriptor = found.get(key)
        if descriptor is None:
            if len(found) >= MOST_DESCRIPTORS:
                found.clear()
            descriptor = found[key] = describe(t)
        return descriptor

    return described


def _misaligned(*tensors: Tensor | None) -> bool:
    """Whether some address is no multiple of 16, which Triton compiles other code for."""
    bits = 0
    for t in tensors:
        bits |= 0 if t is None else t.data_ptr()
    return bits % 16 != 0


def table_size(rows: int, groups: int) -> int:
    """Length of a tile table."""
    return 2 + 3 * groups + rows // 64 + rows // 128


def first_entry(rows: int, groups: int, block_m: int) -> int:
    """Where the entries of this row block begin in a tile table."""
    return 2 + groups + (rows // 64 + groups) * TILE_ROWS.index(block_m)


def precision(like: Tensor) -> str:
    """What float32 operands are rounded to: `torch.backends.cuda.matmul.allow_tf32` decides."""
    exact = like.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return "ieee" if exact else "tf32"
