"""Quantize-then-offload: saved tensors that cross the link as float8 codes, where the user asks for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lazy_lanes import LazyLanes
from torch import Tensor, nn

import fuseops as fo
from fuseops import offload
from fuseops.offload.codes import Coding, coded_bytes, coding_of, decode, encode
from fuseops.offload.planning.hardware import Curve, Hardware
from fuseops.offload.policy import Candidate
from fuseops.ops.names import SavedName
from fuseops.torch_private import WeakStorage

D, F, ROWS = 128, 256, 8
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SCALING = fo.recipes.Scaling()
EVERYTHING = offload.Policy(min_bytes=1, quantize="**")


def rounded(x: Tensor) -> Tensor:
    """What comes back, by hand."""
    return fo.quantize(x.detach(), SCALING, col=False).dequantize().detach()


# --- storages


def hard(dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Blocks of every size, of zeros, denormals, one large among small, boundaries of codes."""
    g = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    x = torch.randn(16, 256, generator=g, dtype=torch.float32)
    x = x * torch.exp2(torch.randint(-20, 8, (16, 1), generator=g).float())
    x[0] = 0
    x[1] = info.tiny * torch.randint(-3, 4, (256,), generator=g)
    x[2, ::7] = info.smallest_normal / 4
    x[3, 5] = min(info.max, 2.0**120) / 2
    x[4] = torch.linspace(-448, 448, 256)
    x[5] = 2.0**-6 * torch.arange(256) / 256  # where codes become denormal, beside amax 448
    x[5, ::128] = 448.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [128, 256])
def test_restored_elements_are_within_the_stated_bound(dtype: torch.dtype, width: int) -> None:
    for seed in range(4):
        x = hard(dtype, seed)
        coding = Coding(dtype, width)
        storage = decode(encode(x.untyped_storage(), coding), coding)
        back = torch.empty(0, dtype=dtype).set_(storage, 0, x.shape, x.stride())
        exact, found = x.double(), back.double()
        amax = exact.view(-1, 128).abs().amax(1, keepdim=True).expand(-1, 128).reshape(x.shape)
        bound = (exact.abs() / 16).maximum((amax / 229376).clamp(min=2.0**-73))
        assert ((found - exact).abs() <= bound).all()
        # and the bound is no larger than it must be
        assert ((found - exact).abs() > bound / 2).any()
        assert torch.equal(back, rounded(x))


def test_nan_and_infinity_stay_marked() -> None:
    x = torch.randn(3, 256)
    x[0, 3], x[1, 4], x[1, 200] = float("nan"), float("inf"), -float("inf")
    coding = Coding(x.dtype, 256)
    back = torch.empty(0).set_(
        decode(encode(x.untyped_storage(), coding), coding), 0, x.shape, x.stride()
    )
    assert torch.equal(back.isnan(), x.isnan())
    assert back[1, 4] == float("inf") and back[1, 200] == -float("inf")
    assert back[0, 4:].isfinite().all() and back[2].isfinite().all()
    assert torch.equal(back[2], rounded(x[2:])[0])


@given(st.sampled_from(DTYPES), st.integers(1, 5), st.sampled_from([128, 160, 384]))
def test_bytes_are_those_that_are_planned(dtype: torch.dtype, rows: int, width: int) -> None:
    x = torch.randn(4 * rows, width).to(dtype)
    coding = coding_of(Candidate.of(x, SavedName(("a.x",), False, "op")), ("**.x",))
    assert isinstance(coding, Coding)
    coded = encode(x.untyped_storage(), coding)
    assert coded.nbytes == coded_bytes(x.nbytes, dtype)
    assert decode(coded, coding).nbytes() == x.nbytes


# --- what is refused


def reason(x: Tensor, name: str = "a.x", also: tuple[str, ...] = (), globs: str = "**") -> Any:
    return coding_of(Candidate.of(x, SavedName((name, *also), False, "op")), (globs,))


def test_what_cannot_be_rounded_says_why() -> None:
    x = torch.randn(4, 128)
    assert reason(x) == Coding(torch.float32, 128)
    assert reason(torch.randn(4, 160)) == Coding(torch.float32, 128)
    assert reason(x, globs="b.*") == ""
    assert reason(x, also=("b.h",), globs="a.*") == "no glob of quantize matches b.h"
    assert reason(x.long()) == "no codes of int64"
    assert reason(x.double()) == "no codes of float64"
    assert reason(x.to(torch.float8_e4m3fn)) == "no codes of float8_e4m3fn"
    assert reason(x[:, :64]) == reason(x[0]) == "narrower than a block of 128"
    assert reason(x[:2]) == "not all of its storage"
    assert reason(torch.randn(1, 130)) == "not whole blocks of 128 elements"
    for field in ("rstd", "mean", "lse"):
        assert reason(x, f"a.{field}") == "a statistic"
    for field in fo.quantize(x, fo.recipes.Scaling()).components():
        assert reason(x, f"a.x.{field}") == "a component of a quantized tensor"
    assert "it may be a mask or a statistic" in reason(x, "a.leaf.0")


# --- steps

BLOCKS = 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            fo.Residual(
                fo.ops.RMSNorm(D), fo.ops.Linear(D, 2 * F), fo.ops.SwiGLU(), fo.ops.Linear(F, D)
            )
            for _ in range(BLOCKS)
        )

    def forward(self, x: Tensor, scope: Callable[[int], Any] | None = None) -> Tensor:
        for k, block in enumerate(self.blocks):
            with nullcontext() if scope is None else scope(k):
                x = block(x)
        return x


def grads(model: Model, x: Tensor, scope: Callable[[int], Any] | None = None) -> list[Tensor]:
    model.zero_grad()
    model(x, scope).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def by_hand(model: Model, x: Tensor, blocks: range) -> list[Tensor]:
    """Gradients where what these blocks save, parameters and statistics aside, is rounded by hand."""
    owned = {p.data_ptr() for p in model.parameters()}

    def pack(t: Tensor) -> Tensor:
        return t if t.dim() < 2 or t.data_ptr() in owned else rounded(t)

    hooks = torch.autograd.graph.saved_tensors_hooks
    return grads(model, x, lambda k: hooks(pack, lambda t: t) if k in blocks else nullcontext())


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(ROWS, D, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("small", [0, 4 << 20])
def test_gradients_are_those_of_tensors_rounded_by_hand(
    dtype: torch.dtype, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies run as late as they may, and what is let go is overwritten."""
    lanes = LazyLanes(lambda n: 0)
    monkeypatch.setattr("fuseops.offload.scheduler.make_lanes", lambda *_: lanes)
    model, x = Model().to(dtype), inputs(dtype)
    exact, steps = grads(model, x), []
    with offload.Scheduler(model, "blocks.*", policy=EVERYTHING, lag=0) as scheduler:
        scheduler._scope.mover.schedule.small = small
        for _ in range(3):  # once the order is known the last block stays
            steps.append(grads(model, x))
    for found, left in zip(steps, (BLOCKS, BLOCKS - 1, BLOCKS - 1), strict=True):
        assert all(map(torch.equal, found, by_hand(model, x, range(left))))
        assert not all(map(torch.equal, found, exact))


@pytest.mark.parametrize("policy", [{}, {"quantize": ()}, {"quantize": "blocks.0.0.rstd"}])
def test_without_being_asked_nothing_is_rounded(policy: dict[str, Any]) -> None:
    model, x = Model(), inputs()
    exact = grads(model, x)
    chosen = offload.Policy(min_bytes=1, **policy)
    with offload.Scheduler(model, "blocks.*", policy=chosen, lag=0) as scheduler:
        assert all(map(torch.equal, grads(model, x), exact))
        assert all(map(torch.equal, grads(model, x), exact))
    assert not any("codes" in e.reason for e in scheduler.report().entries)


def test_the_bytes_of_codes_are_what_moves_and_the_tensors_are_let_go() -> None:
    model, x = Model(), inputs()
    gone: list[WeakStorage] = []
    policy = offload.Policy(min_bytes=1, quantize="**.x", offload="**.x")
    with offload.Scheduler(model, "blocks.*", policy=policy, lag=0) as scheduler:
        saves = scheduler._scope.mover.save

        def save(call: Any, t: Tensor, *args: Any) -> Any:
            gone.append(WeakStorage(t.untyped_storage()))
            return saves(call, t, *args)

        scheduler._scope.mover.save = save  # type: ignore[method-assign,assignment]
        y = model(x)
        report = scheduler.report()
        coded = [e for e in report.entries if e.reason == "policy; as float8 codes"]
        assert len(coded) == 2 * BLOCKS
        assert report.moved_bytes == sum(coded_bytes(e.nbytes, torch.float32) for e in coded)
        # that of the first block is the caller's x
        assert [w.expired() for w in gone] == [False] + [True] * (2 * BLOCKS - 1)
        assert [nbytes for _, nbytes in report.held] == [x.nbytes]
        y.square().sum().backward()
        assert scheduler.report().back_bytes == report.moved_bytes
    assert scheduler._scope.mover.lanes.arena.used == 0


def test_what_shares_a_storage_and_may_not_be_rounded_stays_exact() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = fo.ops.SiLU(), fo.ops.GELU()

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            return self.first(x) + self.second(x)

    model, x = nn.Sequential(Layer(), Layer()), inputs()
    policy = offload.Policy(min_bytes=1, quantize="*.first.x")
    with offload.Scheduler(model, "*", policy=policy, lag=0) as scheduler:
        model(x).sum().backward()
    entries = {e.name: e for e in scheduler.report().entries}
    assert entries["0.first.x"].reason == "policy; as float8 codes"
    kept = entries["0.second.x"]
    assert (kept.decision, kept.nbytes) == ("kept", x.nbytes)
    assert kept.reason.endswith("codes; no glob of quantize matches 0.second.x")


# --- plans

# So slow a link that the peak of a tiny model costs time.
LINK = Curve(((1 << 10, 0.05),))
SLOW = Hardware("slow", LINK, LINK, LINK, memory=50.0, matmul={"float32": 0.01})


def planned(peak: float | None, **options: Any) -> offload.OffloadPlan:
    model, x = Model(), torch.randn(256, D, requires_grad=True)
    layers: dict[str, Any] = {"layers": "blocks.*", "hardware": SLOW}
    before = offload.plan(model, x, **layers).before.peak
    options = {**layers, "policy": offload.Policy(min_bytes=1 << 10, **options)}
    return offload.plan(model, x, peak=None if peak is None else int(peak * before), **options)


@pytest.mark.parametrize("peak", [0.95, 0.9, 0.7])
def test_a_plan_rounds_where_that_is_faster_and_only_if_asked(peak: float) -> None:
    exact, coded = planned(peak), planned(peak, quantize="**.x")
    assert exact.bytes_of("quantize") == 0
    assert coded.after.seconds <= exact.after.seconds and coded.fits >= exact.fits
    assert coded.after.peak <= (coded.limits.peak or 0) or not coded.fits
    rows = [t for t in coded.tensors if t.decision == "quantize"]
    assert rows and coded.after.coding > 0 and coded.after.seconds < exact.after.seconds
    text = " ".join(coded.explain().split())
    assert "max(|x|/16, amax/229376)" in text and "as float8 codes, 0.258 of its bytes" in text
    assert "codes" not in exact.explain()


def test_without_a_budget_nothing_is_rounded() -> None:
    assert planned(None, quantize="**").bytes_of("quantize") == 0


def test_a_plan_with_codes_runs_as_it_is() -> None:
    plan = planned(0.9, quantize="**.x")
    assert plan.bytes_of("quantize")
    model, x = Model(), torch.randn(256, D, requires_grad=True)
    with offload.Scheduler(model, plan.layers, plan=plan) as scheduler:
        scheduler._scope.mover.schedule.small = plan.settings.small
        for _ in range(3):
            grads(model, x)
    scheduler.assert_matched(plan)
    facts = dict(scheduler.report().schedule)
    assert facts["host_peak"] == plan.after.host
    rounds = {t.name for t in plan.tensors if t.decision == "quantize"}
    assert {e.name for e in scheduler.report().entries if "float8 codes" in e.reason} >= rounds


def test_components_of_quantized_tensors_are_known_by_name_and_stay_exact() -> None:
    """In a plan, in what it says, and in the run."""
    model = nn.Sequential(
        *(
            fo.Sequential(
                fo.ops.Linear(D, D, bias=False),
                fo.ops.SiLU(),
                fo.ops.Quantize(),
                fo.ops.Linear(D, D),
            )
            for _ in range(4)
        )
    )
    x = torch.randn(256, D, requires_grad=True)
    fo.configure(model, recipe=fo.recipes.Float8BlockScaling(wgrad="block"))
    policy = offload.Policy(min_bytes=1, quantize="**")
    plan = offload.plan(model, x, layers="*", policy=policy, hardware=SLOW)
    codes = {t.name: t for t in plan.tensors if t.name.endswith((".col", ".row"))}
    assert {t.dtype for t in codes.values()} == {"float8_e4m3fn"}
    assert {f"{name}_scale" for name in codes} <= {t.name for t in plan.tensors}
    with offload.Scheduler(model, "*", plan=dict.fromkeys(plan.decisions, "quantize")) as scheduler:
        model(x).sum().backward()
    entries = {e.name: e for e in scheduler.report().entries}
    for name in (*codes, *(f"{name}_scale" for name in codes)):
        assert name in plan.explain(every=True) and entries[name].decision == "moved"
        assert entries[name].reason == "policy; exact: a component of a quantized tensor"
