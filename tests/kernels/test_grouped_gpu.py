"""Grouped GEMMs on a GPU: every path and configuration with more than ten tiles a program, since a
fault of the barriers shows from the third tile on.
"""

import threading

import pytest
import torch
from laws import splits

from fuseops.kernels import grouped as k
from fuseops.kernels import grouped_glu, grouped_glu_bwd, grouped_paths
from fuseops.kernels.activation import GATES, act_fwd, scaled_act_bwd
from fuseops.kernels.configs import forced
from fuseops.kernels.replay import active_replays, separate_replays

pytestmark = pytest.mark.gpu


def poison(x, offs):
    """NaN in the padding rows, which nothing may read."""
    x[int(offs[-1]) :] = float("nan")
    return x


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
    if path in ("gather", "pingpong") and grouped_paths.wgrad_choice(x, x).path != "pingpong":
        pytest.skip("needs Hopper and a Triton whose Gluon is tested")


@pytest.mark.parametrize(("path", "number"), cases(grouped_paths.MM_SPACES))
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_bias", [None, "bias", "scaled"])
def test_many_tiles_a_program(path, number, transposed, with_bias):
    needs_gluon(path)
    x, dy, weight, offs, bounds = many_tiles()
    a, w = (dy, weight.transpose(1, 2)) if transposed else (x, weight)
    bias = torch.randn(w.shape[:2], device="cuda", dtype=a.dtype) if with_bias else None
    probs = poison(torch.rand(len(a), device="cuda"), offs) if with_bias == "scaled" else None
    full, index = a, None
    if path == "gather":
        a, index, full = by_index(a, offs, torch.int64 if with_bias else torch.int32)
    space = grouped_paths.MM_SPACES[path]
    config = space.candidates((40, *w.shape[1:]), 2)[number]
    with grouped_paths.on_path(path), forced(space, config):
        y = k.grouped_mm(a, w, offs, None, bias, index, probs)
        for _ in range(3):
            again = k.grouped_mm(a, w, offs, None, bias, index, probs)
            assert torch.equal(y.view(torch.int16), again.view(torch.int16))
    for e, (start, end) in enumerate(bounds):
        want = full[start:end].float() @ w[e].float().t()
        if with_bias:
            want += bias[e].float() * (1 if probs is None else probs[start:end, None])
        close(y[start:end], want)
    assert not y[bounds[-1][1] :].any()


@pytest.mark.parametrize(("path", "number"), cases(grouped_paths.SWIGLU_SPACES))
@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize(
    ("form", "width"),
    [
        (("swiglu",), 2048),
        (("srelu",), 1952),
        (("clamped_swiglu", 0), 2048),
        (("clamped_swiglu", 1), 1952),
    ],
)
def test_many_tiles_with_an_activation(path, number, with_probs, form, width):
    """h as the plain product stores it, a as a pass over h would make it."""
    needs_gluon(path)
    x, _, weight, offs, bounds = many_tiles()
    weight = weight[:, :width].contiguous()
    bias = torch.randn(weight.shape[:2], device="cuda", dtype=x.dtype) if len(form) > 1 else None
    probs = torch.rand(len(x), device="cuda") if with_probs else None
    index, full = None, x
    if path == "gather":
        x, index, full = by_index(x, offs)
        full[bounds[-1][1] :] = 0
    space = grouped_paths.SWIGLU_SPACES[path]
    config = space.candidates((40, 2048, 1024), 2)[number]
    with grouped_paths.on_path(path), forced(space, config):
        given = x, weight, offs, None, bias, index, probs, True, *form
        h, a = grouped_glu.grouped_swiglu(*given)
        for _ in range(3):
            again = grouped_glu.grouped_swiglu(*given)
            assert torch.equal(h, again[0]) and torch.equal(a, again[1])
        none, alone = grouped_glu.grouped_swiglu(*given[:7], False, *form)
    assert len(none) == 0 and torch.equal(alone, a)
    assert torch.equal(h, k.grouped_mm(full, weight, offs, None, bias))
    want = act_fwd.twin(h.double(), *form) * (1 if probs is None else probs[:, None])
    torch.testing.assert_close(a.double(), want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(("path", "number"), cases(grouped_paths.SWIGLU_BWD_SPACES))
@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("width", [1024, 960])
@pytest.mark.parametrize("kind", grouped_paths.BACKWARD_ACTS)
def test_many_tiles_that_go_on_through_an_activation(path, number, with_probs, width, kind):
    """What the product and a pass over it give, dprobs but for the order of its sum."""
    needs_gluon(path)
    _, dy, weight, offs, bounds = many_tiles()
    weight = weight[..., :width].contiguous().transpose(1, 2)
    columns = width * (1 + (kind in GATES))
    h = poison(torch.randn(len(dy), columns, device="cuda", dtype=dy.dtype), offs)
    probs = torch.rand(len(dy), device="cuda") if with_probs else None
    index, full, end = None, dy, bounds[-1][1]
    if path == "gather":
        dy, index, full = by_index(dy, offs)
    space = grouped_paths.SWIGLU_BWD_SPACES[path]
    config = space.candidates((40, 1024, 2048), 2)[number]
    with grouped_paths.on_path(path), forced(space, config):
        got = grouped_glu_bwd.grouped_dswiglu(h, dy, weight, offs, None, probs, index, kind)
        for _ in range(3):
            again = grouped_glu_bwd.grouped_dswiglu(h, dy, weight, offs, None, probs, index, kind)
            assert all(map(torch.equal, got, again))
        for _ in range(3):
            over = h.clone()
            rest = grouped_glu_bwd.grouped_dswiglu_into(
                over, dy, weight, offs, None, probs, index, kind
            )
            assert all(map(torch.equal, got, (over, *rest)))
    da, scale = k.grouped_mm(full, weight, offs), probs if with_probs else torch.ones(len(h)).cuda()
    want = scaled_act_bwd(da, h, scale, kind, with_probs, True)
    for one, other in zip(got, (want[0], want[2], want[1]), strict=True):
        one, other = one[:end].float(), other[:end].float()
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2e-3)  # one rounding
        assert (one - other).norm() <= 1e-4 * other.norm()
    assert not any(t[end:].any() for t in got)


@pytest.mark.parametrize(("path", "number"), cases(grouped_paths.WGRAD_SPACES))
@pytest.mark.parametrize("gathered_side", ["dy", "x"])
def test_many_tiles_of_weight_gradients(path, number, gathered_side):
    needs_gluon(path)
    x, dy, weight, offs, bounds = many_tiles()
    left, right, index = dy, x, (None, None)
    if path == "gather" and gathered_side == "dy":
        left, rows, dy = by_index(dy, offs)
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


def test_sums_in_a_buffer_that_begins_anywhere():
    """What no descriptor can be made of is added all the same."""
    x, dy, weight, offs, _ = many_tiles()
    aligned = torch.ones(weight.shape, device="cuda")
    odd = torch.ones(weight.numel() + 1, device="cuda")[1:].view(weight.shape)
    for main in (aligned, odd):
        k.grouped_wgrad_into(main, dy, x, offs)
    close(odd, aligned)
    k.grouped_wgrad_into(odd, dy, x, offs, None, False)
    close(odd, aligned - 1)


@pytest.mark.parametrize(("n", "size"), [(1856, 2880), (2880, 1856), (520, 264), (16, 64)])
@pytest.mark.parametrize("number", [0, 1])
def test_weight_gradients_of_any_width(n, size, number):
    """Tiles beyond both edges, with either side on the right."""
    needs_gluon("pingpong")
    offs = splits(5000, 7, 1, padding=5)
    make = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    x, dy = poison(make(5000, size), offs), poison(make(5000, n), offs)
    ends, space = offs.tolist(), grouped_paths.WGRAD_SPACES["pingpong"]
    main = torch.ones(7, n, size, device="cuda")
    with forced(space, space.candidates((7, n, size), 2)[number]):
        dw = k.grouped_wgrad(dy, x, offs.cuda())
        k.grouped_wgrad_into(main, dy, x, offs.cuda())
    for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        want = dy[start:end].float().t() @ x[start:end].float()
        close(dw[e], want)
        close(main[e] - 1, want)


def test_a_graph_replays_other_splits():
    """The ends of groups, and how many rows there are, may differ at each replay."""
    make = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    x, dy, weight, offs = make(2000, 256), make(2000, 512), make(9, 512, 256), splits(2000, 9, 0)
    offs = offs.cuda()

    def layer():
        tiles = k.group_tiles(offs, 2000)
        y = k.grouped_mm(x, weight, offs, tiles)
        dx = k.grouped_mm(dy, weight.transpose(1, 2), offs, tiles)
        return y, dx, k.grouped_wgrad(dy, x, offs, tiles)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for seed, padding in ((1, 0), (2, 300), (3, 2000)):
        offs.copy_(splits(2000, 9, seed, padding))
        graph.replay()
        assert all(map(torch.equal, captured, layer()))


def test_kept_launches_take_what_lies_at_an_address_now():
    """Buffers stay where they are; values, row counts and group ends change between calls."""
    buffers = [torch.empty(2000 * 512, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    weight = torch.randn(9, 512, 256, device="cuda", dtype=torch.bfloat16)
    ends = torch.empty(9, device="cuda", dtype=torch.int32)
    for seed, rows in enumerate([2000, 1999, 1100, 1999, 2000, 1025, 2000]):
        torch.manual_seed(seed)
        x, dy = (b[: rows * n].view(rows, n) for b, n in zip(buffers, (256, 512), strict=True))
        x.normal_(), dy.normal_(), weight.normal_()
        offs = splits(rows, 9, seed, padding=seed)
        ends.copy_(offs)
        tiles = k.group_tiles(ends, rows)
        y, dw = k.grouped_mm(x, weight, ends, tiles), k.grouped_wgrad(dy, x, ends, tiles)
        copies = [t.clone() for t in (x, weight, ends, dy)]
        with separate_replays():  # made anew
            assert torch.equal(y, k.grouped_mm(*copies[:3]))
            assert torch.equal(dw, k.grouped_wgrad(copies[3], copies[0], copies[2]))
        for e, (start, end) in enumerate(zip([0, *offs.tolist()], offs.tolist(), strict=False)):
            close(y[start:end], x[start:end].float() @ weight[e].float().t())
            close(dw[e], dy[start:end].float().t() @ x[start:end].float())


def test_kept_launches_hold_no_memory_and_follow_the_stream():
    from triton import knobs

    x, weight = (
        torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((640, 256), (3, 128, 256))
    )
    offs = torch.tensor([100, 500, 640], device="cuda", dtype=torch.int32)
    tiles = k.group_tiles(offs, 640)
    want = k.grouped_mm(x, weight, offs, tiles)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        k.grouped_mm(x, weight, offs, tiles)
    assert torch.cuda.memory_allocated() == before
    side, told = torch.cuda.Stream(), []
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late = x * 2
        y = k.grouped_mm(late, weight, offs, tiles)  # would read `late` too early on another stream
    torch.cuda.synchronize()
    assert torch.equal(y, 2 * want)

    def hook(metadata):
        told.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        again = k.grouped_mm(x, weight, offs, tiles)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert len(told) == 1 and "grouped_mm" in told[0] and torch.equal(again, want)


def test_a_new_thread_launches_a_known_kind():
    """It has no CUDA context yet, and encoding a descriptor takes one: autograd's threads begin so."""
    make = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    pairs = [(make(640, 256), make(3, 128, 256)) for _ in range(2)]
    offs = torch.tensor([100, 500, 640], device="cuda", dtype=torch.int32)
    tiles, found = k.group_tiles(offs, 640), []
    for _ in range(2):
        k.grouped_mm(*pairs[0], offs, tiles)
    torch.cuda.synchronize()
    thread = threading.Thread(target=lambda: found.append(k.grouped_mm(*pairs[1], offs, tiles)))
    thread.start(), thread.join()
    torch.cuda.synchronize()
    assert torch.equal(found[0], k.grouped_mm(*pairs[1], offs, tiles))


def test_the_third_call_does_without_the_launcher(monkeypatch):
    """It makes no descriptor and looks at no argument."""
    x, weight = (
        torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((640, 256), (3, 128, 256))
    )
    offs = torch.tensor([100, 500, 640], device="cuda", dtype=torch.int32)
    with separate_replays(), torch.no_grad():
        tiles = k.group_tiles(offs, 640)
        for _ in range(3):
            k.grouped_mm(x, weight, offs, tiles)
        (replay,) = next(
            found for key, found in active_replays.current.items() if key[0] is k.grouped_mm
        )
        if replay.call == replay._run_checked:
            pytest.skip("this Triton looks at each launch")
        monkeypatch.setattr(k.grouped_mm, "launcher", None)
        k.grouped_mm(x, weight, offs, tiles)


def test_a_strided_index_gathers_the_right_rows():
    needs_gluon("gather")
    x, dy, weight, offs, _ = many_tiles()
    tokens, index, _ = by_index(x, offs)
    strided = torch.stack([index, torch.zeros_like(index)], 1)[:, 0]
    with grouped_paths.on_path("gather"):
        y = k.grouped_mm(tokens, weight, offs, None, None, strided)
        assert torch.equal(y, k.grouped_mm(tokens, weight, offs, None, None, index))
        dw = k.grouped_wgrad(dy, tokens, offs, None, None, strided)
        assert torch.equal(dw, k.grouped_wgrad(dy, tokens, offs, None, None, index))
