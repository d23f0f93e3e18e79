"""Which path a grouped GEMM takes, and what stands in the way of a better one, in words for `explain()`."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from fuseops.kernels.configs import triton_release
from fuseops.kernels.grouped_paths import (
    FEW_ROWS,
    GATHER_BELOW,
    GLUON_TESTED,
    TMA_ARCHS,
    mm_path,
    wgrad_path,
)
from fuseops.kernels.launch import current_arch
from fuseops.kernels.registry import INTERPRET
from fuseops.words import dtype_name

Reasons = Iterable[tuple[bool, str]]  # (does it stand in the way, how to say it)


def mm_words(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, index: Tensor | None = None
) -> str:
    """The path of `grouped_mm`, as "pingpong" or "tma (K is 72, not a multiple of 64)"."""
    path, (groups, n, k) = mm_path(x, weight, bias, index), weight.shape
    packed = weight.stride() in ((n * k, k, 1), (n * k, 1, n))
    reasons: dict[str, Reasons] = {
        "pointer": [*_undescribed("x", x), *_undescribed("the weight", weight), _rows("y", n, x)],
        "tma": [
            *_no_gluon(x),
            (not packed, "the weight is not packed"),
            (k % 64 != 0, f"K is {k}, not a multiple of 64"),
            (groups * max(n, k) >= 1 << 31, "the weight has too many rows"),
        ],
        "pingpong": [_few(index), *_copied(index is not None, n)],
    }
    return _joined(path, reasons)


def wgrad_words(dy: Tensor, x: Tensor, x_index: Tensor | None = None) -> str:
    """The path of `grouped_wgrad` over a dy whose rows are in order, as above."""
    path = wgrad_path(dy, x, None, x_index)
    reasons: dict[str, Reasons] = {
        "pointer": [*_undescribed("dy", dy), *_undescribed("x", x), _rows("dw", x.shape[1], x)],
        "tma": _no_gluon(x),
        "pingpong": _copied(x_index is not None, dy.shape[1]),
    }
    return _joined(path, reasons)


def _joined(path: str, reasons: dict[str, Reasons]) -> str:
    why = next((text for stands, text in reasons.get(path, ()) if stands), None)
    return path if why is None else f"{path} ({why})"


def _few(index: Tensor | None) -> tuple[bool, str]:
    few = index is not None and index.shape[0] <= FEW_ROWS
    return few, "its rows are copied first: there are few"


def _copied(gathers: bool, width: int) -> Reasons:
    return [
        (
            gathers and width >= GATHER_BELOW,
            f"its rows are copied first: faster with {width} columns",
        ),
        (gathers, "its rows are copied first: they are not a multiple of 32 bytes"),
    ]


def _undescribed(name: str, t: Tensor) -> Reasons:
    arch = current_arch(t.device)
    others = [stride for stride in t.stride() if stride != 1]
    apart = next((stride for stride in others if stride % 8), 0) * t.itemsize
    dtype = dtype_name(t.dtype)
    return [
        (arch not in TMA_ARCHS, f"sm_{arch} loads by pointers"),
        (t.itemsize != 2, f"{name} is {dtype}"),
        (t.data_ptr() % 16 != 0, f"{name} is not 16-byte aligned"),
        (len(others) != t.dim() - 1 or 0 in others, f"{name} has strides {t.stride()}"),
        (apart != 0, f"rows of {name} are {apart} bytes apart, not a multiple of 16"),
    ]


def _rows(name: str, width: int, like: Tensor) -> tuple[bool, str]:
    size = width * like.itemsize
    return size % 16 != 0, f"rows of {name} are {size} bytes, not a multiple of 16"


def _no_gluon(x: Tensor) -> Reasons:
    arch, triton = current_arch(x.device), triton_release()
    return [
        (INTERPRET, "the interpreter runs no Gluon"),
        (arch != 90, f"sm_{arch}, pingpong is for sm_90"),
        (triton not in GLUON_TESTED, f"pingpong is not tested with triton {triton}"),
    ]
