"""Columnwise FP8 in vectors that begin anew in each group."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from laws import SEEDS, few, run, splits, tensor
from test_quantize import FORMATS, inputs, same_bits

from fuseops import kernels as K
from fuseops.kernels import quantize as k

pytestmark = pytest.mark.usefixtures("kernels")


@given(inputs(), FORMATS, st.sampled_from([1, 2, 5]), SEEDS)
@few
def test_group_blocks(x, dtype, groups, seed):
    padding = min(len(x), seed % 5)
    x[len(x) - padding :] = float("nan")
    same_bits(k.quantize_group_blocks, x, splits(len(x), groups, seed, padding), dtype)


def test_many_rows_and_groups():
    """More rows than one split and one block hold, much padding, and more groups than a warp sees at once."""
    x = torch.randn(700, 40)
    for ends in ([0, 300, 300, 437], [700], [1, 130, 257, 700], range(3, 700, 10)):
        same_bits(
            k.quantize_group_blocks,
            x,
            torch.tensor([*ends], dtype=torch.int32),
            torch.float8_e4m3fn,
        )


ENDS = st.integers(0, 304) | st.sampled_from([31, 32, 33, 127, 128, 129])


@given(st.lists(ENDS, min_size=1, max_size=9), st.sampled_from([8, 64, 100]), FORMATS, SEEDS)
@few
def test_groups_end_anywhere(ends, n, dtype, seed):
    """Every column is written, whichever rows its block holds."""
    x = tensor((304, n), torch.bfloat16, "normal", seed)
    ends = torch.tensor(sorted(ends), dtype=torch.int32)
    x[int(ends[-1]) :] = float("nan")
    same_bits(k.quantize_group_blocks, x, ends, dtype)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(0, 40), SEEDS)
@few
def test_groups_are_quantized_alone_at_aligned_columns(counts, padding, seed):
    rows = sum(counts) + padding
    x = tensor((rows, 8), torch.float32, "normal", seed)
    x[sum(counts) :] = float("nan")
    offs = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q, scale = run(k.quantize_group_blocks, x, offs, torch.float8_e4m3fn)
    ends = K.column_offs(offs)
    starts = [0, *ends.tolist()]
    for part, start, stop in zip(
        x[: sum(counts)].split(counts), starts, ends.tolist(), strict=False
    ):
        assert start % 128 == 0
        whole = F.pad(part, (0, 0, 0, -len(part) % 128))  # its columns, as rows of the transpose
        alone, alone_scale = k.quantize_vectors.twin(whole.t(), torch.float8_e4m3fn)
        assert torch.equal(q[:, start : start + len(whole)].float(), alone.float())
        assert not q[:, start + len(part) : stop].float().any()
        assert torch.equal(scale[start // 128 :][: len(alone_scale)], alone_scale)
    assert not q[:, starts[-1] :].float().any()
