"""The rule `pointwise`: a run of elementwise ops, level-1 ops too, is one kernel each way for every number of rows.

What inductor makes of a graph is its own affair: laws over many runs execute the traced graphs as they are, and a few
tests have inductor compile them.
"""

import copy
import functools
import itertools
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fuseops as fo
from fuseops import offload, torch_private
from fuseops.rules.fused import pointwise
from fuseops.testing import assert_fused_matches_unfused

D = 8


class Swish(fo.Op):
    """A researcher's op."""

    reads = ("probs",)

    def __init__(self, d: int = D, gain: float = 1.5) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.linspace(0.5, 1.5, d))
        self.gain = gain

    def fwd(self, x: Tensor, *, beta: Tensor, probs: Tensor) -> Tensor:
        return self.gain * x * torch.sigmoid(beta * x) * probs[..., None]


class Tanh(fo.Op):
    def fwd(self, x: Tensor) -> Tensor:
        return torch.tanh(x) + x.abs().clamp(max=2.0)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that were compiled: here they run as they are."""
    made: list[Any] = []

    def generated(graph: Any, tensors: Any) -> Any:
        made.append(graph)
        return graph

    monkeypatch.setattr(torch_private, "inductor_compile", generated)
    monkeypatch.setattr(torch_private, "inductor_unsupported_reason", lambda device: None)
    monkeypatch.setattr(pointwise, "CACHE", {})
    return made


@pytest.fixture
def by_choice() -> Iterator[None]:
    with fo.rules("pointwise"):
        yield


def data(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def fired(model: fo.Sequential, x: Tensor, **side: Tensor) -> list[tuple[int, int]]:
    plan = model.plan(x, **side)
    assert all(s in plan.backward for s in plan.forward if s.rule == "pointwise")
    return [(s.start, s.stop) for s in plan.forward if s.rule == "pointwise"]


def misses(model: fo.Sequential, x: Tensor, **side: Tensor) -> list[str]:
    return [m.reason for m in model.plan(x, **side).misses if m.rule == "pointwise"]


OPS = {
    "Swish": Swish,
    "Tanh": Tanh,
    "Bias": lambda: fo.ops.Bias(D),
    "ConstantScale": lambda: fo.ops.ConstantScale(0.7),
    "SiLU": fo.ops.SiLU,
    "GELU": lambda: fo.ops.GELU("tanh"),
    "ScaledSReLU": fo.ops.ScaledSReLU,
}


@st.composite
def runs(draw: st.DrawFn, dtype: torch.dtype) -> tuple[fo.Sequential, Tensor, dict[str, Tensor]]:
    names = draw(st.lists(st.sampled_from(sorted(OPS)), min_size=2, max_size=5))
    leading = draw(st.sampled_from([(6,), (2, 5), (1,), (D,)]))
    if len(leading) > 1:  # probabilities are (R,) there
        names = [name for name in names if name != "ScaledSReLU"] + ["SiLU", "Tanh"]
    ops = [OPS[name]() for name in names]
    gated = draw(st.booleans())
    if gated:
        ops.insert(0, fo.ops.SwiGLU())
    sides = {"probs": torch.rand(leading)}
    if draw(st.booleans()):
        name = draw(st.sampled_from(["other", "<residual>", "x of blocks.0"]))
        ops.append(fo.ops.Add(name))
        sides[name] = torch.randn(*leading, D).to(dtype)
    model = fo.Sequential(*ops).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(0.5, 1.5)
            p.requires_grad_(draw(st.booleans()))
    return (
        model,
        torch.randn(*leading, D * (1 + gated)).to(dtype),
        {name: sides[name] for name in model.reads},
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("graphs", "by_choice")
def test_a_run_equals_its_ops_and_is_one_span(dtype: torch.dtype) -> None:
    @settings(max_examples=-(-settings.default.max_examples // 15))  # each is traced
    @given(case=runs(dtype), asks=st.booleans())
    def law(case: tuple[fo.Sequential, Tensor, dict[str, Tensor]], asks: bool) -> None:
        model, x, side = case
        x.requires_grad_(asks)
        with fo.fusion(disable=["bias_act"]):  # which goes first
            assert assert_fused_matches_unfused(model, x, **side) == ("pointwise",)
            found = fired(model, x, **side)
            # ops before the first that has a gradient are a run of their own
            assert found == [(0, len(model))] if asks else found
            fused = model.plan(x, **side)
        with fo.fusion(False):
            plain = model.plan(x, **side)
        assert fused.saved_bytes <= plain.saved_bytes

    law()


@pytest.mark.usefixtures("by_choice")
def test_inductor_makes_one_kernel_each_way_for_every_number_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two layers that are alike share theirs; a run repeats bit for bit."""
    device = torch.device("cpu")
    if (why := torch_private.inductor_unsupported_reason(device)) is not None:
        pytest.skip(why)
    made, generated = [], torch_private.inductor_compile
    monkeypatch.setattr(pointwise, "CACHE", {})
    monkeypatch.setattr(
        torch_private, "inductor_compile", lambda *given: made.append(given) or generated(*given)
    )
    layers = [fo.Sequential(Swish(), fo.ops.ConstantScale(0.5), Tanh()) for _ in range(2)]
    for rows in (5, 1, 0, 8, 300):
        for layer in layers:
            x, probs = data(rows, D), torch.rand(rows, requires_grad=True)
            assert assert_fused_matches_unfused(layer, x, probs=probs) == ("pointwise",)
    leaves = [x, probs, *layer.parameters()]
    first, again = (torch.autograd.grad(layer(x, probs=probs).sum(), leaves) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len(made) == 2


def test_more_rows_trace_nothing_anew(graphs: list[Any], by_choice: None) -> None:
    model = fo.Sequential(Swish(), Tanh())
    for rows in (3, 1, 0, 8, 100):
        model(data(rows, D), probs=torch.rand(rows)).sum().backward()
    assert len(graphs) == 2
    model[0].gain = 2.0  # what it computes with is part of the graph
    model(data(3, D), probs=torch.rand(3)).sum().backward()
    assert len(graphs) == 4
    assert assert_fused_matches_unfused(model, data(3, D), probs=torch.rand(3)) == ("pointwise",)


def test_a_step_that_is_repeated_runs_its_kernels(
    monkeypatch: pytest.MonkeyPatch, graphs: list[Any], by_choice: None
) -> None:
    ran: list[Any] = []

    def generated(graph: Any, tensors: Any) -> Any:
        return lambda *given: ran.append(graph) or graph(*given)

    monkeypatch.setattr(torch_private, "inductor_compile", generated)
    model = fo.Sequential(fo.ops.SiLU(), fo.ops.ConstantScale(0.7), fo.ops.GELU("tanh"))
    for k in range(6):
        x = data(3, D)
        y = model(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
        assert len(ran) == 2 * (k + 1)
        with fo.reference():
            torch.testing.assert_close(y, expected := model(x))
            torch.testing.assert_close(dx, *torch.autograd.grad(expected.sum(), x))


LOUD = SimpleNamespace(gain=2.0)


def louder(x: Tensor) -> Tensor:
    return x * GAIN


class Loud(fo.Op):
    """What it computes stands in many places."""

    slope = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.shift = 0.0

    @property
    def steep(self) -> float:
        return self.slope + self.shift

    def fwd(self, x: Tensor) -> Tensor:
        return louder(x) * self.steep + (1.0 if self.training else 2.0)


GAIN = 2.0
CHANGES: dict[str, Callable[[fo.Op, pytest.MonkeyPatch], Any]] = {
    "of the instance": lambda op, m: setattr(op, "shift", 3.0),
    "of the class": lambda op, m: m.setattr(Loud, "slope", 3.0),
    "of the module": lambda op, m: m.setattr(sys.modules[__name__], "GAIN", 3.0),
    "the mode": lambda op, m: op.eval(),
}


@pytest.mark.usefixtures("graphs", "by_choice")
@pytest.mark.parametrize("what", CHANGES)
def test_what_an_op_computes_with_may_change(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = fo.Sequential(Loud(), Tanh()), data(3, D)
    for _ in range(2):
        assert assert_fused_matches_unfused(model, x) == ("pointwise",)
        CHANGES[what](model[0], monkeypatch)


class Held:
    """A number in places that code reaches by more than a name."""

    gain = 2.0

    def __call__(self) -> float:
        return self.gain

    def get(self) -> float:
        return self.gain

    @staticmethod
    def apply(x: Tensor) -> Tensor:
        return x * Held.gain


HELD = Held()
bound, partly = HELD.get, functools.partial(HELD.get)


class Inherited(fo.Op):
    def fwd(self, x: Tensor) -> Tensor:
        return x * HELD.gain


class Super(Inherited):
    def fwd(self, x: Tensor) -> Tensor:
        return super().fwd(x).tanh()


OUT_OF_SIGHT: dict[str, Callable[[Tensor], Tensor]] = {
    "a class": lambda x: x * Held.gain,
    "a static method": lambda x: Held.apply(x),
    "an object to call": lambda x: x * HELD(),
    "a bound method": lambda x: x * bound(),
    "a partial": lambda x: x * partly(),
    "getattr": lambda x: x * getattr(Held, "ga" + "in"),
    "globals": lambda x: x * globals()["Held"].gain,
    "a helper": lambda x: louder(x),
}


@pytest.mark.usefixtures("graphs", "by_choice")
@pytest.mark.parametrize("where", [*OUT_OF_SIGHT, "the fwd of a base"])
def test_no_kernel_outlives_a_number_that_code_does_not_name(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = OUT_OF_SIGHT.get(where)
    op = Super() if compute is None else op_of(lambda x, op: compute(x).tanh())
    model, x = fo.Sequential(op), data(3, D)
    for gain, helper in ((2.0, lambda x: x * 2.0), (3.0, lambda x: x * 3.0)):
        monkeypatch.setattr(Held, "gain", gain)
        monkeypatch.setattr(sys.modules[__name__], "louder", helper)
        with fo.reference():
            expected = model(x)
        torch.testing.assert_close(model(x), expected)


class Affine(fo.Op):
    """Any of its parameters may be absent."""

    def __init__(self, *present: str) -> None:
        super().__init__()
        for name in ("scale", "shift", "slope"):
            own = nn.Parameter(torch.linspace(0.5, 1.5, D)) if name in present else None
            self.register_parameter(name, own)

    def fwd(
        self, x: Tensor, *, scale: Tensor | None, shift: Tensor | None, slope: Tensor | None
    ) -> Tensor:
        x = torch.tanh(x) if slope is None else torch.tanh(slope * x)
        x = x if scale is None else x * scale
        return x if shift is None else x + shift


@pytest.mark.usefixtures("graphs", "by_choice")
def test_ops_that_lack_different_parameters_share_no_kernel() -> None:
    names = ("scale", "shift", "slope")
    for count in range(4):
        for present in itertools.combinations(names, count):
            model = fo.Sequential(Affine(*present))
            assert assert_fused_matches_unfused(model, data(3, D)) == ("pointwise",)


@pytest.mark.usefixtures("graphs", "by_choice")
def test_an_attribute_that_is_another_in_each_step_keeps_no_more_and_more_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pointwise, "MAX_CACHED", 4)
    model, x = fo.Sequential(Loud(), Tanh()), data(3, D)
    for step in range(9):
        model[0].shift = float(step)
        assert assert_fused_matches_unfused(model, x) == ("pointwise",)
        assert 0 < len(pointwise.CACHE) <= 4


def op_of(compute: Any, **own: Any) -> fo.Op:
    kind = type("Mine", (fo.Op,), {"fwd": lambda self, x: compute(x, self)})
    made = kind()
    made.__dict__.update(own)
    return made


REFUSED: dict[str, tuple[Any, str]] = {
    "reduction": (lambda x, op: x.softmax(-1), "_softmax is not elementwise"),
    "product": (lambda x, op: x @ x.t() @ x, "mm is not elementwise"),
    "random": (lambda x, op: x + torch.rand_like(x), "draws random numbers"),
    "write": (lambda x, op: x.clone().mul_(2), "writes in place"),
    "values": (lambda x, op: x * 2 if bool((x > 0).all()) else x, "depends on values"),
    "branch": (lambda x, op: x * (2 if float(x[0, 0]) else 3), "depends on values"),
    "rows": (lambda x, op: x * 2 if x.shape[0] > 100 else x * 3, "depends on the number of rows"),
    "nothing": (lambda x, op: x[:, :4], "computes nothing"),
    "tensor": (lambda x, op: x * torch.tensor([2.0] * D), "does not come by keyword"),
    "elsewhere": (lambda x, op: x * LOUD.gain, "LOUD' is a SimpleNamespace, and may change"),
    "detached": (lambda x, op: x.detach() * 2, "no gradient reaches"),
}


@pytest.mark.usefixtures("graphs", "by_choice")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_kernel_says_why(name: str) -> None:
    compute, reason = REFUSED[name]
    model = fo.Sequential(fo.ops.Linear(D, D), op_of(compute))
    x = data(4, D)
    if name == "random":  # which no level-1 op may be, with a gradient
        x, model = x.detach(), model.requires_grad_(False)
    (found,) = misses(model, x)
    assert reason in found, found


@pytest.mark.usefixtures("graphs", "by_choice")
def test_what_a_run_reads_beside_x_is_of_its_rows_and_fixed() -> None:
    other = fo.Sequential(Swish(), Tanh())
    with pytest.raises(RuntimeError):  # as the ops alone say
        misses(other, data(4, D), probs=torch.rand(3))
    gain = type("Gain", (fo.Op,), {"reads": ("g",), "fwd": lambda self, x, *, g: x * g})
    assert "has not the leading axes" in misses(fo.Sequential(gain()), data(4, D), g=data(D))[0]
    held = op_of(lambda x, op: x * op.sizes[0], sizes=[2.0])
    assert "'sizes' is a list" in misses(fo.Sequential(held), data(4, D))[0]
    assert "no rows" in misses(fo.Sequential(Tanh()), data(D))[0]
    added = fo.Sequential(fo.ops.Add("r"), fo.ops.SiLU())
    assert "both of its terms" in misses(added, data(4, D), r=data(4, D))[0]


@pytest.mark.usefixtures("graphs", "by_choice")
def test_other_rules_go_first_and_what_is_between_is_cut_out() -> None:
    ops = fo.ops
    model = fo.Sequential(
        ops.Linear(D, D), ops.SiLU(), Tanh(), ops.SiLU(), ops.Dropout(0.5), ops.SiLU(), Tanh(),
        op_of(lambda x, op: x.cumsum(-1)), ops.ConstantScale(2.0), Tanh(),
    )  # fmt: skip
    x = data(4, D)
    plan = model.plan(x)
    assert plan.forward[0].rule == "linear_act"
    assert fired(model, x) == [(2, 4), (5, 7), (8, 10)]
    assert set(misses(model, x)) == {
        "aten.cumsum is not elementwise",
        "overlaps 0:2 of act_linear",
    }
    assert "Pointwise  rule pointwise (joint)" in model.explain(x)


def test_it_is_on_by_choice_only(graphs: list[Any]) -> None:
    model, x = fo.Sequential(Tanh(), Tanh()), data(4, D)
    assert fired(model, x) == [] and misses(model, x) == []
    fo.configure(model, rules=["pointwise"])
    for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert fired(same, x) == [(0, 2)]
    with fo.fusion(disable=["pointwise"]):
        assert misses(model, x) == ["disabled"]
    with fo.fusion(strict=["pointwise"]):
        model(x)
    with pytest.raises(fo.FuseOpsError, match=r"expects .* got 'pointwize'"):
        fo.configure(model, rules=["pointwize"])


@pytest.mark.usefixtures("graphs", "by_choice")
def test_saved_tensors_have_names_and_move() -> None:
    model, x, probs = fo.Sequential(Swish(), Tanh()), data(64, D), torch.rand(64)
    names = {s.name: s.is_param for s in model.plan(x, probs=probs).saved}
    assert names == {"0.x": False, "0.beta": True, "0.probs": False}
    expected = torch.autograd.grad(model(x, probs=probs).sum(), [x, *model.parameters()])
    with offload.to_host(min_bytes=0):
        y = model(x, probs=probs)
    for got, want in zip(
        torch.autograd.grad(y.sum(), [x, *model.parameters()]), expected, strict=True
    ):
        assert torch.equal(got, want)


def test_under_autocast_and_compile_the_ops_are_as_they_are(
    graphs: list[Any], by_choice: None
) -> None:
    model, x = fo.Sequential(fo.ops.Linear(D, D), Tanh(), fo.ops.ConstantScale(2.0)), data(4, D)
    with torch.autocast("cpu", torch.bfloat16):
        assert "pointwise" in assert_fused_matches_unfused(model, x)
    made = len(graphs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x))
    assert len(graphs) <= made + 2  # of the eager call
