"""The harness of conftest.py: poisoned memory does what it says and breaks nothing else."""

import sys
import types
from collections.abc import Callable
from typing import Any

import fresh
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

SOURCE = """
import torch

def allocate(x):
    return [
        torch.empty(2, 3, dtype=x.dtype, device=x.device),
        torch.empty_like(x),
        torch.empty_strided((2, 2), (1, 2), dtype=x.dtype, device=x.device),
        x.new_empty(4),
        x.new_empty_strided((2, 2), (1, 2)),
    ]

def double(x):
    y = torch.empty_like(x)
    z = x.new_empty(x.shape[0], 4)
    y.copy_(x)
    z.copy_(x)
    zeros = [torch.empty(x.shape).zero_(), x.new_empty(x.shape, dtype=x.dtype).zero_()]
    zeros += [x.new_empty_strided((x.shape[0], 4), (4, 1)).zero_()]
    return y + z + sum(zeros)
"""


def functions_of(module: str) -> dict[str, Any]:
    """The functions above, as if `module` had defined them."""
    made = sys.modules[module] = types.ModuleType(module)  # dynamo imports a function's module
    exec(SOURCE, made.__dict__)
    return made.__dict__


ours = functions_of("fuseops.kernels.example")
allocate: Callable[[Tensor], list[Tensor]] = ours["allocate"]
double: Callable[[Tensor], Tensor] = ours["double"]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu], ids=str
)
def test_package_floats_are_nan(dtype: torch.dtype) -> None:
    for t in allocate(torch.zeros(5, dtype=dtype)):
        assert t.float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_package_integers_are_extreme(dtype: torch.dtype) -> None:
    for t in allocate(torch.zeros(5, dtype=dtype)):
        assert (t == torch.iinfo(dtype).max).all()


def test_only_the_package_gets_poison() -> None:
    others = functions_of("fuseops_users_model")["allocate"]
    x = torch.zeros(5)
    before = [t.clone() for t in allocate(x)]
    del before  # gives NaN-filled blocks back to the allocator, which may return them below
    assert torch.empty.__name__ == "allocate"
    for t in others(x):
        t.fill_(1.0)
        assert t.isfinite().all()
    assert torch.nn.Linear(3, 3).weight.isfinite().all()


@pytest.mark.uninitialized
def test_the_mark_leaves_torch_alone() -> None:
    assert torch.empty.__name__ == "empty"
    assert "new_empty" not in vars(torch.Tensor)


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=[pytest.mark.cxx, pytest.mark.slow]),
    ],
)
def test_compiled_code_is_not_disturbed(backend: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(double, backend=backend, fullgraph=True)
    for rows in (3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), double(x))


@pytest.mark.uninitialized
def test_torch_compiles_after_a_poisoned_test() -> None:
    torch.compiler.reset()
    x = torch.randn(3, 4)
    torch.testing.assert_close(
        torch.compile(double, backend="aot_eager", fullgraph=True)(x), double(x)
    )


def test_fake_meta_and_function_transforms() -> None:
    with FakeTensorMode():
        assert len(allocate(torch.zeros(5))) == 5
    with torch.device("meta"):
        assert all(t.device.type == "meta" for t in allocate(torch.zeros(5)))
    with torch.inference_mode():
        assert all(t.isnan().all() for t in allocate(torch.zeros(5)))
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.func.vmap(double)(x[None]), 2 * x[None])


# Two examples at least: each must start from the same state of torch's generator.
drawn: list[float] = []


@given(st.integers())
def test_examples_start_from_one_seed(_: int) -> None:
    drawn.append(torch.rand(()).item())
    assert len(set(drawn)) == 1


def test_a_run_of_some_minutes_needs_no_workers() -> None:
    """Without xdist nothing tells how the order was drawn, and nothing asks for it."""
    ours = "-p", "no:xdist", "--minutes", "1", "--collect-only", __file__
    ran = fresh.run("-m", "pytest", *ours)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "order drawn by" not in ran.stdout and "collected" in ran.stdout
