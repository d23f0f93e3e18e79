"""The fused MLPs on a CUDA device: their peak is the planned one, and their bits repeat."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseops as fo
from fuseops.kernels import configs
from fuseops.kernels.registry import watch_launches
from fuseops.rules.fused import dswiglu, mlp
from fuseops.rules.fused.grouped_mlp import EPILOGUE

pytestmark = pytest.mark.gpu

E, D, F, TOKENS, TOP_K = 8, 1024, 1536, 8192, 2
ROWS = TOKENS * TOP_K
Model = tuple[Callable[[], Any], int, tuple[Any, ...]]  # build, rows of x and y, other inputs


WHERE: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}


def experts(**options: Any) -> fo.Sequential:
    where = {**WHERE, **options}
    return fo.Sequential(
        {
            "fc1": fo.ops.GroupedLinear(E, D, 2 * F, bias=False, **where),
            "act": fo.ops.ScaledSwiGLU(),
            "fc2": fo.ops.GroupedLinear(E, F, D, bias=False, **where),
        }
    )


def layer() -> fo.MoE:
    return fo.MoE(D, F, E, TOP_K, **WHERE)


def routing() -> fo.Routing:
    counts = torch.multinomial(torch.ones(E), ROWS, replacement=True).bincount(minlength=E)
    return fo.Routing.from_counts(counts.cuda(), torch.rand(ROWS, device="cuda"))


MODELS: dict[str, Callable[[], Model]] = {
    "grouped": lambda: (experts, ROWS, (routing(),)),
    "moe": lambda: (layer, TOKENS, ()),
}


WIDE = {**MODELS, "wide": lambda: (lambda: fo.MoE(D, 2048, E, TOP_K, **WHERE), TOKENS, ())}
"""With a layer so wide that rows are copied for a moment."""


def step(model: Any, x: Tensor, args: tuple[Any, ...], dy: Tensor) -> None:
    model.zero_grad(set_to_none=True)
    model(x, *args).backward(dy)


@pytest.mark.parametrize("prefer", ["speed", "memory"])
@pytest.mark.parametrize("name", WIDE)
def test_the_peak_of_a_step_is_the_planned_one(name: str, prefer: str) -> None:
    build, rows, args = WIDE[name]()
    model, dy = build(), torch.randn(rows, D, device="cuda", dtype=torch.bfloat16)
    fo.configure(model, prefer=prefer)
    for _ in range(2):  # kernels, and the workspace of cuBLAS
        step(model, torch.randn_like(dy, requires_grad=True), args, dy)
    model.zero_grad(set_to_none=True)
    gc.collect()  # what an earlier test left would be freed in the step
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    x = torch.randn_like(dy, requires_grad=True)
    step(model, x, args, dy)
    torch.cuda.synchronize()
    real = torch.cuda.max_memory_allocated() - start
    model.zero_grad(set_to_none=True)
    plan = model.plan(x, *args)
    given = sum(t.nbytes for r in args for t in r if t is not None)  # saved, but there at the start
    assert plan.rehearsed and plan.fused
    assert abs(plan.peak_bytes - given - real) <= 0.01 * real


@pytest.mark.parametrize("name", WIDE)
def test_what_is_preferred_changes_the_peak_and_no_bit(name: str) -> None:
    build, rows, args = WIDE[name]()
    model, dy = build(), torch.randn(rows, D, device="cuda", dtype=torch.bfloat16)
    x, found, peaks = torch.randn_like(dy), [], []
    for prefer in ("speed", "memory"):
        fo.configure(model, prefer=prefer)
        leaf = x.clone().requires_grad_()
        step(model, leaf, args, dy)
        found.append([leaf.grad, *(p.grad for p in model.parameters())])
        peaks.append(model.plan(leaf, *args).peak_bytes)
        said = "prefer='memory'" in model.explain(leaf, *args)
        assert said == (name != "grouped") or torch.cuda.get_device_capability() != (9, 0)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert peaks[1] <= peaks[0]
    assert peaks[1] < peaks[0] or name != "moe" or torch.cuda.get_device_capability() != (9, 0)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_repeats_bit_for_bit(name: str) -> None:
    build, rows, args = MODELS[name]()
    model, dy = build(), torch.randn(rows, D, device="cuda", dtype=torch.bfloat16)
    x = torch.randn_like(dy)
    found = []
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        step(model, leaf, args, dy)
        found.append([leaf.grad, *(p.grad for p in model.parameters())])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_the_activation_in_the_epilogue_equals_a_pass_over_h(name: str) -> None:
    build, rows, args = MODELS[name]()
    model, dy = build(), torch.randn(rows, D, device="cuda", dtype=torch.bfloat16)
    x, found, ran = torch.randn_like(dy), [], []
    for choice in (0, 1):
        leaf = x.clone().requires_grad_()
        with configs.forced(EPILOGUE, {"EPILOGUE": choice}), watch_launches() as launched:
            step(model, leaf, args, dy)
        ran.append("grouped_swiglu" in {op.name for op, *_ in launched})
        found.append([leaf.grad, *(p.grad for p in model.parameters())])
    assert not ran[0]
    assert ran[1] or torch.cuda.get_device_capability() != (9, 0)
    for one, other in zip(*found, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < 2**-8  # one rounding of a


@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_through_the_activation_equals_a_pass_over_it(name: str) -> None:
    build, rows, args = MODELS[name]()
    model, dy = build(), torch.randn(rows, D, device="cuda", dtype=torch.bfloat16)
    x, found, ran = torch.randn_like(dy), [], []
    for choice in (0, 1):
        leaf = x.clone().requires_grad_()
        with configs.forced(dswiglu.EPILOGUE, {"EPILOGUE": choice}), watch_launches() as launched:
            step(model, leaf, args, dy)
        ran.append("grouped_dswiglu_into" in {op.name for op, *_ in launched})
        found.append([leaf.grad, *(p.grad for p in model.parameters())])
    assert not ran[0]
    assert ran[1] or torch.cuda.get_device_capability() != (9, 0)
    for one, other in zip(*found, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < 2**-10  # a few elements of dh round the other way


@pytest.mark.parametrize("name", MODELS)
def test_inference_writes_no_h_and_gives_the_same_y(name: str) -> None:
    build, rows, args = MODELS[name]()
    model, x = build(), torch.randn(rows, D, device="cuda", dtype=torch.bfloat16)
    with configs.forced(EPILOGUE, {"EPILOGUE": 1}):
        trained = model(x.requires_grad_(), *args).detach()
        with torch.no_grad():
            y = model(x, *args)  # also what the first call allocates for good
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            assert torch.equal(model(x, *args), y)
            peak = torch.cuda.max_memory_allocated() - start
    assert torch.equal(y, trained)
    assert peak < 2 * ROWS * 2 * F or torch.cuda.get_device_capability() != (9, 0)


@pytest.mark.parametrize("act", [fo.ops.SwiGLU, fo.ops.SReLU])
def test_a_dense_mlp_equals_passes_over_its_activation(act: type[Any]) -> None:
    wide = 2 * F if act is fo.ops.SwiGLU else F
    fc1, fc2 = (fo.ops.Linear(k, n, bias=False, **WHERE) for k, n in ((D, wide), (F, D)))
    model = fo.Residual(fo.ops.RMSNorm(D, **WHERE), fc1, act(), fc2)
    x, dy = torch.randn(2, 1001, D, **WHERE).unbind()
    found, ran = [], []
    for choice in (0, 1):
        leaf, there = x.clone().requires_grad_(), {"EPILOGUE": choice}
        with (
            configs.forced(mlp.SWIGLU, there),
            configs.forced(mlp.DSWIGLU, there),
            watch_launches() as launched,
        ):
            step(model, leaf, (), dy)
        ran.append({"grouped_swiglu", "grouped_dswiglu"} & {op.name for op, *_ in launched})
        found.append([leaf.grad, *(p.grad for p in model.parameters())])
    assert not ran[0]
    assert len(ran[1]) == 2 or torch.cuda.get_device_capability() != (9, 0)
    for one, other in zip(*found, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < 2**-8
