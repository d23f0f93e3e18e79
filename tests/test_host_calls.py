"""What a repeated step of an unchanged plan costs the host: Python functions called, which no clock makes noisy."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from counted import calls_in
from torch import nn

import fuseops as fo
from fuseops import offload
from fuseops.kernels.launch import HAS_TRITON
from fuseops.kernels.registry import KernelOp
from fuseops.offload import marks
from fuseops.offload.lanes.cpu import CpuLanes
from fuseops.offload.storages import StorageMap

OLDEST = torch.__version__.startswith("2.11.")  # calls a function more where it saves


def step_of(
    model: nn.Module,
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext,
    x: torch.Tensor | None = None,
) -> int:
    x = torch.randn(3, 16, requires_grad=True) if x is None else x

    def step() -> None:
        with scope():
            y = model(x).sum()
        y.backward()

    step(), step(), step()
    return calls_in(step)


@pytest.fixture
def fresh_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is marked or ready, and no host memory divided, as by earlier tests."""
    for said in ("marked", "complete"):
        monkeypatch.setattr(marks, said, StorageMap())
    lanes = CpuLanes()
    monkeypatch.setattr("fuseops.offload.scopes.lanes_of", lambda device: lanes)


def linears(count: int, *scope: Callable[[], AbstractContextManager[Any]]) -> int:
    ops = (fo.ops.Linear(16, 16, bias=False) for _ in range(count))
    return step_of(fo.Sequential(*ops), *scope)


def test_a_repeated_step_looks_up_and_runs() -> None:
    few, many = linears(2), linears(8)
    assert (many - few) / 6 <= 4  # of an op: fwd, bwd, and what they call
    assert few <= 53 + OLDEST  # a third of them torch's


@pytest.mark.uninitialized
@pytest.mark.usefixtures("fresh_lanes")
def test_three_ops_with_and_without_to_host() -> None:
    def three(*scope: Callable[[], AbstractContextManager[Any]]) -> int:
        ops = fo.ops.Linear(16, 32, bias=False), fo.ops.SwiGLU(), fo.ops.Linear(16, 16, bias=False)
        return step_of(fo.Sequential(*ops), *scope)

    assert three() <= 116
    assert three(offload.to_host) <= 150 + OLDEST  # nothing is large enough to move
    assert three(lambda: offload.to_host(min_bytes=0)) <= 233 + OLDEST  # two of four do


@pytest.mark.uninitialized
@pytest.mark.usefixtures("fresh_lanes")
def test_what_offload_adds_to_an_op() -> None:
    """Each saves x and its weight, which stays in any case."""

    def added(min_bytes: int) -> float:
        def scope() -> offload.scopes.Scope:
            return offload.to_host(min_bytes=min_bytes)

        return (linears(8, scope) - linears(2, scope)) / 6 - 4

    assert added(1 << 20) <= 14
    assert added(0) <= 35  # there and back: one node saves them all, and they travel together


def test_what_is_added_to_a_chain_adds_its_own_calls_alone() -> None:
    """Rules that match are not asked again, and nobody looks at an op once for each of them."""

    def blocks(count: int) -> int:
        ops = (fo.ops.RMSNorm(16), fo.ops.Linear(16, 32), fo.ops.SwiGLU(), fo.ops.Linear(16, 16))
        return step_of(fo.Sequential(*(fo.Residual(*ops) for _ in range(count))))

    one, two, three = map(blocks, (1, 2, 3))
    assert abs((three - two) - (two - one)) <= 8
    assert three - two <= 160  # most of them in the twins of kernels


def test_the_first_call_of_a_model_imports_no_compiler() -> None:
    """The check of fused ops, on the meta device: torch would import dynamo and sympy, a second or two."""
    code = """if True:
        import sys, torch, fuseops as fo
        ops = fo.ops.RMSNorm(16), fo.ops.Linear(16, 32), fo.ops.SwiGLU(), fo.ops.Linear(16, 16)
        fo.Sequential(fo.Residual(*ops), fo.Residual(*ops))(torch.randn(3, 16))
        assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules
    """
    assert not (ran := fresh.run("-c", code)).returncode, ran.stderr


# --- a step under a recipe, beside one in bf16


@pytest.fixture
def kernels_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel gives what it gave for operands of these shapes before: what is counted stands around it, in a step that
    nothing replays.
    """
    given: dict[Any, Any] = {}

    def again(op: KernelOp[..., Any], *args: Any, **options: Any) -> Any:
        values = (*args, *options, *options.values())
        kinds = [(v.shape, v.dtype) if isinstance(v, torch.Tensor) else v for v in values]
        key = (op.name, args[0].device, *kinds)
        if key not in given:
            given[key] = calls(op, *args, **options)
        return given[key]

    calls = KernelOp.__call__
    monkeypatch.setattr(KernelOp, "__call__", again)
    monkeypatch.setattr("fuseops.run.repeats.transcribable", lambda operands: False)


def dense_mlp() -> nn.Module:
    ops = (
        fo.ops.RMSNorm(128),
        fo.ops.Linear(128, 512, bias=False),
        fo.ops.SwiGLU(),
        fo.ops.Linear(256, 128, bias=False),
    )
    return fo.Residual(*ops).to(torch.bfloat16)


def moe() -> nn.Module:
    return fo.MoE(128, 128, 4, 2, dtype=torch.bfloat16)


@pytest.mark.parametrize("weights", ["none", "step"])
@pytest.mark.parametrize(("make", "most"), [(dense_mlp, 124), (moe, 89)])
def test_calls_that_a_recipe_adds_to_a_step(
    make: Callable[[], nn.Module], most: int, weights: str, kernels_at_once: None
) -> None:
    def calls(scope: Callable[[], AbstractContextManager[Any]]) -> int:
        x = torch.randn(32, 128, dtype=torch.bfloat16, requires_grad=True)
        return step_of(make(), scope, x)

    recipe = fo.recipes.Float8BlockScaling(weights=weights)
    assert calls(lambda: fo.recipe(recipe, strict=True)) - calls(nullcontext) <= most


# --- the path of a GPU, whose launches are left out


def counts(*what: str) -> dict[str, dict[str, Any]]:
    ran = fresh.run(str(Path(__file__).with_name("as_gpu.py")), *what)
    assert not ran.returncode, ran.stderr
    found: dict[str, dict[str, Any]] = json.loads(ran.stdout)
    return found


@pytest.fixture(scope="module")
def as_gpu() -> dict[str, dict[str, Any]]:
    return counts()


on_cpus = pytest.mark.skipif(
    torch.cuda.is_available() or not HAS_TRITON, reason="a CPU stands for a GPU, under Triton"
)


@on_cpus
def test_launchers_of_a_repeated_step_are_replayed_on_a_gpu(
    as_gpu: dict[str, dict[str, Any]],
) -> None:
    """One that no replay does for runs all of its Python at each step: of an MoE in FP8 they took 5 ms."""
    of_torch = {"moe": {"wide_mm"}}  # a product
    for step, found in as_gpu.items():
        assert {*found["anew"]} <= of_torch.get(step.split()[0], set()), step


@on_cpus
@pytest.mark.parametrize(
    ("model", "most", "quantized", "delayed"),
    [("mlp", 68, 111, 131), ("linears", 82, 242, 274), ("moe", 107, 147, 161)],
)
def test_calls_of_a_step_on_a_gpu(
    as_gpu: dict[str, dict[str, Any]], model: str, most: int, quantized: int, delayed: int
) -> None:
    """quantized: under a recipe, which launches more kernels.  delayed: under one that has a state"""
    calls = {step.split()[1]: f["calls"] for step, f in as_gpu.items() if step.split()[0] == model}
    assert calls["bf16"] <= most and calls.pop("delayed") <= delayed
    assert max(calls.values()) <= quantized


@on_cpus
@pytest.mark.skipif(
    OLDEST,
    reason="its compiler compares tensors with what they are not",
)
def test_a_compiled_step_calls_what_one_of_plain_torch_does_and_launches() -> None:
    """The dispatcher takes longer to arrive at a launch than the launch: nothing that is launched goes through it."""
    found = counts("compiled")
    more = {name: row["fuseops"]["calls"] - row["plain"]["calls"] for name, row in found.items()}
    # the backward of an activation; a forward of ours, which dynamo enters; 18 launches, two of them by torch
    older = torch.__version__ < "2.14"  # a launch of ours calls one more since
    mlp, moe = (6, 115) if older else (8, 136)
    assert more["mlp"] <= mlp and more["linears"] <= 3 and more["moe"] <= moe, more
    launched = {name: row["fuseops"]["launched"] for name, row in found.items()}
    assert launched["moe"] == {"its own": 1}  # the router's weight gradient is rounded
    for name in ("mlp", "linears"):
        assert {*launched[name]} == {"its own"}
        assert launched[name]["its own"] <= found[name]["plain"]["launched"]["its own"]
