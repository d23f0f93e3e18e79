"""Grouped GEMMs equal their twins for any split, on every path, and repeat bit for bit."""

import itertools
from types import FunctionType, SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import DEVICE, DTYPES, SEEDS, assert_matches, few, run, splits, tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels import grouped as k
from fuseops.kernels import grouped_glu, grouped_glu_bwd, grouped_paths
from fuseops.kernels.activation import GATES
from fuseops.kernels.launch import device

pytestmark = pytest.mark.usefixtures("kernels")
ROWS = st.sampled_from([0, 1, 63, 65, 127, 200])
SIZES = st.sampled_from([1, 8, 17, 64, 100, 136])
GROUPS = st.sampled_from([1, 2, 3, 9])


@st.composite
def ends(draw, rows):
    """Random splits, one group with everything, all empty; with and without padding."""
    groups, seed = draw(GROUPS), draw(SEEDS)
    kind, padding = (
        draw(st.sampled_from(["random", "one", "empty"])),
        draw(st.sampled_from([0, 70])),
    )
    if kind == "empty":
        return torch.zeros(groups, dtype=torch.int32)
    if kind == "one":
        where = torch.arange(groups) >= seed % groups
        return (where * max(rows - padding, 0)).to(torch.int32)
    return splits(rows, groups, seed, padding)


def poison(x, offs):
    """NaN in the padding rows, which nothing may read."""
    x[int(offs[-1]) :] = float("nan")
    return x


@st.composite
def problems(draw):
    """x (R, K), dy (R, N), weight (E, N, K) in one of three layouts, offs."""
    rows, n, size, dtype, seed = draw(ROWS), draw(SIZES), draw(SIZES), draw(DTYPES), draw(SEEDS)
    offs = draw(ends(rows))
    strided = draw(st.booleans())
    x = poison(tensor((rows, size), dtype, "normal", seed, strided), offs)
    dy = poison(tensor((rows, n), dtype, "normal", seed + 1, strided), offs)
    shape, axes = draw(
        st.sampled_from([((0, 1, 2), (0, 1, 2)), ((0, 2, 1), (0, 2, 1)), ((1, 2, 0), (2, 0, 1))])
    )
    full = (len(offs), n, size)
    weight = tensor(tuple(full[i] for i in shape), dtype, "normal", seed + 2).permute(axes)
    return x, dy, weight, offs


@given(problems(), st.booleans(), st.sampled_from(["no bias", "bias", "scaled"]))
@few
def test_forward(problem, with_tiles, with_bias):
    x, dy, weight, offs = problem
    tiles = run(k.group_tiles, offs, len(x)) if with_tiles else None
    bias = None if with_bias == "no bias" else tensor(weight.shape[:2], x.dtype, "normal", 7)
    probs = None
    if with_bias == "scaled":
        probs = torch.rand(len(x))
        probs[int(offs[-1]) :] = float("nan")
    args = (x, weight, offs, tiles, bias, None, probs)
    y = assert_matches(k.grouped_mm, *args, sums=True)
    assert torch.equal(y, run(k.grouped_mm, *args))
    assert_matches(k.grouped_mm, dy, weight.transpose(1, 2), offs, tiles, sums=True)


FORMS = [(kind, i) for kind in grouped_paths.EPILOGUE_ACTS for i in range(1 + (kind in GATES))]


@given(problems(), SEEDS, *[st.booleans()] * 4, st.sampled_from(FORMS))
@few
def test_an_activation_at_the_end(problem, seed, with_probs, gather, need_h, with_bias, form):
    """The product and its activation, whatever makes the second."""
    x, _, weight, offs = problem
    weight = torch.cat([weight, weight.flip(1)], 1)
    probs = torch.rand(len(x)) if with_probs else None
    index = None
    if with_probs:
        probs[int(offs[-1]) :] = float("nan")
    if gather:
        x, index = gathered(len(x), x.shape[1], x.dtype, seed)
    bias = tensor(weight.shape[:2], x.dtype, "normal", 7) if with_bias else None
    args = x, weight, offs, None, bias, index, probs, need_h, *form
    assert_matches(grouped_glu.grouped_swiglu, *args, sums=True)


@given(
    problems(), SEEDS, st.booleans(), st.booleans(), st.sampled_from(grouped_paths.BACKWARD_ACTS)
)
@few
def test_a_gradient_that_goes_on_through_an_activation(problem, seed, with_probs, gather, kind):
    """Whatever takes it through; nothing comes from padding."""
    _, dy, weight, offs = problem
    dy, weight, index = dy, weight.transpose(1, 2), None
    h = poison(
        tensor((len(dy), (1 + (kind in GATES)) * weight.shape[1]), dy.dtype, "normal", seed + 3),
        offs,
    )
    probs = torch.rand(len(dy)) if with_probs else None
    if with_probs:
        probs[int(offs[-1]) :] = float("nan")
    if gather:
        dy, index = gathered(len(dy), dy.shape[1], dy.dtype, seed)
    rest = dy, weight, offs, None, probs, index, kind
    want = assert_matches(grouped_glu_bwd.grouped_dswiglu, h, *rest, sums=True)
    over = h.to(DEVICE)
    got = over, *run(grouped_glu_bwd.grouped_dswiglu_into, over, *rest)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)


@given(problems(), st.booleans(), st.booleans())
@few
def test_wgrad(problem, with_tiles, accumulate):
    x, dy, _, offs = problem
    tiles = run(k.group_tiles, offs, len(x)) if with_tiles else None
    dw = assert_matches(k.grouped_wgrad, dy, x, offs, tiles, sums=True)
    assert torch.equal(dw, run(k.grouped_wgrad, dy, x, offs, tiles))
    before = torch.randn(dw.shape).to(DEVICE)
    got, want = before.clone(), before.cpu()
    run_in_place(k.grouped_wgrad_into, got, dy, x, offs, tiles, accumulate)
    k.grouped_wgrad_into.twin(want, dy, x, offs, None, accumulate)
    torch.testing.assert_close(got.cpu(), want, rtol=2e-5, atol=1e-3)


@given(problems(), SEEDS, st.booleans(), st.booleans(), st.booleans())
@few
def test_weight_gradients_by_the_kernel_of_a_few_rows(problem, seed, of_dy, of_x, accumulate):
    """Of any number of rows, those of either operand by index; neighbours and padding are never read."""
    x, dy, _, offs = problem
    sides = []
    for rows, indexed in ((dy, of_dy), (x, of_x)):
        index = None
        if indexed:
            rows, index = gathered(len(rows), rows.shape[1], rows.dtype, seed + len(sides))
            index[int(offs[-1]) :] = 1 << 30
        sides.append((rows, index))
    (dy, dy_index), (x, x_index) = sides
    args = dy, x, offs, None, dy_index, x_index
    with grouped_paths.on_path("few"):
        dw = assert_matches(k.grouped_wgrad, *args, sums=True)
        assert torch.equal(dw, run(k.grouped_wgrad, *args))
        got = torch.randn(dw.shape).to(DEVICE)
        want = got.cpu().clone()
        run_in_place(k.grouped_wgrad_into, got, *args[:4], accumulate, *args[4:])
    k.grouped_wgrad_into.twin(want, *args[:4], accumulate, *args[4:])
    torch.testing.assert_close(got.cpu(), want, rtol=2e-5, atol=1e-3)


def gathered(rows, size, dtype, seed):
    """x (T, size), and an index of `rows` of its rows; T is 1 to 90."""
    count = 1 + seed % 90
    g = torch.Generator().manual_seed(seed)
    kind = torch.int32 if seed % 2 else torch.int64
    return tensor((count, size), dtype, "normal", seed), torch.randint(
        0, count, (rows,), generator=g, dtype=kind
    )


@given(problems(), SEEDS, st.booleans())
@few
def test_gathered_rows(problem, seed, with_tiles):
    """Rows by index equal rows copied before, and the index of a padding row is never read."""
    x, dy, weight, offs = problem
    tiles = run(k.group_tiles, offs, len(x)) if with_tiles else None
    (some_x, x_index), (some_dy, dy_index) = (
        gathered(len(t), t.shape[1], t.dtype, seed + i) for i, t in enumerate((x, dy))
    )
    x_index[int(offs[-1]) :] = dy_index[int(offs[-1]) :] = 1 << 30
    assert_matches(k.grouped_mm, some_x, weight, offs, tiles, None, x_index, sums=True)
    other = weight.transpose(1, 2)
    assert_matches(k.grouped_mm, some_dy, other, offs, tiles, None, dy_index, sums=True)
    assert_matches(k.grouped_wgrad, dy, some_x, offs, tiles, None, x_index, sums=True)
    assert_matches(k.grouped_wgrad, some_dy, x, offs, tiles, dy_index, None, sums=True)
    got = torch.randn(len(offs), dy.shape[1], x.shape[1]).to(DEVICE)
    want = got.cpu().clone()
    run_in_place(k.grouped_wgrad_into, got, some_dy, x, offs, tiles, True, dy_index, None)
    k.grouped_wgrad_into.twin(want, some_dy, x, offs, None, True, dy_index, None)
    torch.testing.assert_close(got.cpu(), want, rtol=2e-5, atol=1e-3)


def run_in_place(op, buffer, *args):
    run(op, buffer, *args)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "size"), [(136, 128), (264, 192), (128, 72)])
@pytest.mark.parametrize("padding", [0, 5])
def test_aligned_operands(dtype, n, size, padding):
    """What descriptors can describe, with K that BLOCK_K divides and K that it does not."""
    offs = splits(500, 5, 3, padding)
    x, dy = tensor((500, size), dtype), tensor((500, n), dtype, seed=1)
    weight = tensor((5, n, size), dtype, seed=2)
    poison(x, offs), poison(dy, offs)
    assert_matches(k.grouped_mm, x, weight, offs, sums=True)
    assert_matches(k.grouped_mm, dy, weight.transpose(1, 2), offs, sums=True)
    assert_matches(k.grouped_wgrad, dy, x, offs, sums=True)


def test_a_group_does_not_see_its_neighbours_nan():
    offs = torch.tensor([70, 140, 210], dtype=torch.int32)
    x, dy, weight = (
        tensor((210, 72), torch.bfloat16),
        tensor((210, 136), torch.bfloat16, seed=1),
        tensor((3, 136, 72), torch.bfloat16, seed=2),
    )
    clean = [
        run(k.grouped_mm, x, weight, offs),
        run(k.grouped_mm, dy, weight.transpose(1, 2), offs),
        run(k.grouped_wgrad, dy, x, offs),
    ]
    for t in (x, dy):
        t[:70] = t[140:] = float("nan")
    weight[0] = weight[2] = float("inf")
    dirty = [
        run(k.grouped_mm, x, weight, offs),
        run(k.grouped_mm, dy, weight.transpose(1, 2), offs),
        run(k.grouped_wgrad, dy, x, offs),
    ]
    for a, b in zip(clean[:2], dirty[:2], strict=True):
        assert torch.equal(a[70:140], b[70:140])
    assert torch.equal(clean[2][1], dirty[2][1])


@given(st.data(), ROWS)
@few
def test_tile_table(data, rows):
    offs = data.draw(ends(rows))
    assert torch.equal(run(k.group_tiles, offs, rows), k.group_tiles.twin(offs, rows))


@given(st.integers(1, 70), st.integers(1, 9), st.sampled_from([1, 2, 8, 16]))
@few
def test_tiles_come_in_bands(num_m, num_n, group):
    """Every tile once, in bands of GROUP row blocks; the last has half as many or up to half more."""
    code = device("grouped_mm").swizzle.fn.__code__
    where = lambda condition, yes, no: yes if condition else no  # noqa: E731
    language = SimpleNamespace(maximum=max, minimum=min, where=where)
    swizzle = FunctionType(code, {"tl": language})  # on Python's integers
    found = [swizzle(tile, num_m, num_n, group) for tile in range(num_m * num_n)]
    bands = max((num_m + group // 2) // group, 1)
    ends = [*range(0, bands * group, group), num_m]
    want = [
        (row, column)
        for first, end in itertools.pairwise(ends)
        for column in range(num_n)
        for row in range(first, end)
    ]
    assert found == want


def test_most_groups():
    offs = splits(1100, 1024, 0, 10)
    assert torch.equal(run(k.group_tiles, offs, 1100), k.group_tiles.twin(offs, 1100))


def test_paths():
    """On the interpreter, which stands for Hopper without Gluon."""
    x, w = torch.empty(8, 64, dtype=torch.bfloat16), torch.empty(2, 64, 64, dtype=torch.bfloat16)
    if DEVICE == "cpu":
        assert (
            grouped_paths.mm_choice(x, w).path
            == "tma"
            == grouped_paths.mm_choice(x, w.transpose(1, 2)).path
        )
        assert grouped_paths.wgrad_choice(x, x).path == "tma"
        assert grouped_paths.wgrad_choice(x, x, groups=2).path == "few"
        assert grouped_paths.mm_choice(x[:, :63], w[:, :, :63]).path == "tma"
    assert grouped_paths.mm_choice(x.float(), w.float()).path == "pointer"
    assert grouped_paths.mm_choice(x, w[:, :63]).path == "pointer"
    assert grouped_paths.mm_choice(x[:, 1:33], w[:, :, 1:33]).path == "pointer"


def test_paths_of_hopper(monkeypatch):
    """Which operands the Gluon kernels take, and where rows by index are copied first."""
    monkeypatch.setattr(
        grouped_paths, "gluon_refusals", lambda arch: [None if arch == 90 else "sm"]
    )
    mm, wgrad = grouped_paths._mm_choice.__wrapped__, grouped_paths._wgrad_choice.__wrapped__
    half, both, x, odd = torch.bfloat16, (True, True), (128, 1), (136, 1)  # rows of 17 x 16 bytes
    packed = lambda n, k: ((n * k, k, 1), both, (8, n, k))  # noqa: E731
    turned, wider = ((s, both, (8, 512, 128)) for s in ((1 << 16, 1, 512), (1 << 17, 256, 1)))
    assert mm(90, half, x, *packed(512, 128), None).path == "pingpong"
    assert mm(90, half, x, *turned, False).path == "gather"
    assert mm(90, half, x, *turned, True).path == "pingpong"  # few rows
    assert mm(90, half, odd, *packed(512, 128), False).path == "pingpong"
    assert mm(90, half, x, *packed(4096, 128), False).path == "pingpong"
    assert mm(90, half, odd, *packed(512, 136), None).path == "tma"  # 64 does not divide K
    assert mm(90, half, x, *wider, None).path == "tma"
    assert mm(100, half, x, *packed(512, 128), False).path == "tma"
    assert mm(90, torch.float32, x, *packed(512, 128), False).path == "pointer"
    assert wgrad(90, half, (512, 1), x, both, 512, 128, None).path == "pingpong"
    assert wgrad(90, half, (512, 1), x, both, 512, 128, 512).path == "gather"
    assert wgrad(90, half, (512, 1), odd, both, 512, 136, 512).path == "pingpong"
    assert wgrad(90, half, (4096, 1), x, both, 4096, 128, 4096).path == "pingpong"
    assert wgrad(80, half, (512, 1), x, both, 512, 128, 512).path == "pointer"


def test_errors_name_what_was_given():
    x, w, offs = torch.randn(6, 4), torch.randn(2, 3, 4), torch.tensor([2, 6], dtype=torch.int32)
    with pytest.raises(FuseOpsError, match=r"offs is torch.int32\(1,\), expected int32\(2,\)"):
        k.grouped_mm.launcher(x, w, offs[:1])
    with pytest.raises(FuseOpsError, match=r"weight is \(2, 4, 3\), expected \(E, N, 4\)"):
        k.grouped_mm.launcher(x, w.transpose(1, 2), offs)
    with pytest.raises(FuseOpsError, match=r"operands are torch\.float32 and torch\.bfloat16"):
        k.grouped_mm.launcher(x, w.bfloat16(), offs)
    with pytest.raises(FuseOpsError, match=r"expected group_tiles\(offs, 6\)"):
        k.grouped_mm.launcher(x, w, offs, offs)
    with pytest.raises(FuseOpsError, match=r"main_grad is torch\.bfloat16"):
        k.grouped_wgrad_into.launcher(w.bfloat16(), x[:, :3], x, offs)


def test_a_kept_plan_sees_every_call():
    """Other rows, addresses, alignment and ends under one key: nothing of a call is remembered."""
    weight = tensor((4, 64, 64), torch.bfloat16)
    for rows in (60, 40, 63, 60):
        wide = tensor((rows + 1, 64), torch.bfloat16, seed=rows)
        shifted = wide.view(-1)[1 : 1 + rows * 64].view(rows, 64)
        for x in (wide[:rows], wide[1:], shifted):
            offs = splits(rows, 4, rows, 3)
            y = assert_matches(k.grouped_mm, x, weight, offs, sums=True)
            assert_matches(k.grouped_wgrad, y, x, offs, sums=True)


def small(rows, dtype=torch.float32):
    offs = torch.tensor([rows // 3, rows - 1], dtype=torch.int32)
    return torch.randn(rows, 16, dtype=dtype), torch.randn(2, 24, 16, dtype=dtype), offs


def test_operands_that_nothing_takes_are_told_apart():
    """After a call of operands that are right, too."""
    x, weight, offs = (t.to(DEVICE) for t in small(40))
    tiles = k.group_tiles(offs, 40)
    y = k.grouped_mm(x, weight, offs, tiles)
    dw = k.grouped_wgrad(y, x, offs, tiles)
    wrong = [
        lambda: k.grouped_mm(x[:, :8], weight, offs, tiles),
        lambda: k.grouped_mm(x, weight[:1], offs, tiles),
        lambda: k.grouped_mm(x, weight, offs[:1], tiles),
        lambda: k.grouped_mm(x, weight, offs.long(), tiles),
        lambda: k.grouped_mm(x, weight, offs, tiles[1:]),
        lambda: k.grouped_mm(x, weight, offs, tiles.long()),
        lambda: k.grouped_mm(x, weight, offs, tiles, weight[:, 1:, 0]),
        lambda: k.grouped_mm(x, weight, offs, tiles, None, offs.float()),
        lambda: k.grouped_mm(x, weight, offs, tiles, None, None, x[:, 0].contiguous()),
        lambda: k.grouped_mm(x, weight, offs, tiles, weight[:, :, 0], None, x[:, 0].half()),
        lambda: k.grouped_mm(x.half(), weight, offs, tiles),
        lambda: k.grouped_wgrad(y[1:], x, offs, tiles),
        lambda: k.grouped_wgrad(y, x.half(), offs, tiles),
        lambda: k.grouped_wgrad(y, x, offs, tiles[1:]),
        lambda: k.grouped_wgrad_into(dw[1:], y, x, offs, tiles),
    ]
    for number, call in enumerate(wrong):
        with pytest.raises(FuseOpsError):
            call()
            pytest.fail(f"call {number} passed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_strides_of_small_operands(dtype):
    """An index, ends, a table and a bias with gaps between their elements."""
    x, weight, offs = (t.to(DEVICE) for t in small(40, dtype))
    gaps = lambda t: torch.stack([t, torch.full_like(t, 7)], -1)[..., 0]  # noqa: E731
    index = torch.randperm(40, device=DEVICE)
    bias = torch.randn(2, 24, device=DEVICE, dtype=dtype)
    tiles = k.group_tiles(offs, 40)
    probs = torch.rand(40, device=DEVICE)
    want = k.grouped_mm(x, weight, offs, tiles, bias, index, probs)
    for _ in range(2):
        strided = map(gaps, (offs, tiles, bias, index, probs))
        got = k.grouped_mm(x, weight, *strided)
        assert torch.equal(got, want)
        assert torch.equal(k.group_tiles(gaps(offs), 40), tiles)
        dw = k.grouped_wgrad(got, x, gaps(offs), gaps(tiles), None, gaps(index))
        assert torch.equal(dw, k.grouped_wgrad(got, x, offs, tiles, None, index))
