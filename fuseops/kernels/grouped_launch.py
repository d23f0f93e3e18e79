"""How a grouped GEMM is launched: which kernel can take the operands, with which tiles.

Paths, best first:
* pingpong: Gluon, sm_90, bf16 and fp16, a packed weight, K a multiple of 64, a tested Triton;
* tma: Triton with tensor descriptors, sm_90 and sm_100, bf16 and fp16, rows of a multiple of 16 bytes;
* pointer: Triton, everything else.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fuseops.kernels.configs import Config, Space, versions
from fuseops.kernels.launch import current_arch, device, launch, num_sms
from fuseops.kernels.registry import INTERPRET
from fuseops.kernels.tiles import cdiv

TMA_ARCHS = (90, 100)
GLUON_TESTED = ("3.6", "3.8")
TILE_ROWS = (64, 128)  # the row blocks a tile table knows


def _tile(m: int, n: int, k: int, group: int, parts: int, per_sm: int, warps: int) -> Config:
    return {
        **{"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": group, "SUBTILES": parts},
        **{"PER_SM": per_sm, "num_warps": warps, "num_stages": 3},
    }


WIDE = _tile(128, 256, 64, 8, 1, 1, 8)
TWO_AN_SM = _tile(128, 128, 64, 8, 2, 2, 4)  # one program stores while the other multiplies


def _tma_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    return [WIDE, TWO_AN_SM]


def _mm_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """Long products in wide tiles; where stores weigh more, or groups are small, two programs."""
    groups, _, k = dims
    return WIDE if k > 768 and rows >= 1024 * groups else TWO_AN_SM


def _wgrad_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    return [{**WIDE, "SUBTILES": 2}, TWO_AN_SM]


def _wgrad_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    return _wgrad_candidates(dims, itemsize)[rows < 2048 * dims[0]]


def _pointer_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Small tiles for float32, and for widths whose rows are not aligned: their loads take registers."""
    small = itemsize == 4 or any(size % 8 for size in dims[1:])
    return [_tile(64, 64, 32, 8, 1, 2, 4) if small else _tile(128, 128, 32, 8, 1, 1, 8)]


def _pointer_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    return _pointer_candidates(dims, itemsize)[0]


def _pingpong_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    return [
        {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 64, "GROUP": 8, "STAGES": stages}
        for m, n, stages in ((64, 256, 5), (128, 128, 6))
    ]


def _pingpong_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """Square tiles read less, which shows where K is so short that loads do not hide, and waste
    less at the edge of some N.
    """
    groups, n, k = dims
    short = k <= 768 and rows >= 1024 * groups
    return _pingpong_candidates(dims, itemsize)[short or 0 < n % 256 <= 128]


MM_PINGPONG = Space("grouped_mm_pingpong", _pingpong_candidates, _pingpong_default)
MM_TMA = Space("grouped_mm_tma", _tma_candidates, _mm_default)
MM_POINTER = Space("grouped_mm", _pointer_candidates, _pointer_default)
WGRAD_TMA = Space("grouped_wgrad_tma", _wgrad_candidates, _wgrad_default)
WGRAD_POINTER = Space("grouped_wgrad", _pointer_candidates, _pointer_default)
MM_SPACES = {"pingpong": MM_PINGPONG, "tma": MM_TMA, "pointer": MM_POINTER}


def mm_path(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str:
    """Which kernel multiplies these: "pingpong", "tma" or "pointer"."""
    if x.data_ptr() % 16 or weight.data_ptr() % 16:
        return "pointer"
    arch, size = current_arch(x.device), x.itemsize
    return _mm_path(arch, size, x.shape[1], x.stride(), weight.shape, weight.stride(), bias is None)


def wgrad_path(dy: Tensor, x: Tensor) -> str:
    """Which kernel takes the weight gradient of these: "tma" or "pointer"."""
    if dy.data_ptr() % 16 or x.data_ptr() % 16 or x.shape[1] * x.itemsize % 16:
        return "pointer"
    arch, size = current_arch(x.device), x.itemsize
    describable = _describable(arch, size, dy.stride()) and _describable(arch, size, x.stride())
    return "tma" if describable else "pointer"


@functools.lru_cache(maxsize=4096)
def _mm_path(
    arch: int,
    itemsize: int,
    k: int,
    x_strides: tuple[int, ...],
    w_shape: tuple[int, ...],
    w_strides: tuple[int, ...],
    plain: bool,
) -> str:
    groups, n, _ = w_shape
    described = _describable(arch, itemsize, x_strides) and _describable(arch, itemsize, w_strides)
    if not described or n * itemsize % 16:
        return "pointer"
    gluon = arch == 90 and not INTERPRET and _triton() in GLUON_TESTED
    packed = w_strides in ((n * k, k, 1), (n * k, 1, n))
    fits = k % 64 == 0 and groups * max(n, k) < 1 << 31
    return "pingpong" if gluon and packed and fits and plain else "tma"


@functools.lru_cache(maxsize=4096)
def _describable(arch: int, itemsize: int, strides: tuple[int, ...]) -> bool:
    """Whether TMA takes it: 16-bit, one contiguous axis, the others a multiple of 16 bytes apart."""
    others = [s for s in strides if s != 1]
    aligned = all(s > 0 and s % 8 == 0 for s in others)
    return arch in TMA_ARCHS and itemsize == 2 and aligned and len(others) == len(strides) - 1


def _triton() -> str:
    return ".".join(versions()["triton"].split(".")[:2])


def launch_mm(
    x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, tiles: Tensor
) -> Tensor:
    """The output of `grouped_mm`; x has contiguous columns, weight a contiguous axis 1 or 2."""
    (rows, k), (groups, n, _) = x.shape, weight.shape
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    path = mm_path(x, weight, bias)
    config = dict(MM_SPACES[path].pick(rows, (groups, n, k), x))
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    transposed, strides = weight.stride(2) != 1, (x.stride(0), *weight.stride())
    programs = min(
        config.pop("PER_SM", 1) * num_sms(x.device), (rows // block_m + groups) * cdiv(n, block_n)
    )
    sizes = (first_entry(rows, groups, block_m), rows, groups, n, k)
    options: dict[str, Any]
    if path == "pingpong":
        module = device("grouped_pingpong")
        inner = n if transposed else k
        w_shape, w_block = [weight.numel() // inner, inner], [64 if transposed else block_n, 64]
        operands: tuple[Any, ...] = (
            module.Descriptor(x, x.shape, x.stride(), [block_m, block_k]),
            module.Descriptor(weight, w_shape, [inner, 1], w_block),
            module.Descriptor(y, y.shape, y.stride(), [block_m, 64]),
        )
        options = {"TRANSPOSED": transposed, "BLOCK_N": block_n, "GROUP": config["GROUP"],
                   "STAGES": config["STAGES"], "num_warps": 4, "maxnreg": 168}  # fmt: skip
        launch(
            module.grouped_mm_pingpong_kernel, (programs,), y, *operands, offs, tiles, *sizes,
            key=_key((offs, tiles), x.dtype, n, k, block_m, *options.values()), **options,
        )  # fmt: skip
        return y
    module, operands = device("grouped_mm"), (x, weight, y)
    if path == "tma":
        w = weight.transpose(1, 2) if transposed else weight
        w_block = [1, block_k, block_n] if transposed else [1, block_n, block_k]
        operands = (
            module.describe(x, [block_m, block_k]),
            module.describe(w, w_block),
            module.describe_ragged(y, [block_m, block_n // config["SUBTILES"]]),
        )
    bias = y if bias is None else bias
    options = {"HAS_BIAS": bias is not y, "TRANSPOSED": transposed, "TMA": path == "tma",
               "PRECISION": precision(x), **config}  # fmt: skip
    launch(
        module.grouped_mm_kernel, (programs,), y, *operands, bias, offs, tiles, *sizes, *strides,
        key=_key((x, weight, bias, offs, tiles), x.dtype, n, k, *strides, *options.values()),
        **options,
    )  # fmt: skip
    return y


def launch_wgrad(
    dw: Tensor, dy: Tensor, x: Tensor, offs: Tensor, tiles: Tensor, accumulate: bool
) -> None:
    """Write or, in float32, add the weight gradient; dy and x have contiguous columns."""
    (rows, n), k, groups = dy.shape, x.shape[1], len(offs)
    path = wgrad_path(dy, x)
    space = WGRAD_TMA if path == "tma" else WGRAD_POINTER
    config = dict(space.pick(rows, (groups, n, k), x))
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    programs = min(
        config.pop("PER_SM") * num_sms(x.device), groups * cdiv(n, block_m) * cdiv(k, block_n)
    )
    module, operands = device("grouped_mm"), (dy, x, dw)
    if path == "tma":
        part = block_n // config["SUBTILES"]
        operands = (
            module.describe_ragged(dy, [block_k, block_m]),
            module.describe_ragged(x, [block_k, block_n]),
            dw if accumulate else module.describe(dw, [1, block_m, part]),
        )
    strides = dy.stride(0), x.stride(0)
    options = {"ACCUMULATE": accumulate, "TMA": path == "tma", "PRECISION": precision(x), **config}
    launch(
        module.grouped_wgrad_kernel, (programs,),
        dw, *operands, offs, tiles, rows, groups, n, k, *strides,
        key=_key((dw, dy, x, offs, tiles), x.dtype, dw.dtype, n, k, *strides, *options.values()),
        **options,
    )  # fmt: skip


def _key(tensors: tuple[Tensor, ...], *values: Any) -> tuple[Any, ...] | None:
    """What the compiled code depends on, for tensors that are aligned as Triton likes them."""
    return None if any(t.data_ptr() % 16 for t in tensors) else values


def table_size(rows: int, groups: int) -> int:
    """Length of a tile table."""
    return 2 + groups + sum(rows // block + groups for block in TILE_ROWS)


def first_entry(rows: int, groups: int, block_m: int) -> int:
    """Where the entries of this row block begin in a tile table."""
    return 2 + groups + (rows // 64 + groups) * TILE_ROWS.index(block_m)


def precision(like: Tensor) -> str:
    """What float32 operands are rounded to: `torch.backends.cuda.matmul.allow_tf32` decides."""
    exact = like.dtype == torch.float32 and not torch.backends.cuda.matmul.allow_tf32
    return "ieee" if exact else "tf32"
