"""Columnwise FP8 with a scale a column, and in vectors that begin anew in each group."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import ROWS, SEEDS, few, run, splits, tensor
from test_quantize import FORMATS, inputs, same_bits

from fuseops.kernels import quantize as k

pytestmark = pytest.mark.usefixtures("kernels")


@given(inputs(), FORMATS, st.booleans())
@few
def test_per_column(x, dtype, pow2):
    same_bits(k.quantize_columns, x, dtype, pow2)


@given(inputs(), FORMATS, st.sampled_from([1, 2, 5]), SEEDS, st.booleans())
@few
def test_group_blocks(x, dtype, groups, seed, pow2):
    padding = min(len(x), seed % 5)
    x[len(x) - padding :] = float("nan")
    same_bits(k.quantize_group_blocks, x, splits(len(x), groups, seed, padding), dtype, pow2)


def test_many_rows_and_long_groups():
    """More rows than one split and one block hold, and much padding."""
    x = torch.randn(700, 40)
    same_bits(k.quantize_columns, x, torch.float8_e4m3fn)
    for ends in ([0, 300, 300, 437], [700], [1, 130, 257, 700]):
        same_bits(
            k.quantize_group_blocks, x, torch.tensor(ends, dtype=torch.int32), torch.float8_e4m3fn
        )


ENDS = st.integers(0, 304) | st.sampled_from([32, 33, 127, 128, 129])  # rows that tiles hold


@given(st.lists(ENDS, min_size=1, max_size=9), st.sampled_from([8, 64, 100]), FORMATS, SEEDS)
@few
def test_groups_end_anywhere(ends, n, dtype, seed):
    """Words of four rows that belong to several blocks, where columns begin at multiples of 16 bytes."""
    x = tensor((304, n), torch.bfloat16, "normal", seed)
    ends = torch.tensor(sorted(ends), dtype=torch.int32)
    x[int(ends[-1]) :] = float("nan")
    same_bits(k.quantize_group_blocks, x, ends, dtype)


@given(ROWS, SEEDS)
@few
def test_a_group_alone_gives_what_it_gives_among_others(rows, seed):
    x = torch.randn(rows + 50, 8, generator=torch.Generator().manual_seed(seed))
    ends = torch.tensor([50, rows + 50], dtype=torch.int32)
    q, scale = run(k.quantize_group_blocks, x, ends, torch.float8_e4m3fn)
    _, alone, _, alone_scale = k.quantize_blocks.twin(x[50:], torch.float8_e4m3fn, 1, "col")
    assert torch.equal(q[:, 50:].float(), alone.float())
    assert torch.equal(scale[1 : 1 + len(alone_scale)], alone_scale)
