"""Weight gradients that do not go through autograd: main_grad buffers, and `backward_dw()`."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import functional_call

import fuseops as fo
from fuseops import offload
from fuseops.errors import InPlaceError
from fuseops.ops.op import Op

E, D, F = 3, 6, 4


class Scaled(fo.Op):
    """A level-1 op: its gradients come from autograd over `fwd`."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.linspace(0.5, 1.5, D))

    def fwd(self, x: Tensor, *, gain: Tensor) -> Tensor:
        return x * gain


def model(**options: Any) -> fo.Sequential:
    torch.manual_seed(0)
    return fo.Sequential(
        {
            "gain": Scaled(),
            "fc1": fo.ops.GroupedLinear(E, D, 2 * F, bias=False, **options),
            "act": fo.ops.ScaledSwiGLU(),
            "fc2": fo.ops.GroupedLinear(E, F, D, **options),
        }
    ).double()


def call(seq: fo.Sequential, counts: list[int], x: Tensor) -> Tensor:
    probs = torch.linspace(0.1, 1, len(x), dtype=x.dtype)
    routing = fo.Routing.from_counts(counts, probs=probs)
    y: Tensor = seq(x, routing)
    return y


def data(rows: int) -> Tensor:
    return torch.randn(rows, D, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))


def plain(counts: list[int], x: Tensor, times: int = 1) -> dict[str, Tensor]:
    """The gradients of the same model where autograd accumulates them."""
    seq = model()
    for _ in range(times):
        call(seq, counts, x).square().sum().backward()
    return {name: p.grad for name, p in seq.named_parameters()}  # type: ignore[misc]


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a.double(), b.double(), rtol=1e-12, atol=1e-12)


COUNTS = st.lists(st.integers(0, 3), min_size=E, max_size=E)


@given(COUNTS, st.booleans(), st.integers(1, 3))
def test_main_grad_accumulates_what_grad_would(counts: list[int], fused: bool, times: int) -> None:
    seq, x = model(accumulate_into_main_grad=True), data(sum(counts) + 1)
    for op in (seq["fc1"], seq["fc2"]):
        for p in op.parameters():
            p.main_grad = torch.zeros_like(p)
            p.grad_added_to_main_grad = False
    for _ in range(times):
        with fo.fusion(fused):
            y = call(seq, counts, x)
        y.square().sum().backward()
    expected = plain(counts, x, times)
    close(seq["gain"].gain.grad, expected["gain.gain"])
    for name, p in seq.named_parameters():
        if name.startswith("fc"):
            assert not p.grad.any() and p.grad_added_to_main_grad
            close(p.main_grad, expected[name])


def test_main_grad_is_overwritten_where_the_parameter_says_so() -> None:
    seq, x = model(accumulate_into_main_grad=True), data(5)
    for op in (seq["fc1"], seq["fc2"]):
        for p in op.parameters():
            p.main_grad, p.overwrite_main_grad = torch.full_like(p, torch.nan), True
    call(seq, [2, 0, 3], x).square().sum().backward()
    close(seq["fc1"].weight.main_grad, plain([2, 0, 3], x)["fc1.weight"])


@pytest.mark.parametrize("apart", [False, True])  # whether the buffers of groups are views of one
def test_of_the_weights_of_groups_those_are_overwritten_that_say_so(apart: bool) -> None:
    counts, x = [2, 0, 3], data(5)
    seq, expected = model(accumulate_into_main_grad=True, packed=False), plain(counts, x)
    for fc in ("fc1", "fc2"):
        whole = torch.ones_like(expected[f"{fc}.weight"])
        for name, p in seq[fc].named_parameters():
            p.main_grad = torch.ones_like(p) if apart or "bias" in name else whole[int(name[-1])]
            p.overwrite_main_grad = name.endswith(("0", "1"))
    call(seq, counts, x).square().sum().backward()
    for name, p in seq.named_parameters():
        if "fc" in name:
            grad = expected[name[:-1]][int(name[-1])]
            close(p.main_grad, grad if p.overwrite_main_grad else 1 + grad)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])  # ops write this one themselves
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_backward_overwrites_the_main_grad_of_a_shared_weight_once(
    fused: bool, packed: bool, delayed: bool, again: bool, dtype: torch.dtype
) -> None:
    """Ops that share a weight, in one step or in two, and an op that runs twice: later gradients are added."""

    def shared(**options: Any) -> fo.Sequential:
        torch.manual_seed(0)
        fc1, fc2 = (fo.ops.GroupedLinear(E, D, D, packed=packed, **options) for _ in "ab")
        for name, p in fc1.named_parameters():
            setattr(fc2, name, p)
        ops = [fc1, fo.ops.ScaledSReLU(), fc2] + [fo.ops.SiLU(), fc1] * again
        return fo.Sequential(*ops).to(dtype)

    counts, usual = [2, 0, 3], shared()
    seq = shared(accumulate_into_main_grad=True, delay_wgrad=delayed)
    usual.load_state_dict(seq.state_dict())
    for p in seq.parameters():
        p.main_grad, p.overwrite_main_grad = torch.full_like(p, torch.nan), True
    for x in (data(5).to(dtype), data(5).to(dtype)):
        usual.zero_grad()
        call(usual, counts, x).square().sum().backward()
        with fo.fusion(fused):
            y = call(seq, counts, x)
        y.square().sum().backward()
        seq.backward_dw()
        for p, q in zip(seq.parameters(), usual.parameters(), strict=True):
            torch.testing.assert_close(p.main_grad, q.grad)


def test_main_grad_is_asked_for_where_it_is_made_on_demand() -> None:
    op, x = (
        fo.ops.GroupedLinear(E, D, D, bias=False, accumulate_into_main_grad=True),
        torch.randn(4, D),
    )
    buffer = torch.zeros_like(op.weight)
    op.weight.get_main_grad = lambda: buffer
    op(x, fo.Routing.from_counts([1, 1, 2])).sum().backward()
    assert buffer.abs().sum() > 0 and op.weight.grad is None


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("recipe", [None, fo.recipes.Float8CurrentScaling()])
def test_a_float32_buffer_takes_sums_that_are_not_rounded_before(
    delayed: bool, recipe: Any
) -> None:
    op = fo.ops.GroupedLinear(
        E, D, D, accumulate_into_main_grad=True, delay_wgrad=delayed, dtype=torch.bfloat16
    )
    for p in op.parameters():
        p.main_grad = torch.full_like(p, torch.nan, dtype=torch.float32)
        p.overwrite_main_grad = True
    exact = fo.ops.GroupedLinear(E, D, D, dtype=torch.float64)
    exact.load_state_dict(op.state_dict())
    routing = fo.Routing.from_counts([37, 0, 40])
    for _ in range(2):
        # small integers, exact in fp8 too (448 / 14 is a power of two); their sums are not in bfloat16
        x = torch.randint(1, 14, (80, D)).bfloat16()
        x[:, 0] = 14
        with fo.recipe(recipe):
            op(x, routing).sum().backward()
        fo.Sequential(op).backward_dw()
        exact(x.double(), routing).sum().backward()
        for p in op.parameters():
            p.overwrite_main_grad = False
    assert not torch.equal(exact.weight.grad.bfloat16().double(), exact.weight.grad)
    for p, q in zip(op.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(p.main_grad.double(), q.grad, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize(
    ("buffer", "why"),
    [
        (None, "which is NoneType: set it to a float32 tensor"),
        (torch.zeros(E, D, D + 1), r"shape \(3, 6, 7\)"),
        (torch.zeros(E, D, D, dtype=torch.float16), "torch.float16"),
        (torch.zeros(D, D, E).permute(2, 0, 1), "non-contiguous"),
        (torch.zeros(E, D, D, device="meta"), "on meta"),
    ],
)
def test_a_buffer_that_cannot_hold_the_gradient_is_refused(buffer: Any, why: str) -> None:
    seq = fo.Sequential(
        {"fc": fo.ops.GroupedLinear(E, D, D, bias=False, accumulate_into_main_grad=True)}
    )
    seq["fc"].weight.main_grad = buffer
    y = seq(torch.randn(4, D), fo.Routing.from_counts([1, 1, 2]))
    with pytest.raises(fo.FuseOpsError, match=why) as caught:
        y.sum().backward()
    assert any("'fc' (GroupedLinear)" in note for note in caught.value.__notes__)


def test_an_op_writes_into_the_buffer_itself() -> None:
    class Into(fo.ops.Linear):
        live_call = True

        def bwd(self, saved: Any, dy: Any, *, call: Any) -> Any:
            grads = super().bwd(saved, dy, call=call)
            assert call.overwrite == {"weight"}
            call.out["weight"].copy_(grads.params["weight"])
            return grads._replace(params={"weight": None})

    op, x = Into(D, D, bias=False), torch.randn(4, D)
    op.accumulate_into_main_grad = True
    op.weight.main_grad = torch.full_like(op.weight, torch.nan)
    op.weight.overwrite_main_grad = True
    op(x).sum().backward()
    usual = fo.ops.Linear(D, D, bias=False)
    usual.load_state_dict(op.state_dict())
    usual(x).sum().backward()
    assert op.weight.grad is None
    torch.testing.assert_close(op.weight.main_grad, usual.weight.grad)


# --- delayed


@given(COUNTS, st.integers(1, 3), st.booleans())
def test_backward_dw_gives_what_the_backward_left_out(
    counts: list[int], times: int, main: bool
) -> None:
    seq, x = model(delay_wgrad=True, accumulate_into_main_grad=main), data(sum(counts) + 1)
    for op in (seq["fc1"], seq["fc2"]):
        for p in op.parameters():
            p.main_grad = torch.zeros_like(p)
    for _ in range(times):
        call(seq, counts, x).square().sum().backward()
    weights = [seq["fc1"].weight, seq["fc2"].weight]
    assert all(p.grad is None and not p.main_grad.any() for p in weights)
    assert seq.backward_dw() == 2 * times and seq.backward_dw() == 0
    expected = plain(counts, x, times)
    for name, p in seq.named_parameters():
        close(p.main_grad if main and name.startswith("fc") else p.grad, expected[name])


@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_gradient_that_is_asked_for_is_returned_and_added_to_nothing(
    main: bool, delay: bool, packed: bool
) -> None:
    """As with plain torch: neither `torch.autograd.grad` nor what `backward(inputs=)` leaves out reaches `.grad`."""
    counts, x = [2, 0, 3], data(5).requires_grad_()
    seq = model(delay_wgrad=delay, accumulate_into_main_grad=main, packed=packed)
    for p in seq.parameters():
        p.main_grad = torch.zeros_like(p)
    loss = call(seq, counts, x).square().sum()
    leaves = [x, *seq.parameters()]
    found = torch.autograd.grad(loss, leaves, retain_graph=True)
    loss.backward(inputs=[x], retain_graph=True)
    assert seq.backward_dw() == 0
    assert all(p.grad is None and not p.main_grad.any() for p in seq.parameters())
    loss.backward()
    seq.backward_dw()
    for leaf, got in zip(leaves, found, strict=True):
        mine = leaf.main_grad if main and leaf.grad is None else leaf.grad
        close(got, mine / 2 if leaf is x else mine)


@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("delay", [False, True])
def test_each_backward_adds_to_those_alone_that_it_is_asked_for(main: bool, delay: bool) -> None:
    """Of the ops of one segment, another one in each backward."""
    counts, x = [2, 0, 3], data(5)
    seq = model(delay_wgrad=delay, accumulate_into_main_grad=main)
    loss, expected = call(seq, counts, x).square().sum(), plain(counts, x)
    for name, asked in seq.named_parameters():
        for p in seq.parameters():
            p.grad, p.main_grad = None, torch.zeros_like(p)
        loss.backward(inputs=[asked], retain_graph=True)
        assert seq.backward_dw() == (delay and name in ("fc1.weight", "fc2.weight"))
        for other, p in seq.named_parameters():
            mine = p.main_grad if main and other != "gain.gain" else p.grad
            added = torch.zeros_like(p) if mine is None else mine
            close(added, expected[name] if other == name else torch.zeros_like(p))


@pytest.mark.parametrize("given", ["own", "leaf", "computed", "one"])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_functional_call_gives_gradients_to_the_tensors_that_it_was_given(
    packed: bool, main: bool, delay: bool, given: str
) -> None:
    """To `.grad` as autograd does. The op's own have main_grad and the queue for themselves."""

    def step(seq: fo.Sequential) -> tuple[list[Tensor], list[Tensor]]:
        own = {n: p for n, p in seq.named_parameters() if n.startswith("fc")}
        names = [n for n in own if given != "one" or n in ("fc1.weight", "fc1.weight0")]
        leaves = {n: own[n].detach().clone().requires_grad_() for n in names}
        weights = {"own": own, "computed": {n: 2 * p for n, p in own.items()}}.get(given, leaves)
        functional_call(seq, weights, (x, routing)).square().sum().backward()
        seq.backward_dw()
        return [*own.values()], [*leaves.values()]

    x, probs = data(5), torch.linspace(0.1, 1, 5, dtype=torch.float64)
    routing = fo.Routing.from_counts([2, 0, 3], probs=probs)
    seq = model(delay_wgrad=delay, accumulate_into_main_grad=main, packed=packed)
    for p in seq.parameters():
        p.main_grad = torch.zeros_like(p)
    for found, wanted in zip(step(seq), step(model(packed=packed)), strict=True):
        for ours, theirs in zip(found, wanted, strict=True):
            sums = [t for t in (ours.grad, getattr(ours, "main_grad", None)) if t is not None]
            none = torch.zeros_like(ours)
            close(sum(sums, none), none if theirs.grad is None else theirs.grad)
            assert not (main and given == "own") or ours.grad is None


def test_what_is_said_of_gradients_after_a_call_holds_in_the_next() -> None:
    seq, x = fo.Sequential(fo.ops.Linear(4, 3, bias=False)), torch.randn(5, 4)
    op, whole = seq[0], torch.zeros(3, 4)
    seq(x).sum().backward()
    expected, op.weight.grad = op.weight.grad, None
    op.weight.main_grad, op.accumulate_into_main_grad = whole, True
    seq(x).sum().backward()
    assert op.weight.grad is None and torch.equal(whole, expected)
    op.accumulate_into_main_grad, op.delays = False, ("weight",)
    seq(x).sum().backward()
    assert op.weight.grad is None and seq.backward_dw() == 1
    assert torch.equal(op.weight.grad, expected)


def test_a_rehearsed_step_leaves_what_waits_as_it_was() -> None:
    seq, x = fo.Sequential(fo.ops.Linear(4, 3, bias=False)), torch.randn(5, 4)
    seq[0].delays = ("weight",)
    seq.plan(x)
    assert seq.backward_dw() == 0
    seq(x).sum().backward()
    seq.plan(x)
    assert seq.backward_dw() == 1 and type(seq[0].weight.grad) is Tensor


@pytest.mark.parametrize("main", [False, True])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_what_explains_tests_and_plans_a_step_adds_nothing(
    main: bool, delay: bool, packed: bool
) -> None:
    seq = model(delay_wgrad=delay, accumulate_into_main_grad=main, packed=packed)
    for p in seq.parameters():
        p.main_grad = torch.full_like(p, 3.0)
    routing = fo.Routing.from_counts([2, 0, 3], probs=torch.ones(5, dtype=torch.float64))
    batch = (data(5), routing)
    call(seq, [2, 0, 3], data(5)).sum().backward()
    before = [(p.grad, p.main_grad.clone()) for p in seq.parameters()]
    fo.explain(seq, *batch)
    assert seq.plan(*batch).rehearsed
    fo.testing.assert_fused_matches_unfused(seq, *batch)
    sizes = [offload.plan(seq, *batch, record=real).before.peak for real in (False, True)]
    assert min(sizes) >= sum(p.main_grad.nbytes for p in seq.parameters())
    for p, (grad, main_grad) in zip(seq.parameters(), before, strict=True):
        assert p.grad is grad and torch.equal(p.main_grad, main_grad)
    assert seq.backward_dw() == (2 if delay else 0)


def test_what_an_error_stops_stays_in_the_queue() -> None:
    seq, x = model(delay_wgrad=True, accumulate_into_main_grad=True), data(5)
    for op in (seq["fc1"], seq["fc2"]):
        for p in op.parameters():
            p.main_grad = torch.zeros_like(p)
    call(seq, [2, 0, 3], x).square().sum().backward()
    buffer = seq["fc1"].weight.main_grad
    del seq["fc1"].weight.main_grad
    with pytest.raises(fo.FuseOpsError, match="main_grad") as caught:
        seq.backward_dw()
    assert "in backward_dw of 'fc1' (GroupedLinear)" in caught.value.__notes__
    seq["fc1"].weight.main_grad = buffer
    assert seq.backward_dw() == 1  # fc2's was done before
    close(buffer, plain([2, 0, 3], x)["fc1.weight"])


def test_any_parameter_of_any_op_can_wait() -> None:
    seq, x = model(), data(5)
    seq["gain"].delays = ("gain",)
    call(seq, [2, 0, 3], x).square().sum().backward()
    assert seq["gain"].gain.grad is None and seq["fc1"].weight.grad is not None
    seq.backward_dw()
    close(seq["gain"].gain.grad, plain([2, 0, 3], x)["gain.gain"])


def test_a_frozen_weight_waits_for_nothing() -> None:
    seq, x = model(delay_wgrad=True), data(5)
    seq["fc1"].weight.requires_grad_(False)
    call(seq, [2, 0, 3], x).sum().backward()
    assert seq.backward_dw() == 1


@pytest.mark.parametrize("name", ["gain", "fc1", "fc2", "4"])
def test_a_delayed_op_is_in_no_fused_backward_and_says_so(name: str) -> None:
    """One before or behind them keeps no ops from being fused."""
    seq, x = model().append(Scaled().double()), data(5)
    ((delayed, _), *_) = seq[name].named_parameters()
    seq[name].delays = (delayed,)
    routing = fo.Routing.from_counts([2, 0, 3], probs=torch.ones(5, dtype=torch.float64))
    plan = seq.plan(x, routing)
    miss = "grouped_mlp", (1, 4), f"GroupedLinear delays {[delayed]}"
    assert (miss in plan.misses) == name.startswith("fc")
    assert ("grouped_mlp" in {s.rule for s in plan.fused}) != (miss in plan.misses)


class StoppedError(Exception):
    pass


def stopped(_: Tensor) -> None:
    raise StoppedError


@given(COUNTS, st.booleans(), st.integers(0, 2))
def test_a_backward_that_was_interrupted_puts_nothing_off(
    counts: list[int], main: bool, before: int
) -> None:
    """What came before it waits on; a backward that runs may work off what it has put off itself."""
    seq, x = model(delay_wgrad=True, accumulate_into_main_grad=main), data(sum(counts) + 1)
    for op in (seq["fc1"], seq["fc2"]):
        for p in op.parameters():
            p.main_grad = torch.zeros_like(p)
    for _ in range(before):
        call(seq, counts, x).square().sum().backward()
    trapped = x.clone().requires_grad_()
    trapped.register_hook(stopped)
    with pytest.raises(StoppedError):
        call(seq, counts, trapped).square().sum().backward()
    assert [len(seq[fc].__dict__["_delayed_gradients"]) for fc in ("fc1", "fc2")] == [before] * 2
    leaf = x.clone().requires_grad_()
    leaf.register_hook(lambda _: done.append(seq.backward_dw()))
    done: list[int] = []
    call(seq, counts, leaf).square().sum().backward()
    assert done[0] >= 2
    seq.backward_dw()
    expected = plain(counts, x, before + 1)
    for name in ("fc1.weight", "fc2.weight"):
        p = seq.get_parameter(name)
        close(p.main_grad if main else p.grad, expected[name])


@pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="dynamo of torch 2.11 fails at an assertion of its own",
)
def test_compiled_autograd_puts_gradients_off_too() -> None:
    from torch._dynamo import compiled_autograd  # half a second

    op = fo.ops.GroupedLinear(E, D, D, delay_wgrad=True)
    y = op(torch.randn(4, D), fo.Routing.from_counts([1, 1, 2]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo's, of what it traces
        with compiled_autograd._enable(torch.compile(backend="eager")):
            y.sum().backward()
    assert fo.Sequential(op).backward_dw() == 1


def test_the_queue_is_not_copied_and_not_pickled() -> None:
    op = fo.ops.GroupedLinear(E, D, D, delay_wgrad=True)
    op(torch.randn(4, D), fo.Routing.from_counts([1, 1, 2])).sum().backward()
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert fo.Sequential(twin).backward_dw() == 0
    assert fo.Sequential(op).backward_dw() == 1


def test_an_op_that_is_called_alone_has_its_own_backward_dw() -> None:
    routing, x = fo.Routing.from_counts([1, 1, 2]), torch.randn(4, D)
    now, later = (fo.ops.GroupedLinear(E, D, D, delay_wgrad=delay) for delay in (False, True))
    later.load_state_dict(now.state_dict())
    for op in (now, later):
        op(x, routing).square().sum().backward()
    assert later.weight.grad is None and later.backward_dw() == 1
    assert torch.equal(later.weight.grad, now.weight.grad) and now.backward_dw() == 0


@pytest.mark.parametrize("option", ["delay_wgrad", "accumulate_into_main_grad"])
def test_compile_is_refused_by_name(option: str) -> None:
    op: Op[Any] = fo.ops.GroupedLinear(E, D, D, **{option: True})
    run = torch.compile(op, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"GroupedLinear under torch\.compile"):
        run(torch.randn(4, D), fo.Routing.from_counts([1, 1, 2]))


# --- between the forward, the backward and backward_dw ---------------------------------------------------------------


@pytest.mark.parametrize("written", ["x", "dy", "weight", "nothing"])
@pytest.mark.parametrize("by_data_parallel_buffer", [False, True])
def test_what_a_delayed_gradient_reads_may_not_be_written(
    written: str, by_data_parallel_buffer: bool
) -> None:
    """A write to what it does not read, the weight, is legal: an optimizer of another stage may step."""

    def run(**options: Any) -> tuple[fo.ops.GroupedLinear, dict[str, Tensor]]:
        torch.manual_seed(0)
        op = fo.ops.GroupedLinear(E, D, F, bias=False, **options).double()
        tensors = {"x": data(6), "weight": op.weight.detach(), "dy": data(6)[:, :F].contiguous()}
        op(tensors["x"], offs=torch.tensor([1, 3, 6], dtype=torch.int32)).backward(tensors["dy"])
        return op, {**tensors, "nothing": torch.ones(1)}

    expected = run()[0].weight.grad
    op, tensors = run(delay_wgrad=True)
    if by_data_parallel_buffer:
        op.accumulate_into_main_grad = True
        op.weight.main_grad = torch.zeros_like(op.weight)
    with torch.no_grad():
        tensors[written].mul_(3)
    if written in ("x", "dy"):
        with pytest.raises(InPlaceError, match=rf"backward_dw: '{written}' of GroupedLinear"):
            op.backward_dw()
        return
    op.backward_dw()
    close(op.weight.main_grad if by_data_parallel_buffer else op.weight.grad, expected)


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_into_main_grad": True}, {"delay_wgrad": True}]
)
@pytest.mark.parametrize("frozen", ["before the backward", "before the forward only"])
def test_what_is_frozen_when_the_backward_runs_gets_nothing(options: Any, frozen: str) -> None:
    """As autograd: it asks a leaf when the gradient arrives, and one that the forward did not know gets none."""
    seq = model(**options)
    for p in seq.parameters():
        p.main_grad = torch.zeros_like(p)
    weight = seq["fc1"].weight
    weight.requires_grad_(frozen == "before the backward")
    loss = call(seq, [2, 0, 3], data(5)).square().sum()
    weight.requires_grad_(frozen != "before the backward")
    loss.backward()
    if options.get("delay_wgrad"):
        seq.backward_dw()
    assert weight.grad is None and not weight.main_grad.any()
    other = seq["fc2"].weight
    close(
        other.main_grad if "accumulate_into_main_grad" in options else other.grad,
        plain([2, 0, 3], data(5))["fc2.weight"],
    )


# --- reductions that hang on gradients


def test_hooks_behind_the_accumulation_run_once_the_delayed_gradient_is_there() -> None:
    counts = [2, 1, 4]
    x, expected = data(7), plain(counts, data(7))
    seq = model(delay_wgrad=True)
    seen: list[tuple[str, Tensor]] = []
    for name, p in seq.named_parameters():

        def note(p: Tensor, name: str = name) -> None:
            if p.grad is not None:  # torch runs it in the backward too, where there is none yet
                seen.append((name, p.grad.clone()))

        p.register_post_accumulate_grad_hook(note)
    finished: list[str] = []
    for name in ("fc1", "fc2"):
        assert seq[name].weight.skip_backward_post_hook
        seq[name].register_wgrad_accumulation_and_reduce_hooks(lambda n=name: finished.append(n))
    call(seq, counts, x).square().sum().backward()
    assert {name for name, _ in seen} == {"gain.gain", "fc2.bias"} and not finished
    assert seq.backward_dw() == 2
    assert sorted(finished) == ["fc1", "fc2"] and len(seen) == 4
    for name, gradient in seen:
        torch.testing.assert_close(gradient, expected[name])


@pytest.mark.parametrize("how", ["main_grad", "delays"])
def test_under_compile_it_is_refused_by_name(how: str) -> None:
    op = fo.ops.Linear(4, 4)
    op.accumulate_into_main_grad, op.delays = how == "main_grad", ("weight",) * (how == "delays")
    said = r"Linear under torch\.compile: a gradient that is delayed or goes to main_grad is eager"
    with pytest.raises(Exception, match=said):
        torch.compile(fo.Sequential(op), backend="eager")(torch.randn(2, 4))


def test_a_buffer_under_compile_is_written_outside_of_the_graph_or_refused_by_name() -> None:
    op, x, y = fo.ops.Linear(4, 4), torch.randn(2, 4), torch.zeros(2, 4)
    got = torch.compile(op, backend="eager")(x, out={"y": y})
    assert got.data_ptr() == y.data_ptr() and torch.equal(y, op(x))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="out= is eager only"):
        torch.compile(op, backend="eager", fullgraph=True)(x, out={"y": y})
