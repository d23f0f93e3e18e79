"""FP8 GEMMs equal their twins for any split, size and scaling, whatever multiplies."""

import re

import fp8_operands as f8
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import DEVICE, SEEDS, few, place, run
from test_grouped import ROWS, ends

from fuseops.errors import FuseOpsError
from fuseops.kernels import fp8, fp8_paths
from fuseops.kernels.grouped import group_tiles

SIZES = st.sampled_from([1, 8, 16, 48, 128, 136, 272])
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
# the interpreter runs the dequantization and the kernels of `grouped`, which have tests of their own
fewer = settings(few, max_examples=6) if DEVICE == "cpu" else few


def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.usefixtures("kernels")
@given(st.data(), ROWS, SIZES, SIZES, SEEDS, DTYPES, *[st.booleans()] * 4)
@fewer
def test_forward(data, rows, n, k, seed, dtype, grouped, with_bias, with_tiles, fast):
    """Padding rows hold NaN codes, and come out as zeros."""
    g, scaling = generator(seed), data.draw(st.sampled_from(f8.SCALINGS["rows"]))
    offs = data.draw(ends(rows)) if grouped else None
    operands = f8.of_mm(g, scaling, rows, n, k, len(offs) if grouped else 0)
    bias = torch.randn(operands[2].shape[:-1], generator=g).bfloat16() if with_bias else None
    if grouped:
        operands[0].view(torch.uint8)[int(offs[-1]) :] = 0x7F
    tiles = run(group_tiles, offs, rows) if grouped and with_tiles else None
    y = run(fp8.fp8_mm, *operands, offs, tiles, bias, dtype, fast)
    f8.assert_products(y, fp8.fp8_mm.twin(*operands, offs, None, bias, dtype))
    if grouped:
        assert not y[int(offs[-1]) :].any()


@pytest.mark.usefixtures("kernels")
@given(st.data(), ROWS, SIZES, SIZES, SEEDS, st.booleans(), st.booleans())
@fewer
def test_forward_as_codes(data, rows, n, k, seed, grouped, with_bias):
    """The codes stand for the product, to the half of a last place of theirs; those of padding for zeros."""
    g = generator(seed)
    offs = data.draw(ends(rows)) if grouped else None
    operands = f8.of_mm(g, "block", rows, n, k, len(offs) if grouped else 0)
    bias = torch.randn(operands[2].shape[:-1], generator=g).bfloat16() if with_bias else None
    codes, scale = run(fp8.fp8_mm_operand, *operands, offs, None, bias)
    want = fp8.fp8_mm.twin(*operands, offs, None, bias, torch.float32)
    assert codes.shape == want.shape and scale.shape == (-(-n // 128), rows)
    spread = scale.t().repeat_interleave(128, 1)[:, :n]
    got, largest = codes.float() * spread, want.abs().max() if want.numel() else 0.0
    assert ((got - want).abs() <= want.abs() / 16 + spread * 2.0**-10 + 1e-3 * largest).all()
    if grouped:
        assert not got[int(offs[-1]) :].any()


@pytest.mark.usefixtures("kernels")
@given(st.data(), ROWS, SIZES, SIZES, SEEDS, DTYPES, st.booleans(), st.booleans())
@fewer
def test_wgrad(data, rows, n, k, seed, dtype, grouped, accumulate):
    g, scaling = generator(seed), data.draw(st.sampled_from(f8.SCALINGS["columns"]))
    offs = data.draw(ends(rows)) if grouped else None
    operands = f8.of_wgrad(g, scaling, offs, rows, n, k)
    dw = run(fp8.fp8_wgrad, *operands, offs, None, dtype)
    want = fp8.fp8_wgrad.twin(*operands, offs, None, dtype)
    f8.assert_products(dw, want)
    before = torch.randn(dw.shape, generator=g)
    got, want = before.clone().to(DEVICE), before.clone()
    on_device = [place(t) if isinstance(t, torch.Tensor) else t for t in (*operands, offs)]
    fp8.fp8_wgrad_into.launcher(got, *on_device, None, accumulate)
    fp8.fp8_wgrad_into.twin(want, *operands, offs, None, accumulate)
    f8.assert_products(got.cpu(), want)
    if offs is not None:  # into some columns, or rows, of larger matrices, rounded once
        larger = torch.zeros(len(offs), n + 8, k + 8, dtype=dtype, device=DEVICE)
        for into in (larger[:, :n, 8:], larger[:, 8:, :k]):
            fp8.fp8_wgrad_into.launcher(into, *on_device, None, False)
            f8.assert_products(into.cpu(), dw)


def wide(codes, scale, rows_at_once, columns_at_once):
    """codes times scales in float64, by numpy."""
    spread = np.repeat(np.repeat(scale, rows_at_once, 0), columns_at_once, 1)
    values = codes.float().numpy().astype(np.float64)
    return values * spread[: values.shape[0], : values.shape[1]]


@given(SEEDS, st.sampled_from([1, 130, 200]), st.sampled_from([8, 136]), st.sampled_from([16, 144]))
@few
def test_twins_are_the_product_of_codes_times_scales(seed, rows, n, k):
    """By numpy, in float64: each vector of 128 has the scale of its row, each square of a weight its own."""
    g = generator(seed)
    x, x_scale, weight, weight_scale, _ = f8.of_mm(g, "block", rows, n, k, 2)
    offs = torch.tensor([rows // 3, rows], dtype=torch.int32)
    y = fp8.fp8_mm.twin(x, x_scale, weight, weight_scale, "block", offs, None, None, torch.float32)
    left = wide(x, x_scale.t().numpy(), 1, 128)
    for e, (start, end) in enumerate(((0, rows // 3), (rows // 3, rows))):
        want = left[start:end] @ wide(weight[e], weight_scale[e].numpy(), 128, 128).T
        np.testing.assert_allclose(y[start:end], want, rtol=1e-4, atol=1e-3)

    dy, dy_scale, x, x_scale, _ = f8.of_wgrad(g, "square", offs, rows, n, k)
    dw = fp8.fp8_wgrad.twin(dy, dy_scale, x, x_scale, "square", offs, None, torch.float32)
    left, right = wide(dy, dy_scale.numpy(), 128, 128), wide(x, x_scale.numpy(), 128, 128)
    second = (rows // 3 // 128 + 1) * 128
    for e, (begin, size) in enumerate(((0, rows // 3), (second, rows - rows // 3))):
        used = slice(begin, begin + size)
        np.testing.assert_allclose(dw[e], left[:, used] @ right[:, used].T, rtol=1e-4, atol=1e-3)


@pytest.mark.usefixtures("kernels")
def test_wrong_operands_are_named():
    g = generator(0)
    x, x_scale, weight, weight_scale, _ = f8.of_mm(g, "block", 6, 16, 32, 3)
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    good = {
        "x": x, "x_scale": x_scale, "weight": weight, "weight_scale": weight_scale,
        "scaling": "block", "offs": offs,
    }  # fmt: skip
    for changed, words in (
        ({"x_scale": x_scale.t().contiguous()}, "x_scale is torch.float32(6, 1), expected float32(1, 6)"),
        ({"weight_scale": weight_scale[0]}, "expected float32(3, 1, 1)"),
        ({"weight": weight[0]}, "weight is (16, 32), expected (3, N, 32)"),
        ({"offs": offs[:2]}, "weight is (3, 16, 32), expected (2, N, 32)"),
        ({"offs": offs.long()}, "offs is torch.int64(3,), expected int32 (E,)"),
        ({"scaling": "square"}, "scaling is 'square', expected one of"),
        ({"tiles": offs}, "expected group_tiles(offs, 6)"),
        ({"bias": weight_scale.half()}, "bias is (3, 1, 1), expected (3, 16)"),
        ({"scaling": "tensor"}, "x_scale is torch.float32(1, 6), expected float32, () or (3,)"),
    ):  # fmt: skip
        with pytest.raises(FuseOpsError, match=re.escape(words)):
            run(lambda_of(fp8.fp8_mm, good | changed))
    columns = f8.of_wgrad(g, "square", offs, 6, 16, 32)
    for place_of, value, words in (
        (0, columns[0][:, :200], "x is (32, 384), expected (K, 200)"),
        (1, columns[1].t().contiguous(), "dy_scale is torch.float32(3, 1), expected float32(1, 3)"),
        (4, "rows", "scaling is 'rows', expected one of"),
    ):
        wrong = [*columns[:place_of], value, *columns[place_of + 1 :]]
        with pytest.raises(FuseOpsError, match=re.escape(words)):
            fp8.fp8_wgrad.launcher(*wrong, offs)
    with pytest.raises(FuseOpsError, match="expected a contiguous float32 buffer"):
        fp8.fp8_wgrad_into.launcher(torch.zeros(3, 16, 32).bfloat16(), *columns, offs)
    with pytest.raises(FuseOpsError, match="expected a contiguous float32 buffer"):
        fp8.fp8_wgrad_into.launcher(torch.zeros(3, 16, 64)[..., :32], *columns, offs)
    with pytest.raises(
        FuseOpsError, match=re.escape("main_grad is (3, 32, 16), expected (3, 16, 32)")
    ):
        fp8.fp8_wgrad_into.launcher(torch.zeros(3, 32, 16), *columns, offs)


def lambda_of(op, arguments):
    """An op whose launcher takes these arguments."""

    class Bound:
        launcher = staticmethod(lambda: op.launcher(**arguments))

    return Bound


def test_paths_say_why():
    """In words, for operands that the kernel does not take."""
    x, w = torch.empty(4, 72, device="meta"), torch.empty(2, 24, 72, device="meta")
    assert fp8_paths.path_of(None, "K is 72", "later") == "dequantize (K is 72)"
    assert fp8_paths.path_of(None, None) == "cooperative"
    assert fp8_paths.mm_path(x, w).startswith("dequantize (")


def test_what_is_brought_eight_numbers_at_once_is_aligned(monkeypatch):
    """`act_path` is asked on a Hopper GPU, at any address of either input."""
    monkeypatch.setattr(fp8_paths, "_device", lambda device: (None,))
    held = torch.empty(4 * 256 + 8, dtype=torch.bfloat16)
    x = held[:1024].view(4, 256)
    assert fp8_paths.act_path(x, x, fp8_paths.E4M3) == "once"
    for shift in range(1, 9):
        h = held[shift:][:1024].view(4, 256)
        want = "once" if (2 * shift) % 16 == 0 else "parts"
        assert fp8_paths.act_path(x, h, fp8_paths.E4M3) == want
        assert fp8_paths.act_path(h, x, fp8_paths.E4M3) == want
