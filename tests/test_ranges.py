"""A profile has a range for every span, forward and backward, by its name; without a profile there is none."""

from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

import fuseops as fo
from fuseops.run import ranges, run


def profiled() -> torch.profiler.profile:
    cpu = torch.profiler.ProfilerActivity.CPU
    return torch.profiler.profile(activities=[cpu], acc_events=True)  # torch 2.11 warns without


def stack() -> tuple[torch.nn.Module, torch.Tensor]:
    blocks = [
        fo.Residual(fo.ops.LayerNorm(8), fo.ops.Linear(8, 8), fo.ops.GELU()),
        fo.Residual(fo.ops.RMSNorm(8), fo.MoE(8, 4, 4, 2), torch.nn.Tanh()),
    ]
    model = torch.nn.ModuleDict({"blocks": torch.nn.Sequential(*blocks)})["blocks"]
    root = torch.nn.Module()
    root.blocks = model
    fo.configure(root)
    return model, torch.randn(6, 8, requires_grad=True)


SPANS = {
    "blocks.0:norm_linear", "blocks.0.2", "blocks.1.0", "blocks.1.1.router",
    "blocks.1.1.dispatch", "blocks.1.1:routed_mlp",
}  # fmt: skip


def test_every_span_is_a_range_that_holds_what_it_runs() -> None:
    model, x = stack()
    plain = model(x)
    plain.sum().backward()
    expected = [plain.detach(), x.grad, *(p.grad for p in model.parameters())]
    for p in (x, *model.parameters()):
        p.grad = None
    with profiled() as profile:
        y = model(x)
        y.sum().backward()
    for a, b in zip(
        [y.detach(), x.grad, *(p.grad for p in model.parameters())], expected, strict=True
    ):
        assert torch.equal(a, b)
    events = {e.name: e for e in profile.events() if e.name.startswith("blocks.")}
    assert set(events) >= SPANS
    backward = {name.removesuffix(" backward") for name in events if name.endswith(" backward")}
    assert {"blocks.1.1:routed_mlp", "blocks.1.0"} <= backward
    inside = {child.name for child in events["blocks.0:norm_linear"].cpu_children}
    assert any(name in ("aten::linear", "aten::addmm", "aten::mm") for name in inside), inside
    backwards = events["blocks.1.1:routed_mlp backward"]
    assert backwards.cpu_children and not events["blocks.1.1:routed_mlp"].name.endswith("backward")


def test_ranges_say_the_spans_of_the_plan() -> None:
    model, x = stack()
    with profiled() as profile:
        model(x)
    named = {e.name for e in profile.events() if e.name.startswith("blocks.")}
    for plan in (p for top in fo.plans(model, x) for p in top.walk()):
        for span in plan.forward:
            if span.rule:
                assert any(name.endswith(f":{span.rule}") for name in named)


def test_without_a_profile_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("ranges without a profile")

    model, x = stack()
    monkeypatch.setattr(run.ranges, "in_ranges", never)
    model(x).sum().backward()


def test_nvtx_ranges_need_no_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    closed: list[str] = []

    @contextmanager
    def noted(label: str) -> Any:
        opened.append(label)
        yield
        closed.append(label)

    monkeypatch.setattr(ranges, "NVTX", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", noted)
    model, x = stack()
    model(x).sum().backward()
    assert set(opened) >= SPANS and sorted(opened) == sorted(closed)
    assert opened.index("blocks.0:norm_linear backward") > opened.index(
        "blocks.1.1:routed_mlp backward"
    )


def test_an_error_in_a_range_says_what_it_says_without() -> None:
    class Fails(fo.Op):
        def fwd(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("mine")

    model = fo.Sequential(fo.ops.RMSNorm(8), Fails())
    told = []
    for scope in (profiled, nullcontext):
        with pytest.raises(ValueError, match="mine") as failed, scope():
            model(torch.randn(2, 8))
        told.append(failed.value.__notes__)
    assert told[0] == told[1] and "Fails" in told[0][0]
