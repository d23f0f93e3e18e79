"""Products of codes in small blocks are those of what the codes stand for, by the kernel and by plain torch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import DEVICE, SEEDS, few, run, splits
from test_operands import varied

from fuseops import kernels as K
from fuseops.errors import FuseOpsError
from fuseops.kernels.formats import E2M1, E4M3, E5M2, micro_format

older = DEVICE != "cpu" and torch.cuda.get_device_capability() < (10, 0)
pytestmark = [
    pytest.mark.usefixtures("kernels"),
    pytest.mark.skipif(older, reason="tensor cores that scale codes came with Blackwell"),
]
FORMS = st.sampled_from([(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E2M1, E2M1)])


def codes(x, data, layout="row", offs=None):
    """(codes, swizzled scales, what both stand for, 1 or the number that it is over)."""
    amax = None
    if data is E2M1:
        amax = K.amax_of_groups(K.amax_of_tokens(x, 1), offs)
    found, scale = K.quantize_micro.twin(x, data, layout, offs, amax)
    form, turn = micro_format(data), layout == "col"
    values = K.dequantize_format(found, scale.view(form.scale), data, form.block)
    whole = None if amax is None else (1 / K.whole_inverse(amax)).reshape(-1)
    return found, K.swizzled(scale, None if turn else offs), values, whole


def weights(groups, n, k, data, seed):
    made = [
        codes(varied((n, k), torch.float32, "normal", seed + e), data)
        for e in range(max(groups, 1))
    ]
    parts = [torch.stack([part[i] for part in made]) for i in range(3)]
    whole = None if made[0][3] is None else torch.cat([part[3] for part in made])
    return (*parts, whole) if groups else (*(part[0] for part in parts), whole)


def product(a, b):
    return None if a is None else a * b


ROWS, GROUPS = st.sampled_from([0, 1, 63, 129, 300]), st.integers(0, 4)
OUT = st.sampled_from([torch.float32, torch.bfloat16])
SIZES = st.sampled_from([1, 40, 128, 160])


@given(
    rows=ROWS, n=SIZES, k=st.sampled_from([32, 40, 64, 150, 288]), seed=SEEDS, forms=FORMS, groups=GROUPS, dtype=OUT
)  # fmt: skip
@few
def test_rows_times_a_weight(rows, n, k, seed, forms, groups, dtype):
    x = varied((rows, k), torch.float32, "normal", seed)
    padding = min(rows, seed % 9) if groups else 0
    x[rows - padding :] = 0.0
    offs = splits(rows, groups, seed, padding) if groups else None
    left, left_scale, a, one = codes(x, forms[0], "row", offs)
    right, right_scale, b, other = weights(groups, n, k, forms[1], seed)
    left.view(torch.uint8)[rows - padding :] = 0x7F  # NaN, where the format has one
    args = left, left_scale, right, right_scale, offs, product(one, other), dtype
    if offs is None:
        exact, size = a.double() @ b.double().T, a.abs() @ b.abs().T
    else:
        exact, size = (
            K.grouped_mm.twin(f(a), f(b), offs) for f in (torch.Tensor.double, torch.abs)
        )
    factor = 1.0 if one is None else by_row(product(one, other), offs, rows)
    compare(K.micro_mm, args, exact * factor, size * factor, k, dtype)


def by_row(whole, offs, rows):
    return whole if offs is None else K.spread_over_groups(whole, offs, rows, 0.0)[:, None]


@given(rows=ROWS, n=SIZES, k=SIZES, seed=SEEDS, forms=FORMS, groups=GROUPS, dtype=OUT)
@few
def test_columns_times_columns(rows, n, k, seed, forms, groups, dtype):
    offs = splits(rows, groups, seed, 0) if groups else None
    sides = [
        codes(varied((rows, wide), torch.float32, "normal", seed + i), data, "col", offs)
        for i, (wide, data) in enumerate(zip((n, k), forms, strict=True))
    ]
    (dy, dy_scale, a, one), (x, x_scale, b, other) = sides
    args = dy, dy_scale, x, x_scale, offs, product(one, other), dtype
    if offs is None:
        exact, size = a.double() @ b.double().T, a.abs() @ b.abs().T
    else:
        ends = K.column_offs(offs)
        exact, size = (
            K.grouped_wgrad.twin(f(a).T, f(b).T, ends) for f in (torch.Tensor.double, torch.abs)
        )
    factor = (
        1.0
        if one is None
        else product(one, other).reshape(-1, 1, 1)
        if groups
        else product(one, other)
    )
    compare(K.micro_wgrad, args, exact * factor, size * factor, rows, dtype)


def compare(op, args, exact, size, summed, dtype):
    """Sums of so many products in float32, and one rounding."""
    eps = torch.finfo(torch.float32).eps
    bound = (
        size.double() * eps * (summed + 3)
        + exact.abs() * torch.finfo(dtype).eps
        + torch.finfo(dtype).tiny
    )
    for y in (op.twin(*args), run(op, *args)):
        assert y.dtype == dtype and y.shape == exact.shape
        assert ((y.double() - exact).abs() <= bound).all()


def test_swizzled_scales_come_back():
    scale = torch.randint(1, 255, (300, 9), dtype=torch.uint8)
    offs = torch.tensor([5, 5, 260, 290], dtype=torch.int32)
    assert torch.equal(K.unswizzled(K.swizzled(scale), 300, 9), scale)
    back = K.unswizzled(K.swizzled(scale, offs), 300, 9, offs)
    assert torch.equal(back[:290], scale[:290]) and not back[290:].any()
    many = torch.randint(1, 255, (3, 130, 5), dtype=torch.uint8)
    found = K.swizzled(many)
    assert torch.equal(found[1], K.swizzled(many[1]))
    assert torch.equal(K.unswizzled(found, 130, 5), many)


def test_scales_in_another_order_are_refused():
    x, scale, *_ = codes(torch.ones(4, 64), E4M3)
    with pytest.raises(FuseOpsError, match="as swizzled"):
        K.micro_mm.launcher(x, scale[0], x, scale)
    with pytest.raises(FuseOpsError, match="weight is"):
        K.micro_mm.launcher(x, scale, x[:, :32], scale)
