"""Which kernel takes the operands of a grouped GEMM, and with which tiles.

Paths, best first:
* pingpong: Gluon, sm_90, bf16 and fp16, a packed weight, K a multiple of 64, a tested Triton; it
  alone reads rows by index (rows a multiple of 32 bytes), for the others they are copied first;
* tma: Triton with tensor descriptors, sm_90 and sm_100, bf16 and fp16, rows of a multiple of 16 bytes;
* pointer: Triton, everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from fuseops.kernels.configs import Config, Space, versions
from fuseops.kernels.launch import current_arch
from fuseops.kernels.registry import INTERPRET

TMA_ARCHS = (90, 100)
GLUON_TESTED = ("3.6", "3.8")


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


def _ring(m: int, n: int, cooperative: int, stages: int) -> Config:
    return {"BLOCK_M": m, "BLOCK_N": n, "COOPERATIVE": cooperative, "GROUP": 8, "STAGES": stages}


def _pingpong_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    return [_ring(64, 256, 0, 5), _ring(128, 128, 0, 6), _ring(128, 256, 1, 4)]


def _pingpong_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """Square tiles read less, which shows where K is so short that loads do not hide, and waste
    less at the edge of some N.
    """
    groups, n, k = dims
    short = k <= 512 and rows >= 1024 * groups
    return _pingpong_candidates(dims, itemsize)[short or 0 < n % 256 <= 128]


def _gather_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Wide tiles: programs that gather drift apart, and smaller ones would read too much."""
    return [_ring(128, 256, 1, 4)]


def _gather_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    return _gather_candidates(dims, itemsize)[0]


def _wgrad_ring(tile: Config) -> Config:
    return {name: value for name, value in tile.items() if name != "BLOCK_N"}


def _wgrad_ring_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    return [_wgrad_ring(_ring(64, 256, 0, 5)), _wgrad_ring(_ring(128, 256, 1, 4))]


def _wgrad_ring_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    return _wgrad_ring_candidates(dims, itemsize)[0]


def _wgrad_gather_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    return [_wgrad_ring(tile) for tile in _gather_candidates(dims, itemsize)]


def _wgrad_gather_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    return _wgrad_gather_candidates(dims, itemsize)[0]


MM_GATHER = Space("grouped_mm_gather", _gather_candidates, _gather_default)
MM_PINGPONG = Space("grouped_mm_pingpong", _pingpong_candidates, _pingpong_default)
MM_TMA = Space("grouped_mm_tma", _tma_candidates, _mm_default)
MM_POINTER = Space("grouped_mm", _pointer_candidates, _pointer_default)
WGRAD_GATHER = Space("grouped_wgrad_gather", _wgrad_gather_candidates, _wgrad_gather_default)
WGRAD_PINGPONG = Space("grouped_wgrad_pingpong", _wgrad_ring_candidates, _wgrad_ring_default)
WGRAD_TMA = Space("grouped_wgrad_tma", _wgrad_candidates, _wgrad_default)
WGRAD_POINTER = Space("grouped_wgrad", _pointer_candidates, _pointer_default)
MM_SPACES = {"gather": MM_GATHER, "pingpong": MM_PINGPONG, "tma": MM_TMA, "pointer": MM_POINTER}
WGRAD_SPACES = {
    **{"gather": WGRAD_GATHER, "pingpong": WGRAD_PINGPONG},
    **{"tma": WGRAD_TMA, "pointer": WGRAD_POINTER},
}

forced_path: str | None = None


@contextmanager
def on_path(path: str) -> Iterator[None]:
    """Inside, every grouped GEMM takes this path, which has to be able to (for tuning and tests)."""
    global forced_path
    forced_path = path
    try:
        yield
    finally:
        forced_path = None


def mm_path(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, index: Tensor | None = None
) -> str:
    """Which kernel multiplies these: "gather" (pingpong that reads rows by index), "pingpong",
    "tma" or "pointer"; with an index, all but the first copy the rows before.
    """
    if forced_path is not None:
        return forced_path
    if x.data_ptr() % 16 or weight.data_ptr() % 16:
        return "pointer"
    where = current_arch(x.device), x.itemsize
    return _mm_path(
        *where, x.shape[1], x.stride(), weight.shape, weight.stride(), index is not None
    )


def wgrad_path(
    dy: Tensor, x: Tensor, dy_index: Tensor | None = None, x_index: Tensor | None = None
) -> str:
    """Which kernel takes the weight gradient of these: "gather", "pingpong", "tma" or "pointer"."""
    if forced_path is not None:
        return forced_path
    if dy.data_ptr() % 16 or x.data_ptr() % 16:
        return "pointer"
    where = current_arch(x.device), x.itemsize
    gathers = dy_index is not None or x_index is not None
    return _wgrad_path(*where, dy.shape[1], x.shape[1], dy.stride(), x.stride(), gathers)


@functools.lru_cache(maxsize=4096)
def _mm_path(
    arch: int,
    itemsize: int,
    k: int,
    x_strides: tuple[int, ...],
    w_shape: tuple[int, ...],
    w_strides: tuple[int, ...],
    gathers: bool,
) -> str:
    groups, n, _ = w_shape
    described = _describable(arch, itemsize, x_strides) and _describable(arch, itemsize, w_strides)
    if not described or n * itemsize % 16:
        return "pointer"
    packed = w_strides in ((n * k, k, 1), (n * k, 1, n))
    fits = k % 64 == 0 and groups * max(n, k) < 1 << 31
    if not (_gluon(arch) and packed and fits):
        return "tma"
    return "gather" if gathers and x_strides[0] % 16 == 0 else "pingpong"


@functools.lru_cache(maxsize=4096)
def _wgrad_path(
    arch: int,
    itemsize: int,
    n: int,
    k: int,
    dy_strides: tuple[int, ...],
    x_strides: tuple[int, ...],
    gathers: bool,
) -> str:
    strides = dy_strides, x_strides
    if k * itemsize % 16 or not all(_describable(arch, itemsize, s) for s in strides):
        return "pointer"
    if not _gluon(arch):
        return "tma"
    aligned = n % 16 == k % 16 == 0 and all(s[0] % 16 == 0 for s in strides)
    return "gather" if gathers and aligned else "pingpong"


def _gluon(arch: int) -> bool:
    triton = ".".join(versions()["triton"].split(".")[:2])
    return arch == 90 and not INTERPRET and triton in GLUON_TESTED


@functools.lru_cache(maxsize=4096)
def _describable(arch: int, itemsize: int, strides: tuple[int, ...]) -> bool:
    """Whether TMA takes it: 16-bit, one contiguous axis, the others a multiple of 16 bytes apart."""
    others = [s for s in strides if s != 1]
    aligned = all(s > 0 and s % 8 == 0 for s in others)
    return arch in TMA_ARCHS and itemsize == 2 and aligned and len(others) == len(strides) - 1
