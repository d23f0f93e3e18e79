"""FP8 GEMMs on a GPU: every configuration with more than ten tiles a program, since a fault of barriers or parities
shows from the third tile on. Outputs come from memory full of NaN.
"""

import fp8_operands as f8
import pytest
import torch
from laws import splits
from test_operands import close, hidden

from fuseops.kernels import fp8, fp8_paths, operands
from fuseops.kernels.configs import forced

pytestmark = pytest.mark.gpu
ROWS, GROUPS, N, K = 40000, 40, 2064, 1168  # 129 and 73 times 16: no tile divides them


def cases(*spaces):
    return [
        (space.name, number)
        for space in spaces
        for number in range(len(space.candidates((GROUPS, N, K), 1)))
    ]


def needs_hopper():
    x = torch.empty(128, 128, device="cuda", dtype=torch.float8_e4m3fn)
    if fp8_paths.wgrad_path(x, x) != "cooperative":
        pytest.skip(fp8_paths.wgrad_path(x, x))


def setup(seed=0):
    """(generator, offs on the CPU, on the GPU), with empty groups and padding."""
    needs_hopper()
    offs = splits(ROWS, GROUPS, seed, padding=77)
    offs[3:6] = offs[3]
    offs[7] = offs[8] - 1
    return torch.Generator("cuda").manual_seed(seed), offs, offs.cuda()


def repeated(run):
    """The result of five runs that are equal bit for bit, each from poisoned memory."""
    first = None
    for _ in range(5):
        poison = torch.full((1 << 28,), float("nan"), device="cuda")
        del poison
        y = run()
        first = y if first is None else first
        assert torch.equal(y.view(torch.uint8), first.view(torch.uint8))
    return first


def assert_each(got, want):
    """By 128 x 128 block, so that one wrong scale shows."""
    f8.assert_products(got, want)
    pad = [-want.shape[-1] % 128, -want.shape[-2] % 128]
    squares = [
        torch.nn.functional.pad(t, (0, pad[0], 0, pad[1]))
        .float().square().unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128)).sum((-1, -3))
        for t in (got.float() - want.float(), want)
    ]  # fmt: skip
    assert (squares[0] <= 8e-3**2 * squares[1] + 1e-12).all()


@pytest.mark.parametrize(("name", "number"), cases(fp8_paths.MM, fp8_paths.MM_FAST))
@pytest.mark.parametrize("scaling", f8.SCALINGS["rows"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_forward(name, number, scaling, with_bias):
    fast = name == "fp8_mm_fast"
    if fast and scaling == "block":
        pytest.skip("blocks are never summed in place")
    g, ends, offs = setup()
    operands = f8.of_mm(g, scaling, ROWS, N, K, GROUPS)
    operands[0].view(torch.uint8)[int(ends[-1]) :] = 0x7F
    bias = torch.randn(GROUPS, N, device="cuda").bfloat16() if with_bias else None
    space = fp8_paths.MM_FAST if fast else fp8_paths.MM
    dtype = torch.float16 if with_bias and scaling == "block" else torch.bfloat16
    with forced(space, space.candidates((GROUPS, N, K), 1)[number]):
        y = repeated(lambda: fp8.fp8_mm(*operands, offs, None, bias, dtype, fast))
    want = fp8.fp8_mm.twin(*operands, ends.cuda(), None, bias, dtype)
    assert not y[int(ends[-1]) :].any()
    (f8.assert_products if fast or with_bias else assert_each)(y, want)


@pytest.mark.parametrize(("name", "number"), cases(fp8_paths.MM))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dense_forward(name, number, dtype):
    g, _, _ = setup()
    operands = f8.of_mm(g, "block", 20002, 4112, 1168, 0)
    with forced(fp8_paths.MM, fp8_paths.MM.candidates((1, 4112, 1168), 1)[number]):
        y = repeated(lambda: fp8.fp8_mm(*operands, dtype=dtype))
    assert_each(y, fp8.fp8_mm.twin(*operands, dtype=dtype))


@pytest.mark.parametrize(
    ("name", "number", "scaling"),
    [
        *((*case, scaling) for case in cases(fp8_paths.WGRAD) for scaling in ("square", "tensor")),
        *((*case, "block") for case in cases(fp8_paths.WGRAD_VECTORS)),
    ],
)
@pytest.mark.parametrize("dense", [False, True])
def test_wgrad(name, number, scaling, dense):
    g, ends, offs = setup()
    if dense:
        ends = offs = None
    operands = f8.of_wgrad(g, scaling, ends, 2000 if dense else 30000, 4112, 2064)
    if not dense:
        ends, offs = ends.clamp(max=30000), offs.clamp(max=30000)
        operands = f8.of_wgrad(g, scaling, ends, 30000, 2064, 1168)
    space = fp8_paths.WGRAD_VECTORS if scaling == "block" else fp8_paths.WGRAD
    config = space.candidates((GROUPS, N, K), 1)[number]
    with forced(space, config):
        dw = repeated(lambda: fp8.fp8_wgrad(*operands, offs))
        exact = fp8.fp8_wgrad.twin(*operands, offs, None, torch.float32)
        f8.assert_products(dw, exact.to(dw.dtype))
        if not dense and scaling != "tensor":
            full = ends.diff(prepend=torch.zeros(1)) > 0
            assert_each(dw[full], exact[full].to(dw.dtype))
        total = torch.full_like(exact, 0.5)
        fp8.fp8_wgrad_into(total, *operands, offs, None, True)
        fp8.fp8_wgrad_into(total, *operands, offs, None, True)
        f8.assert_products(total, 2 * exact + 0.5)
        fp8.fp8_wgrad_into(total, *operands, offs, None, False)
        odd = torch.full((total.numel() + 1,), 0.5, device="cuda")[1:].view(total.shape)
        fp8.fp8_wgrad_into(odd, *operands, offs, None, True)  # no descriptor begins there
        f8.assert_products(odd, exact + 0.5)
        f8.assert_products(total, exact)
        larger = dw.new_zeros(*exact.shape[:-2], exact.shape[-2] + 64, exact.shape[-1] + 128)
        for into in (larger[..., 64:, :-128], larger[..., :-64, 128:]):
            fp8.fp8_wgrad_into(into, *operands, offs, None, False)
            assert torch.equal(into, dw)
            assert larger.count_nonzero() == into.count_nonzero()
            larger.zero_()


def test_e5m2_gradients():
    g, ends, offs = setup()
    operands = f8.of_mm(g, "block", ROWS, 512, 1024, GROUPS, torch.float8_e5m2)
    y = repeated(lambda: fp8.fp8_mm(*operands, offs))
    assert_each(y, fp8.fp8_mm.twin(*operands, offs))
    operands = f8.of_wgrad(g, "square", ends, ROWS, 512, 1024, torch.float8_e5m2)
    f8.assert_products(fp8.fp8_wgrad(*operands, offs), fp8.fp8_wgrad.twin(*operands, offs))


def test_rows_that_no_descriptor_takes_are_padded():
    """Scales (K / 128, R) of R rows that 4 does not divide."""
    g, _, _ = setup()
    for rows in (1, 3, 4, 129, 1001):
        operands = f8.of_mm(g, "block", rows, 256, 384, 0)
        f8.assert_products(fp8.fp8_mm(*operands), fp8.fp8_mm.twin(*operands))


@pytest.mark.parametrize("number", range(len(operands.DSWIGLU_ONCE.candidates((1152,), 2))))
@pytest.mark.parametrize("coded", [False, True])
def test_dswiglu_of_many_tiles(number, coded):
    """A program has several blocks of features, nine in all, and a group several blocks of tokens."""
    g, ends, offs = setup()
    end, n, e4m3 = int(ends[-1]), 1152, torch.float8_e4m3fn
    da, h = (torch.randn(ROWS, w, generator=g, device="cuda").bfloat16() for w in (n, 2 * n))
    da *= torch.exp2(torch.randint(-5, 6, (ROWS, 1), generator=g, device="cuda").float()).bfloat16()
    h, h_scale = hidden(h, coded)
    args = da, h, da[:, 0].float().sigmoid(), offs, e4m3, e4m3, True, True, True, h_scale
    with forced(operands.DSWIGLU_ONCE, operands.DSWIGLU_ONCE.candidates((n,), 2)[number]):
        repeated(lambda: written(operands.dswiglu_operand(*args), end))
        got = operands.dswiglu_operand(*args)
    want, none = operands.dswiglu_operand.twin(*args), torch.empty(0)
    close(got[:4], want[:4], e4m3, end)
    close((none, none, *got[4:6]), (none, none, *want[4:6]), e4m3, end)
    torch.testing.assert_close(got[6], want[6], rtol=1e-4, atol=1e-5 * n)


def written(parts, end):
    """The bytes of an operand's parts, of rows those up to `end`."""
    row, scale, *rest = parts
    parts = row[:end], scale[:, :end], *rest
    return torch.cat([t.contiguous().view(torch.uint8).flatten() for t in parts])
