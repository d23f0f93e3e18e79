"""explain says what ran: every span and miss, every saved tensor with its exact bytes, and leaves no trace."""

import dataclasses
import itertools
import json
import random
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, find, given, settings
from hypothesis import strategies as st
from norm_linear import NORM_LINEAR
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import offload, torch_private
from fuseops.errors import RecomputationError
from fuseops.explain import charts
from fuseops.explain.drawing import svg
from fuseops.explain.html import page
from fuseops.ops import names, scopes
from fuseops.ops.activations import ACTS
from fuseops.plan.records import Planned
from fuseops.rules.builtin_rules import BUILTIN_RULES
from fuseops.rules.rule import types_of
from fuseops.testing.catalogue import exported
from fuseops.testing.strategies import Case, chains, op_cases, rule_cases

EXPERTS, ROWS, D, F = 4, 12, 16, 24
FLOAT, INT = 4, 4
WANTED = " | ".join(op.__name__ for op in types_of(ACTS))  # behind a Linear or a Bias


def grouped_mlp(*, bias: bool = False, width: int = 2 * F) -> fo.Sequential:
    return fo.Sequential(
        {
            "fc1": fo.ops.GroupedLinear(EXPERTS, D, width, bias=bias),
            "act": fo.ops.ScaledSwiGLU(),
            "fc2": fo.ops.GroupedLinear(EXPERTS, F, D, bias=False),
        }
    )


def routing() -> fo.Routing:
    chosen = torch.arange(EXPERTS).repeat_interleave(torch.tensor([3, 0, 5, 4]))[:, None]
    return fo.Routing.from_topk(chosen, torch.rand(ROWS, 1), num_experts=EXPERTS)


def rows(*, grad: bool = True) -> Tensor:
    return torch.randn(ROWS, D, requires_grad=grad)


class Block(nn.Module):
    """Ops, plain modules and plain torch in one."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = fo.Residual(
            fo.ops.RMSNorm(D), fo.ops.Linear(D, F), nn.Dropout(0.5), fo.ops.Linear(F, D)
        )
        self.experts = grouped_mlp()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor, r: fo.Routing) -> Tensor:
        return self.norm(self.experts(self.mlp(x), r)).tanh()


class Model(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(n)])

    def forward(self, x: Tensor, r: fo.Routing) -> Tensor:
        for block in self.blocks:
            x = block(x, r)
        return x


def saved(plan: fo.FusionPlan) -> dict[str, fo.SavedTensor]:
    return {t.name: t for t in plan.saved}


# --- saved tensors ---------------------------------------------------------------------


def test_the_grouped_mlp_saves_x_h_probs_and_offs_only() -> None:
    plan = grouped_mlp().plan(rows(), routing())
    assert {t.name: t.nbytes for t in plan.saved if not t.is_param} == {
        "fc1.x": ROWS * D * FLOAT,
        "act.x": ROWS * 2 * F * FLOAT,
        "act.probs": ROWS * FLOAT,
        "fc1.offs": EXPERTS * INT,
    }
    assert {t.name: t.nbytes for t in plan.saved if t.is_param} == {
        "fc1.weight": 0,
        "fc2.weight": 0,
    }
    assert plan.saved_bytes == (ROWS * (D + 2 * F + 1)) * FLOAT + EXPERTS * INT
    assert saved(plan)["act.x"].shape == (ROWS, 2 * F)
    assert saved(plan)["fc1.offs"].dtype is torch.int32


def test_a_frozen_weight_saves_no_input() -> None:
    layer = fo.Sequential(fo.ops.Linear(D, D, bias=False))
    layer.requires_grad_(False)
    assert [t.name for t in layer.plan(rows()).saved] == ["0.weight"]
    assert layer.plan(rows(grad=False)).saved == ()


def test_shared_storage_is_counted_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = (fo.Sequential(fo.ops.Linear(D, D)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x[: ROWS // 2]).sum() + self.k(x).sum()

    q, k, *_ = fo.plans(Twice(), rows(grad=False))
    assert saved(q)["q.0.x"].nbytes == ROWS * D * FLOAT  # a slice keeps the whole storage
    assert saved(k)["k.0.x"].nbytes == 0
    assert saved(k)["k.0.x"].shared_with == "q.0.x"


def test_plain_modules_are_named_by_path_and_grad_fn() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).exp()

    (plan,) = fo.plans(nn.Sequential(Head(), nn.GELU()), rows())
    found = saved(plan)
    assert [*found] == [
        "0.fc.leaf.0",
        "0.fc.TBackward0.0",
        "0.ExpBackward0.0",
        "1.ExpBackward0.0",
    ]
    weight = found["0.fc.TBackward0.0"]
    assert weight.is_param and weight.nbytes == 0 and weight.shared_with == "0.fc.weight"
    # gelu saves its input, which is exp's output, which exp saves
    assert found["1.ExpBackward0.0"].shared_with == "0.ExpBackward0.0"
    assert plan.saved_bytes == 2 * ROWS * D * FLOAT


def test_buffers_cost_nothing() -> None:
    plan = fo.plans(nn.Sequential(nn.BatchNorm1d(D)).eval(), rows())[0]
    shared = {t.shared_with for t in plan.saved if t.shared_with}
    assert {"0.running_mean", "0.running_var"} <= shared
    assert plan.saved_bytes == ROWS * D * FLOAT + sum(
        t.nbytes for t in plan.saved if t.shape == (0,)
    )


def test_what_the_model_throws_away_is_not_saved() -> None:
    class Discards(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x.exp()
            return x.sin()

    (plan,) = fo.plans(Discards(), rows())
    assert [t.name for t in plan.saved] == ["leaf.0"]


def test_quantized_tensors_are_listed_by_component() -> None:
    with fo.recipe(fo.recipes.Float8CurrentScaling()), fo.fusion(False):
        plan = grouped_mlp().plan(rows(), routing())
    found = saved(plan)
    assert found["fc1.x.col"].dtype is torch.float8_e4m3fn
    columns = (ROWS // 128 + len(routing().offs)) * 128  # groups begin at multiples of 128
    assert found["fc1.x.col"].nbytes == columns * D
    assert {o.op for o in plan.operands} == {"fc1", "fc2"}
    assert {o.role for o in plan.operands} == {"input", "weight", "grad_output"}


def test_the_sum_over_plans_is_what_the_graph_holds() -> None:
    model = Model(3)
    x, r = rows(), routing()
    held: dict[int, int] = {}
    own = {torch_private.storage_id(t) for t in (*model.parameters(), *model.buffers())}

    def pack(t: Tensor) -> Tensor:
        held[torch_private.storage_id(t)] = t.untyped_storage().nbytes()
        keep.append(t.detach())
        return t.detach()

    keep: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x, r)
    expected = sum(size for storage, size in held.items() if storage not in own)
    assert sum(plan.saved_bytes for plan in fo.plans(model, x, r)) == expected
    del y


class Reads(nn.Module):
    """A plain module that reads values: no fake tensor can stand in."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.sum() > 0)


def test_the_peak_of_a_rehearsed_step_is_all_that_lives_in_it() -> None:
    model = fo.Sequential(fo.ops.Linear(D, 4 * D, bias=False))
    plan = model.plan(rows())
    x, y, w = ROWS * D, ROWS * 4 * D, 4 * D * D
    assert plan.rehearsed
    assert plan.saved_bytes == x * FLOAT
    assert plan.peak_bytes == (x + y + x + w) * FLOAT  # with dx and dw
    assert all(p.grad is None for p in model.parameters())
    assert "at the peak of a step" in str(plan) and "at the peak of a step" in plan.to_html()


@dataclasses.dataclass
class Wrapped:
    """What a plain module may return, which torch's pytrees know nothing of."""

    y: Tensor


class Wraps(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(x.exp().sin())


def test_a_model_that_returns_a_dataclass_is_seen_as_one_that_returns_a_tensor() -> None:
    peaks, names = set(), set()
    for kind in (Wrapped, lambda y: (y,), lambda y: {"y": y}, lambda y: y):
        peaks.add(fo.Sequential(fo.ops.Linear(D, 2 * D), Wraps(kind)).plan(rows()).peak_bytes)
        (plan,) = fo.plans(Wraps(kind), rows().requires_grad_())
        names.add(tuple(t.name for t in plan.saved))
    assert len(peaks) == 1 and names == {("ExpBackward0.0", "ExpBackward0.1")}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_the_search_for_anomalies_does_not_stop_a_rehearsal() -> None:
    model = fo.Sequential(fo.ops.Linear(D, 4 * D, bias=False))
    with torch.autograd.detect_anomaly():
        inside = model.plan(rows())
        assert torch.is_anomaly_check_nan_enabled()
        planned = offload.plan(model, rows())
    assert planned.before.peak > 0
    for notes in (inside.notes, planned.assumed):  # its own bytes are not counted, and it says so
        assert any("detect_anomaly" in note for note in notes)
    assert not any("detect_anomaly" in note for note in model.plan(rows()).notes)
    assert inside.rehearsed and inside.peak_bytes == model.plan(rows()).peak_bytes


def test_peak_without_a_rehearsal_adds_the_largest_output_that_is_not_saved() -> None:
    ops = fo.ops.Linear(D, 10 * D, bias=False), fo.ops.SwiGLU(), Reads()
    plan = fo.Sequential(*ops).plan(rows())
    assert not plan.rehearsed and "with the largest temporary" in str(plan)
    # the Linear's output is the SwiGLU's saved x; the SwiGLU's own output is not saved
    assert plan.temporaries == ROWS * 5 * D * FLOAT
    assert plan.peak_bytes == plan.saved_bytes + plan.temporaries


def test_the_largest_temporary_behind_a_plain_module_of_a_nested_sequential() -> None:
    inner = fo.Sequential(fo.ops.Linear(D, 2 * D, bias=False), nn.Linear(2 * D, 3 * D))
    model = fo.Sequential(inner, fo.ops.Linear(3 * D, 5 * D, bias=False), fo.ops.SiLU(), Reads())
    plan = model.plan(rows())
    assert not plan.rehearsed and plan.temporaries == ROWS * 5 * D * FLOAT


# --- spans, misses and notes -----------------------------------------------------------


def without_grad() -> Any:
    return torch.no_grad()


def with_rule(model: fo.Sequential) -> fo.Sequential:
    """Under a rule that takes an RMSNorm and a Linear."""
    fo.configure(model, rules=[fo.Rule("first", NORM_LINEAR.pattern, NORM_LINEAR.build)])
    return model


CASES = {
    "condition": (
        lambda: fo.Sequential(fo.ops.Linear(D, D), fo.ops.Bias(D), fo.ops.SiLU()),
        "linear_act",
        "the Linear has a bias of its own, and a Bias follows",
    ),
    "widths": (
        lambda: fo.Sequential(
            fo.ops.GroupedLinear(EXPERTS, D, 2 * D, bias=False),
            fo.ops.ScaledSwiGLU(),
            fo.ops.Linear(D, D),
        ),
        "grouped_mlp",
        "op 2 is Linear, wanted GroupedLinear",
    ),
    "both biases": (
        lambda: fo.Sequential(fo.ops.Linear(D, D), fo.ops.Bias(D), fo.ops.GELU()),
        "linear_act",
        "the Linear has a bias of its own, and a Bias follows",
    ),
    "overlap": (
        lambda: with_rule(fo.Sequential(fo.ops.RMSNorm(D), fo.ops.Linear(D, D), fo.ops.SiLU())),
        "linear_act",
        "overlaps 0:2 of first",
    ),
    "the end": (
        lambda: fo.Sequential(fo.ops.Linear(D, D, bias=False), fo.ops.Bias(D)),
        "linear_act",
        f"the sequence ends, wanted {WANTED}",
    ),
    "a plain module": (
        lambda: fo.Sequential(fo.ops.Bias(D), nn.SiLU()),
        "bias_act",
        f"'1' is SiLU, a plain module, wanted {WANTED}",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_miss_has_its_reason(case: str) -> None:
    build, rule, reason = CASES[case]
    model = build()
    side = {n: getattr(routing(), n) for n in model.reads}
    plan = model.plan(rows(), **side)
    assert reason in [m.reason for m in plan.misses if m.rule == rule]
    assert reason in str(plan)
    assert reason in model.explain(rows(), **side)


@pytest.mark.parametrize("rule", BUILTIN_RULES, ids=lambda rule: rule.name)
def test_every_rule_is_reported_when_it_may_not_fire(rule: fo.Rule) -> None:
    model, x, side = find(
        rule_cases(rule, torch.float32, ["normal"]),
        lambda case: rule.name in {s.rule for s in case.model.plan(case.x, **case.side).fused},
        settings=settings(max_examples=200, phases=[Phase.generate]),
    )
    with fo.fusion(disable=[rule.name]):
        assert (rule.name, "disabled") in [(m.rule, m.reason) for m in model.plan(x, **side).misses]
    with fo.fusion(False):
        text = model.explain(x, **side)
    assert re.search(rf"\b{rule.name}\b.*fusion is off", text)


@pytest.mark.parametrize("op", exported(), ids=lambda op: op.__name__)
@given(data=st.data())
@settings(max_examples=2)
def test_one_op_alone_is_no_sign_that_a_rule_is_wanted(op: type, data: st.DataObject) -> None:
    case = data.draw(op_cases(op, kinds=["normal"]))
    model, published = fo.Sequential(case.model), case.model.writes
    assert not model.plan(case.x, returns=published, **case.side).not_fused


PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm"}


@pytest.mark.parametrize("op", exported(), ids=lambda op: op.__name__)
@given(data=st.data())
@settings(max_examples=2)
def test_an_op_that_has_products_follows_a_recipe_or_says_why_not(
    op: type, data: st.DataObject
) -> None:
    case = data.draw(op_cases(op, torch.float32, kinds=["normal"]))
    with torch.autograd.profiler.profile() as seen:
        case.model(case.x, **case.side)
    multiplies = any(event.name in PRODUCTS for event in seen.function_events)
    with fo.recipe(fo.recipes.Float8BlockScaling()):
        (alone,) = fo.plans(case.model, case.x, **case.side) or (None,)
        published = case.model.writes
        plan = fo.Sequential({"it": case.model}).plan(case.x, returns=published, **case.side)
    said = [
        p is not None and any("under every recipe" in n for n in p.notes) for p in (alone, plan)
    ]
    assert said == [bool(case.model.stays_high)] * 2
    assert not multiplies or bool(plan.operands) != said[0]


def case_of(*modules: nn.Module) -> Case:
    return Case(fo.Sequential(*modules), torch.ones(2, 4), {})


@given(case=chains(BUILTIN_RULES, torch.float32))
@example(case_of(fo.ops.SiLU(), fo.ops.RMSNorm(4), fo.ops.Identity(), fo.ops.SiLU()))
@example(  # a border inside of a backward span, which begins inside of a forward span
    case_of(
        fo.Residual(fo.ops.SiLU(), fo.ops.Linear(4, 4)),
        fo.Residual(fo.ops.RMSNorm(4), fo.ops.SiLU()),
    )
)
def test_a_segment_begins_where_nothing_crosses_and_nowhere_else(case: Case) -> None:
    """Before a norm or a Tap, around what runs outside of a node, and where another Sequential begins; in no span."""
    plans: list[Any] = []
    with scopes.watch_plans(plans.append):
        case.model(case.x, **case.side)
    for plan in plans:
        ops = [op for seg in plan.segments for op in seg.ops]
        inner = [name for seg in plan.segments for step in seg.forward for name in step.scopes]
        spans, offset = (*plan.forward, *plan.backward), plan.forward[0].start
        inside = {i - offset for span in spans for i in range(span.start + 1, span.stop)}
        bounds = {0, len(ops), *(i for i, op in enumerate(ops) if op.cut_before)}
        outside = [span for span in spans if span.kind in ("plain", "call")]
        bounds |= {at - offset for span in outside for at in (span.start, span.stop)}
        bounds -= inside
        for i in range(1, len(ops)):
            if inner[i] != inner[i - 1]:  # a span is never cut
                bounds.add(max({*range(i + 1)} - inside))
        found = [(seg.start, seg.stop) for seg in plan.segments]
        assert found == [*itertools.pairwise(sorted(bounds))]


def test_positions_count_the_whole_sequential() -> None:
    model = fo.Sequential(
        nn.Identity(),
        fo.ops.Linear(D, D),
        nn.Tanh(),
        fo.ops.Linear(D, D, bias=False),
        fo.ops.Bias(D),
        fo.ops.Dropout(0.5),
    )
    plan = model.plan(rows())
    for spans in (plan.forward, plan.backward):
        assert [i for s in spans for i in range(s.start, s.stop)] == list(range(6))
        assert [s.kind for s in spans] == ["module", "op", "module", "op", "op", "op"]
    assert plan.segments == ((1, 2), (3, 6))
    # the planner counts within the run of ops that begins at 3
    near = [m for m in plan.misses if m.span == (3, 5) and m.rule == "linear_act"]
    assert [m.reason for m in near] == [f"op 5 is Dropout, wanted {WANTED}"]


def test_an_overlap_behind_a_plain_module_names_its_true_place() -> None:
    ops = fo.ops.RMSNorm(D), fo.ops.Linear(D, D), fo.ops.SiLU()
    model = with_rule(fo.Sequential(nn.Identity(), *ops))
    (miss,) = [m for m in model.plan(rows()).misses if m.rule == "linear_act"]
    assert miss == ("linear_act", (2, 4), "overlaps 1:3 of first")


def test_a_hook_is_named_only_where_it_took_something() -> None:
    class Hooked(nn.Module):
        def __init__(self, op: fo.Op) -> None:
            super().__init__()
            self.inner = fo.Sequential(op)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                return self.inner(x)

    x = torch.randn(4, 8, requires_grad=True)
    assert "saved-tensors hook" in str(fo.explain(Hooked(fo.ops.SiLU()), x))
    scale = fo.ops.ConstantScale(2.0)  # saves a number, and no tensor
    assert "saved-tensors hook" not in str(fo.explain(Hooked(scale), x))
    assert "note" not in str(fo.Sequential(scale).explain(x))


def test_hooks_and_overridden_forwards_are_said() -> None:
    class Own(fo.ops.Linear):
        def forward(self, x: Any, *args: Any, **side: Any) -> Any:
            return super().forward(x) * 2

    model = fo.Sequential(
        {"hooked": fo.ops.Linear(D, D), "own": Own(D, D), "replaced": fo.ops.Linear(D, D)}
    )
    model.hooked.register_forward_hook(lambda *_: None)
    forward = model.replaced.forward
    model.replaced.forward = lambda x: forward(x)
    plan = model.plan(rows())
    assert [s.kind for s in plan.forward] == ["call"] * 3
    text = str(plan)
    for words in ("has hooks", "overrides forward", "replaced on the instance"):
        assert any(words in note for note in plan.notes)
        assert words in text
    # they save under the names that they have inside a fused run
    assert {t.name for t in plan.saved if not t.is_param and ".x" in t.name} == {
        "hooked.x",
        "own.x",
        "replaced.x",
    }


def test_what_a_pure_op_could_gain_is_said_once() -> None:
    class Twice(fo.Op[Any]):
        def fwd(self, x: Tensor) -> Tensor:
            return 2 * x

    model = fo.Sequential(Twice(), fo.ops.Linear(D, D), Twice())
    (note,) = model.plan(rows()).notes
    assert note.startswith("Twice: ") and "rule pointwise" in note
    with fo.fusion(False):
        assert not model.plan(rows()).notes
    with fo.rules("pointwise"):
        plan = model.plan(rows())
    assert [s.rule for s in plan.fused] == ["pointwise"] * 2 and not plan.notes


def test_no_gradient_eval_reference_and_autocast_are_said() -> None:
    model = fo.Sequential(fo.ops.Linear(D, D), fo.ops.GELU(), nn.Dropout(0.5))
    with torch.no_grad():
        plan = model.plan(rows())
    assert plan.saved == () and "no gradient is wanted: nothing is saved" in plan.notes
    with fo.reference():
        plan = model.plan(rows())
    assert any("reference" in note for note in plan.notes) and plan.misses == ()
    training = model.plan(rows())
    assert "2.leaf.0" in saved(training)
    assert "2.leaf.0" not in saved(model.eval().plan(rows()))
    with torch.autocast("cpu", torch.bfloat16):
        plan = model.plan(rows())
    assert saved(plan)["0.x"].dtype is torch.bfloat16
    assert saved(plan)["0.weight"].dtype is torch.float32 and saved(plan)["0.weight"].nbytes == 0


def test_meta_tensors_are_planned() -> None:
    with torch.device("meta"):
        model = fo.Sequential(fo.ops.Linear(D, D), fo.ops.GELU())
        plan = model.plan(torch.randn(ROWS, D))
    assert [s.rule for s in plan.forward] == ["linear_act"]
    assert plan.saved_bytes == 2 * ROWS * D * FLOAT


def test_fake_tensors_are_planned_outside_of_their_mode_as_inside_but_for_the_peak() -> None:
    with (mode := FakeTensorMode()):
        model, x = fo.Sequential(fo.ops.Linear(D, D), fo.ops.GELU()), torch.randn(ROWS, D)
        inside = model.plan(x)
    outside = model.plan(x)
    assert inside.saved == outside.saved and inside.forward == outside.forward
    assert outside.rehearsed and not inside.rehearsed
    with torch.device("meta"):
        meta = fo.Sequential(fo.ops.Linear(D, D), fo.ops.GELU())
        assert meta.plan(torch.randn(ROWS, D)).peak_bytes == outside.peak_bytes
    with mode, pytest.raises(fo.FuseOpsError, match="leave the mode first"):
        offload.plan(model, x, layers="1", peak=1 << 20)


def test_a_checkpoint_is_said() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = fo.Sequential(fo.ops.Linear(D, D), fo.ops.GELU())

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.mlp, x, use_reentrant=False)

    plan, rest = fo.plans(Checkpointed(), rows())
    assert plan.saved == () and any("checkpoint" in note for note in plan.notes)
    assert [t.shape for t in rest.saved if t.nbytes] == [(ROWS, D)]  # its input


def test_an_op_called_alone_is_said() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = fo.ops.Linear(D, D)

        def forward(self, x: Tensor) -> Any:
            return self.fc(x)

    (plan,) = fo.plans(Alone(), rows())
    assert {t.name for t in plan.saved} == {"fc.x", "fc.weight"}
    said = "(Linear): called alone; rules match only inside a fuseops.Sequential"
    assert plan.notes == (f"fc {said}",)
    hooked = fo.ops.Linear(D, D)  # its own Sequential calls it
    hooked.register_forward_hook(lambda op, args, y: None)
    for outer in (nn.Sequential, fo.Sequential):
        (plan,) = fo.plans(outer(Alone(), hooked), rows())
        notes = [note for note in plan.notes if "called alone" in note]
        if outer is fo.Sequential:
            assert notes == [f"0.fc {said}"] and str(plan).count("0.fc (Linear)") == 1
        else:
            assert notes == [f"2 {said[1:7]}{said[8:]}"]


def test_a_forward_that_is_called_as_a_method_is_seen() -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = fo.Sequential(fo.ops.Linear(D, D), nn.Tanh(), fo.ops.Linear(D, D))

        def forward(self, x: Tensor) -> Any:
            return self.mlp.forward(self.mlp.forward(x))

    first, second, *_ = fo.plans(Direct(), rows())
    assert first.path == second.path == "mlp"
    assert [s.kind for s in first.forward] == ["op", "module", "op"]
    assert first.forward == second.forward and len(first.notes) == 0


def test_compiled_models_are_explained_as_written() -> None:
    model = fo.Sequential(fo.ops.Linear(D, D), fo.ops.GELU())
    compiled = torch.compile(model, backend="eager")
    (plan,) = fo.plans(compiled, rows())
    assert [s.rule for s in plan.forward] == ["linear_act"]
    assert set(saved(plan)) == {"0.x", "0.weight", "1.x"}


def test_a_model_without_a_sequential_says_so() -> None:
    assert "no fuseops.Sequential ran" in fo.explain(nn.Flatten(), torch.ones(2, 2))


# --- nested and repeated ---------------------------------------------------------------


def test_nested_sequentials_have_plans_of_their_own() -> None:
    inner = fo.Residual(fo.ops.Linear(D, D), fo.ops.SiLU())
    inner.register_forward_hook(lambda *_: None)  # without one it is spliced into the plan
    plan = fo.Sequential({"first": inner, "last": fo.ops.Linear(D, D)}).plan(rows())
    (nested,) = plan.nested
    assert "a Sequential of its own: has hooks" in str(plan)
    assert nested.path == "first" and [s.rule for s in nested.fused] == ["linear_act", "tap_linear"]
    assert {t.name for t in nested.saved} == {"first.0.x", "first.0.weight", "first.1.x"}
    assert set(nested.saved) < set(plan.saved)
    assert plan.saved_bytes == 3 * ROWS * D * FLOAT
    assert "LinearAct" in str(plan)


class Stack(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        mlps = [fo.Residual(fo.ops.RMSNorm(D), fo.ops.Linear(D, D)) for _ in range(n)]
        self.blocks = nn.ModuleList(nn.ModuleDict({"mlp": mlp}) for mlp in mlps)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block["mlp"](x)  # type: ignore[index]
        return x


def test_equal_blocks_share_a_section() -> None:
    text, short = fo.explain(Stack(12), rows()), fo.explain(Stack(2), rows())
    assert "blocks.0.mlp .. blocks.11.mlp (12 times)" in text
    assert "blocks.*.mlp.0.x" in text
    assert len(text.splitlines()) == len(short.splitlines())


def test_a_block_that_differs_has_a_section_of_its_own() -> None:
    text = fo.explain(Model(12), rows(), routing())
    # the first experts keep the probabilities that the others share
    assert "blocks.1.experts .. blocks.11.experts (11 times)" in text
    assert "with blocks.0.experts.act.probs" in text
    stack = Stack(3)
    stack.blocks[1]["mlp"][0].register_forward_hook(lambda *_: None)  # type: ignore[index]
    assert "blocks.0.mlp .. blocks.2.mlp (2 times)" in fo.explain(stack, rows())


def test_blocks_in_one_sequential_share_a_section() -> None:
    blocks = fo.Sequential(*(fo.Residual(fo.ops.Linear(D, D), fo.ops.SiLU()) for _ in range(12)))
    text = blocks.explain(rows())
    assert "1.tap .. 11.add" in text and "the same 11 times more" in text
    assert len(text.splitlines()) < 40


# --- names -----------------------------------------------------------------------------


def test_names_are_relative_until_a_root_was_seen() -> None:
    model = Model(2)
    experts = model.blocks[1].experts  # type: ignore[union-attr]
    assert set(saved(experts.plan(rows(), routing()))) >= {"fc1.x", "act.x"}  # type: ignore[operator]
    assert all(
        t.name.startswith("blocks.") for p in fo.plans(model, rows(), routing()) for t in p.saved
    )
    assert "blocks.1.experts.fc1.x" in saved(experts.plan(rows(), routing()))  # type: ignore[operator]


def test_names_are_absolute_after_configure() -> None:
    model = nn.Sequential(nn.Identity(), fo.Sequential({"fc": fo.ops.Linear(D, D)}))
    fo.configure(model, fusion=True)
    plan = model[1].plan(rows())
    assert plan.path == "1" and set(saved(plan)) == {"1.fc.x", "1.fc.weight"}


def test_a_part_keeps_the_names_of_the_whole() -> None:
    model = Model(2)
    fo.configure(model, fusion=True)
    before = {t.name for p in fo.plans(model, rows(), routing()) for t in p.saved}
    part = {t.name for p in fo.plans(model.blocks[1], rows(), routing()) for t in p.saved}
    assert part and part <= before
    assert before == {t.name for p in fo.plans(model, rows(), routing()) for t in p.saved}


# --- no trace --------------------------------------------------------------------------


def test_nothing_stays_installed() -> None:
    model = Model(2)
    tables = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)

    def state() -> Any:
        hooks = [list(table) for table in tables] + [
            list(torch_module._global_forward_hooks_always_called)  # type: ignore[attr-defined]
        ]
        top = torch_private.top_saved_tensor_hooks()
        return (
            hooks,
            top,
            names.thread.observers,
            names.thread.frame,
            list(scopes.current().watchers),
        )

    before = state()
    fo.explain(model, rows(), routing())
    assert state() == before
    with pytest.raises(fo.SideInputError):
        fo.explain(model, rows(), None)
    assert state() == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_random_states_buffers_and_gradients_are_untouched() -> None:
    model, x, r = Model(2), rows(), routing()
    model(x, r).sum().backward()
    grads = {
        n: (p.grad, p.grad._version) for n, p in model.named_parameters() if p.grad is not None
    }
    values = {n: (b, b._version, b.clone()) for n, b in model.named_buffers()}
    before = torch.get_rng_state(), random.getstate(), x.grad
    fo.explain(model, x, r)
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    assert x.grad is before[2]
    for name, p in model.named_parameters():
        if name in grads:
            assert p.grad is grads[name][0] and p.grad._version == grads[name][1]
    for name, b in model.named_buffers():
        same, version, value = values[name]
        assert b is same and b._version == version and torch.equal(b, value), name


def test_explaining_between_forward_and_backward_changes_no_gradient() -> None:
    model, x, r = Model(2), rows(), routing()

    def gradients(explained: bool) -> Iterator[Tensor]:
        torch.manual_seed(0)
        y = model(x, r).square().sum()
        with fo.fusion(False) if explained else nullcontext():
            text = fo.explain(model, x, r) if explained else ""
        assert ("fusion is off" in text) == explained
        return iter(torch.autograd.grad(y, [*model.parameters(), x]))

    for mine, theirs in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(mine, theirs)


TRIALS: dict[str, Callable[[fo.Sequential, Tensor], Any]] = {
    "explain": fo.explain,
    "plan of a Sequential": lambda model, x: model.plan(x),
    "plan of a step": offload.plan,
    "recorded plan": lambda model, x: offload.plan(model, x, record=True),
    "compared": fo.testing.assert_fused_matches_unfused,
}


@pytest.mark.parametrize("trial", TRIALS.values(), ids=TRIALS)
def test_a_checkpointed_backward_still_finds_its_settings(trial: Any) -> None:
    model, off = fo.Sequential(fo.ops.Linear(D, D), fo.ops.GELU()), fo.fusion(False)
    y = checkpoint(model, rows(), use_reentrant=False)
    with off:
        trial(model, rows())
    y.sum().backward()  # type: ignore[union-attr]
    with off:
        y = checkpoint(model, rows(), use_reentrant=False)
    trial(model, rows())
    with pytest.raises(RecomputationError, match="fusion was False, is True"):
        y.sum().backward()  # type: ignore[union-attr]


def test_the_graph_of_the_run_is_dropped() -> None:
    outputs = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x.exp()
            outputs.append(weakref.ref(y))
            return y

    fo.explain(nn.Sequential(fo.Sequential(fo.ops.Linear(D, D)), Watch()), rows())
    assert outputs and outputs[0]() is None


def test_a_gradient_inside_the_forward_is_right_under_explain() -> None:
    seen: list[Tensor] = []  # not in the module, where explain() would leave none

    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = fo.Sequential(fo.ops.Linear(D, D), fo.ops.GELU())

        def forward(self, x: Tensor) -> Tensor:
            (force,) = torch.autograd.grad(self.energy(x).sum(), x)
            seen.append(force)
            return force

    model, x = Force(), rows()
    model(x)
    fo.explain(model, x)
    assert torch.equal(*seen)


# --- records ---------------------------------------------------------------------------


def test_diff_says_what_changed() -> None:
    model = fo.Sequential(fo.ops.Linear(D, D), fo.Residual(fo.ops.Linear(D, D), fo.ops.GELU()))
    plan = model.plan(rows())
    assert plan.diff(model.plan(rows())) == ""
    with fo.fusion(disable=["linear_act"]):
        other = model.plan(rows())
    lines = plan.diff(other).splitlines()
    assert any(line.startswith("- forward: LinearAct[1.0..1.1]") for line in lines)
    assert any("+ misses" in line and "disabled" in line for line in lines)


# what `diff` compares: all that is listed, but for notes, which are sentences about the rest
LISTS = [
    f.name
    for f in dataclasses.fields(Planned)
    if str(f.type).startswith("tuple") and f.name not in ("notes", "nested")
]
ITEMS = {name: st.lists(st.integers(0, 2), max_size=2).map(tuple) for name in LISTS}
LEAVES = st.builds(Planned, path=st.sampled_from(["a", "b"]), **ITEMS)
PLANS = st.builds(
    Planned,
    path=st.just("model"),
    **ITEMS,
    nested=st.lists(LEAVES, max_size=2, unique_by=lambda plan: plan.path).map(tuple),
)


def listed(plan: Planned) -> set[tuple[str, str]]:
    """What a plan and those nested in it have, each with the plan's path."""
    inner = {(f"{p.path}: ", line) for p in plan.nested for _, line in listed(p)}
    own = {("", f"{name}: {item}") for name in LISTS for item in getattr(plan, name)}
    return own | inner


@given(PLANS, PLANS)
def test_diff_has_each_item_that_one_plan_alone_has(mine: Planned, theirs: Planned) -> None:
    shared = {p.path for p in mine.nested} & {p.path for p in theirs.nested}
    found = set(mine.diff(theirs).splitlines())
    expected: set[str] = set()
    for sign, here, there in [("-", mine, theirs), ("+", theirs, mine)]:
        expected |= {f"{sign} nested: {p.path}" for p in here.nested if p.path not in shared}
        alone = listed(here) - listed(there)
        expected |= {f"{at}{sign} {item}" for at, item in alone if not at or at[:-2] in shared}
    assert found == expected and mine.diff(mine) == ""


def test_json_round_trip() -> None:
    for plan in fo.plans(Model(2), rows(), routing()):
        data = plan.to_json()
        assert json.loads(json.dumps(data)) == json.loads(json.dumps(plan.to_json()))
        assert data["schema_version"] == 1
        assert data["saved_bytes"] == plan.saved_bytes == sum(t["nbytes"] for t in data["saved"])


class Page(HTMLParser):
    """Checks that every tag is closed in order."""

    VOID = {"meta", "br", "rect", "path"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_whole_and_self_contained() -> None:
    plans = fo.plans(Model(2), rows(), routing())
    for html in (page(plans), plans[0].to_html(), plans[0]._repr_html_()):
        parser = Page()
        parser.feed(html)
        assert parser.open == [] and {"svg", "rect", "table"} <= parser.tags
        assert not re.search(r"https?:|//\w|url\(|@import", html)
        assert not {"script", "link", "img", "iframe"} & parser.tags
    assert "prefers-color-scheme:dark" in page(plans)


def test_html_escapes_what_users_write() -> None:
    nasty = "<script>alert('&')</script>"

    def condition(ops: Any, c: Any) -> str:
        return nasty

    rule = fo.Rule(nasty, (fo.ops.Linear,), lambda *ops: None, when=(condition,))  # type: ignore[arg-type, return-value]
    with fo.rules(rule):
        plan = fo.Sequential({nasty.replace(".", ""): fo.ops.Linear(D, D)}).plan(rows())
    html = page([plan], title=nasty)
    assert nasty not in html and "&lt;script&gt;" in html


@pytest.mark.gpu
def test_on_cuda_under_autocast() -> None:
    model = fo.Sequential(
        fo.ops.Linear(D, D), fo.ops.GELU(), fo.ops.Dropout(0.5), nn.Dropout(0.5)
    ).cuda()
    x = torch.randn(ROWS, D, device="cuda", requires_grad=True)
    before = torch.cuda.get_rng_state()
    with torch.autocast("cuda", torch.bfloat16):
        plan = model.plan(x)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert [s.rule for s in plan.fused] == ["linear_act", "act_linear"]
    found = saved(plan)
    assert found["0.x"].dtype is torch.bfloat16 and found["0.x"].nbytes == ROWS * D * 2
    assert found["0.weight"].nbytes == 0
    assert "3.leaf.0" in found
    assert torch.cuda.get_rng_state().equal(before) and x.grad is None


def test_a_quantized_edge_says_what_multiplies_it() -> None:
    model, x = fo.Sequential(fo.ops.Linear(8, 6)), torch.randn(5, 8)
    with fo.recipe(fo.recipes.Float8BlockScaling()):
        assert any("FP8 tensor cores" in note for note in model.plan(x).notes)
    assert not model.plan(x).notes


def test_an_op_that_was_configured_by_itself_is_told_that_it_runs_as_its_sequential_does() -> None:
    model, x = fo.Sequential({"fc": fo.ops.Linear(8, 6)}), torch.randn(5, 8)
    fo.configure(model.fc, recipe=fo.recipes.Float8BlockScaling())
    (note,) = model.plan(x).notes
    assert note.startswith("fc (Linear) was configured by itself") and "recipe was Float8" in note
    fo.configure(model, recipe=None)
    assert not model.plan(x).notes


def test_a_wide_drawing_shrinks_to_its_page() -> None:
    drawing = svg(fo.Sequential(*(fo.ops.SiLU() for _ in range(20))).plan(torch.randn(2, 8)))
    width, least = (
        float(re.search(pattern, drawing)[1])
        for pattern in (r'width="(\d+)"', r"max-width:max\(100%,(\d+)px\);height:auto")
    )
    assert "viewBox" in drawing and 0.6 * width < least < width


class Shifted(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + 1


def test_what_a_parametrization_gives_is_not_what_the_next_op_gets() -> None:
    """It runs as a module inside the Sequential, and its output, a weight, has another shape."""
    moe = fo.MoE(8, 6, num_experts=4, top_k=2)
    x = torch.randn(5, 8)
    expected = moe.plan(x)
    for name in ("fc1", "fc2"):
        nn.utils.parametrize.register_parametrization(moe[name], "weight", Shifted())
    plan = moe.plan(x)
    assert [(span.ops, span.rule) for span in plan.forward] == [
        (span.ops, span.rule) for span in expected.forward
    ]
    weights = moe["fc1"].weight.nbytes + moe["fc2"].weight.nbytes  # made by the parametrization
    assert plan.saved_bytes == expected.saved_bytes + weights
    assert plan.peak_bytes == expected.peak_bytes + weights


def test_ticks_are_round_and_inside() -> None:
    assert charts.ticks(1.3, 5.6) == [2, 3, 4, 5]
    assert charts.ticks(0, 400) == [0, 100, 200, 300, 400]
    assert charts.ticks(2.31, 2.42) == pytest.approx([2.32, 2.34, 2.36, 2.38, 2.4, 2.42])


class Named(fo.Sequential): ...


@pytest.mark.parametrize(
    ("model", "title"),
    [
        (fo.MoE(D, F, EXPERTS, 2), "MoE"),
        (fo.Residual(fo.ops.Linear(D, D)), "Residual"),
        (Named(fo.ops.Linear(D, D)), "Named"),
        (fo.Sequential(fo.ops.Linear(D, D)), "Sequential"),
        (nn.Sequential(fo.MoE(D, F, EXPERTS, 2)), "0"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_plan_has_the_title_of_its_path_or_class(model: nn.Module, title: str) -> None:
    explained = fo.explain(model, torch.randn(ROWS, D))
    assert title in explained.splitlines()
    assert f'"{title}: ops and spans"' in explained.plans[0].to_html()
