"""A segment whose calls are alike does again what one of them did, and nothing else that it depends on is missed."""

import copy
import dataclasses
import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import fresh
import plain_moe
import pytest
import torch
from counted import calls_in
from hypothesis import Phase, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import kernels as K
from fuseops import offload
from fuseops.kernels import transcript
from fuseops.kernels.registry import opaque_call
from fuseops.kernels.replay import forget_replays
from fuseops.kernels.transcript import Transcriber, transcribable, transcribing
from fuseops.ops.op import NothingSaved
from fuseops.plan.cover import DIRECTIONS
from fuseops.plan.segment import MAX_SLOT_MAPS
from fuseops.rules.builtin_rules import BUILTIN_RULES
from fuseops.testing.strategies import rule_cases

MODELS: dict[str, Callable[[], nn.Module]] = {
    "linears": lambda: fo.Sequential(*(fo.ops.Linear(16, 16, bias=k > 0) for k in range(3))),
    "mlp": lambda: fo.Residual(
        fo.ops.RMSNorm(16), fo.ops.Linear(16, 32), fo.ops.SwiGLU(), fo.ops.Linear(16, 16)
    ),
    "norms": lambda: fo.Sequential(fo.ops.LayerNorm(16), fo.ops.GELU(), fo.ops.Linear(16, 8)),
    "residual": lambda: fo.Residual(fo.ops.LayerNorm(16), fo.ops.Linear(16, 16)),
    "blocks": lambda: fo.Sequential(*(MODELS["mlp"]() for _ in range(3))),
    "alone": lambda: fo.ops.Linear(16, 8),
    "dropout": lambda: fo.Sequential(fo.ops.Linear(16, 16), fo.ops.Dropout(0.5)),
}


def step(model: nn.Module, x: Tensor, seed: int = 0) -> list[Tensor]:
    """y and every gradient."""
    torch.manual_seed(seed)
    y = model(x)
    leaves = [x, *model.parameters()]
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.cos(y.detach()))]


def segments(model: Any) -> list[Any]:
    (piece,) = (run for _, run in model._runner.pieces)
    return [*next(iter(piece.plans.last_call.plans.values())).segments]


def inputs(k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(k)).to(dtype).requires_grad_()


class Swish(fo.Op):
    """Level 1: `fwd` alone."""

    def fwd(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


PARTS: dict[str, Callable[[], list[Any]]] = {
    "linear": lambda: [fo.ops.Linear(16, 16)],
    "norm": lambda: [fo.ops.RMSNorm(16)],
    "act": lambda: [fo.ops.GELU()],
    "level 1": lambda: [Swish()],
    "plain": lambda: [nn.Identity()],
    # in a Sequential of its own, whose side names are: a chain may have two
    "tap": lambda: [fo.Sequential(fo.ops.Tap("kept"), fo.ops.Linear(16, 16), fo.ops.Add("kept"))],
    "residual": lambda: [fo.Residual(fo.ops.RMSNorm(16), Swish(), fo.ops.Linear(16, 16))],
    "experts": lambda: [fo.MoE(16, 8, 4, top_k=2)],
}


@settings(max_examples=10)
@example(["tap", "tap"])
@given(st.lists(st.sampled_from([*PARTS]), min_size=1, max_size=5))
def test_a_repeated_step_of_any_chain_gives_what_a_first_one_gives(chain: list[str]) -> None:
    torch.manual_seed(0)
    repeats(fo.Sequential(*(op for name in chain for op in PARTS[name]())))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_repeated_step_gives_what_a_first_one_gives(name: str, autocast: bool) -> None:
    repeats(MODELS[name](), autocast)


def repeats(model: nn.Module, autocast: bool = False) -> None:
    """Five steps of a training are each to the bit what a copy gives that repeats nothing."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for k in range(5):
            x = inputs(k)
            new = copy.deepcopy(model)
            for ours, theirs in zip(step(model, x, k), step(new, x, k), strict=True):
                assert torch.equal(ours, theirs)
            with torch.no_grad():
                [p.add_(torch.randn_like(p)) for p in model.parameters()]


def frames_of(run: Callable[[], Any]) -> set[str]:
    """The Python functions that run, the backward in this thread too."""
    ran: set[str] = set()

    def see(frame: Any, event: str, arg: Any) -> None:
        ran.add(frame.f_code.co_qualname)

    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(see)
        run()
        sys.setprofile(None)
    return ran


def test_a_repeated_step_runs_nothing_of_an_op() -> None:
    model, x = MODELS["mlp"](), inputs(0)

    def methods() -> set[str]:
        ran = frames_of(lambda: model(x).sum().backward())
        return {name for name in ran if name.endswith((".fwd", ".bwd"))}

    assert methods() and methods() and methods()
    assert not methods()


def counting(base: type, names: tuple[str, ...], ran: Counter[str]) -> type:
    """A subclass outside of the package that does the same, and counts the calls of these methods."""

    def counts(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            ran[name] += 1
            return getattr(base, name)(self, *args, **kwargs)

        return functools.wraps(getattr(base, name))(method)

    return type("Own", (base,), {name: counts(name) for name in names})


@pytest.mark.parametrize("rule", BUILTIN_RULES, ids=lambda rule: rule.name)
@settings(max_examples=3, phases=[Phase.generate])  # a smaller case says no more
@given(data=st.data())
def test_a_fused_op_that_is_not_built_in_runs_in_every_step(
    rule: fo.Rule, data: st.DataObject
) -> None:
    """It may depend on anything, and do anything besides."""
    methods = {"forward": "fwd", "backward": "bwd"}
    names = tuple(methods[direction] for direction in DIRECTIONS[rule.kind])
    ran: Counter[str] = Counter()
    own = dataclasses.replace(rule, name="own", build=counting(rule.build, names, ran))
    case = data.draw(rule_cases(rule, torch.float32, ["normal"]))
    leaves = [case.x.requires_grad_(), *case.model.parameters()]

    def calls() -> Counter[str]:
        ran.clear()
        with fo.rules(own):
            torch.autograd.grad(case.model(case.x, **case.side).sum(), leaves, allow_unused=True)
        return ran.copy()

    first, *others = (calls() for _ in range(7))
    assume(first)
    assert set(first) == {*names} and all(each == first for each in others)


@pytest.mark.parametrize("how", ["delays", "main_grad"])
@pytest.mark.parametrize("name", ["linears", "mlp", "residual", "alone"])
def test_a_repeated_step_gives_gradients_that_autograd_does_not_return(name: str, how: str) -> None:
    usual = MODELS[name]()
    model = copy.deepcopy(usual)
    linears = [m for m in model.modules() if isinstance(m, fo.ops.Linear)]
    for op in linears:
        op.accumulate_into_main_grad = how == "main_grad"
        op.delays = ("weight",) if how == "delays" else ()
    for k in range(8):
        for p in [p for op in linears for p in op.parameters()]:
            p.main_grad = torch.zeros_like(p)  # type: ignore[attr-defined]
        model.zero_grad(), usual.zero_grad()
        for m in (model, usual):
            m(inputs(k)).square().sum().backward()
        [op.backward_dw() for op in linears if how == "delays"]
        pairs = zip(model.named_parameters(), usual.parameters(), strict=True)
        for ours, theirs in ((p, q) for (n, p), q in pairs if n.endswith("weight")):
            found = ours.main_grad if ours.grad is None else ours.grad  # type: ignore[attr-defined]
            assert torch.equal(found, theirs.grad)
    if name != "alone":  # which has no segment
        nodes = [seg for seg in segments(model) if seg.kind == "node"]
        forwards = [[*seg.repeats.kinds.values()] for seg in nodes]
        assert all(len(calls) == 1 and calls[0].transcripts for calls in forwards)


@pytest.mark.parametrize("steps", [1, 4])
def test_what_is_written_to_an_op_is_seen_by_the_next_call(steps: int) -> None:
    model, x = MODELS["mlp"](), inputs(0)
    for _ in range(steps):
        step(model, x)
    model[0].eps = 0.5
    new = copy.deepcopy(model)
    for ours, theirs in zip(step(model, x), step(new, x), strict=True):
        assert torch.equal(ours, theirs)


def test_of_numbers_that_calls_save_few_are_kept() -> None:
    """An attribute that is another at each step leaves nothing behind."""
    model, x = fo.Sequential(fo.ops.ConstantScale(1.0)), inputs(0)
    for k in range(2 * MAX_SLOT_MAPS):
        model[0].scale = float(k)
        model(x).sum().backward()
        (seg,) = segments(model)
        assert len(seg.slot_maps) <= MAX_SLOT_MAPS


def test_what_is_written_down_imports_no_compiler() -> None:
    """Dynamo is half a second of an import, for a step that never compiles."""
    code = """
import sys, torch, fuseops as fo
model, x = fo.Sequential(fo.ops.Linear(8, 8), fo.ops.Linear(8, 8)), torch.randn(2, 8, requires_grad=True)
for _ in range(4):
    model(x).sum().backward()
(_, run), = model._runner.pieces
(seg,) = next(iter(run.plans.last_call.plans.values())).segments
assert all(kind.transcripts for kind in seg.repeats.kinds.values())
assert "torch._dynamo" not in sys.modules
"""
    ran = fresh.run("-c", code)
    assert not ran.returncode, ran.stderr


def test_inputs_of_another_kind_are_no_repetition() -> None:
    model = MODELS["mlp"]()
    for k in range(12):
        x = inputs(k, torch.float64 if k % 4 == 3 else torch.float32).detach()
        x = (x.t().contiguous().t() if k % 2 else x).requires_grad_()
        model = model.to(x.dtype)
        for ours, theirs in zip(step(model, x), step(copy.deepcopy(model), x), strict=True):
            assert torch.equal(ours, theirs)


@given(
    counts=st.lists(st.integers(-3, 5), min_size=1, max_size=3),
    behind=st.sampled_from(["", "act", "experts"]),
    training=st.booleans(),
)
def test_what_is_refused_is_refused_in_a_repeated_call(
    counts: list[int], behind: str, training: bool
) -> None:
    """Ends of groups, which are looked at on a CPU: in the same words; ends that are right are repeated."""
    ops: dict[str, list[fo.Op[Any]]] = {
        "act": [fo.ops.ScaledSwiGLU()],
        "experts": [fo.ops.GroupedLinear(len(counts), 4, 3)],
    }
    model = fo.Sequential(fo.ops.Permute(1), *ops.get(behind, []))
    x = torch.randn(6, 4, requires_grad=training)
    pos = torch.arange(6, dtype=torch.int32)[:, None]
    right = torch.full((len(counts),), 6, dtype=torch.int32)
    drawn = torch.tensor(counts).cumsum(0).to(torch.int32)
    side = {"index": torch.arange(6), "pos": pos, "probs": torch.rand(6)}
    side = {name: t for name, t in side.items() if name in model.reads}

    def refused(of: nn.Module, offs: Tensor) -> list[str]:
        try:
            with torch.set_grad_enabled(training):
                y = of(x, offs=offs, **side)
        except fo.FuseOpsError as error:
            return [str(error), *error.__notes__]
        if training:
            torch.autograd.grad(y.sum(), x)
        return []

    for _ in range(4):
        assert not refused(model, right)
    assert refused(model, drawn) == refused(copy.deepcopy(model), drawn)
    assert not refused(model, right)


def test_settings_of_launches_and_debug_end_what_is_written() -> None:
    model, x = MODELS["linears"](), inputs(0)
    for _ in range(4):
        step(model, x)
    (seg,) = segments(model)
    written = seg.repeats
    with fo.debug():
        looked = calls_in(lambda: step(model, x))
    assert looked > calls_in(lambda: step(model, x))
    assert seg.repeats is written
    forget_replays()
    step(model, x)
    assert seg.repeats is not written


def test_a_graph_that_is_kept_is_gone_through_again() -> None:
    model = MODELS["mlp"]()
    for k in range(5):
        x, leaves = inputs(k), [*model.parameters()]
        y = model(x).sum()
        first = torch.autograd.grad(y, leaves, retain_graph=True)
        for ours, theirs in zip(torch.autograd.grad(y, leaves), first, strict=True):
            assert torch.equal(ours, theirs)


def test_a_repeated_forward_without_a_graph() -> None:
    model = MODELS["mlp"]()
    for k in range(5):
        x = inputs(k)
        y = model(x)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(model(x), y)


def test_gradients_of_a_batch_of_directions() -> None:
    """Of legacy vmap, whose tensors have no addresses of their own."""
    model, x = MODELS["linears"](), inputs(0)
    for _ in range(4):
        y = model(x)
        batched = torch.autograd.grad(y, x, torch.stack([y.detach()] * 2), is_grads_batched=True)
        (alone,) = torch.autograd.grad(model(x), x, y.detach())
        torch.testing.assert_close(batched[0][1], alone)


def test_buffers_of_the_caller_are_written_to_after_calls_without_any() -> None:
    op, x = MODELS["alone"](), inputs(0)
    y, dx = [t.detach() for t in step(op, x)[:2]]
    for _ in range(4):
        step(op, x)
    buffers = {"y": torch.zeros_like(y), "dx": torch.zeros_like(dx)}
    found = op(x, out=buffers)
    torch.autograd.grad(found, x, torch.cos(y))
    assert torch.equal(buffers["y"], y) and torch.equal(buffers["dx"], dx)


# --- a layer of experts


Way = Callable[[fo.MoE, Tensor], Any]


def twice(moe: fo.MoE, x: Tensor) -> Any:
    x = x.detach().requires_grad_()
    y = plain_moe.outputs(moe, x)[0] + plain_moe.outputs(moe, 2 * x)[0]
    wanted = [x, *(p for p in moe.parameters() if p.requires_grad)]
    return [y, *torch.autograd.grad(y.square().sum(), wanted)]


def from_a_kept_graph(moe: fo.MoE, x: Tensor) -> Any:
    x = x.detach().requires_grad_()
    y, _ = plain_moe.outputs(moe, x)
    wanted = [x, *(p for p in moe.parameters() if p.requires_grad)]
    loss = y.square().sum()
    return [
        y,
        *torch.autograd.grad(loss, wanted, retain_graph=True),
        *torch.autograd.grad(loss, wanted),
    ]


def checkpointed(moe: fo.MoE, x: Tensor) -> Any:
    x = x.detach().requires_grad_()
    layer = partial(plain_moe.outputs, moe)
    y, _ = checkpoint(layer, x, use_reentrant=False, context_fn=fo.checkpoint_contexts)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *moe["fc2"].parameters()][:1])]


def alone(moe: fo.MoE, x: Tensor) -> Any:
    with torch.no_grad():
        return [moe(x)]


def inside(scope: Callable[[], Any]) -> Way:
    def way(moe: fo.MoE, x: Tensor) -> Any:
        with scope():
            return plain_moe.step(moe, x)

    return way


def hooked(moe: fo.MoE, x: Tensor) -> Any:
    handle = moe["act"].register_forward_hook(lambda op, args, y: 2 * y)
    try:
        return plain_moe.step(moe, x)
    finally:
        handle.remove()


WAYS: dict[str, Way] = {
    "a step": plain_moe.step,
    "a layer used twice": twice,
    "a graph gone through twice": from_a_kept_graph,
    "a checkpoint": checkpointed,
    "a forward alone": alone,
    "to the host": inside(lambda: offload.to_host(min_bytes=0)),
    "h made again": inside(offload.recompute),
    "no fusion": inside(lambda: fo.fusion(False)),
    "autocast": inside(lambda: torch.autocast("cpu", torch.bfloat16)),
    "a hook": hooked,
}


def replace(moe: fo.MoE) -> None:
    moe["router"].weight = nn.Parameter(moe["router"].weight.detach().flip(0))


def swap(moe: fo.MoE) -> None:
    moe["fc2"].weight.data = moe["fc2"].weight.data.flip(0)


def rescale(moe: fo.MoE) -> None:
    moe["router"].scale += 0.5


def limit(moe: fo.MoE) -> None:
    moe["dispatch"].capacity_factor = None if moe["dispatch"].capacity_factor else 0.75


def move(moe: fo.MoE) -> None:
    if moe["router"].expert_bias is not None:
        moe["router"].update_expert_bias(0.5)


EDITS: dict[str, Callable[[fo.MoE], Any]] = {
    "frozen": lambda moe: moe["fc1"].weight.requires_grad_(not moe["fc1"].weight.requires_grad),
    "evaluated": lambda moe: moe.train(not moe.training),
    "replaced": replace,
    "swapped": swap,
    "rescaled": rescale,
    "limited": limit,
    "moved": move,
}


def tensors_in(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [
        t
        for item in (found.values() if isinstance(found, dict) else found)
        for t in tensors_in(item)
    ]


def assert_same(way: Way, moe: fo.MoE, x: Tensor) -> None:
    """As a copy, which repeats nothing, and counts as much."""
    new = copy.deepcopy(moe)
    ours, theirs = tensors_in(way(moe, x)), tensors_in(way(new, x))
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
    if moe["router"].expert_bias is not None:
        assert torch.equal(moe["router"].tokens_per_expert, new["router"].tokens_per_expert)


@settings(max_examples=settings.default.max_examples // 2)
@given(st.data())
def test_a_repeated_layer_of_experts_gives_what_a_first_one_gives(data: st.DataObject) -> None:
    """Whatever happens to it between its steps, for any routing, of any number of tokens."""

    def choose(*values: Any) -> Any:
        return data.draw(st.sampled_from(values))

    torch.manual_seed(choose(*range(99)))
    kind, top_k = choose("even", "zipf", "one expert"), choose(2, 1, 3)
    moe = plain_moe.built(kind, top_k, **plain_moe.options(choose))
    for _ in range(data.draw(st.integers(1, 6))):
        way, rows = WAYS[choose(*WAYS)], choose(7, 7, 1, 0)
        for _ in range(4):
            assert_same(way, moe, torch.randn(rows, plain_moe.D, dtype=torch.float64))
        EDITS[choose(*EDITS)](moe)
        assert_same(way, moe, torch.randn(rows, plain_moe.D, dtype=torch.float64))


@settings(max_examples=settings.default.max_examples // 2)
@given(st.data())
def test_a_repeated_layer_of_experts_runs_nothing_of_an_op(data: st.DataObject) -> None:
    options = plain_moe.options(lambda *values: data.draw(st.sampled_from(values)))
    moe, x = plain_moe.built("even", 2, **options), torch.randn(7, plain_moe.D, dtype=torch.float64)
    for _ in range(3):
        plain_moe.step(moe, x)
    methods = {"Router.fwd", "RoutedMLP.fwd", "RoutedMLP.bwd", "Router.bwd"}
    assert methods & frames_of(lambda: plain_moe.step(copy.deepcopy(moe), x)) == methods
    assert not methods & frames_of(lambda: plain_moe.step(moe, x))


class Fails(fo.Op[NothingSaved]):
    """The identity, whose backward raises what it is told to."""

    __module__ = "fuseops.ops.elementwise"  # others are not repeated

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def fwd(self, x: Tensor) -> fo.Out:
        return fo.Out(x * 1, NothingSaved())

    def bwd(self, saved: NothingSaved, dy: Tensor) -> fo.Grads:
        return fo.Grads(opaque_call(self.looked, dy))

    def looked(self, dy: Tensor) -> Tensor:
        if self.told:
            raise ValueError(*self.told)
        return dy * 1


@pytest.mark.parametrize("at", range(3))
def test_an_error_in_a_repeated_backward_names_its_op(at: int) -> None:
    model = fo.Sequential(*(Fails() for _ in range(3)), fo.ops.Linear(16, 16))

    def notes(tried: fo.Sequential) -> list[str]:
        y = tried(inputs(0)).sum()
        tried[at].told.append("told")
        with pytest.raises(ValueError, match="told") as raised:
            y.backward()
        return raised.value.__notes__

    for _ in range(4):
        model(inputs(0)).sum().backward()
    bwd = Fails.bwd.__qualname__
    assert bwd not in frames_of(lambda: model(inputs(0)).sum().backward())
    new = copy.deepcopy(model)
    assert notes(model) == notes(new)
    assert f"'{at}' (Fails)" in "".join(notes(model))


# --- what is written down


def written(function: Callable[..., Any], *operands: Tensor) -> Any:
    with torch.no_grad(), transcribing(operands) as seen:
        out = function(*operands)
    return seen.generate(out)


ELSEWHERE = torch.ones(4, 4)


def offs_of(x: Tensor) -> Tensor:
    return x.new_full((1,), len(x), dtype=torch.int32)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "reads values": lambda x: x * x.sum().item(),
    "a size by values": lambda x: x[x > 0],
    "draws": lambda x: x + torch.rand_like(x),
    "writes": lambda x: x.clone().add_(1),
    "writes by a kernel op": lambda x: K.grouped_mm_into(x, x + 1, x[None] + 1, offs_of(x)),
    "takes what is elsewhere": lambda x: x + ELSEWHERE,
    "gives what is elsewhere": lambda x: ELSEWHERE,
}


def test_what_is_called_again_takes_what_lives_for_one_call() -> None:
    """Asked twice, it is called once; a dict that lives longer would be that of the first call."""

    def count(own: dict[str, Any], x: Tensor) -> Tensor:
        own["calls"] = own.get("calls", 0) + 1
        own.setdefault("x", x + own["calls"])
        found: Tensor = own["x"]
        return found

    def function(x: Tensor) -> Tensor:
        return opaque_call(count, own, x) + opaque_call(count, own, x)

    x, shared = torch.randn(4, 4), {"a": {}, "b": (own := {})}
    with torch.no_grad(), transcribing([x], shared) as seen:
        y = function(x)
    again, later = seen.generate(y), {"b": {"calls": 4}}
    assert again is not None and torch.equal(again([x], later), 2 * (x + 5))
    assert later["b"]["calls"] == 5
    with torch.no_grad(), transcribing([x], {"a": {}}) as seen:
        y = function(x)
    assert seen.generate(y) is None and seen.why == "a dict comes from elsewhere"


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_written_down(why: str) -> None:
    assert written(REFUSED[why], torch.randn(4, 4)) is None


def test_a_written_function_does_the_same_for_operands_alike_alone() -> None:
    def function(x: Tensor, w: Tensor) -> Any:
        gate, up = (x @ w.t()).chunk(2, -1)
        return gate.mT, [None, (up + x[:, :2]).view(2, -1), x]

    again = written(function, torch.randn(4, 4), torch.randn(4, 4))
    for _ in range(3):
        x, w = torch.randn(4, 4), torch.randn(4, 4)
        given = [x, w]
        with torch.no_grad():
            y, (none, z, same) = again(given)
            y_, (_, z_, _) = function(x, w)
        assert not given and none is None and same is x
        assert torch.equal(y, y_) and torch.equal(z, z_) and y.stride() == y_.stride()
    others: list[list[Tensor]] = [
        [x, w.double()],
        [x, w.t()],
        [x[:3], w],
        [x, x],
        [x, nn.Parameter(w)],
        [x.requires_grad_(), w],
    ]
    for given in others:
        before = [*given]
        assert again(given) is None and given == before


def test_operands_that_are_one_tensor_are_so_again() -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    again = written(lambda a, b, c: (a @ b, c + a), x, y, x)
    one, other = torch.randn(4, 4), torch.randn(4, 4)
    for found, right in zip(again([one, other, one]), (one @ other, one + one), strict=True):
        assert torch.equal(found, right)
    assert again([one, other, other]) is None and again([one, other, one.clone()]) is None
    assert again([one, one, one]) is None
    apart = written(lambda a, b: a + b, x, y)
    assert apart([one, one]) is None


def test_operands_and_results_are_let_go_after_their_last_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive: list[bool] = []
    watched: list[Any] = []

    def add(*given: Any, **named: Any) -> Tensor:
        alive.append(any(ref() is not None for ref in watched))
        return torch.add(*given, **named)

    monkeypatch.setitem(transcript.DIRECT, torch.ops.aten.add.Tensor, add)
    again = written(lambda x, w: (x @ w).t() + 1, torch.randn(4, 4), torch.randn(4, 4))
    given = [torch.randn(4, 4), torch.randn(4, 4)]
    watched += map(weakref.ref, given)
    again(given)
    assert alive == [False]


def test_tensors_without_addresses_of_their_own_are_not_watched() -> None:
    x = torch.randn(4, 4)
    assert transcribable([x, x.t()])
    assert not transcribable([x.to_sparse()])


def test_a_transcriber_knows_a_tensor_by_itself() -> None:
    """Not by its address, which another one may have by then."""
    seen = Transcriber([x := torch.randn(4, 4)])
    assert seen._slot(x) == 0 and seen._slot(x.detach()) is None
    number = id(x)
    del x
    assert seen.slots[number][0]() is None


# --- on a GPU, where launches are written down


RECIPES: dict[str, Any] = {
    "none": None,
    "block": fo.recipes.Float8BlockScaling(),
    "block_kept": fo.recipes.Float8BlockScaling(weights="step"),
    "current": fo.recipes.Float8CurrentScaling(),
    "current_kept": fo.recipes.Float8CurrentScaling(weights="step"),
    "delayed": fo.recipes.DelayedScaling(amax_history_len=3),
}


def step_under(recipe: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    with nullcontext() if recipe is None else fo.recipe(recipe, strict=True):
        return step(model, x)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rows", [64, 512])
@pytest.mark.parametrize("name", ["mlp", "linears", "moe"])
def test_a_repeated_step_on_a_gpu(name: str, rows: int, recipe: str) -> None:
    """On another stream too, for operands that lie elsewhere in memory, and weights that are written to meanwhile; 512
    rows take kernels of grouped GEMMs.
    """
    where: Any = {"device": "cuda", "dtype": torch.bfloat16}
    ops = (
        fo.ops.RMSNorm(512, **where),
        fo.ops.Linear(512, 2048, bias=False, **where),
        fo.ops.SwiGLU(),
        fo.ops.Linear(1024, 512, bias=False, **where),
    )
    chain = (fo.ops.Linear(512, 512, **where) for _ in range(4))
    model = fo.Residual(*ops) if name == "mlp" else fo.Sequential(*chain)
    if name == "moe":  # whose backward writes over h, but where the graph is kept
        model = fo.MoE(512, 256, 16, 4, **where)
    other = torch.cuda.Stream()
    for k in range(24):
        memory = torch.randn(rows * 512 + 8, **where)
        x = memory[(k % 3 == 2) :][: rows * 512].view(rows, 512).requires_grad_()
        torch.cuda.synchronize()
        with torch.cuda.stream(other if k % 8 > 4 else torch.cuda.current_stream()):
            both = model, copy.deepcopy(model)
            found = [[*step_under(RECIPES[recipe], m, x), *m.state_dict().values()] for m in both]
            torch.cuda.synchronize()
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)
        if k % 5 == 4:
            with torch.no_grad():
                [p.mul_(-0.75) for p in model.parameters()]
            fo.weights_changed(model)  # delayed scales follow
    (seg,) = segments(model)
    written = [len(kind.transcripts) for kind in seg.repeats.kinds.values()]
    assert len(written) == 2 and all(written)
