"""Casts and transposes equal their twins bit for bit, hard values and batches included."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import ROWS, SEEDS, VALUES, WIDTHS, assert_same_layout, few, run, tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels import casts as k

pytestmark = pytest.mark.usefixtures("kernels")
DTYPES = st.sampled_from(k.DTYPES)


def same_bits(op, *args):
    got, want = run(op, *args), op.twin(*args)
    pairs = [(got, want)] if isinstance(got, torch.Tensor) else zip(got, want, strict=True)
    for g, w in pairs:
        assert_same_layout(g, w)
        assert torch.equal(g.float().isnan(), w.float().isnan())
        assert torch.equal(g.float().nan_to_num(7.0), w.float().nan_to_num(7.0)), (g, w)


@st.composite
def inputs(draw):
    dtype = draw(DTYPES)
    wide = torch.float32 if dtype.itemsize == 1 else dtype
    x = tensor((draw(ROWS), draw(WIDTHS)), wide, draw(VALUES), draw(SEEDS), draw(st.booleans()))
    return x if dtype == wide else x.clamp(-400, 400).to(dtype)


@given(inputs(), DTYPES)
@few
def test_cast(x, dtype):
    same_bits(k.cast, x, dtype)


@given(inputs(), DTYPES, st.sampled_from(["row", "col", "both"]))
@few
def test_transpose(x, dtype, layout):
    same_bits(k.cast_transpose, x, dtype, layout)


@given(st.sampled_from([0, 1, 3]), st.sampled_from([0, 1, 33, 64]), SEEDS, st.booleans())
@few
def test_batch(batch, rows, seed, strided):
    x = tensor((batch, rows, 2 * 70), torch.float32, "normal", seed)
    x = x[:, :, 70:] if strided else x
    same_bits(k.cast_transpose, x, torch.bfloat16, "both")


@pytest.mark.parametrize("shape", [(6, 16), (64, 130), (3, 33, 16)])
def test_float32_in_both_fp8_layouts(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100
    same_bits(k.cast_transpose, x, torch.float8_e4m3fn, "both")


def test_any_shape():
    for x in (torch.randn(3, 5, 7), torch.randn(()), torch.randn(0), torch.randn(4, 6).t()):
        same_bits(k.cast, x, torch.float16)
    same_bits(k.cast, torch.randn(3, 4096), torch.bfloat16)
    same_bits(k.cast_transpose, torch.randn(6, 5).t(), torch.bfloat16, "both")


def test_errors_name_what_was_given():
    with pytest.raises(FuseOpsError, match=r"x is torch.int32, expected one of torch.bfloat16"):
        k.cast.launcher(torch.ones(2, 3, dtype=torch.int32), torch.float16)
    with pytest.raises(FuseOpsError, match=r"x is \(3,\), expected \(R, N\) or \(B, R, N\)"):
        k.cast_transpose.launcher(torch.ones(3), torch.float16)
