"""Groups end with the rows, whatever their ends say: nothing beyond the tensors is read or written."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import DEVICE, SEEDS, few, run, tensor
from samples import samples
from torch.utils._pytree import tree_leaves

from fuseops import kernels as K
from fuseops.kernels.registry import KERNEL_OPS

pytestmark = pytest.mark.usefixtures("kernels")
ROWS, ENDS = 6, [2, 2, 5]  # of the samples
GROUPED = sorted(
    name
    for name, args in samples().items()
    if any(isinstance(t, torch.Tensor) and t.tolist() == ENDS for t in args)
)


def amid_poison(t):
    """A tensor of rows as the first of a larger one, whose other rows are NaN."""
    if not isinstance(t, torch.Tensor) or t.shape[:1] != (ROWS,) or not t.is_floating_point():
        return t
    whole = t.new_empty(400, *t.shape[1:])
    codes = t.dtype == torch.float8_e4m3fn
    whole.view(torch.uint8 if codes else t.dtype).fill_(0x7F if codes else float("nan"))
    whole[:ROWS] = t
    return whole[:ROWS]


def results(name, last):
    """What an op gives of its sample, whose last group ends at row `last`."""
    ends = torch.tensor([*ENDS[:-1], last], dtype=torch.int32)
    given = [
        ends if isinstance(t, torch.Tensor) and t.tolist() == ENDS else amid_poison(t)
        for t in samples()[name]
    ]
    first, *rest = given
    if not name.endswith("_into"):
        return tree_leaves(run(KERNEL_OPS[name], *given))
    first = first.clone().to(DEVICE)
    KERNEL_OPS[name](first, *[t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in rest])
    return [first.cpu()]


@pytest.mark.parametrize("name", GROUPED)
def test_groups_that_end_beyond_the_rows_end_with_them(name):
    for got, want in zip(results(name, 300), results(name, ROWS), strict=True):
        assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=5).map(sorted),
    st.sampled_from([64, 100, 128]),
    SEEDS,
)
@few
def test_blocks_of_groups_too(ends, n, seed):
    """Kernels that number blocks of groups without a table write each block of those that begin beyond the rows."""
    whole = tensor((900, n), torch.bfloat16, "normal", seed)
    whole[300:] = float("nan")
    x, probs, bias = whole[:300], torch.rand(300), torch.randn(len(ends), n)
    given = torch.tensor(ends, dtype=torch.int32)
    for op, *args in (
        (K.quantize_group_blocks, x, "ends", torch.float8_e4m3fn),
        (K.quantize_groups, x, "ends", torch.float8_e4m3fn, True, True),
        (K.quantize_operand, x, "ends", torch.float8_e4m3fn),
        (K.grouped_bias_bwd, x, "ends", probs, bias),
    ):
        got, want = (
            tree_leaves(run(op, *[e if isinstance(a, str) else a for a in args]))
            for e in (given, given.clamp(max=300))
        )
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
