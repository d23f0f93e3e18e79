"""A repeated step launches kernels as its ops do, on memory that it knows by address alone."""

import copy
import ctypes
import importlib
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from laws import DEVICE

import fuseops as fo
from fuseops import kernels as K
from fuseops import torch_private
from fuseops.kernels.registry import held_once
from fuseops.kernels.replay import separate_replays
from fuseops.kernels.transcript import transcribing

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


def standing_at(now, like):
    """An operand as a launch takes it, of which a number arrives."""
    if hasattr(like, "block_shape"):
        return type(like)(memory_at(now, like.base), like.shape, like.strides, like.block_shape)
    return memory_at(now, like) if isinstance(like, torch.Tensor) else now


class Addressed:
    """Launches an interpreted kernel as a compiled one is launched: by numbers."""

    head, constants = (), ()
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=()))

    def __init__(self, kernel, args, options, seen):
        self.kernel, self.args, self.options, self.seen = kernel, args, options, seen

    def stream_of(self, index):
        return "stream"

    def encode_descriptor(self, descriptor, number):
        return [descriptor.base.address]

    def raw(self, x, y, z, stream, *operands):
        assert stream == "stream"
        self.seen.append(self.kernel)
        given = [standing_at(*each) for each in zip(operands, self.args, strict=True)]
        launches.launch(self.kernel, (x, y, z), *given, **self.options)


@pytest.fixture
def by_address(monkeypatch):
    """Kernels that were launched by address."""
    seen = []

    def launched(kernel, grid, args, options):
        launches.launch(kernel, grid, *args, **options)
        return Addressed(kernel, [*args], options, seen)

    monkeypatch.setattr("fuseops.kernels.replay.launch_and_bind", launched)
    monkeypatch.setattr(torch_private, "current_device", lambda: -1)
    with separate_replays():
        yield seen


def model_of(kind):
    where = {"device": DEVICE, "dtype": torch.bfloat16}
    mlp = [fo.ops.Linear(16, 64, **where), fo.ops.SwiGLU(), fo.ops.Linear(32, 16, **where)]
    norms = [fo.ops.LayerNorm(16, **where), fo.ops.GELU(), fo.ops.Linear(16, 16, **where)]
    linears = (fo.ops.Linear(16, 16, **where) for _ in range(2))
    chains = {"mlp": [fo.ops.RMSNorm(16, **where), *mlp], "norms": norms, "linears": linears}
    return fo.MoE(16, 16, 4, 2, **where) if kind == "moe" else fo.Residual(*chains[kind])


def step(model, x):
    y = model(x)
    leaves = [x, *model.parameters()]
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.cos(y.detach()))]


def step_under(recipe, model, x):
    with nullcontext() if recipe is None else fo.recipe(recipe, strict=True):
        return step(model, x)


def same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def repetitions(model):
    """What is written down of each segment, by kinds of calls."""
    (run,) = (piece for _, piece in model._runner.pieces)
    nodes = [
        seg for seg in next(iter(run.plans.last_call.plans.values())).segments if seg.kind == "node"
    ]
    return [[*seg.repeats.kinds.values()] for seg in nodes]


RECIPES = {
    "none": None,
    "block": fo.recipes.Float8BlockScaling(),
    "block_kept": fo.recipes.Float8BlockScaling(weights="step"),
    "current": fo.recipes.Float8CurrentScaling(),
    "delayed": fo.recipes.DelayedScaling(),
    "delayed_kept": fo.recipes.DelayedScaling(weights="step", fwd=torch.float8_e5m2),
}


CASES = [(kind, rows, "none") for kind in ("mlp", "norms", "linears") for rows in (6, 1, 0)]
CASES += [("mlp", rows, recipe) for recipe in RECIPES if recipe != "none" for rows in (6, 0)]


@pytest.mark.parametrize(("kind", "rows", "recipe"), CASES)
def test_a_repeated_step_launches_what_its_ops_do(kind, rows, recipe, by_address):
    """Of weights that are written to between some of the steps."""
    model, per_step = model_of(kind), []
    for k in range(7):
        x = torch.randn(rows, 16, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        by_address.clear()
        twin = copy.deepcopy(model)
        found = step_under(RECIPES[recipe], model, x)
        per_step.append(len(by_address))
        with separate_replays():
            expected = step_under(RECIPES[recipe], twin, x)
        same(found, expected)
        same(model.state_dict().values(), twin.state_dict().values())
        if recipe == "none":  # under one, a step launches a kernel often enough to replay it
            assert len(by_address) == per_step[-1], k
        if k in (1, 3):
            with torch.no_grad():
                [p.mul_(-0.75) for p in model.parameters()]
            fo.weights_changed(model)  # delayed scales follow
    assert per_step[-1] == per_step[-2]
    nodes = repetitions(model)
    kinds = [calls for of_node in nodes for calls in of_node]
    assert len(kinds) == 2 * len(nodes) and all(calls.transcripts for calls in kinds)
    launching = [
        a for calls in kinds for a, _ in calls.transcripts if "stream_of" in a.__code__.co_names
    ]
    # whose forward is a product alone
    assert len(launching) >= (1 if kind == "linears" else 2) * (rows > 0)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("rows", [6, 300, 0])
def test_what_only_launches_use_lies_in_one_tensor(rows, small, by_address, monkeypatch):
    """Each place is used again once it was read, and nothing that lives is written over; large memory is no part."""
    made, allocate = [], torch_private.empty_strided

    def noting(device):
        return lambda *of: made.append(of) or allocate(device)(*of)

    monkeypatch.setattr(torch_private, "empty_strided", noting)
    monkeypatch.setattr("fuseops.kernels.transcript.SCRATCH_MOST", 1 << 20 if small else 0)

    def function(x, bias):
        first = K.bias_fwd(x, bias)
        y = first
        for _ in range(5):
            y = K.bias_fwd(y, bias)
        grad = K.act_bwd(K.act_fwd(y, "relu"), y, "relu")
        return K.add_rmsnorm_fwd(grad, first, bias, 1e-6)[0]

    torch.manual_seed(0)
    given = torch.randn(rows, 16), torch.randn(16)
    with torch.no_grad():
        expected = [function(*given) for _ in range(3)]  # the third is a replay
        with transcribing(given) as seen:
            out = function(*given)
        again = seen.generate(out)
        made.clear()
        assert torch.equal(again([*given]), expected[0])
    scratch = [shape[0] for shape, _, dtype in made if dtype is torch.uint8]
    one = -(-rows * 64 // 512) * 512  # bytes of a tensor
    assert len(scratch) == (small and rows > 0)
    if small:
        assert sum(scratch) <= 4 * one + 1024 and len(made) < 6


def test_a_repeated_step_reads_the_state_that_there_is_now(by_address):
    """Scales that were loaded in place of the old ones, wherever in memory, of another history and another recipe."""
    model = model_of("mlp")
    x = torch.randn(6, 16, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    short, long = (fo.recipes.DelayedScaling(amax_history_len=n) for n in (2, 5))
    for k, recipe in enumerate([short] * 9 + [long, short, short] + [long] * 6):
        if k in (5, 7, 16):
            loaded = {}
            for name, t in model.state_dict().items():
                memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=DEVICE)
                by = 0.5 if "fp8_" in name else 1
                loaded[name] = memory[k == 5 :][: t.numel()].view(t.shape).copy_(t * by)
            model.load_state_dict(loaded, assign=True)
        model.train(k not in (8, 9, 15))
        if k % 3 == 2:
            fo.weights_changed(model)
        twin = copy.deepcopy(model)
        with separate_replays():
            expected = step_under(recipe, twin, x)
        same(step_under(recipe, model, x), expected)
        if model.training:  # else the state stays as it is, and a copy does not know whose it is
            same(model.state_dict().values(), twin.state_dict().values())
            amaxes = [t for name, t in model.state_dict().items() if name.endswith("fp8_amax")]
            assert amaxes and not any(t.data_ptr() % 16 for t in amaxes)  # as launches take it


def test_experts_write_over_what_nobody_else_holds(by_address):
    """Their tile table is made once a step, and dh is written over h: not where a kept graph holds h."""
    model = model_of("moe")
    xs = [
        torch.randn(rows, 16, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for rows in (6, 6, 0)
    ]
    with separate_replays():
        expected = [step(copy.deepcopy(model), x) for x in xs]

    for k in range(5):
        same(step(model, xs[2]), expected[2])
        by_address.clear()
        same(step(model, xs[k % 2]), expected[k % 2])
    assert [kernel.__name__ for kernel in by_address].count("group_tiles_kernel") == 1
    (kinds,) = repetitions(model)
    assert [len(calls.transcripts) for calls in kinds] == [1, 1] * 2
    for _ in range(4):
        y, leaves = model(xs[0]), [xs[0], *model.parameters()]
        for retain in (True, False):
            dy = torch.cos(y.detach())
            grads = torch.autograd.grad(y, leaves, dy, retain_graph=retain)
            same([y.detach(), *grads], expected[0])
    assert sorted(len(calls.transcripts) for calls in kinds) == [1, 1, 1, 2]  # one makes dh anew
    same(step(model, xs[1]), expected[1])


def test_a_kernel_writes_into_what_nobody_else_can_hold(by_address):
    """What a function made, or an operand that its caller gave away, which is then asked at each call."""

    def over(h, dy, probs):
        return h, *K.scaled_act_bwd_into(h, dy, probs, "swiglu")

    def over_own(x, dy, probs):
        return over(x + x, dy, probs)

    def over_given(held, dy, probs):
        return over(held.pop() if held_once(held) else held[0] + 0, dy, probs)

    def operands():
        torch.manual_seed(0)
        return torch.randn(4, 8), torch.randn(4, 4), torch.rand(4)

    def written(function):
        given = [*operands()]
        with torch.no_grad(), transcribing(given) as seen:
            x, dy, probs = given
            given.clear()
            held = [x]
            del x
            out = function(held if function is over_given else held.pop(), dy, probs)
        return seen.generate(out), seen.why

    for _ in range(3):  # the third is a replay
        with torch.no_grad():
            over(*operands())
    assert written(over) == (None, "scaled_act_bwd_into writes into what others may hold")
    for function in (over_own, over_given):
        again, _ = written(function)
        x, *rest = operands()
        expected = over((x + x) if function is over_own else x.clone(), *rest)
        given = [x, *rest]
        held_by_name = again(given)
        if function is over_given:
            assert held_by_name is None and len(given) == 3
        del x
        found = held_by_name or again(given)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rows", [5, 1, 0])
def test_a_weight_that_is_transposed_for_one_product_is_given_to_linear(rows):
    """Not one that something else reads, or that is given back; bits and calls of torch's product stay."""

    def function(x, w, bias):
        turned, shared = w.t(), w.t()
        y = torch.addmm(bias, x, turned) + torch.mm(x, w.t())
        return y, x.t().mm(x), torch.mm(x, shared) + shared.sum(), (w + w).t()

    def operands():
        torch.manual_seed(0)
        return torch.randn(rows, 8), torch.randn(4, 8), torch.randn(4)

    with torch.no_grad():
        with transcribing(given := [*operands()]) as seen:
            out = function(*given)
        again = seen.generate(out)
        found, expected = again([*operands()]), function(*operands())
    assert all(map(torch.equal, found, expected))
    seen_calls = []
    with torch.no_grad():
        sys.setprofile(lambda frame, event, arg: seen_calls.append(arg) if event == "c_call" else 0)
        again([*operands()])
        sys.setprofile(None)
    names = [call.__name__ for call in seen_calls]
    assert [names.count(name) for name in ("linear", "addmm", "mm", "t")] == [2, 0, 2, 3]
