"""FP8 quantization equals its twin bit for bit, and the twin saturates whatever torch's own cast
does.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import SEEDS, VALUES, assert_same_layout, few, run, tensor

from fuseops import kernels as K
from fuseops.kernels import quantize as k

pytestmark = pytest.mark.usefixtures("kernels")
ROWS = st.sampled_from([0, 1, 2, 7, 16, 36, 63, 65, 127, 144, 256])  # 16 and more: wide columns
FORMATS = st.sampled_from(k.FORMATS)
WIDTHS = st.sampled_from([1, 8, 100, 128, 130, 257])


@st.composite
def inputs(draw):
    shape = draw(ROWS), draw(WIDTHS)
    return tensor(
        shape,
        draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        draw(VALUES),
        draw(SEEDS),
        draw(st.booleans()),
    )


def same_bits(op, *args):
    for got, want in zip(run(op, *args), op.twin(*args), strict=True):
        assert_same_layout(got, want)
        assert torch.equal(got.float().isnan(), want.float().isnan())
        assert torch.equal(got.float().nan_to_num(), want.float().nan_to_num()), (got, want)


@given(inputs(), FORMATS)
@few
def test_vectors(x, dtype):
    same_bits(k.quantize_vectors, x, dtype)


@pytest.mark.parametrize("dtype", k.FORMATS, ids=str)
def test_saturation(dtype):
    """Finite values beyond the range and infinities become its ends, NaN stays NaN."""
    limit = torch.finfo(dtype).max
    x = torch.tensor(
        [limit, limit * 1.04, 1e30, float("inf"), -1e30, -float("inf"), float("nan"), 0.0]
    )
    q = K.saturate(x, dtype).float()
    assert (
        q[:4].tolist() == [limit] * 4
        and q[4:6].tolist() == [-limit] * 2
        and q[6].isnan()
        and q[7] == 0
    )


def test_round_trip():
    """x is q * scale to the format's precision."""
    x = torch.randn(200, 300) * torch.logspace(-3, 3, 300)
    q, scale = k.quantize_vectors(x, torch.float8_e4m3fn)
    back = q.float() * scale.repeat_interleave(128, 0)[:300].t()
    torch.testing.assert_close(back, x, rtol=2**-4, atol=x.abs().max().item() * 2**-9)
