"""MXFP8 and NVFP4 by the kernel are those of plain torch, bit for bit, as are the places of swizzled scales."""

import pytest
import torch
from format_oracle import hard
from hypothesis import given
from hypothesis import strategies as st
from laws import DEVICE, DTYPES, SEEDS, VALUES, assert_same_layout, few, place, run, splits, tensor
from torch.utils._pytree import tree_map_only

from fuseops import kernels as K
from fuseops.errors import FuseOpsError
from fuseops.kernels import micro
from fuseops.kernels.formats import E2M1

pytestmark = pytest.mark.usefixtures("kernels")
DATA = (*micro.FORMATS, E2M1)
LAYOUTS = st.sampled_from(micro.LAYOUTS)


def same_bits(x, data, layout, offs=None, swizzle=False):
    """Of the kernel and its twin, with the amax that NVFP4 asks for: of rows outside of groups nothing counts."""
    amax = None
    if data is E2M1:
        amax = K.amax_of_groups(K.amax_of_tokens(x, 1), offs)
    args, op = (x, data, layout, offs, amax, swizzle), micro.quantize_micro
    expected = op.twin(*args)
    assert_same_bits(run(op, *args), expected)
    if DEVICE == "cuda":  # where torch's own kernels round, too
        assert_same_bits(op.twin(*tree_map_only(torch.Tensor, place, args)), expected)


def assert_same_bits(found, expected):
    for got, want in zip(found, expected, strict=True):
        assert_same_layout(got, want)
        if want.dtype is not torch.uint8:  # whichever NaN
            assert torch.equal(got.float().isnan().cpu(), want.float().isnan())
            got, want = (t.float().nan_to_num(0.0) for t in (got, want))
        assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("data", DATA, ids=str)
@pytest.mark.parametrize("layout", micro.LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hard_values(data, layout, dtype):
    x = torch.from_numpy(hard(37, 70)).to(dtype)
    for rows in (x, x[[0, 1, 6, 7, 8, 12]]):  # with and without infinities
        same_bits(rows, data, layout)
        same_bits(rows, data, layout, torch.tensor([2, 2, 5], dtype=torch.int32), True)


@given(
    rows=st.sampled_from([0, 1, 63, 129, 300]), k=st.sampled_from([1, 33, 64, 130, 260]), dtype=DTYPES,
    values=VALUES, seed=SEEDS, data=st.sampled_from(DATA), layout=LAYOUTS, groups=st.integers(0, 5),
    swizzle=st.booleans(), strided=st.booleans(),
)  # fmt: skip
@few
def test_groups_of_any_size(rows, k, dtype, values, seed, data, layout, groups, swizzle, strided):
    x = tensor((rows, k), dtype, values, seed, strided)
    padding = min(rows, seed % 9) if groups else 0
    x[rows - padding :] = float("nan")
    offs = splits(rows, groups, seed, padding) if groups else None
    same_bits(x, data, layout, offs, swizzle)


@given(r=st.integers(1, 300), s=st.integers(1, 20))
def test_a_swizzled_scale_stands_where_tensor_cores_look(r, s):
    """Byte (r // 128) ceil(S / 4) 512 + (s // 4) 512 + (r % 32) 16 + (r % 128 // 32) 4 + s % 4."""
    scale = torch.randint(1, 255, (r, s), dtype=torch.uint8)
    found = K.swizzled(scale).flatten()
    i, j = torch.arange(r)[:, None], torch.arange(s)[None, :]
    at = (i // 128 * -(-s // 4) + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
    assert torch.equal(found[at], scale)
    assert found.count_nonzero() == r * s and len(found) == -(-r // 128) * -(-s // 4) * 512


def test_groups_have_scale_tiles_of_their_own():
    """Those of group g begin at block offs[g-1] // 128 + g and are the ones that its rows have alone."""
    x = torch.randn(400, 96)
    offs = torch.tensor([5, 5, 260, 390], dtype=torch.int32)
    _, scale = run(micro.quantize_micro, x, micro.FORMATS[0], "row", offs, None, True)
    begin = 0
    for g, end in enumerate(offs.tolist()):
        _, alone = micro.quantize_micro.twin(x[begin:end], micro.FORMATS[0])
        wanted = K.swizzled(alone)
        first = begin // 128 + g
        assert torch.equal(scale[first : first + len(wanted)], wanted)
        begin = end


def test_bad_arguments_are_refused():
    x = torch.randn(4, 32)
    amax = torch.ones(())  # which NVFP4 needs, and nothing else takes
    for args in (
        *((x[0], DATA[0]), (x, torch.float32), (x, DATA[0], "both")),
        *((x, E2M1), (x, DATA[0], "row", None, amax), (x, E2M1, "row", None, amax[None])),
    ):
        with pytest.raises(FuseOpsError, match="expected"):
            micro.quantize_micro.launcher(*args)
