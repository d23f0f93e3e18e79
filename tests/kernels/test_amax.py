"""One scale a group, or one a matrix: kernels equal their twins bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import DEVICE, SEEDS, VALUES, few, run, splits
from test_operands import DTYPES, FORMATS, ROWS, same, varied

from fuseops import kernels as K
from fuseops.errors import FuseOpsError
from fuseops.kernels import amax as k

pytestmark = pytest.mark.usefixtures("kernels")
WIDTHS = st.sampled_from([1, 16, 100, 144])
WANTED = st.sampled_from([(True, True), (True, False), (False, True)])


def both(op, *args):
    return run(op, *args), op.twin(*args)


@given(
    ROWS, WIDTHS, DTYPES, VALUES, FORMATS, SEEDS, WANTED, st.sampled_from([0, 1, 3]), st.booleans()
)
@few
def test_groups(rows, n, dtype, values, fmt, seed, wanted, groups, by_index):
    x = varied((rows, n), dtype, values, seed, strided=seed % 4 == 0)
    index = None
    if by_index:
        x, index = x[: max(rows // 2, 1)], torch.arange(rows).flip(0) % max(rows // 2, 1)
    offs = splits(rows, groups, seed, min(rows, seed % 3)) if groups else None
    end = rows if offs is None else int(offs[-1])
    same(*both(k.quantize_groups, x, offs, fmt, *wanted, index), end, (0,))
    amax, of_twin = both(k.group_amax, x, offs, index)
    assert torch.equal(amax, of_twin)
    if by_index and end:
        copied = k.group_amax.twin(x[index], offs)
        assert torch.equal(amax, copied)


@given(
    ROWS, st.sampled_from([16, 64]), DTYPES, VALUES, FORMATS, SEEDS, WANTED, st.sampled_from([0, 3])
)
@few
def test_some_features_under_the_scales_of_all(rows, cut, dtype, values, fmt, seed, wanted, groups):
    """They have the codes and the scales that they have in the whole."""
    x = varied((rows, 144), dtype, values, seed)
    offs = splits(rows, groups, seed, min(rows, seed % 3)) if groups else None
    end = rows if offs is None else int(offs[-1])
    inv_scale = K.inverse_scale(k.group_amax.twin(x, offs), fmt, False)
    data, columns, scale = K.quantize_groups.twin(x, offs, fmt, *wanted)
    for part in (slice(0, cut), slice(cut, 144)):
        got, twin = both(k.quantize_groups, x[:, part], offs, fmt, *wanted, None, inv_scale)
        rows_of, columns_of = (
            t if t.dim() == 1 else t[at] for t, at in ((data, (..., part)), (columns, part))
        )
        same(twin, (rows_of, columns_of, scale), end, (0,))
        same(got, twin, end, (0,))


def test_scales_that_do_not_fit_are_named():
    x, offs = torch.ones(4, 16), torch.tensor([1, 4], dtype=torch.int32)
    with pytest.raises(
        FuseOpsError, match=r"inv_scale is torch.float32\(3,\), expected float32\(2,\)"
    ):
        k.quantize_groups.launcher(x, offs, torch.float8_e4m3fn, inv_scale=torch.ones(3))


@given(
    st.sampled_from([1, 3]), st.sampled_from([16, 100, 128, 144]), WIDTHS, DTYPES, VALUES, FORMATS,
    SEEDS, WANTED,
)  # fmt: skip
@few
def test_matrices(groups, n, k_, dtype, values, fmt, seed, wanted):
    w = varied((groups * n, k_), dtype, values, seed).view(groups, n, k_)
    same(run(k.quantize_matrices, w, fmt, *wanted), K.quantize_matrices.twin(w, fmt, *wanted))
    one, of_one = K.quantize_matrices.twin(w[0], fmt), K.quantize_matrices.twin(w[:1], fmt)
    same(one, tuple(t[0] for t in of_one))
    same(run(k.quantize_matrices, w[0], fmt), one)
    assert torch.equal(*both(k.matrix_amax, w)) and torch.equal(*both(k.matrix_amax, w[0]))
    inv_scale = torch.exp2(torch.arange(groups) - 2.0)
    same(*both(k.quantize_matrices, w, fmt, *wanted, inv_scale))


def test_a_wide_tensor_has_one_amax():
    x = torch.ones(130, 1100, dtype=torch.bfloat16)  # more than one program of columns
    x[129, 1099], x[3, 5] = 7.0, 3.0
    offs = torch.tensor([129, 130], dtype=torch.int32)
    scale = run(k.quantize_groups, x, offs, torch.float8_e4m3fn)[2]
    torch.testing.assert_close(scale, torch.tensor([3.0, 7.0]) / 448)


@given(
    st.sampled_from([1, 3, 40]), FORMATS, st.integers(0, 2), st.integers(0, 3), st.booleans(), SEEDS
)
@few
def test_delayed_inverse(groups, fmt, role, margin, record, seed):
    """Scales that are there are taken as they are; amaxes rise, of one role alone."""
    g = torch.Generator().manual_seed(seed)
    of = torch.tensor([0.0, 2.0**-149, 2.0**-127, 1.0, 3e38, torch.finfo(torch.float32).max])
    amax = of[torch.randint(len(of), (groups,), generator=g)] * torch.rand(groups, generator=g)
    amax = amax.squeeze() if groups == 1 and seed % 2 else amax
    scales = torch.rand(3, groups, generator=g) * torch.randint(2, (3, groups), generator=g)
    amaxes = torch.rand(3, groups, generator=g)
    rest = amax, role, fmt, 2.0**-margin, record
    raised = [amaxes.clone(), amaxes.to(DEVICE, copy=True)]  # both are written
    of_twin = k.delayed_inverse.twin(scales, raised[0], *rest)
    assert torch.equal(run(k.delayed_inverse, scales, raised[1], *rest), of_twin)
    assert torch.equal(raised[0], raised[1].cpu())
    own = torch.finfo(fmt).max / amax.reshape(-1).double().clamp(min=0) * 2.0**-margin
    expected = torch.where(scales[role] > 0, scales[role].double(), own)
    seen = (amax.reshape(-1) > 0) | (scales[role] > 0)
    largest = torch.finfo(torch.float32).max
    close = of_twin.reshape(-1).double() / expected.clamp(max=largest)
    assert (close[seen] - 1).abs().max() <= 2.0**-22 if seen.any() else True
    changed = (raised[0] != amaxes).any(1)
    assert not changed[[k for k in range(3) if k != role or not record]].any()
    if record:
        assert torch.equal(raised[0][role], torch.maximum(amaxes[role], amax.reshape(-1)))
