"""A repeated step launches kernels as its ops do, on memory that it knows by address alone."""

import copy
import ctypes
import importlib
from types import SimpleNamespace

import pytest
import torch
from laws import DEVICE

import fuseops as fo
from fuseops import torch_private
from fuseops.kernels.replay import apart

pytestmark = [
    pytest.mark.usefixtures("kernels"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU launches itself: test_repeats.py"),
]
launches = importlib.import_module("fuseops.kernels.launch")  # not the function of this name


def memory_at(address, like):
    """A tensor of this kind that begins at an address."""
    spans = [(size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True)]
    count = sum(spans) + 1 if like.numel() else 0
    if not count:
        return torch.empty_like(like)
    raw = (ctypes.c_char * (count * like.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=like.dtype).as_strided(like.shape, like.stride())


class Addressed:
    """Launches an interpreted kernel as a compiled one is launched: by numbers."""

    head, constants = (), ()
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=()))

    def __init__(self, kernel, args, options, seen):
        self.kernel, self.args, self.options, self.seen = kernel, args, options, seen

    def stream_of(self, index):
        return "stream"

    def raw(self, x, y, z, stream, *operands):
        assert stream == "stream"
        self.seen.append(self.kernel)
        given = [
            memory_at(now, like) if isinstance(like, torch.Tensor) else now
            for now, like in zip(operands, self.args, strict=True)
        ]
        launches.launch(self.kernel, (x, y, z), *given, **self.options)


@pytest.fixture
def by_address(monkeypatch):
    """Kernels that were launched by address."""
    seen = []

    def launched(kernel, grid, args, options):
        launches.launch(kernel, grid, *args, **options)
        return Addressed(kernel, [*args], options, seen)

    monkeypatch.setattr(launches, "launched", launched)
    monkeypatch.setattr(torch_private, "current_device", lambda: -1)
    with apart():
        yield seen


def ops_of(kind):
    where = {"device": DEVICE, "dtype": torch.bfloat16}
    mlp = [fo.ops.Linear(16, 64, **where), fo.ops.SwiGLU(), fo.ops.Linear(32, 16, **where)]
    return {
        "mlp": [fo.ops.RMSNorm(16, **where), *mlp],
        "norms": [fo.ops.LayerNorm(16, **where), fo.ops.GELU(), fo.ops.Linear(16, 16, **where)],
        "linears": [fo.ops.Linear(16, 16, **where) for _ in range(2)],
    }[kind]


@pytest.mark.parametrize("rows", [6, 1, 0])
@pytest.mark.parametrize("kind", ["mlp", "norms", "linears"])
def test_a_repeated_step_launches_what_its_ops_do(kind, rows, by_address):
    model = fo.Residual(*ops_of(kind))

    def step(of, x):
        y = of(x)
        leaves = [x, *of.parameters()]
        return [y.detach(), *torch.autograd.grad(y, leaves, torch.cos(y.detach()))]

    per_step = []
    for k in range(6):
        x = torch.randn(rows, 16, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        by_address.clear()
        found = step(model, x)
        per_step.append(len(by_address))
        with apart():
            expected = step(copy.deepcopy(model), x)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
        assert len(by_address) == per_step[-1], k
    assert per_step[-1] == per_step[-2]
    (run,) = (piece for _, piece in model._runner.pieces)
    nodes = [seg for seg in next(iter(run.last.plans.values())).segments if seg.kind == "node"]
    kinds = [alike for seg in nodes for alike in seg.repeats.kinds.values()]
    assert len(kinds) == 2 * len(nodes) and all(alike.again for alike in kinds)
    launching = [a for alike in kinds for a, _ in alike.again if "stream_of" in a.__code__.co_names]
    assert len(launching) >= (1 if kind == "linears" else 2) * (
        rows > 0
    )  # whose forward is a product alone
