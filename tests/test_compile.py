"""torch.compile(fullgraph=True) runs a Sequential as eager does, with no recompile per row count."""

import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

import fuseops as fo
from fuseops.run import compiled as compiled_module
from fuseops.run.compiled import forward_class
from fuseops.run.guard_free import guard_free
from fuseops.run.trace_queries import TraceQueries
from fuseops.testing.catalogue import Wanted, catalogue

E, D, F = 4, 16, 24
ROWS = (6, 8, 12, 20, 33)
FRAMES = 2  # one for the first row count, one with dim 0 dynamic

Side = dict[str, Tensor]


class ScaledSwish(fo.Op):
    """A level-1 op with a parameter and a side input."""

    reads = ("probs",)

    def __init__(self, d: int) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(d))

    def fwd(self, x: Tensor, *, beta: Tensor, probs: Tensor) -> Tensor:
        return x * torch.sigmoid(beta * x) * probs[:, None]


def experts(bias: bool) -> fo.Sequential:
    return fo.Sequential(
        {
            "fc1": fo.ops.GroupedLinear(E, D, 2 * F, bias=bias),
            "act": fo.ops.ScaledSwiGLU(),
            "fc2": fo.ops.GroupedLinear(E, F, D, bias=bias),
        }
    )


def routed(rows: int) -> Side:
    counts = torch.multinomial(torch.ones(E), rows, replacement=True).bincount(minlength=E)
    return {"offs": counts.cumsum(0).to(torch.int32), "probs": torch.rand(rows)}


def nothing(rows: int) -> Side:
    return {}


def probs(rows: int) -> Side:
    return {"probs": torch.rand(rows)}


def quantized(model: fo.Sequential) -> fo.Sequential:
    fo.configure(model, recipe=fo.recipes.Float8CurrentScaling())
    return model


def tied() -> fo.Sequential:
    model = fo.Sequential(fo.ops.Linear(16, 16), fo.ops.SiLU(), fo.ops.Linear(16, 16))
    model[2].weight = model[0].weight
    return model


def residual() -> fo.Sequential:
    return fo.Residual(
        fo.ops.RMSNorm(16),
        fo.ops.Linear(16, 32, bias=False),
        fo.ops.SwiGLU(),
        fo.ops.Linear(16, 16),
    )


CASES: dict[str, tuple[Callable[[], fo.Sequential], Callable[[int], Side]]] = {
    "linear_act": (
        lambda: fo.Sequential(fo.ops.Linear(16, 16), fo.ops.GELU(), fo.ops.Linear(16, 16)),
        nothing,
    ),
    "bias_act": (
        lambda: fo.Sequential(fo.ops.Linear(16, 16, bias=False), fo.ops.Bias(16), fo.ops.SReLU()),
        nothing,
    ),
    "layer_norm": (
        lambda: fo.Sequential(fo.ops.LayerNorm(16), fo.ops.Linear(16, 16), fo.ops.ReLU()),
        nothing,
    ),
    "residual": (residual, nothing),
    "nested": (
        lambda: fo.Sequential(residual(), nn.LayerNorm(16), residual(), fo.ops.Identity()),
        nothing,
    ),
    "level_1": (
        lambda: fo.Sequential(fo.ops.Linear(16, 16), ScaledSwish(16), fo.ops.Linear(16, 16)),
        probs,
    ),
    "reshape": (
        lambda: fo.Sequential(
            fo.ops.Linear(16, 16), fo.ops.Reshape(-1, 4, 4), fo.ops.SiLU(), fo.ops.Reshape(-1, 16)
        ),
        nothing,
    ),
    "grouped_mlp": (lambda: experts(False), routed),
    "grouped_biased": (lambda: experts(True), routed),
    "tied": (tied, nothing),
    "fp8": (
        lambda: quantized(
            fo.Sequential(fo.ops.Linear(16, 16), fo.ops.GELU(), fo.ops.Linear(16, 16))
        ),
        nothing,
    ),
    "fp8_grouped": (lambda: quantized(experts(True)), routed),
}


def step(run: Callable[..., Tensor], model: nn.Module, x: Tensor, side: Side) -> list[Tensor]:
    """Output and every gradient of one step."""
    model.zero_grad()
    leaves = [x.clone().requires_grad_()]
    inputs = {}
    for name, t in side.items():
        inputs[name] = t.clone().requires_grad_() if t.is_floating_point() else t
        leaves += [inputs[name]] if t.is_floating_point() else []
    y = run(leaves[0], **inputs)
    (y * torch.arange(y.numel()).view(y.shape).sin()).sum().backward()
    return [y, *(t.grad for t in leaves), *(p.grad.clone() for p in model.parameters())]


def compiled(model: nn.Module, backend: str) -> tuple[Any, list[int]]:
    frames: list[int] = []

    def counting(graph: Any, inputs: Any) -> Any:
        frames.append(1)
        return lookup_backend(backend)(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=counting), frames


@pytest.mark.uninitialized
@pytest.mark.parametrize("name", CASES)
def test_compiled_equals_eager_without_a_recompile_per_row_count(name: str) -> None:
    build, draw = CASES[name]
    model = build()
    run, frames = compiled(model, "aot_eager")
    for rows in ROWS:
        x, side = torch.randn(rows, 16), draw(rows)
        for ours, eager in zip(step(run, model, x, side), step(model, model, x, side), strict=True):
            torch.testing.assert_close(ours, eager)
    assert len(frames) <= FRAMES


@pytest.mark.cxx
@pytest.mark.slow
@pytest.mark.uninitialized
@pytest.mark.parametrize("name", ["nested", "grouped_mlp"])
def test_inductor_equals_eager(name: str) -> None:
    build, draw = CASES[name]
    model = build()
    run, frames = compiled(model, "inductor")
    for rows in ROWS[:3]:
        x, side = torch.randn(rows, 16), draw(rows)
        for ours, eager in zip(step(run, model, x, side), step(model, model, x, side), strict=True):
            torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    assert len(frames) <= FRAMES


@pytest.mark.parametrize("bias", [False, True])
def test_the_compiled_reference_differentiates(bias: bool) -> None:
    """The grouped reference reads `offs`, so a graph holds the registered op, with a derivative of its own."""
    model, x, side = experts(bias), torch.randn(9, D), routed(7)
    side["probs"] = torch.rand(9)
    run, _ = compiled(model, "aot_eager")
    expected = step(model, model, x, side)
    with fo.reference():
        for ours, eager in zip(step(run, model, x, side), expected, strict=True):
            torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_wrong_width_is_refused_as_in_eager(fullgraph: bool) -> None:
    torch._dynamo.reset()  # sizes that it saw differ would be symbols, which messages do not show
    # a Bias of one feature would be spread over all of them
    seq = fo.Sequential(fo.ops.RMSNorm(D), fo.ops.Bias(1))
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=fullgraph)
    # with fullgraph dynamo may wrap it, and quotes it
    wanted = (fo.errors.ShapeError, torch._dynamo.exc.Unsupported)
    with pytest.raises(wanted, match="Bias expects x with 1 features on the last axis"):
        compiled(torch.randn(3, D))


def test_code_compiled_for_any_size_refuses_a_wrong_width() -> None:
    torch._dynamo.reset()
    seq = fo.Sequential(fo.ops.Linear(D, F), fo.ops.SwiGLU(), fo.ops.Linear(F // 2, D))
    compiled = torch.compile(seq, backend="aot_eager", dynamic=True)
    x = torch.randn(3, D)
    torch.testing.assert_close(compiled(x), seq(x))
    with pytest.raises(fo.errors.ShapeError, match=f"expects x with {D} features"):
        compiled(torch.randn(3, D + 1))


def test_an_error_in_traced_code_shows_its_line() -> None:
    with pytest.raises(fo.errors.FuseOpsError) as caught:
        forward_class()().run(fo.Sequential(), torch.randn(3, D), (), (), {"y": None}, {})
    last = caught.traceback[-1]
    assert str(last.path) == compiled_module.__file__
    assert "raise FuseOpsError" in str(last.statement)


def test_annotations_of_traced_code_may_name_what_type_checkers_alone_know(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text(
        "from __future__ import annotations\n\ndef run(x: Unknown) -> Unknown:\n    return abs(x)\n"
    )
    spec = importlib.util.spec_from_file_location("late", file)
    assert spec is not None and spec.loader is not None
    late = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(late)
    copy: Any = guard_free([late.run])
    assert copy().run(-2) == 2 and copy().run.__code__.co_freevars == ("abs",)


def test_a_routing_by_position_compiles() -> None:
    model = experts(False)
    run, _ = compiled(model, "aot_eager")
    x = torch.randn(8, D)
    routing = fo.Routing(**routed(8))
    torch.testing.assert_close(run(x, routing), model(x, routing))


def test_a_compiled_call_sees_the_scope_and_the_replaced_op() -> None:
    model = fo.Sequential(fo.ops.Linear(16, 16), fo.ops.GELU())
    run, frames = compiled(model, "aot_eager")
    x = torch.randn(5, 16)
    torch.testing.assert_close(run(x), model(x))
    with fo.recipe(fo.recipes.Float8CurrentScaling()):
        torch.testing.assert_close(run(x), model(x))
    assert len(frames) == 2
    model[0] = fo.ops.Linear(16, 16)
    torch.testing.assert_close(run(x), model(x))
    model[1] = fo.ops.SiLU()
    torch.testing.assert_close(run(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_is_off_inside_of_compiled_ops(dtype: torch.dtype) -> None:
    """As in eager, forward and backward: of what a recipe computes in float32, too."""
    model = fo.Sequential(fo.ops.Linear(D, D), fo.ops.SiLU(), fo.ops.Linear(D, D)).to(dtype)
    x = torch.randn(5, D, dtype=dtype)
    run, _ = compiled(model, "aot_eager")
    with fo.recipe(fo.recipes.MXFP8BlockScaling()):
        alone = step(model, model, x, {})
        with torch.autocast("cpu", torch.bfloat16):
            eager = step(model, model, x, {})
            assert all(map(torch.equal, step(run, model, x, {}), eager))
    assert dtype is not torch.float64 or all(map(torch.equal, eager, alone))


def test_a_compiled_call_sees_a_forward_that_was_replaced_on_the_instance() -> None:
    torch.compiler.reset()
    seq, x = fo.Sequential(fo.ops.Linear(D, D), fo.ops.SiLU()), torch.randn(3, D)
    compiled = torch.compile(seq, backend="aot_eager", fullgraph=True)
    before = compiled(x)
    seq[1].forward = lambda x: 2 * nn.functional.silu(x)
    torch.testing.assert_close(compiled(x), 2 * before)
    del seq[1].forward
    torch.testing.assert_close(compiled(x), before)


def test_a_thread_that_ran_nothing_yet_compiles() -> None:
    """Nothing that is set in a thread for the first time, while it is traced, may be guarded on as absent."""
    for _ in range(2):  # dynamo's own first call in a process hides it
        torch.compiler.reset()
        model = fo.Residual(nn.Linear(8, 8))  # two runs of alias ops, which are plain torch
        x = torch.randn(3, 8, requires_grad=True)
        with ThreadPoolExecutor(max_workers=1) as thread:
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            y = thread.submit(compiled, x).result()
        torch.testing.assert_close(y, x + model[0](x))


def test_a_routing_of_counts_compiles() -> None:
    """Rows that another rank sent are counted in traced code, too."""
    torch.compiler.reset()
    counted = torch.compile(fo.Routing.from_counts, fullgraph=True, backend="aot_eager")
    assert counted(torch.tensor([2, 0, 3])).offs.tolist() == [2, 2, 5]


class Added(nn.Module):
    """A block that is compiled by itself, as blocks of a model are."""

    def __init__(self, op: fo.Op) -> None:
        super().__init__()
        lost = [name for name in op.losses if name in op.writes]
        self.mlp = fo.Sequential(op, *map(fo.ops.InjectLoss, lost))

    def forward(self, x: Tensor, side: Side) -> Tensor:
        return 2 * self.mlp(x, **side)


def routed_by(rows: int) -> Side:
    """What ops read, for two groups."""
    split = {"offs": torch.tensor([1, rows], dtype=torch.int32), "probs": torch.rand(rows)}
    return {**split, "residual": torch.randn(rows, 8), "skip": torch.randn(rows, 8)}


def _with_numbers() -> list[type]:
    """Ops of the catalogue that hold a number, which may differ from block to block."""
    found = []
    for op, known in catalogue().items():
        made = known.make(Wanted(lambda *options: options[0], 8, 8, 2))
        if any(type(value) is float for value in vars(made).values()) and set(made.reads) <= {
            *routed_by(4)
        }:
            found.append(op)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("op", _with_numbers(), ids=lambda op: op.__name__)
def test_blocks_that_differ_in_a_number_compile_one_by_one(op: type) -> None:
    """Dynamo makes a symbol of a number that differs from the one it saw before."""
    torch._dynamo.reset()
    for k in range(2):
        known = catalogue()[op]
        made = known.make(Wanted(lambda *options, k=k: options[k % len(options)], 8, 8, 2))
        for name, value in list(vars(made).items()):
            if type(value) is float and 0 < value < 1:
                setattr(made, name, value / (k + 1))
        x, rows = torch.randn(4, 8, requires_grad=True), 4
        side = {n: t for n, t in {**routed_by(rows)}.items() if n in made.reads}
        block = Added(made)
        torch.manual_seed(0)
        expected = block(x, side)
        block.compile(backend="eager", fullgraph=True)
        torch.manual_seed(0)
        torch.testing.assert_close(block(x, side), expected)


def guards_in(model: nn.Module, x: Tensor) -> int:
    """What every later call of a compiled module is checked against."""
    found: list[set[Any]] = []

    def counted(guards: Any) -> list[bool]:
        found.append({(g.guard_type, g.name) for g in guards})
        return [True] * len(guards)

    torch._dynamo.reset()
    torch.compile(model, backend="eager", options={"guard_filter_fn": counted})(x)
    return sum(map(len, found))


class PlainSwiGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up


class PlainResidual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_a_compiled_call_is_guarded_on_little() -> None:
    """At most half more than what dynamo checks of plain modules: names of traced code, and what was planned, are no
    guards.
    """
    x = torch.randn(3, 16, requires_grad=True)

    def linears(layer: Callable[[int, int], nn.Module], seq: type[nn.Sequential]) -> int:
        return guards_in(seq(*(layer(16, 16) for _ in range(8))), x)

    first, last = nn.Linear(16, 32, bias=False), nn.Linear(16, 16)
    plain = guards_in(PlainResidual(nn.RMSNorm(16), first, PlainSwiGLU(), last), x)
    assert guards_in(residual(), x) <= 1.5 * plain
    assert linears(fo.ops.Linear, fo.Sequential) <= 1.5 * linears(nn.Linear, nn.Sequential)
    assert guards_in(fo.MoE(16, 24, E, 2), x) <= 200  # of 288 once


def changed(op: fo.Op, name: str) -> None:
    value = getattr(op, name)
    setattr(op, name, value * 2 if isinstance(value, float) else not value)


@pytest.mark.parametrize(
    "op, name",
    [
        (lambda: fo.ops.RMSNorm(16, eps=0.5), "eps"),
        (lambda: fo.ops.Dropout(1e-9), "training"),
        (lambda: fo.ops.Dropout(1e-9), "p"),
        (lambda: fo.ops.ClampedSwiGLU(limit=0.25), "options"),
    ],
)
def test_a_compiled_call_sees_an_attribute_that_changed(op: Callable[[], fo.Op], name: str) -> None:
    torch._dynamo.reset()
    seq, x = fo.Sequential(fo.ops.Linear(16, 16), op()), torch.randn(3, 16)
    run = torch.compile(seq, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(x), seq(x))
    value = getattr(seq[1], name)
    if isinstance(value, tuple):
        setattr(seq[1], name, tuple(2 * v if type(v) is float else v for v in value))
    else:
        changed(seq[1], name)
    torch.testing.assert_close(run(x), seq(x))


def test_a_mode_set_inside_of_compiled_code_is_that_of_the_call() -> None:
    torch._dynamo.reset()
    seq, x = fo.Sequential(fo.ops.RMSNorm(16, eps=0.5)), torch.randn(3, 16)

    def halved(x: Tensor) -> Tensor:
        seq[0].eps = 0.25
        y = seq(x)
        seq[0].eps = 0.5
        return y

    expected = halved(x)
    assert not torch.allclose(expected, seq(x))
    torch.testing.assert_close(torch.compile(halved, backend="aot_eager")(x), expected)


def test_sizes_that_are_all_symbols_compile() -> None:
    torch._dynamo.reset()
    model = fo.Sequential(fo.ops.RMSNorm(16), fo.ops.RMSNorm(16), fo.ops.Linear(16, 8))
    run = torch.compile(model, dynamic=True, backend="aot_eager", fullgraph=True)
    for rows in ROWS[:2]:
        x = torch.randn(rows, 16)
        for ours, eager in zip(step(run, model, x, {}), step(model, model, x, {}), strict=True):
            torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16), (16,)])
def test_conditions_know_the_axes_of_x_in_a_trace(shape: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    model, x = residual(), torch.randn(*shape)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for ours, eager in zip(step(run, model, x, {}), step(model, model, x, {}), strict=True):
        torch.testing.assert_close(ours, eager)


def test_a_trace_asks_the_planner_for_the_conditions_of_an_moe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Traced conditions are guards: a third of all those that every call of an MoE checked."""
    asked: list[bool] = []
    ask = TraceQueries.depends_on_symbols

    def depends_on_symbols(self: TraceQueries, *about: Any) -> bool:
        asked.append(ask(self, *about))
        return asked[-1]

    monkeypatch.setattr(TraceQueries, "depends_on_symbols", depends_on_symbols)
    torch.compiler.reset()
    moe = fo.MoE(D, F, E, 2)
    torch.compile(moe, backend="eager", fullgraph=True)(torch.randn(6, D))
    assert asked == [False]


def test_a_model_is_exported_with_parameters_that_want_gradients() -> None:
    """Its groups are those of the tokens that it gets, of another number too."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = fo.Residual(fo.ops.RMSNorm(8), fo.MoE(8, 6, 4, 2))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.block(x)
            return y

    model, shapes = Model(), {"x": {0: torch.export.Dim("tokens", min=2, max=64)}}
    x = torch.randn(6, 8)
    program = torch.export.export(model, (x,), dynamic_shapes=shapes, strict=True)
    exported = program.module()
    for tokens in (6, 11):
        x = torch.randn(tokens, 8)
        torch.testing.assert_close(exported(x), model(x))
