"""FP8 operands: kernels equal their twins bit for bit, twins an oracle of numpy, and the shift is exact."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import SEEDS, VALUES, few, run, splits, tensor

from fuseops import kernels as K
from fuseops.kernels import norm, norm_operand
from fuseops.kernels import operands as k
from fuseops.kernels.configs import forced

pytestmark = pytest.mark.usefixtures("kernels")
FORMATS = st.sampled_from(k.FORMATS)
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
ROWS = st.sampled_from([1, 7, 127, 128, 130])
WIDTHS = st.sampled_from([16, 112, 128, 144, 100])  # the last runs the reference


def varied(shape, dtype, values="normal", seed=0, strided=False):
    """Magnitudes that change from token to token and block to block: else a scale read from a wrong place passes."""
    x = tensor(shape, dtype, values, seed, strided)
    if values == "normal":
        g = torch.Generator().manual_seed(seed)
        x *= torch.exp2(torch.randint(-5, 6, (len(x), 1), generator=g).float()).to(dtype)
        blocks = torch.exp2(torch.randint(-5, 6, (1, -(-x.shape[1] // 128)), generator=g).float())
        x *= blocks.repeat_interleave(128, 1)[:, : x.shape[1]].to(dtype)
    return x


def same(got, want, end=None, rows=()):
    """Equal codes and scales; those of rows up to `end`, behind which nothing is written."""
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.shape == w.shape and g.dtype == w.dtype
        if not w.numel():
            continue
        if i in rows and end is not None:
            g, w = (t[:, :end] if t.dtype is torch.float32 else t[:end] for t in (g, w))
        if g.dtype.itemsize == 1:
            nan = w.float().isnan()
            assert torch.equal(g.float().isnan(), nan)
            assert torch.equal(g.float()[~nan], w.float()[~nan]), i
        else:
            assert torch.equal(g, w), i


@given(ROWS, WIDTHS, DTYPES, VALUES, FORMATS, SEEDS, st.booleans(), st.sampled_from([0, 1, 3]))
@few
def test_rows_and_columns(rows, n, dtype, values, fmt, seed, row, groups):
    x = varied((rows, n), dtype, values, seed, strided=seed % 4 == 0)
    offs = splits(rows, groups, seed, min(rows, seed % 3)) if groups else None
    want = K.quantize_operand.twin(x, offs, fmt, row)
    end = rows if offs is None else int(offs[-1])
    same(run(k.quantize_operand, x, offs, fmt, row), want, end, (0, 1))


@given(
    ROWS,
    WIDTHS,
    FORMATS,
    SEEDS,
    st.sampled_from([(1, 1), (1, 0), (0, 1)]),
    st.booleans(),
    st.booleans(),
)
@few
def test_codes_by_index(tokens, n, fmt, seed, wanted, by_index, grouped):
    grouped = grouped or by_index
    data, scale = K.quantize_vectors.twin(varied((tokens, n), torch.bfloat16, "normal", seed), fmt)
    g = torch.Generator().manual_seed(seed)
    rows = tokens if not by_index else tokens + seed % 150
    index = torch.randint(0, tokens, (rows,), generator=g).int() if by_index else None
    offs = splits(rows, 1 + seed % 4, seed, min(rows, seed % 3)) if grouped else None
    row, col = map(bool, wanted)
    want = K.permute_operand.twin(data, scale, index, offs, row, col)
    end = rows if offs is None else int(offs[-1])
    same(run(k.permute_operand, data, scale, index, offs, row, col), want, end, (0, 1))


@pytest.mark.parametrize("chunk", [1, 2, 4, 64])
@pytest.mark.parametrize("n", [640, 784])
def test_codes_by_index_in_any_order_of_their_features(chunk, n):
    """Five blocks of features, and seven of which the last is not whole, by chunks that do not divide them too."""
    codes, scale = K.quantize_vectors.twin(
        varied((70, n), torch.bfloat16, "normal", 3), torch.float8_e4m3fn
    )
    index = torch.randint(0, 70, (300,), generator=torch.Generator().manual_seed(5)).int()
    offs = torch.tensor([130, 130, 299], dtype=torch.int32)
    with forced(k.PERMUTE, {**next(iter(k.PERMUTE.candidates((n,), 1))), "CHUNK": chunk}):
        got = run(k.permute_operand, codes, scale, index, offs, True, True)
    same(got, K.permute_operand.twin(codes, scale, index, offs, True, True), 299, (0, 1))


@given(ROWS, st.sampled_from([16, 128, 208]), DTYPES, FORMATS, SEEDS, st.booleans(), st.booleans())
@few
def test_swiglu(rows, n, dtype, fmt, seed, scaled, col):
    h, h_scale = hidden(tensor((rows, 2 * n), dtype, "normal", seed), seed % 3 == 0)
    probs = torch.rand(rows) if scaled else None
    offs = splits(rows, 3, seed, min(rows, seed % 3)) if seed % 2 else None
    args = h, probs, offs, fmt, True, col, h_scale
    got, want = run(k.swiglu_operand, *args), K.swiglu_operand.twin(*args)
    close(got, want, fmt, rows if offs is None else int(offs[-1]))


@given(ROWS, st.sampled_from([128, 256]), DTYPES, FORMATS, SEEDS, st.booleans())
@settings(few, max_examples=8)
def test_dswiglu(rows, n, dtype, fmt, seed, scaled):
    da, h_scale = tensor((rows, n), dtype, "normal", seed), None
    h = varied((rows, 2 * n), dtype, "normal", seed + 1)
    if dtype is not torch.float32:
        h, h_scale = hidden(h, seed % 3 == 0)
    probs = torch.rand(rows) if scaled else None
    offs = splits(rows, 3, seed, min(rows, seed % 3)) if seed % 2 else None
    end = rows if offs is None else int(offs[-1])
    args = da, h, probs, offs, fmt, torch.float8_e4m3fn, True, True, True, h_scale
    got, want = run(k.dswiglu_operand, *args), K.dswiglu_operand.twin(*args)
    close(got[:4], want[:4], fmt, end)
    none = torch.empty(0)
    close((none, none, *got[4:6]), (none, none, *want[4:6]), torch.float8_e4m3fn, end)
    torch.testing.assert_close(got[6], want[6], rtol=1e-4, atol=1e-5 * n)


@given(
    ROWS, st.sampled_from([16, 128, 208, 100]), DTYPES, FORMATS, SEEDS, st.booleans(), st.booleans()
)
@few
def test_a_norm_that_writes_an_operand(rows, n, dtype, fmt, seed, added, weighted):
    """Its rows are the codes of what its rstd makes of x, and its columns those of its rows. The norm alone sums a row
    in another order, and rstd may differ in its last place.
    """
    x = varied((rows, n), dtype, "normal", seed, strided=seed % 4 == 0)
    residual = varied((rows, n), dtype, "normal", seed + 1) if added else None
    weight = tensor((n,), dtype, "normal", seed + 2) if weighted else None
    offset = float(seed % 2)
    data, scale, h, rstd = run(norm_operand.rmsnorm_operand, x, residual, weight, 1e-6, fmt, offset)
    want = K.rmsnorm_operand.twin(x, residual, weight, 1e-6, fmt, offset)
    none = torch.empty(0)
    close((data, scale, none, none), (*want[:2], none, none), fmt, rows)
    if added:
        _, h_alone, rstd_alone = run(norm.add_rmsnorm_fwd, x, residual, weight, 1e-6, offset)
        assert torch.equal(h, h_alone)
    else:
        h, (_, rstd_alone) = x, run(norm.rmsnorm_fwd, x, weight, 1e-6, offset)
    torch.testing.assert_close(rstd, rstd_alone, rtol=n * 2.0**-24, atol=0)
    y = h.float() * rstd[:, None]
    y = y if weight is None else y * (weight.float() + offset)
    same((data, scale), run(k.quantize_operand, y.to(dtype), None, fmt)[:2])
    columns = run(norm_operand.rmsnorm_columns, h, weight, rstd, fmt, float(seed % 2))
    same(columns, run(k.permute_operand, data, scale, None, None, False, True)[2:])
    same(columns, K.rmsnorm_columns.twin(h, weight, rstd, fmt, float(seed % 2)))


def hidden(h, quantized):
    """(h, None), or the codes of h and their scales."""
    if not quantized:
        return h, None
    data, scale = K.quantize_vectors.twin(h, torch.float8_e4m3fn)
    return data, scale


def close(got, want, fmt, end):
    """Equal values but for a last place of the activation: a code beside, and a scale where amax is on its edge."""
    for codes, scales, columns in ((0, 1, False), (2, 3, True)):
        if not want[codes].numel():
            assert not got[codes].numel()
            continue
        mine, theirs = (values(t[codes], t[scales], columns) for t in (got, want))
        if not columns:
            mine, theirs = mine[:end], theirs[:end]
        assert not mine.isnan().any()
        assert (mine != theirs).sum() <= 0.02 * mine.numel()
        step = 2.0 ** -(3 if fmt is torch.float8_e4m3fn else 2)
        torch.testing.assert_close(
            mine,
            theirs,
            rtol=step,
            atol=step * 2.0**-5 * float(theirs.abs().amax() if theirs.numel() else 0),
        )


def values(codes, scales, columns):
    """What codes stand for, written a second time."""
    if columns:
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[
            : codes.shape[0], : codes.shape[1]
        ]
    else:
        wide = scales.repeat_interleave(128, 0)[: codes.shape[1]].t()
    return codes.float() * wide


def test_more_groups_than_a_warp_sees_at_once():
    x, offs = varied((130, 16), torch.bfloat16, "normal", 1), splits(130, 40, 3, 2)
    want = K.quantize_operand.twin(x, offs, torch.float8_e4m3fn)
    same(run(k.quantize_operand, x, offs, torch.float8_e4m3fn), want, int(offs[-1]), (0, 1))


@pytest.mark.parametrize("fmt", k.FORMATS, ids=str)
def test_the_shift_of_a_code_is_exact_unless_its_bits_fall_off(fmt):
    """Every code at every shift: the value itself where the format holds it at the larger scale, else the nearest."""
    codes = torch.arange(256, dtype=torch.uint8).view(fmt)
    codes = codes[codes.float().isfinite()]
    data = torch.cat([codes.view(torch.uint8)] * 20).view(20, -1).view(fmt)
    data = torch.cat([data, data[:1]])  # a row at the largest scale
    scale = torch.exp2(torch.tensor([-float(d) for d in range(20)] + [0.0])).expand(2, -1)
    _, _, col, square = run(k.permute_operand, data, scale.contiguous(), None, None, False, True)
    assert (square == 1.0).all()
    got = col[:, :20].float().t()
    value = data[:20].float() * scale[0, :20, None]
    assert torch.equal(got, value.to(fmt).float())
    exact = value.to(fmt).float() == value
    smallest = {torch.float8_e4m3fn: 2.0**-6, torch.float8_e5m2: 2.0**-14}[fmt]
    assert exact[value.abs() >= smallest].all()
    assert ((got - value).abs() <= torch.finfo(fmt).tiny * torch.finfo(fmt).eps / 2).all()
    assert not exact.all()


@given(
    st.sampled_from([(1, 16, 8), (2, 128, 128), (3, 144, 260), (2, 30, 40)]),
    DTYPES,
    VALUES,
    FORMATS,
    SEEDS,
    st.sampled_from([(1, 1), (1, 0), (0, 1)]),
)
@few
def test_weights(shape, dtype, values, fmt, seed, wanted):
    w = tensor((shape[0] * shape[1], shape[2]), dtype, values, seed).view(shape)
    row, col = map(bool, wanted)
    same(run(k.quantize_weight, w, fmt, row, col), K.quantize_weight.twin(w, fmt, row, col))
    one, of_one = K.quantize_weight.twin(w[0], fmt), K.quantize_weight.twin(w[:1], fmt)
    same(one, tuple(t[0] for t in of_one))
    same(run(k.quantize_weight, w[0], fmt), one)


# --- the twins against numpy and ml_dtypes

NUMPY = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2}


def oracle(x, fmt):
    """(codes as bytes, scales) of one block, by numpy: a power of two by frexp, rounding by ml_dtypes."""
    limit = float(ml_dtypes.finfo(NUMPY[fmt]).max)
    amax = np.max(
        np.abs(np.nan_to_num(x, nan=0.0, posinf=3.4028235e38, neginf=-3.4028235e38)), initial=0
    )
    inv = 2.0**63 if amax == 0 else min(2.0 ** (np.frexp(limit / float(amax))[1] - 1), 2.0**63)
    return cast(x * np.float32(inv), fmt), np.float32(1 / inv)


def cast(x, fmt):
    limit = float(ml_dtypes.finfo(NUMPY[fmt]).max)
    return np.clip(x, -limit, limit).astype(NUMPY[fmt])


def bits(t):
    return t.contiguous().view(torch.uint8).numpy()


@given(st.sampled_from([1, 130, 200]), st.sampled_from([8, 130]), VALUES, FORMATS, SEEDS)
@few
def test_twins_equal_numpy(rows, n, values, fmt, seed):
    x = varied((rows, n), torch.bfloat16, values, seed)
    offs = splits(rows, 3, seed, min(rows, seed % 3))
    row, scale, col, square = K.quantize_operand.twin(x, offs, fmt)
    wide, start = x.float().numpy(), 0
    codes, scales = np.empty((rows, n), NUMPY[fmt]), np.empty((-(-n // 128), rows), np.float32)
    for r in range(rows):
        for b in range(len(scales)):
            at = slice(128 * b, 128 * b + 128)
            codes[r, at], scales[b, r] = oracle(wide[r, at], fmt)
    nan = np.isnan(codes.astype(np.float32))
    assert (bits(row)[~nan] == codes.view(np.uint8)[~nan]).all() and (scale.numpy() == scales).all()
    written = np.zeros(square.shape, bool)
    for g, end in enumerate(offs.tolist()):
        for t in range(start, end, 128):
            token, column = slice(t, min(t + 128, end)), (start // 128 + g) * 128 + t - start
            for b in range(len(scales)):
                at, largest = slice(128 * b, 128 * b + 128), scales[b, token].max()
                shift = (scales[b, token] / largest)[:, None]
                want = cast(codes[token, at].astype(np.float32) * shift, fmt).T
                got = bits(col[at, column : column + want.shape[1]])
                keep = ~np.isnan(want.astype(np.float32))
                assert (got[keep] == want.view(np.uint8)[keep]).all()
                assert square[b, column // 128] == largest
                written[b, column // 128] = True
        start = end
    columns = torch.zeros(col.shape, dtype=torch.bool)
    for g, (begin, end) in enumerate(zip([0, *offs.tolist()], offs.tolist(), strict=False)):
        first = (begin // 128 + g) * 128
        columns[:, first : first + end - begin] = True
    assert not bits(col)[~columns.numpy()].any()


@given(st.sampled_from([(1, 130, 8), (2, 16, 200)]), VALUES, FORMATS, SEEDS)
@few
def test_the_twin_of_weights_equals_numpy(shape, values, fmt, seed):
    w = varied((shape[0] * shape[1], shape[2]), torch.bfloat16, values, seed).view(shape)
    row, scale, col, col_scale = K.quantize_weight.twin(w, fmt)
    assert torch.equal(bits_of(col), bits_of(row).mT) and torch.equal(col_scale, scale.mT)
    for e, i, j in np.ndindex(*scale.shape):
        at = (e, slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        want, mine = oracle(w[at].float().numpy(), fmt)
        keep = ~np.isnan(want.astype(np.float32))
        assert (bits(row[at])[keep] == want.view(np.uint8)[keep]).all() and scale[e, i, j] == mine


def bits_of(t):
    return t.contiguous().view(torch.uint8)
