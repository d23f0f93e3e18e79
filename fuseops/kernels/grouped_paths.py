"""A path is the kernel that a grouped GEMM runs; it is chosen here with its tiles, and the reason against a better one.

Paths, best first:
* pingpong: Gluon, sm_90, bf16 and fp16, a packed weight, K a multiple of 64, a tested Triton; it
  alone reads rows by index (rows a multiple of 32 bytes), for the others they are copied first;
* tma: Triton with tensor descriptors, sm_90 and sm_100, bf16 and fp16, rows of a multiple of 16 bytes;
* pointer: Triton, everything else.
Weight gradients of groups of a few rows on Hopper take "few", Triton that stores more than it multiplies.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fuseops.kernels.configs import Config, Space, triton_release
from fuseops.kernels.launch import INTERPRET, current_arch
from fuseops.kernels.replay import separate_replays
from fuseops.torch_private import is_fake
from fuseops.words import dtype_name

TMA_ARCHS = (90, 100)
FEW_ROWS = 4096  # up to this many rows a copy takes less time than a GEMM that is bound by weights loses by gathering
FEW_PER_GROUP = 32  # average rows of a group up to which a GEMM is bound by reading weights
WGRAD_FEW = 16  # average rows of a group up to which a weight gradient is bound by stores
GATHER_BELOW = 4096  # columns of the other operand: for wider ones a copy of the rows costs less
GLUON_TESTED = ("3.6", "3.8", "3.9")
# activations in the epilogue of a product, and activation gradients in that of an input gradient
EPILOGUE_ACTS = {"swiglu": "SwiGLU", "clamped_swiglu": "clamped SwiGLU", "srelu": "squared ReLU"}
BACKWARD_ACTS = ("swiglu", "srelu")
TESTED_INTERLEAVE = {"swiglu": 0, "clamped_swiglu": 1, "srelu": 0}  # that was run on a GPU


def _tile(m: int, n: int, k: int, group: int, parts: int, per_sm: int, warps: int) -> Config:
    return {
        **{"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "GROUP": group, "SUBTILES": parts},
        **{"PER_SM": per_sm, "num_warps": warps, "num_stages": 3},
    }


WIDE = _tile(128, 256, 64, 8, 1, 1, 8)
TWO_PER_SM = _tile(128, 128, 64, 8, 2, 2, 4)  # one program stores while the other multiplies
WIDE_IN_PARTS = {**WIDE, "SUBTILES": 2}


def _mm_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """Wide tiles for long sums; two programs a multiprocessor where stores take longer, or groups are small."""
    groups, _, k = dims
    return WIDE if k > 768 and rows >= 1024 * groups else TWO_PER_SM


def _wgrad_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    return TWO_PER_SM if rows < 2048 * dims[0] else WIDE_IN_PARTS


def _pointer_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Small tiles for float32, and for widths whose rows are not aligned: their loads take registers."""
    small = itemsize == 4 or any(size % 8 for size in dims[1:])
    return [_tile(64, 64, 32, 8, 1, 2, 4) if small else _tile(128, 128, 32, 8, 1, 1, 8)]


def _ring(m: int, n: int, cooperative: int, stages: int, band: int = 1024) -> Config:
    """GROUP makes bands of so many rows: tiles in flight, one or two for each of 132 multiprocessors, that
    cover about a square read least. A GPU at its power limit pays for every byte with its clock.
    """
    names = "BLOCK_M", "BLOCK_N", "COOPERATIVE", "GROUP", "STAGES"
    return dict(zip(names, (m, n, cooperative, band // m, stages), strict=True))


SMALL_RING, SQUARE_RING = _ring(64, 256, 0, 5), _ring(128, 128, 0, 6)
WIDE_RING = _ring(128, 256, 1, 4, 2048)
FEW_RING = {**_ring(64, 128, 0, 8), "BOX": 16}
"""For groups of a few rows: half as wide as small tiles, and of 64 rows only those boxes of 16 are read that the group
has. A GEMM that is all reading of weights ends with fewer of them on their way, and reads less besides.
"""
GATHERED = [_ring(128, 256, 1, 4)]
"""Wide: programs that gather drift apart, and smaller tiles would read too much."""
ACTIVATED = [SMALL_RING, WIDE_RING, SQUARE_RING, FEW_RING]
"""Small tiles hide the activation as well."""
ACTIVATED_GATHERED = [_ring(64, 256, 0, 4), WIDE_RING]
"""Rows by index take longer than a fifth stage makes up for."""
BACKWARDS = [{**_ring(128, 128, 0, 5), "PART": 32, "SLOTS": 2}]
"""Each consumer prefetches h through a ring of SLOTS subtiles of PART rows."""


def _pingpong_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """Small tiles hide their stores. Where K is so long that stores hardly count, or so short that
    nothing hides them, wide tiles read least; square ones are between, and waste less at some N.
    """
    groups, n, k = dims
    if rows <= FEW_PER_GROUP * groups:
        return FEW_RING
    many = rows >= 1024 * groups
    if k >= 8192 or (many and k <= 256):
        return WIDE_RING
    return SQUARE_RING if (many and k <= 512) or 0 < n % 256 <= 128 else SMALL_RING


def _swiglu_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """Square tiles where the last small one is half empty or more, and there are few beside it."""
    groups, n, _ = dims
    if rows <= FEW_PER_GROUP * groups:
        return FEW_RING
    return SQUARE_RING if 0 < n % 256 <= 128 and n < 4096 else SMALL_RING


def _wgrad_ring(tile: Config) -> Config:
    return {name: value for name, value in tile.items() if name != "BLOCK_N"}


WIDE_WGRAD, SMALL_WGRAD = _wgrad_ring(WIDE_RING), _wgrad_ring(SMALL_RING)
FEW_WGRAD = _wgrad_ring({**_ring(64, 256, 0, 8), "BLOCK_K": 16, "STORES": 4})
"""For groups of a few rows, whose weight gradient is all stores: steps of 16 rows leave room for a whole tile on its
way out."""


def _wgrad_ring_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """Wide tiles where groups are long: on an H200 at its power limit 2 to 6 % less time than small ones,
    which are as fast while it is cool. Small ones hide their stores, where products are short.
    """
    groups, _, _ = dims
    return FEW_WGRAD if rows <= 64 * groups else SMALL_WGRAD if rows < 512 * groups else WIDE_WGRAD


FEW_SHORT, FEW_LONG = (
    {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": k, "SPLITS": splits, "num_warps": 4}
    for k, splits in ((16, 2), (32, 1))
)


def _wgrad_few_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """Steps of twice as many rows as a group has on average hold nearly all groups whole."""
    return FEW_SHORT if 2 * rows <= FEW_SHORT["BLOCK_K"] * dims[0] else FEW_LONG


GEMM = ("groups", "n", "k")
MM_SPACES = {
    "gather": Space("grouped_mm_gather", GATHERED, dims=GEMM),
    "pingpong": Space(
        "grouped_mm_pingpong",
        [SMALL_RING, SQUARE_RING, WIDE_RING, FEW_RING],
        _pingpong_default,
        GEMM,
    ),
    "tma": Space("grouped_mm_tma", [WIDE, TWO_PER_SM], _mm_default, GEMM),
    "pointer": Space("grouped_mm", _pointer_candidates, dims=GEMM),
}
SWIGLU_SPACES = {
    "pingpong": Space("grouped_swiglu", ACTIVATED, _swiglu_default, GEMM),
    "gather": Space("grouped_swiglu_gather", ACTIVATED_GATHERED, dims=GEMM),
}
SWIGLU_BWD_SPACES = {
    "pingpong": Space("grouped_swiglu_bwd", BACKWARDS, dims=GEMM),
    "gather": Space("grouped_swiglu_bwd_gather", BACKWARDS, dims=GEMM),
}
WGRAD_SPACES = {
    "gather": Space("grouped_wgrad_gather", [WIDE_WGRAD], dims=GEMM),
    "pingpong": Space(
        "grouped_wgrad_pingpong", [WIDE_WGRAD, SMALL_WGRAD, FEW_WGRAD], _wgrad_ring_default, GEMM
    ),
    "tma": Space("grouped_wgrad_tma", [WIDE_IN_PARTS, TWO_PER_SM], _wgrad_default, GEMM),
    "pointer": Space("grouped_wgrad", _pointer_candidates, dims=GEMM),
    "few": Space("grouped_wgrad_few", [FEW_SHORT, FEW_LONG], _wgrad_few_default, GEMM),
}

forced_path: str | None = None


@contextmanager
def on_path(path: str) -> Iterator[None]:
    """Inside, every grouped GEMM takes this path, which has to take its operands (for tuning and tests)."""
    global forced_path
    before, forced_path = forced_path, path
    try:
        with separate_replays(path):
            yield
    finally:
        forced_path = before


class KernelPath(NamedTuple):
    """A `KernelPath` is the path that operands take, and the reason `why` not a better one."""

    path: str
    why: str | None = None

    @property
    def words(self) -> str:
        """The path and the reason, as "pingpong" or "tma (K is 72, not a multiple of 64)"."""
        return self.path if self.why is None else f"{self.path} ({self.why})"


Reasons = Iterable[str | None]  # None where a condition is met


def choose_path(best: str, **others: Reasons) -> KernelPath:
    """The first of `others`, worst first, with a reason against every better path; else the best."""
    for path, reasons in others.items():
        why = next((reason for reason in reasons if reason is not None), None)
        if why is not None:
            return KernelPath(path, why)
    return KernelPath(best)


def mm_choice(x: Tensor, weight: Tensor, index: Tensor | None = None) -> KernelPath:
    """The path of a product: "gather" (pingpong that reads rows by index), "pingpong", "tma" or "pointer".

    With an index, all but the first copy the rows before.
    """
    if forced_path is not None:
        return KernelPath(forced_path)
    few = None if index is None else index.shape[0] <= FEW_ROWS
    sides = x.stride(), weight.stride(), aligned(x, weight)
    return _mm_choice(current_arch(x.device), x.dtype, *sides, weight.shape, few)


def act_path(
    x: Tensor,
    weight: Tensor,
    index: Tensor | None = None,
    kind: str = "swiglu",
    interleave: int = 0,
) -> str:
    """The path that can end in an activation of `EPILOGUE_ACTS`, "gather" or "pingpong": gate and up are halves of N, a
    multiple of 256, or alternate; "" where the activation is a pass of its own.
    """
    path, n = mm_choice(x, weight, index).path, weight.shape[1]
    fits = TESTED_INTERLEAVE.get(kind) == interleave and weight.stride(2) == 1
    fits = fits and (n % 256 == 0 or kind == "srelu" or interleave == 1)
    return path if path in SWIGLU_SPACES and fits else ""


def act_bwd_path(dy: Tensor, weight: Tensor, h: Tensor, index: Tensor | None = None) -> str:
    """The path that can go on through an activation of `BACKWARD_ACTS`, "gather" or "pingpong": N a multiple of 64, h
    packed; "" where the activation is a pass of its own.
    """
    path, n = mm_choice(dy, weight, index).path, weight.shape[1]
    fits = h.is_contiguous() and n % 64 == 0 and (is_fake(h) or h.data_ptr() % 16 == 0)
    return path if path in SWIGLU_BWD_SPACES and fits else ""


def wgrad_choice(
    dy: Tensor,
    x: Tensor,
    dy_index: Tensor | None = None,
    x_index: Tensor | None = None,
    groups: int | None = None,
) -> KernelPath:
    """The path of a weight gradient: "few", "gather", "pingpong", "tma" or "pointer".

    groups: of a 16-bit gradient; None where it is float32, or nothing is known of the groups.
    """
    if forced_path is not None:
        return KernelPath(forced_path)
    rows = (x if x_index is None else x_index).shape[0]
    few = groups is not None and rows <= WGRAD_FEW * groups and x.dtype.itemsize == 2
    if few and current_arch(x.device) == 90:
        return KernelPath("few")
    n, k = dy.shape[1], x.shape[1]
    other = n if x_index is not None else k if dy_index is not None else None
    sides = dy.stride(), x.stride(), aligned(dy, x)
    return _wgrad_choice(current_arch(x.device), x.dtype, *sides, n, k, other)


def aligned(a: Tensor, b: Tensor) -> tuple[bool, bool]:
    """Whether each begins at a multiple of 16 bytes; fake tensors count as aligned."""
    if is_fake(a):
        return True, True
    return a.data_ptr() % 16 == 0, b.data_ptr() % 16 == 0


Strides = tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def _mm_choice(
    arch: int,
    dtype: torch.dtype,
    x: Strides,
    weight: Strides,
    aligned: tuple[bool, bool],
    shape: tuple[int, ...],
    few: bool | None,
) -> KernelPath:
    """`mm_choice`, cached.   few: whether few rows are given by index, None without an index"""
    groups, n, k = shape
    return choose_path(
        "pingpong" if few is None else "gather",
        pointer=[
            *_tma_refusals(arch, "x", dtype, x, aligned[0]),
            *_tma_refusals(arch, "the weight", dtype, weight, aligned[1]),
            _result_rows("y", n, dtype),
        ],
        tma=[
            *gluon_refusals(arch),
            None if weight in ((n * k, k, 1), (n * k, 1, n)) else "the weight is not packed",
            f"K is {k}, not a multiple of 64" if k % 64 else None,
            "the weight has too many rows" if groups * max(n, k) >= 1 << 31 else None,
        ],
        pingpong=[
            "its rows are copied first: there are few" if few else None,
            *_gather_refusals(None if few is None else n, x[0]),
        ],
    )


@functools.lru_cache(maxsize=4096)
def _wgrad_choice(
    arch: int,
    dtype: torch.dtype,
    dy: Strides,
    x: Strides,
    aligned: tuple[bool, bool],
    n: int,
    k: int,
    other: int | None,
) -> KernelPath:
    """`wgrad_choice`, cached.   other: columns of the operand that is not gathered, None where none is"""
    return choose_path(
        "pingpong" if other is None else "gather",
        pointer=[
            *_tma_refusals(arch, "dy", dtype, dy, aligned[0]),
            *_tma_refusals(arch, "x", dtype, x, aligned[1]),
            _result_rows("dw", k, dtype),
        ],
        tma=gluon_refusals(arch),
        pingpong=_gather_refusals(other, n, k, dy[0], x[0]),
    )


def _tma_refusals(
    arch: int, name: str, dtype: torch.dtype, strides: Strides, aligned: bool
) -> Reasons:
    """Reasons why TMA cannot load it: it needs 16 bits, one contiguous axis, other strides of a multiple of 16
    bytes.
    """
    others = [stride for stride in strides if stride != 1]
    apart = next((stride for stride in others if stride % 8), 0) * dtype.itemsize
    plain = len(others) == len(strides) - 1 and 0 not in others
    return [
        None if arch in TMA_ARCHS else f"sm_{arch} loads by pointers",
        None if dtype.itemsize == 2 else f"{name} is {dtype_name(dtype)}",
        None if aligned else f"{name} is not 16-byte aligned",
        None if plain else f"{name} has strides {strides}",
        f"rows of {name} are {apart} bytes apart, not a multiple of 16" if apart else None,
    ]


def _result_rows(name: str, width: int, dtype: torch.dtype) -> str | None:
    size = width * dtype.itemsize
    return f"rows of {name} are {size} bytes, not a multiple of 16" if size % 16 else None


@functools.cache
def gluon_refusals(arch: int, kernel: str = "pingpong") -> tuple[str | None, ...]:
    """Reasons why a kernel in Gluon, `kernel`, cannot run on an architecture."""
    triton = triton_release()
    return (
        "the interpreter runs no Gluon" if INTERPRET else None,
        None if arch == 90 else f"sm_{arch}, {kernel} is for sm_90",
        None if triton in GLUON_TESTED else f"{kernel} is not tested with triton {triton}",
    )


def _gather_refusals(width: int | None, *sizes: int) -> Reasons:
    """Reasons to copy rows before the GEMM.   width: columns of the other operand, None without an index"""
    if width is None:
        return []
    begin, odd = "its rows are copied first:", any(size % 16 for size in sizes)
    return [
        f"{begin} faster with {width} columns" if width >= GATHER_BELOW else None,
        f"{begin} they are not a multiple of 32 bytes" if odd else None,
    ]
