"""Formats of operands in numpy and ml_dtypes, which share nothing with the package."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BIG = np.finfo(np.float32).max
CODES = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float4_e2m1fn_x2": ml_dtypes.float4_e2m1fn,
}


class Coded(NamedTuple):
    """A matrix in blocks: its codes (two of four bits in a byte), a scale a block, what both stand for (float64), and
    the scale of the whole matrix where there is one.
    """

    codes: Array
    scale: Array
    values: Array
    whole: Any = None


def hard(rows: int, n: int) -> Array:
    """Random rows, and some of zeros, denormals, infinities, NaN, and with amax on a boundary of a format or binade."""
    x = np.random.default_rng(0).standard_normal((rows, n)).astype(np.float32)
    x[0] = 0
    x[1] *= np.float32(1e-40)
    x[2, 3], x[3, 5], x[4, 7] = np.inf, -np.inf, np.nan
    x[5] = np.nan
    edges = (
        448.0,
        449.0,
        np.nextafter(np.float32(448), BIG),
        57344.0,
        2.0**-20,
        2.0**-20 * 1.0000001,
        3e38,
        6.0,
    )
    for row, amax in enumerate(edges, 6):
        x[row] = np.clip(x[row], -1, 1)
        x[row, 1] = amax
    x[14] *= np.float32(-0.0)
    return x


def amax_of(x: Array) -> Array:
    """Of every block (axes 1 and 3): NaN counts as nothing, infinity as the largest number."""
    return np.where(np.isnan(x), 0, np.minimum(np.abs(x), BIG)).max(axis=(1, 3), keepdims=True)


def tiles_of(x: Array, block: tuple[int, int]) -> Array:
    """(R, K) -> (R / rows, rows, K / width, width), padded with zeros."""
    (r, k), (rows, width) = x.shape, block
    x = np.pad(x, ((0, -r % rows), (0, -k % width)))
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // width, width)


def whole(tiles: Array, shape: tuple[int, int]) -> Array:
    """The inverse of `tiles_of`."""
    a, rows, b, width = tiles.shape
    return np.ascontiguousarray(tiles.reshape(a * rows, b * width)[: shape[0], : shape[1]])


def mxfp8(x: Array, data: str, block: tuple[int, int]) -> Coded:
    """The smallest power of two, from 2^-127 to 2^127, that brings the block into the range."""
    kind = CODES[data]
    limit = float(ml_dtypes.finfo(kind).max)
    tiles = tiles_of(x.astype(np.float32), block)
    with np.errstate(all="ignore"):
        mantissa, exponent = np.frexp(amax_of(tiles).astype(np.float64) / limit)
        exponent = np.where(mantissa == 0, -127, exponent - (mantissa == 0.5))
        scale = np.exp2(np.clip(exponent, -127, 127).astype(np.float64))
        codes = np.clip(tiles / scale, -limit, limit).astype(np.float32).astype(kind)
        values = codes.astype(np.float64) * scale
    stored = scale[:, 0, :, 0].astype(ml_dtypes.float8_e8m0fnu)
    return Coded(whole(codes, x.shape), stored, whole(values, x.shape))


def nvfp4(x: Array, data: str, block: tuple[int, int]) -> Coded:
    """E4M3 scales of blocks over one of the matrix, each step in float32."""
    f, e4m3 = np.float32, ml_dtypes.float8_e4m3fn
    x = x.astype(f)
    tiles = tiles_of(x, block)
    amax = amax_of(tiles).astype(f)
    largest = amax.max() if amax.size else f(0)
    with np.errstate(all="ignore"):
        up = f(1) if largest == 0 else np.minimum(f(448 * 6) / largest, f(BIG))
        scale = np.minimum(amax * (up / f(6)), f(448)).astype(e4m3)
        inverse = np.minimum(f(1) / (scale.astype(f) * (f(1) / up)), f(BIG))
        scaled = np.where(scale.astype(f) == 0, tiles * f(0), tiles * inverse)
    scaled = np.where(np.isnan(scaled), f(0), np.clip(scaled, -6, 6))
    codes = scaled.astype(ml_dtypes.float4_e2m1fn)
    lost = np.isnan(tiles).any(axis=(1, 3), keepdims=True)
    scale = np.where(lost, f("nan"), scale.astype(f)).astype(e4m3)
    values = codes.astype(np.float64) * scale.astype(np.float64) * np.float64(f(1) / up)
    bits = np.pad(whole(codes, x.shape).view(np.uint8), ((0, 0), (0, x.shape[1] % 2)))
    packed = bits[:, ::2] | (bits[:, 1::2] << 4)
    return Coded(packed, scale[:, 0, :, 0], whole(values, x.shape), f(1) / up)


def float32(
    x: Array, data: str, block: tuple[int, int], powers: bool, epsilon: float = 0.0
) -> Coded:
    """Float32 scales: the range of the format over amax; rounded down to a power of two, up to 2^63, or not."""
    f, kind = np.float32, CODES[data]
    limit = f(ml_dtypes.finfo(kind).max)
    tiles = tiles_of(x.astype(f), block)
    with np.errstate(all="ignore"):
        amax = np.maximum(amax_of(tiles).astype(f), f(epsilon))
        inverse = np.where(amax == 0, f(1), np.minimum(limit / amax, f(BIG)))
        if powers:
            _, exponent = np.frexp(np.minimum(limit / amax, f(BIG)).astype(np.float64))
            inverse = np.exp2(np.where(amax == 0, 63, np.minimum(exponent - 1, 63)).astype(f))
        codes = np.clip(tiles * inverse, -limit, limit).astype(kind)
        scale = (f(1) / inverse).astype(f)
        values = codes.astype(np.float64) * scale
    return Coded(whole(codes, x.shape), scale[:, 0, :, 0], whole(values, x.shape))


def shifted(rows: Coded) -> tuple[Array, Array]:
    """(codes, scales) of the transpose over whole squares of 128: the codes of rows in vectors of 128, shifted to the
    largest scale of each square.
    """
    (r, k), kind = rows.codes.shape, rows.codes.dtype
    limit = float(ml_dtypes.finfo(kind).max)
    squares = rows.scale.reshape(r // 128, 128, -1).max(1)
    by_row = np.repeat(rows.scale, 128, 1)[:, :k]
    by_square = np.repeat(np.repeat(squares, 128, 0), 128, 1)[:, :k]
    moved = rows.codes.astype(np.float32) * (by_row / by_square)
    return np.ascontiguousarray(np.clip(moved, -limit, limit).astype(kind).T), squares.T


def hadamard(x: Array) -> Array:
    """The last axis in sixteens: signs, then the Hadamard matrix over 4, summed in pairs as a butterfly is."""
    signs = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float32)
    x = np.pad(x.astype(np.float32), ((0, 0), (0, -x.shape[1] % 16)))
    parts = [*np.moveaxis(x.reshape(x.shape[0], -1, 16) * signs, 2, 0)]
    half = 1
    while half < 16:
        parts = [
            parts[k] + parts[k + half] if not k & half else parts[k - half] - parts[k]
            for k in range(16)
        ]
        half *= 2
    return np.ascontiguousarray((np.stack(parts, 2) * np.float32(0.25)).reshape(x.shape))
