"""Storages that are offloaded as codes: float8 e4m3 for each element, and a float32 scale, a power of two, for each
128 elements that follow one another in memory. That is 33/32 bytes an element on the link, 0.516 of bfloat16's.

The codes are those of `fo.quantize(x, fo.recipes.Scaling())`, and the reloaded values are its `dequantize()`, bit for
bit, where the last axis of x is whole blocks; otherwise blocks run on from row to row.

The error: s, the scale, is amax / 448 of the block rounded up to a power of two, so below amax / 224, or 2^-63 where
that is more. x / s is exact and at most 448; its code has four significant bits down to 2^-6, and is a multiple of
2^-9 below. So |restored - x| <= max(2^-4 |x|, 2^-10 s), and 2^-10 s < amax / 229376, or 2^-73.

NaN stays NaN and does not count in amax. Infinity stays infinity, and since it counts as the largest float32, what
else is in its block comes back as zero, or as a multiple of 2^111. A finite element that rounds up to a power of two
beyond its dtype comes back as infinity: those within 1/32 of the end of the range.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from fuseops import kernels as K
from fuseops.globs import matches
from fuseops.kernels.tiles import FLOATS
from fuseops.recipes.scaling import E4M3
from fuseops.words import dtype_name

from .policy import Candidate
from .storages import rows_of

BLOCK = 128
BOUND = "each element within max(|x|/16, amax/229376), amax that of its 128 neighbours"
COMPONENTS = ("row", "col")  # fields of a quantized tensor; their scales have a suffix
STATISTICS = ("rstd", "mean", "lse")


class Coding(NamedTuple):
    """A `Coding` quantizes a storage of `dtype` as rows of `width`, which is a multiple of BLOCK."""

    dtype: torch.dtype
    width: int


def coding_of(candidate: Candidate, globs: tuple[str, ...]) -> Coding | str:
    """The coding of a saved tensor's storage, or why it has none: "" where no glob matches."""
    names = (candidate.name, *candidate.also)
    if not any(matches(glob, name) for glob in globs for name in names):
        return ""
    shape, dtype = candidate.shape, candidate.dtype
    if why := exact_by_name(names, globs):
        return why
    if dtype not in FLOATS:
        return f"no codes of {dtype_name(dtype)}"
    if len(shape) < 2 or shape[-1] < BLOCK:
        return f"narrower than a block of {BLOCK}"
    elements = candidate.nbytes // dtype.itemsize
    if elements != math.prod(shape):
        return "not all of its storage"
    if elements % BLOCK:
        return f"not whole blocks of {BLOCK} elements"
    return Coding(dtype, BLOCK if shape[-1] % BLOCK else shape[-1])


def exact_by_name(names: tuple[str, ...], globs: tuple[str, ...]) -> str | None:
    """Why a saved tensor of these names is not rounded, or None."""
    for name in names:
        *path, field = name.split(".")
        if not any(matches(glob, name) for glob in globs):
            return f"no glob of quantize matches {name}"
        if field.partition("_")[0] in COMPONENTS:
            return "a component of a quantized tensor"
        if field in STATISTICS:
            return "a statistic"
        if path[-1:] == ["leaf"]:
            return "made by no op that has a gradient: it may be a mask or a statistic"
    return None


def coded_bytes(nbytes: int, dtype: torch.dtype) -> int:
    """The bytes of the codes and scales of so many bytes."""
    elements = nbytes // dtype.itemsize
    return elements + 4 * (elements // BLOCK)


def encode(storage: UntypedStorage, coding: Coding) -> Tensor:
    """Codes and, behind them, scales.   -> (bytes,) uint8"""
    with torch.no_grad():
        codes, scale = K.quantize_vectors(rows_of(storage, *coding), E4M3)
        return torch.cat([t.view(-1).view(torch.uint8) for t in (codes, scale)])


def decode(coded: Tensor, coding: Coding) -> UntypedStorage:
    """The dequantized storage.   coded: (bytes,) uint8, codes and scales"""
    dtype, width = coding
    elements = coded.numel() * BLOCK // (BLOCK + 4)
    with torch.no_grad():
        codes = coded[:elements].view(E4M3).view(-1, width // BLOCK, BLOCK)
        scale = coded[elements:].view(torch.float32).view(width // BLOCK, -1)
        return codes.to(dtype).mul_(scale.t().unsqueeze(-1)).untyped_storage()


def traffic(nbytes: int, coded: int) -> tuple[int, int]:
    """Bytes of device memory that encoding a storage reads and writes, and those of decoding it."""
    return nbytes + 3 * coded, coded + 3 * nbytes
