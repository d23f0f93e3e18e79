"""Offloaded equals resident, bit for bit: outputs and every gradient, over random models."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload

D = 8

BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: fo.ops.Linear(D, D),
    "norm": lambda: fo.ops.RMSNorm(D),
    "silu": fo.ops.SiLU,
    "gelu": lambda: fo.ops.GELU(approximate="tanh"),
    "bias": lambda: fo.ops.Bias(D),
    "scale": lambda: fo.ops.ConstantScale(1.5),
    "dropout": lambda: fo.ops.Dropout(0.3),
    "plain linear": lambda: nn.Linear(D, D),
    "plain norm": lambda: nn.LayerNorm(D),
    "plain tanh": nn.Tanh,
    "plain dropout": lambda: nn.Dropout(0.3),
    "plain relu in place": lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True)),
    "glu": lambda: fo.Sequential(fo.ops.Linear(D, 2 * D, bias=False), fo.ops.SwiGLU()),
    "residual": lambda: fo.Residual(fo.ops.RMSNorm(D), nn.Linear(D, D), fo.ops.SiLU()),
    "qkv": lambda: QKV(),
}


class QKV(nn.Module):
    """Slices of one buffer, and a duplicate."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return torch.softmax(q @ k.t(), -1) @ (v * v)


models = st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=7)
ways = st.sampled_from(["once", "retain", "accumulate", "subset", "checkpoint", "reentrant"])
scopes = st.sampled_from(["to_host", "large only", "keep", "mixed"])


def build(blocks: list[str], tie: bool) -> nn.Module:
    torch.manual_seed(0)
    parts = [BLOCKS[name]() for name in blocks]
    linears = [p for p in parts if isinstance(p, nn.Linear)]
    if tie and len(linears) > 1:
        linears[-1].weight = linears[0].weight
    return fo.Sequential(*parts)


def scope_of(kind: str, root: nn.Module) -> Any:
    if kind == "keep":
        return offload.keep()
    return offload.to_host(min_bytes=200 if kind == "large only" else 1, root=root)


def step(model: nn.Module, way: str, kind: str | None) -> tuple[list[Tensor], Any]:
    """Outputs and every gradient of one training step, and the scope."""
    torch.manual_seed(1)
    x = torch.randn(6, D, requires_grad=True)
    scope = offload.disabled() if kind is None else scope_of(kind, model)
    inner = offload.keep() if kind == "mixed" else offload.disabled()
    model.zero_grad()
    with scope:
        if way in ("checkpoint", "reentrant"):
            y = checkpoint(model, x * 1, use_reentrant=way == "reentrant")
        else:
            y = model(x * 1)
        if way == "accumulate":
            with inner:
                y = y + model(x * 2)
    if way == "subset":
        return [y, *torch.autograd.grad(y.square().sum(), [x])], scope
    y.square().sum().backward(retain_graph=way == "retain")
    if way == "retain":
        y.sin().sum().backward()
    found = [y, x.grad, *(p.grad for p in model.parameters())]
    return [t.detach().clone() for t in found if t is not None], scope


@given(blocks=models, way=ways, kind=scopes, tie=st.booleans())
def test_offloaded_equals_resident(blocks: list[str], way: str, kind: str, tie: bool) -> None:
    model = build(blocks, tie)
    resident, _ = step(model, way, None)
    offloaded, scope = step(model, way, kind)
    assert len(resident) == len(offloaded)
    for a, b in zip(resident, offloaded, strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride()
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))
    report = scope.report()
    if kind == "keep":
        assert report.moved_bytes == 0
    if way == "once":
        assert report.host_bytes == 0 and report.back_bytes >= 0


@given(blocks=models, tie=st.booleans())
def test_every_saved_byte_is_in_the_report(blocks: list[str], tie: bool) -> None:
    """Each storage that autograd saves is moved or kept once, and all comes back once or more."""
    model = build(blocks, tie)
    x = torch.randn(6, D, requires_grad=True)
    seen: set[int] = set()
    total = 0

    def pack(t: Tensor) -> Tensor:
        nonlocal total
        storage = t.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            held.append(storage)
            total += storage.nbytes()
        return t.detach()

    held: list[torch.UntypedStorage] = []
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x)
    parameters = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in model.parameters()}
    expected = total - sum(s.nbytes() for a, s in parameters.items() if a in seen)
    torch.manual_seed(1)
    with offload.to_host(min_bytes=40) as scope:
        y = model(x)
    report = scope.report()
    assert report.moved_bytes + report.kept_bytes == expected
    assert report.moved_bytes == sum(e.nbytes for e in report.entries if e.decision == "moved")
    y.sum().backward()
    assert scope.report().back_bytes >= report.moved_bytes


def test_ten_steps_of_training_are_equal() -> None:
    def train(kind: str | None) -> list[Tensor]:
        model = build(["norm", "linear", "silu", "qkv", "residual", "glu"], tie=False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(10):
            step(model, "once", kind)
            optimizer.step()
        return list(model.parameters())

    assert all(map(torch.equal, train(None), train("to_host")))
