"""A segment whose calls are alike does again what one of them did, and nothing else that it depends on is missed."""

import copy
import sys
import weakref
from collections.abc import Callable
from typing import Any

import fresh
import pytest
import torch
from counted import calls_in
from torch import Tensor, nn

import fuseops as fo
from fuseops import kernels as K
from fuseops.kernels import transcript
from fuseops.kernels.replay import forget_replays
from fuseops.kernels.transcript import Transcriber, transcribable, transcribed

MODELS: dict[str, Callable[[], nn.Module]] = {
    "linears": lambda: fo.Sequential(*(fo.ops.Linear(16, 16, bias=k > 0) for k in range(3))),
    "mlp": lambda: fo.Residual(
        fo.ops.RMSNorm(16), fo.ops.Linear(16, 32), fo.ops.SwiGLU(), fo.ops.Linear(16, 16)
    ),
    "norms": lambda: fo.Sequential(fo.ops.LayerNorm(16), fo.ops.GELU(), fo.ops.Linear(16, 8)),
    "residual": lambda: fo.Residual(fo.ops.LayerNorm(16), fo.ops.Linear(16, 16)),
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
    return [*next(iter(piece.last.plans.values())).segments]


def inputs(k: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(k)).to(dtype).requires_grad_()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_repeated_step_gives_what_a_first_one_gives(name: str, autocast: bool) -> None:
    model = MODELS[name]()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for k in range(5):
            x = inputs(k)
            new = copy.deepcopy(model)  # which repeats nothing
            for ours, theirs in zip(step(model, x, k), step(new, x, k), strict=True):
                assert torch.equal(ours, theirs)
            with torch.no_grad():
                [p.add_(torch.randn_like(p)) for p in model.parameters()]


def test_a_repeated_step_runs_nothing_of_an_op() -> None:
    model, x = MODELS["mlp"](), inputs(0)
    ran: set[str] = set()

    def see(frame: Any, event: str, arg: Any) -> None:
        ran.add(frame.f_code.co_name)

    def methods() -> set[str]:
        ran.clear()
        with torch.autograd.set_multithreading_enabled(False):
            sys.setprofile(see)
            model(x).sum().backward()
            sys.setprofile(None)
        return ran & {"fwd", "bwd"}

    assert methods() and methods() and methods()
    assert not methods()


@pytest.mark.parametrize("steps", [1, 4])
def test_what_is_written_to_an_op_is_seen_by_the_next_call(steps: int) -> None:
    model, x = MODELS["mlp"](), inputs(0)
    for _ in range(steps):
        step(model, x)
    model[0].eps = 0.5
    new = copy.deepcopy(model)
    for ours, theirs in zip(step(model, x), step(new, x), strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_written_down_imports_no_compiler() -> None:
    """Dynamo is half a second of an import, for a step that never compiles."""
    code = """
import sys, torch, fuseops as fo
model, x = fo.Sequential(fo.ops.Linear(8, 8), fo.ops.Linear(8, 8)), torch.randn(2, 8, requires_grad=True)
for _ in range(4):
    model(x).sum().backward()
(_, run), = model._runner.pieces
(seg,) = next(iter(run.last.plans.values())).segments
assert all(alike.again for alike in seg.repeats.kinds.values())
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


# --- what is written down


def written(function: Callable[..., Any], *operands: Tensor) -> Any:
    with torch.no_grad(), transcribed(operands) as seen:
        out = function(*operands)
    return seen.written(out)


ELSEWHERE = torch.ones(4, 4)
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "reads values": lambda x: x * x.sum().item(),
    "a size by values": lambda x: x[x > 0],
    "draws": lambda x: x + torch.rand_like(x),
    "writes": lambda x: x.clone().add_(1),
    "takes what is elsewhere": lambda x: x + ELSEWHERE,
    "gives what is elsewhere": lambda x: ELSEWHERE,
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_written_down(why: str) -> None:
    assert written(REFUSED[why], torch.randn(4, 4)) is None


def test_a_kernel_that_writes_into_an_operand_is_not_written_down() -> None:
    """Another call may have found that somebody else holds it."""
    h, dy, probs = torch.randn(4, 4), torch.randn(4, 2), torch.rand(4)
    with torch.no_grad(), transcribed([h, dy, probs]) as seen:
        K.scaled_act_bwd_into(h, dy, probs, "swiglu")
    assert seen.why == "scaled_act_bwd_into writes into an operand"


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


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 512])
@pytest.mark.parametrize("name", ["mlp", "linears"])
def test_a_repeated_step_on_a_gpu(name: str, rows: int) -> None:
    """On another stream too, and for operands that lie elsewhere in memory; 512 rows take kernels of grouped GEMMs."""
    where: Any = {"device": "cuda", "dtype": torch.bfloat16}
    ops = (
        fo.ops.RMSNorm(512, **where),
        fo.ops.Linear(512, 2048, bias=False, **where),
        fo.ops.SwiGLU(),
        fo.ops.Linear(1024, 512, bias=False, **where),
    )
    chain = (fo.ops.Linear(512, 512, **where) for _ in range(4))
    model = fo.Residual(*ops) if name == "mlp" else fo.Sequential(*chain)
    other = torch.cuda.Stream()
    for k in range(24):
        memory = torch.randn(rows * 512 + 8, **where)
        x = memory[(k % 3 == 2) :][: rows * 512].view(rows, 512).requires_grad_()
        torch.cuda.synchronize()
        with torch.cuda.stream(other if k % 8 > 4 else torch.cuda.current_stream()):
            found = step(model, x), step(copy.deepcopy(model), x)
            torch.cuda.synchronize()
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)
    (seg,) = segments(model)
    written = [len(alike.again) for alike in seg.repeats.kinds.values()]
    assert len(written) == 2 and all(written)
