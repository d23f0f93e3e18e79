"""What the kernel tests share: drawn tensors with hard values, and the comparison of a kernel with
its twin.
"""

import os
from unittest import mock

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_map_only

from fuseops.kernels import tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

ROWS = st.sampled_from([0, 1, 2, 7, 63, 65, 127])
WIDTHS = st.sampled_from([1, 3, 8, 17, 64, 100, 130])
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
VALUES = st.sampled_from(["normal", "large", "tiny", "constant", "nonfinite"])
SEEDS = st.integers(0, 2**16)

# A launch costs milliseconds in the interpreter: fewer than other laws, 25 in CI.
few = settings(
    max_examples=int(
        os.environ.get("KERNEL_TEST_EXAMPLES", max(settings.default.max_examples // 4, 12))
    ),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def tensor(shape, dtype, values="normal", seed=0, strided=False):
    """Values of one kind; ``strided`` rows lie in a wider buffer filled with NaN."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    if values == "large":
        x = x * (1e4 if dtype != torch.float16 else 2e2)
    elif values == "tiny":
        x = x * 2.0**-130 if dtype != torch.float16 else x * 2.0**-18
    elif values == "constant":
        x = torch.ones(shape)
    elif values == "nonfinite" and x.numel():
        hard = torch.tensor(
            [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, torch.finfo(dtype).max]
        )
        where = torch.randint(0, x.numel(), (min(8, x.numel()),), generator=g)
        x.view(-1)[where] = hard[torch.arange(len(where)) % len(hard)]
    x = x.to(dtype)
    if not strided or len(shape) != 2:
        return x
    wide = torch.full((shape[0], shape[1] + 3), float("nan"), dtype=dtype)
    wide[:, : shape[1]] = x
    return wide[:, : shape[1]]


ULPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2e-5}
STEPS = {torch.bfloat16: 2e-40, torch.float16: 1.2e-7, torch.float32: 1e-42}


def run(op, *args):
    """The Triton kernel's results on the CPU: interpreted, or from the GPU."""
    return tree_map_only(
        torch.Tensor, torch.Tensor.cpu, op.launcher(*tree_map_only(torch.Tensor, place, args))
    )


def place(x):
    """The tensor on the device of the kernels, strides and offset kept."""
    base = x if x._base is None else x._base
    return (
        x
        if DEVICE == "cpu"
        else base.to(DEVICE).as_strided(x.shape, x.stride(), x.storage_offset())
    )


def reference(op, *args):
    """The twin's results; on a GPU it computes in float64 where it would in float32.

    Not for inf and NaN: what overflows in float32 is part of what a kernel computes.
    """
    floats = [a for a in args if isinstance(a, torch.Tensor) and a.dtype.is_floating_point]
    if DEVICE == "cpu" or not all(a.isfinite().all() for a in floats):
        return op.twin(*args)
    with mock.patch.object(tiles, "accumulator", lambda dtype: torch.float64):
        return op.twin(*args)


def assert_matches(op, *args, sums=False, exact=False):
    """The Triton kernel gives what its reference gives, to one rounding of the output dtype.

    ``sums`` allows for cancellation: 1e-4 of the largest value instead of 1e-6.
    """
    got, want = run(op, *args), reference(op, *args)
    single = isinstance(got, torch.Tensor)
    for g, w in zip(*([got], [want]) if single else (got, want), strict=True):
        w = w.to(g.dtype) if w.dtype == torch.float64 else w
        assert_same_layout(g, w)
        if exact or not g.dtype.is_floating_point or not g.numel():
            assert torch.equal(g, w), (g, w)
            continue
        largest = w.float().nan_to_num(0, 0, 0).abs().amax().item()
        atol = max((1e-4 if sums else 1e-6) * largest, STEPS[g.dtype])
        torch.testing.assert_close(
            g.float(), w.float(), rtol=ULPS[g.dtype], atol=atol, equal_nan=True
        )
    return got


def assert_same_layout(got, want):
    """Shape, dtype and strides: the fake, made from the twin, must tell those of the kernel."""
    assert got.shape == want.shape and got.dtype == want.dtype, (
        got.shape,
        want.shape,
        got.dtype,
        want.dtype,
    )
    strides = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (got, want)]
    assert not got.numel() or strides[0] == strides[1], strides


def splits(rows, groups, seed, padding=0):
    """Row ends of groups of random sizes, empty ones included; ``padding`` rows stay behind the
    last.
    """
    g = torch.Generator().manual_seed(seed)
    cuts = torch.randint(0, max(rows - padding, 0) + 1, (groups - 1,), generator=g).sort().values
    return torch.cat([cuts, torch.tensor([max(rows - padding, 0)])]).to(torch.int32)
