"""Quantizers agree bit for bit with numpy and ml_dtypes, which share nothing with the package, on hard values."""

import ml_dtypes
import numpy as np
import pytest
import torch
from laws import run

from fuseops.kernels import amax
from fuseops.kernels import quantize as k

pytestmark = pytest.mark.usefixtures("kernels")
FORMATS = {
    torch.float8_e4m3fn: (ml_dtypes.float8_e4m3fn, 448.0),
    torch.float8_e5m2: (ml_dtypes.float8_e5m2, 57344.0),
}
BIG = np.finfo(np.float32).max


def hard(rows, n):
    """Random rows, and some of zeros, denormals, infinities, NaN, and with amax on a boundary of a format or binade."""
    x = np.random.default_rng(0).standard_normal((rows, n)).astype(np.float32)
    x[0] = 0
    x[1] *= np.float32(1e-40)
    x[2, 3], x[3, 5], x[4, 7] = np.inf, -np.inf, np.nan
    x[5] = np.nan
    for row, largest in enumerate((448.0, 449.0, 57344.0, 2.0**-20, 2.0**-20 * 1.0000001, 3e38), 6):
        x[row] = np.clip(x[row], -1, 1)
        x[row, 1] = largest
    x[12] *= np.float32(-0.0)
    return x


def inverse(x, axes, limit, pow2):
    """limit / amax: NaN counts as nothing, infinity as the largest number."""
    size = np.where(np.isnan(x), np.float32(0), np.minimum(np.abs(x), BIG))
    amax = size.max(axis=axes, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inv = np.float32(limit) / amax
    if pow2:
        return np.exp2(np.floor(np.log2(np.minimum(inv, np.float32(2.0**63)).astype(np.float64))))
    return np.where(amax == 0, np.float32(1), np.minimum(inv, BIG))


def codes(x, inv, dtype):
    kind, limit = FORMATS[dtype]
    with np.errstate(over="ignore", invalid="ignore"):
        return np.clip(x * inv.astype(np.float32), -limit, limit).astype(kind)


def same(found, wanted):
    """The same bits; of NaN, that it is one."""
    bits = found.contiguous().view(torch.uint8).numpy()
    wide = wanted.astype(np.float32)
    assert np.array_equal(np.isnan(found.float().numpy()), np.isnan(wide))
    assert np.array_equal(bits[~np.isnan(wide)], wanted.view(np.uint8)[~np.isnan(wide)])


def same_scales(found, inv):
    with np.errstate(divide="ignore"):
        wanted = np.float32(1) / inv.astype(np.float32)
    assert np.array_equal(found.numpy().reshape(-1), wanted.reshape(-1))


def both(op, *args):
    """Of the kernel and of its twin."""
    return run(op, *args), op.twin(*args)


every_format = pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])


@every_format
def test_of_vectors_of_128(dtype):
    x = hard(17, 256)
    vectors = x.reshape(17, 2, 128)
    inv = inverse(vectors, 2, FORMATS[dtype][1], True)
    for q, scale in both(k.quantize_vectors, torch.from_numpy(x), dtype):
        same(q, codes(vectors, inv, dtype).reshape(17, 256))
        same_scales(scale.t(), inv)


@every_format
def test_of_groups(dtype):
    """One group of 128 rows: vectors down its columns, and of the block behind it zeros."""
    x = hard(128, 40)
    offs = torch.tensor([128], dtype=torch.int32)
    inv = inverse(x, 0, FORMATS[dtype][1], True)
    for q, scale in both(k.quantize_group_blocks, torch.from_numpy(x), offs, dtype):
        same(q[:, :128], np.ascontiguousarray(codes(x, inv, dtype).T))
        same_scales(scale[0], inv)
        assert not q[:, 128:].float().any()


@every_format
def test_of_a_tensor_and_of_matrices(dtype):
    for x in (hard(17, 40)[[0, 1, 4, 6, 13]], hard(17, 40), np.zeros((3, 4), np.float32)):
        inv = inverse(x, (0, 1), FORMATS[dtype][1], False)
        t = torch.from_numpy(x)
        for row, col, scale in both(amax.quantize_groups, t, None, dtype, True, True):
            same(row, codes(x, inv, dtype))
            same(col[:, : len(x)], np.ascontiguousarray(codes(x, inv, dtype).T))
            same_scales(scale, inv)
        for row, turned, scale in both(amax.quantize_matrices, t[None], dtype):
            same(row[0], codes(x, inv, dtype))
            same(turned[0], np.ascontiguousarray(codes(x, inv, dtype).T))
            same_scales(scale, inv)
