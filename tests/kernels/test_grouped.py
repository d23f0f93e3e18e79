"""Grouped GEMMs equal their twins for any split, on every path, and repeat bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import DEVICE, DTYPES, SEEDS, assert_matches, few, run, splits, tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels import grouped as k
from fuseops.kernels import grouped_paths
from fuseops.kernels.configs import forced

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


@given(problems(), st.booleans(), st.booleans())
@few
def test_forward(problem, with_tiles, with_bias):
    x, dy, weight, offs = problem
    tiles = run(k.group_tiles, offs, len(x)) if with_tiles else None
    bias = tensor(weight.shape[:2], x.dtype, "normal", 7) if with_bias else None
    args = (x, weight, offs, tiles, bias)
    y = assert_matches(k.grouped_mm, *args, sums=True)
    assert torch.equal(y, run(k.grouped_mm, *args))
    assert_matches(k.grouped_mm, dy, weight.transpose(1, 2), offs, tiles, sums=True)


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


def test_most_groups():
    offs = splits(3000, 1024, 0, 10)
    assert torch.equal(run(k.group_tiles, offs, 3000), k.group_tiles.twin(offs, 3000))


def test_paths():
    """On the interpreter, which stands for Hopper without Gluon."""
    x, w = torch.empty(8, 64, dtype=torch.bfloat16), torch.empty(2, 64, 64, dtype=torch.bfloat16)
    if DEVICE == "cpu":
        assert grouped_paths.mm_path(x, w) == "tma" == grouped_paths.mm_path(x, w.transpose(1, 2))
        assert grouped_paths.wgrad_path(x, x) == "tma"
        assert grouped_paths.mm_path(x[:, :63], w[:, :, :63]) == "tma"
    assert grouped_paths.mm_path(x.float(), w.float()) == "pointer"
    assert grouped_paths.mm_path(x, w[:, :63]) == "pointer"
    assert grouped_paths.mm_path(x[:, 1:33], w[:, :, 1:33]) == "pointer"


def test_errors_name_what_was_given():
    x, w, offs = torch.randn(6, 4), torch.randn(2, 3, 4), torch.tensor([2, 6], dtype=torch.int32)
    with pytest.raises(FuseOpsError, match=r"offs is \(1,\), expected \(2,\)"):
        k.grouped_mm.launcher(x, w, offs[:1])
    with pytest.raises(FuseOpsError, match=r"x is \(6, 4\) and weight \(2, 4, 3\)"):
        k.grouped_mm.launcher(x, w.transpose(1, 2), offs)
    with pytest.raises(FuseOpsError, match=r"operands are torch\.float32 and torch\.bfloat16"):
        k.grouped_mm.launcher(x, w.bfloat16(), offs)
    with pytest.raises(FuseOpsError, match=r"expected group_tiles\(offs, 6\)"):
        k.grouped_mm.launcher(x, w, offs, offs)
    with pytest.raises(FuseOpsError, match=r"main_grad is torch\.bfloat16"):
        k.grouped_wgrad_into.launcher(w.bfloat16(), x[:, :3], x, offs)


def cases(spaces):
    """(path, number of a configuration)"""
    return [
        (path, number)
        for path, space in spaces.items()
        for number in range(len(space.candidates((40, 2048, 1024), 2)))
    ]


def many_tiles(seed=0):
    """More than ten tiles a program of any configuration: x, dy, weight, offs, bounds."""
    torch.manual_seed(seed)
    rows, n, size, groups = 40000, 2048, 1024, 40
    offs = splits(rows, groups, seed, padding=77)
    offs[3:6] = offs[3]
    make = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    x, dy, weight = make(rows, size), make(rows, n), make(groups, n, size)
    bounds = list(zip([0, *offs.tolist()], offs.tolist(), strict=False))
    return poison(x, offs), poison(dy, offs), weight, offs.cuda(), bounds


def by_index(rows, offs, kind=torch.int32):
    """(x (T, size), index, x[index]) in the place of `rows` (R, size)."""
    x = torch.randn(3000, rows.shape[1], device="cuda", dtype=rows.dtype)
    index = torch.randint(0, 3000, rows.shape[:1], device="cuda", dtype=kind)
    copy = x[index]
    index[int(offs[-1]) :] = 1 << 30
    return x, index, copy


def close(got, want):
    """Relative error of a group; an empty one is all zero."""
    error = (got.float() - want).norm() / want.norm().clamp(min=1e-20)
    assert got.numel() == 0 or error < 4e-3, error


def needs_gluon(path):
    x = torch.empty(128, 128, device="cuda", dtype=torch.bfloat16)
    if path in ("gather", "pingpong") and grouped_paths.wgrad_path(x, x) != "pingpong":
        pytest.skip("needs Hopper and a Triton whose Gluon is tested")


@pytest.mark.gpu
@pytest.mark.parametrize(("path", "number"), cases(grouped_paths.MM_SPACES))
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_many_tiles_a_program(path, number, transposed, with_bias):
    needs_gluon(path)
    x, dy, weight, offs, bounds = many_tiles()
    a, w = (dy, weight.transpose(1, 2)) if transposed else (x, weight)
    bias = torch.randn(w.shape[:2], device="cuda", dtype=a.dtype) if with_bias else None
    full, index = a, None
    if path == "gather":
        a, index, full = by_index(a, offs)
    space = grouped_paths.MM_SPACES[path]
    config = space.candidates((40, *w.shape[1:]), 2)[number]
    with grouped_paths.on_path(path), forced(space, config):
        y = k.grouped_mm(a, w, offs, None, bias, index)
        for _ in range(3):
            again = k.grouped_mm(a, w, offs, None, bias, index)
            assert torch.equal(y.view(torch.int16), again.view(torch.int16))
    for e, (start, end) in enumerate(bounds):
        want = full[start:end].float() @ w[e].float().t()
        close(y[start:end], want + bias[e].float() if with_bias else want)
    assert not y[bounds[-1][1] :].any()


@pytest.mark.gpu
@pytest.mark.parametrize(("path", "number"), cases(grouped_paths.WGRAD_SPACES))
@pytest.mark.parametrize("gathered_side", ["dy", "x"])
def test_many_tiles_of_weight_gradients(path, number, gathered_side):
    needs_gluon(path)
    x, dy, weight, offs, bounds = many_tiles()
    left, right, index = dy, x, (None, None)
    if path == "gather" and gathered_side == "dy":
        left, rows, dy = by_index(dy, offs, torch.int64)
        index = rows, None
    elif path == "gather":
        right, rows, x = by_index(x, offs)
        index = None, rows
    space = grouped_paths.WGRAD_SPACES[path]
    main = torch.ones(weight.shape, device="cuda")
    config = space.candidates(tuple(weight.shape), 2)[number]
    with grouped_paths.on_path(path), forced(space, config):
        dw = k.grouped_wgrad(left, right, offs, None, *index)
        assert torch.equal(dw, k.grouped_wgrad(left, right, offs, None, *index))
        k.grouped_wgrad_into(main, left, right, offs, None, True, *index)
        fresh = torch.full_like(main, float("nan"))
        k.grouped_wgrad_into(fresh, left, right, offs, None, False, *index)
    for e, (start, end) in enumerate(bounds):
        want = dy[start:end].float().t() @ x[start:end].float()
        close(dw[e], want)
        close(main[e] - 1, want)
        close(fresh[e], want)


@pytest.mark.gpu
def test_a_kept_plan_sees_every_call():
    """Other rows, addresses and alignment under one key, and a table that changes between calls."""
    torch.manual_seed(0)
    weight = torch.randn(4, 192, 128, device="cuda", dtype=torch.bfloat16)
    for rows in (300, 260, 511, 300):
        wide = torch.randn(rows + 1, 128, device="cuda", dtype=torch.bfloat16)
        for x in (wide[:rows], wide[1:], wide.view(-1)[1 : 1 + rows * 128].view(rows, 128)):
            offs = splits(rows, 4, rows, 3).cuda()
            y = k.grouped_mm(x, weight, offs)
            dw = k.grouped_wgrad(y, x, offs)
            ends = offs.tolist()
            for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
                close(y[start:end], x[start:end].float() @ weight[e].float().t())
                close(dw[e], y[start:end].float().t() @ x[start:end].float())
