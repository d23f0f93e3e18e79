"""FP8 quantization equals its twin bit for bit, and the twin saturates whatever torch's own cast
does.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import SEEDS, VALUES, assert_same_layout, few, run, tensor

from fuseops.kernels import quantize as k
from fuseops.kernels import reference

pytestmark = pytest.mark.usefixtures("kernels")
ROWS = st.sampled_from([0, 1, 2, 7, 16, 36, 63, 65, 127, 144, 256])  # 16 and more: wide columns
FORMATS = st.sampled_from(k.FORMATS)
LAYOUTS = st.sampled_from(k.LAYOUTS)
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


@given(inputs(), FORMATS, LAYOUTS, st.booleans())
@few
def test_per_tensor(x, dtype, layout, pow2):
    same_bits(k.quantize_tensor, x, dtype, layout, pow2)


@given(inputs(), FORMATS, st.booleans())
@few
def test_per_row(x, dtype, pow2):
    same_bits(k.quantize_rows, x, dtype, pow2)


@given(inputs(), FORMATS, st.sampled_from([1, 128]), LAYOUTS, st.booleans())
@few
def test_blocks(x, dtype, block_rows, layout, pow2):
    same_bits(k.quantize_blocks, x, dtype, block_rows, layout, pow2)


@pytest.mark.parametrize("dtype", k.FORMATS, ids=str)
def test_saturation(dtype):
    """Finite values beyond the range and infinities become its ends, NaN stays NaN."""
    limit = torch.finfo(dtype).max
    x = torch.tensor(
        [limit, limit * 1.04, 1e30, float("inf"), -1e30, -float("inf"), float("nan"), 0.0]
    )
    q = reference.saturate(x, dtype).float()
    assert (
        q[:4].tolist() == [limit] * 4
        and q[4:6].tolist() == [-limit] * 2
        and q[6].isnan()
        and q[7] == 0
    )


@pytest.mark.parametrize("block_rows", [1, 128])
def test_round_trip(block_rows):
    """x is q * scale to the format's precision, in both layouts."""
    x = torch.randn(200, 300) * torch.logspace(-3, 3, 300)
    row, col, row_scale, col_scale = k.quantize_blocks(x, torch.float8_e4m3fn, block_rows, "both")
    spread = lambda s, axis: s.repeat_interleave(128, axis)  # noqa: E731
    if block_rows == 1:
        back = (
            row.float() * spread(row_scale, 0)[:300].t(),
            col.float().t() * spread(col_scale, 0)[:200],
        )
    else:
        back = (
            row.float() * spread(spread(row_scale, 0), 1)[:200, :300],
            (col.float() * spread(spread(col_scale, 0), 1)[:300, :200]).t(),
        )
    for y in back:
        torch.testing.assert_close(y, x, rtol=2**-4, atol=x.abs().max().item() * 2**-9)


@pytest.mark.parametrize(
    ("shape", "dtype", "strided"),
    [
        ((6, 16), torch.float32, False),
        ((6, 16), torch.float32, True),
        ((65, 100), torch.float32, False),
        ((2, 1), torch.bfloat16, True),
    ],
)
def test_both_layouts_of_ragged_rows(shape, dtype, strided):
    """A conversion whose bytes and words are both stored is one that ptxas gets wrong."""
    x = tensor(shape, dtype, strided=strided)
    same_bits(k.quantize_tensor, x, torch.float8_e4m3fn, "both", False)
    same_bits(k.quantize_blocks, x, torch.float8_e4m3fn, 128, "both", False)
