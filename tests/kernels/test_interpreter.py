"""The interpreter rounds and multiplies as the hardware does, bit for bit."""

import numpy as np
import pytest
import torch

from fuseops.kernels.launch import INTERPRET

pytestmark = pytest.mark.usefixtures("interpreted")

if INTERPRET:
    import triton
    import triton.language as tl

    from fuseops.kernels import interpreter

    interpreter.install()

    @triton.jit
    def cast_kernel(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
        offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offs, mask=offs < N)
        tl.store(y_ptr + offs, x.to(y_ptr.dtype.element_ty), mask=offs < N)

    @triton.jit
    def dot_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
        m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :])
        b = tl.load(b_ptr + k[:, None] * N + n[None, :])
        tl.store(c_ptr + m[:, None] * N + n[None, :], tl.dot(a, b, input_precision="ieee"))

    @triton.jit
    def dot_scaled_kernel(
        a_ptr, s_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
    ):
        m, n, k, g = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K), tl.arange(0, K // 32)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :])
        scale = tl.load(s_ptr + m[:, None] * (K // 32) + g[None, :])
        b = tl.load(b_ptr + k[:, None] * N + n[None, :])
        c = tl.dot_scaled(a, scale, "e4m3", b, None, "bf16")
        tl.store(c_ptr + m[:, None] * N + n[None, :], c)

    @triton.jit
    def loop_kernel(x_ptr, y_ptr, N):
        total = 0.0
        for i in range(N):
            total += tl.load(x_ptr + i)
        tl.store(y_ptr, tl.maximum(total, 0.0))


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDER = {
    torch.bfloat16: (torch.float32, torch.float16, *FP8),
    torch.float16: (torch.float32, torch.bfloat16, *FP8),
    torch.float32: (torch.bfloat16, torch.float16, *FP8),
    FP8[0]: (torch.float32, torch.bfloat16, torch.float16),
    FP8[1]: (torch.float32, torch.bfloat16, torch.float16),
}


def every_pattern(dtype):
    """All values of a 8- or 16-bit dtype; for float32 random patterns, and neighbours of every
    bf16 and fp16 value.
    """
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    if dtype.itemsize == 2:
        return bits.to(torch.int16).view(dtype)
    random = torch.randint(
        -(1 << 31), 1 << 31, (1 << 16,), generator=torch.Generator().manual_seed(0)
    )
    narrow = [
        bits.to(torch.int16).view(t).float().view(torch.int32)
        for t in (torch.bfloat16, torch.float16)
    ]
    near = [n + d for n in narrow for d in (-1, 0, 1, 0x7FFF, 0x8000, 0x8001, 0x1000)]
    return torch.cat([random.to(torch.int32), *near]).view(dtype)


def expected(x, dtype):
    if dtype not in FP8:
        return x.float().to(dtype)
    limit = torch.finfo(dtype).max
    return x.float().clamp(-limit, limit).to(dtype)


@pytest.mark.parametrize("src,dst", [(s, d) for s, dsts in WIDER.items() for d in dsts], ids=str)
def test_casts(src, dst):
    x = every_pattern(src)
    y = torch.empty(x.shape, dtype=dst)
    cast_kernel[(triton.cdiv(x.numel(), 1 << 16),)](x, y, x.numel(), BLOCK=1 << 16)
    want, same = expected(x, dst), {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dst.itemsize]
    number = ~x.float().isnan()
    assert torch.equal(y.float().isnan(), ~number)
    assert torch.equal(y.view(same)[number], want.view(same)[number])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, *FP8], ids=str)
def test_dot(dtype):
    g = torch.Generator().manual_seed(1)
    a, b = torch.randn(16, 32, generator=g).to(dtype), torch.randn(32, 16, generator=g).to(dtype)
    c = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, c, M=16, N=16, K=32)
    torch.testing.assert_close(c, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)


def test_dot_of_integers_is_exact():
    a, b = torch.randint(-128, 128, (2, 32, 32), dtype=torch.int8)
    c = torch.empty(32, 32, dtype=torch.int32)
    dot_kernel[(1,)](a, b, c, M=32, N=32, K=32)
    assert torch.equal(c, a.int() @ b.int())


def test_dot_scaled():
    g = torch.Generator().manual_seed(2)
    a = torch.randn(16, 64, generator=g).to(FP8[0])
    b = torch.randn(64, 16, generator=g).bfloat16()
    scale = torch.randint(120, 134, (16, 2), generator=g, dtype=torch.int32).to(torch.uint8)
    c = torch.empty(16, 16)
    dot_scaled_kernel[(1,)](a, scale, b, c, M=16, N=16, K=64)
    wide = a.double() * torch.exp2(scale.double() - 127).repeat_interleave(32, 1)
    torch.testing.assert_close(c, (wide @ b.double()).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("value", [1.5, float("nan")])
def test_loops_and_maximum(value):
    x, y = torch.full((5,), value), torch.empty(1)
    loop_kernel[(1,)](x, y, 5)
    assert y.item() == (7.5 if value == value else 0.0)


def test_integers_become_bf16():
    x = torch.arange(-600, 600, dtype=torch.int32)
    y = torch.empty(1200, dtype=torch.bfloat16)
    cast_kernel[(1,)](x, y, 1200, BLOCK=2048)
    assert torch.equal(y, x.to(torch.bfloat16))
    assert np.isfinite(y.float().numpy()).all()
