"""The autograd bridge: what is saved, who gets a gradient, what is refused, and what an op may be."""

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations, parametrize, prune

import fuseops as fo
from fuseops.errors import DoubleBackwardError
from fuseops.ops import (
    Add,
    Bias,
    Dropout,
    GroupedLinear,
    Identity,
    Linear,
    Reshape,
    RMSNorm,
    SiLU,
    SwiGLU,
    Tap,
)
from fuseops.run import steps


def data(*shape: int) -> Tensor:
    return torch.randn(*(shape or (3, 4)), requires_grad=True)


def stack() -> fo.Sequential:
    torch.manual_seed(0)
    return fo.Sequential(RMSNorm(4), Linear(4, 8), SiLU(), Bias(8), Linear(8, 4))


def plain(seq: fo.Sequential) -> nn.Sequential:
    """The stack of torch's own modules over the same parameters."""
    twins: list[nn.Module] = []
    for op in seq:
        twin = getattr(nn, type(op).__name__, Shift)
        made = twin.__new__(twin)
        made.__dict__ = op.__dict__
        twins.append(made)
    return nn.Sequential(*twins)


class Shift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()]))


def saved_by(f: Callable[[], Tensor]) -> list[Tensor]:
    """The tensors that one forward saves for the backward."""
    seen: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        seen.append(t)
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        f()
    return seen


# --- parameters come from where they live -----------------------------------------------------


def test_functional_call_gradients_go_to_the_given_weights() -> None:
    seq, x = stack(), data()
    other = {k: torch.randn_like(p, requires_grad=True) for k, p in seq.named_parameters()}
    ours = torch.autograd.grad(
        functional_call(seq, other, (x,)).square().sum(), [x, *other.values()]
    )
    twin = plain(seq)
    theirs = torch.autograd.grad(
        functional_call(twin, other, (x,)).square().sum(), [x, *other.values()]
    )
    torch.testing.assert_close(ours, theirs)
    assert all(p.grad is None for p in seq.parameters())


def test_functional_call_through_computed_weights() -> None:
    seq, x, scale = stack(), data(), torch.tensor(1.5, requires_grad=True)
    params = {k: p.detach() * scale for k, p in seq.named_parameters()}
    ours = torch.autograd.grad(functional_call(seq, params, (x,)).sum(), [x, scale])
    params = {k: p.detach() * scale for k, p in seq.named_parameters()}
    theirs = torch.autograd.grad(functional_call(plain(seq), params, (x,)).sum(), [x, scale])
    torch.testing.assert_close(ours, theirs)


def test_a_weight_swapped_between_forward_and_backward_changes_nothing() -> None:
    seq, x = stack(), data()
    expected = trained(seq, x)
    old, y = list(seq.parameters()), seq(x).square().sum()
    for op in seq:
        for name, p in list(op.named_parameters()):
            setattr(op, name, nn.Parameter(torch.full_like(p, 9.0)))
    torch.testing.assert_close(list(torch.autograd.grad(y, [x, *old])), expected)


@pytest.mark.parametrize("edited", ["weight", "input"])
def test_an_in_place_edit_of_what_is_saved_raises(edited: str) -> None:
    seq = fo.Sequential(Linear(4, 4), SiLU(), Linear(4, 4))
    x = data()
    h = x * 1
    y = seq(h)
    with torch.no_grad():
        (seq[0].weight if edited == "weight" else h).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_in_place_edit_of_what_is_not_saved_is_legal() -> None:
    seq, x = fo.Sequential(Linear(4, 4)).requires_grad_(False), data()
    h = x * 1
    y = seq(h)
    h.detach().mul_(2)
    y.sum().backward()
    seq[0].weight.requires_grad_()
    assert x.grad is not None


def test_weight_tying_inside_one_sequential() -> None:
    fc = Linear(4, 4)
    tied, other = Linear(4, 4), nn.Linear(4, 4)
    tied.weight = fc.weight
    other.weight, other.bias = tied.weight, tied.bias
    ours, theirs = fo.Sequential(fc, SiLU(), tied), nn.Sequential(fc, nn.SiLU(), other)
    x = data()
    torch.testing.assert_close(trained(ours, x), trained(theirs, x))


@pytest.mark.parametrize(
    "parametrization", [parametrizations.weight_norm, parametrizations.spectral_norm]
)
def test_a_parametrized_weight_is_still_weight(parametrization: Callable) -> None:
    torch.manual_seed(1)
    ours = fo.Sequential(Linear(4, 4), SiLU())
    theirs = nn.Sequential(nn.Linear(4, 4), nn.SiLU())
    theirs.load_state_dict(ours.state_dict())
    x = data()
    ours(x)
    for model in (ours, theirs):
        torch.manual_seed(2)
        parametrization(model[0])
    for _ in range(3):  # spectral_norm takes one step of its power iteration a forward
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(trained(ours, x), trained(theirs, x))
    torch.testing.assert_close(dict(ours.state_dict()), dict(theirs.state_dict()))
    parametrize.remove_parametrizations(ours[0], "weight")
    parametrize.remove_parametrizations(theirs[0], "weight")
    torch.testing.assert_close(ours(x), theirs(x))


def test_a_parametrized_op_called_alone_copies() -> None:
    op, x = Linear(4, 4), data()
    parametrizations.weight_norm(op)
    expected = op(x).detach()
    twin = copy.deepcopy(op)
    del op
    gc.collect()
    torch.testing.assert_close(twin(x), expected)


class Counted(nn.Module):
    """A parametrization that counts how often it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight


def test_a_parametrization_is_computed_once_a_forward() -> None:
    seq, counted = fo.Sequential(Linear(4, 4), SiLU()), Counted()
    parametrize.register_parametrization(seq[0], "weight", counted)
    for _ in range(2):
        seq(data())  # plans
        counted.calls = 0
    seq(data())
    assert counted.calls == 1


# --- what is saved ----------------------------------------------------------------------------


def test_frozen_linears_save_weights_and_no_activation() -> None:
    seq, x = fo.Sequential(Linear(4, 4), Linear(4, 4)).requires_grad_(False), data()
    weights = {id(p) for p in seq.parameters()}
    saved = saved_by(lambda: seq(x))
    assert saved and all(id(t) in weights for t in saved)


def test_nothing_is_saved_where_nobody_wants_a_gradient() -> None:
    seq = stack().requires_grad_(False)
    assert saved_by(lambda: seq(torch.randn(3, 4))) == []
    assert not seq(torch.randn(3, 4)).requires_grad


def test_ops_before_the_first_trained_parameter_save_nothing() -> None:
    seq = fo.Sequential(Linear(4, 4), SiLU(), Linear(4, 5))
    seq[0].requires_grad_(False)
    seq[2].weight.requires_grad_(False)
    assert saved_by(lambda: seq(torch.randn(3, 4))) == []
    seq[2].weight.requires_grad_()
    assert [t.shape for t in saved_by(lambda: seq(torch.randn(3, 4)))] == [(3, 4)]


def test_a_tensor_that_two_ops_save_takes_one_slot() -> None:
    seq, x = fo.Sequential(Tap("a"), Linear(4, 4, bias=False), Add("a")), data()
    first = saved_by(lambda: seq(x))
    assert len({id(t) for t in first}) == len(first) == 2


def test_a_frozen_op_lets_go_of_its_input() -> None:
    seq, x = fo.Sequential(Linear(4, 4)).requires_grad_(False), data()
    h = x * 1
    storage = StorageWeakRef(h.untyped_storage())
    y = seq(h)
    del h
    assert storage.expired(), "nothing reads the input of a frozen Linear"
    y.sum().backward()


class KeepsSaved(NamedTuple):
    h: Tensor | None


class Keeps(fo.Op[KeepsSaved]):
    """y = 2x; saves a tensor of its own, and notes in the backward which of those of all still live."""

    saves_for = {"x": ("h",)}
    alive: dict[str, StorageWeakRef] = {}
    seen: dict[str, set[str]] = {}

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def fwd(self, x: Tensor) -> fo.Out:
        Keeps.seen[self.name] = {n for n, ref in Keeps.alive.items() if not ref.expired()}
        h = x + 1
        Keeps.alive[self.name] = StorageWeakRef(h.untyped_storage())
        return fo.Out(2 * x, KeepsSaved(h))

    def bwd(self, saved: KeepsSaved, dy: Tensor) -> fo.Grads:
        Keeps.seen[self.name] = {n for n, ref in Keeps.alive.items() if not ref.expired()}
        assert saved.h is not None
        return fo.Grads(2 * dy + 0 * saved.h)


@pytest.mark.parametrize("retain", [False, True])
def test_what_an_op_saved_goes_when_its_backward_has_run(retain: bool) -> None:
    seq = fo.Sequential({name: Keeps(name) for name in "abc"})
    for _ in range(2):  # the first looks at the gradients more closely
        Keeps.alive, Keeps.seen = {}, {}
        loss = seq(data()).sum()
        loss.backward(retain_graph=retain)
    every = {"a", "b", "c"}
    assert Keeps.seen == (
        dict.fromkeys("abc", every) if retain else {"c": every, "b": {"a", "b"}, "a": {"a"}}
    )
    if retain:
        loss.backward()
        assert Keeps.seen["a"] == {"a"}


@pytest.mark.parametrize("grad", [False, True])
def test_what_nobody_will_read_goes_when_its_forward_has_run(grad: bool) -> None:
    Keeps.alive, Keeps.seen = {}, {}
    x = data().requires_grad_(False)
    with torch.set_grad_enabled(grad):
        y = fo.Sequential(*map(Keeps, "abc"), fo.ops.Linear(4, 4))(x)
    assert y.requires_grad is grad and Keeps.seen == {name: set() for name in "abc"}


class NamedSaved(NamedTuple):
    k: Tensor | None


class Named(fo.Op[NamedSaved]):
    """Two side inputs, under names that are no Python names."""

    reads = ("lambda", "a.b")
    saves_for = {"x": ("k",)}

    def fwd(self, x: Tensor, **side: Tensor) -> fo.Out:
        return fo.Out(x * side["lambda"] + side["a.b"], NamedSaved(side["lambda"]))

    def bwd(self, saved: NamedSaved, dy: Tensor) -> fo.Grads:
        return fo.Grads(dy * saved.k)


def test_side_inputs_may_have_any_name() -> None:
    x, a, b = data(), torch.randn(1), torch.randn(1)
    y = fo.Sequential(Named(), fo.ops.SiLU())(x, **{"lambda": a, "a.b": b})
    expected = torch.nn.functional.silu(x * a + b)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(*(torch.autograd.grad(t.sum(), x) for t in (y, expected)))


def test_segments_alike_are_compiled_once() -> None:
    blocks = [fo.Residual(fo.ops.RMSNorm(4), fo.ops.Linear(4, 4)) for _ in range(9)]
    steps._factory_of.cache_clear()
    fo.Sequential(*blocks)(data()).sum().backward()
    made = steps._factory_of.cache_info()
    assert made.misses <= 6 < made.hits  # the first, the last and those between, both ways


@pytest.mark.parametrize("trained_names", [(), ("1.weight",), ("1.bias", "4.weight"), ("3.bias",)])
def test_gradients_go_only_where_requires_grad_wants_them(trained_names: tuple[str, ...]) -> None:
    seq, x = stack(), data()
    everything = dict(zip(["x", *dict(seq.named_parameters())], trained(seq, x), strict=True))
    for name, p in seq.named_parameters():
        p.requires_grad_(name in trained_names)
    seq(x).square().sum().backward()
    torch.testing.assert_close(x.grad, everything["x"])
    for name, p in seq.named_parameters():
        if name in trained_names:
            torch.testing.assert_close(p.grad, everything[name])
        else:
            assert p.grad is None


def test_gradients_have_their_owners_dtype() -> None:
    seq = fo.Sequential(RMSNorm(4), Linear(4, 4), Bias(4), SiLU()).bfloat16()
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    assert {g.dtype for g in trained(seq, x)} == {torch.bfloat16}


# --- second derivatives -----------------------------------------------------------------------


def second(y: Tensor, x: Tensor) -> Tensor:
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    return torch.autograd.grad(dx.square().sum(), x)[0]


REFUSED = r"second derivative through .*fuseops\.reference\(\)"


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("leaf", [False, True])
def test_second_derivatives_are_refused(freeze: bool, beside: bool, leaf: bool) -> None:
    seq, x = stack().requires_grad_(not freeze), data()
    h = x if leaf else x * 1
    y = seq(h).square().sum() + (h.pow(3).sum() if beside else 0)
    with pytest.raises(DoubleBackwardError, match=REFUSED):
        second(y, x)


@pytest.mark.parametrize("leaf", [False, True])
@pytest.mark.parametrize("op", [Linear(4, 4), SwiGLU(), Bias(4), Dropout(0.5)], ids=repr)
def test_second_derivatives_are_refused_where_the_input_is_not_saved(op: fo.Op, leaf: bool) -> None:
    seq, x = fo.Sequential(op).requires_grad_(False), data()
    with pytest.raises(DoubleBackwardError, match=REFUSED):
        second(seq(x if leaf else x * 1).pow(2).sum() + x.pow(3).sum(), x)


@pytest.mark.parametrize("leaf", [False, True])
def test_second_derivatives_are_refused_where_only_what_is_computed_from_the_input_is_saved(
    leaf: bool,
) -> None:
    # neither the incoming gradient nor anything that is saved is in a graph: the inputs' ties decide
    seq, x = fo.Sequential(Linear(4, 4), SiLU()).requires_grad_(False), data()
    with pytest.raises(DoubleBackwardError, match=REFUSED):
        second(seq(x if leaf else x * 1).sum() + x.pow(3).sum(), x)


def test_second_derivatives_towards_parameters_are_refused() -> None:
    seq = stack()
    grads = torch.autograd.grad(
        seq(torch.randn(3, 4)).square().sum(), list(seq.parameters()), create_graph=True
    )
    with pytest.raises(DoubleBackwardError, match=REFUSED):
        sum(g.square().sum() for g in grads).backward()


def test_second_derivatives_towards_computed_parameters_are_refused() -> None:
    seq, raw = fo.Sequential(Bias(4), SiLU()), torch.randn(4, requires_grad=True)
    y = functional_call(seq, {"0.bias": raw * 1}, (torch.randn(3, 4),)).sum() + raw.pow(3).sum()
    with pytest.raises(DoubleBackwardError, match=REFUSED):
        second(y, raw)


def test_second_derivatives_towards_side_inputs_are_refused() -> None:
    w = data(3)
    seq = fo.Sequential(fo.ops.ScaledSwiGLU())
    with pytest.raises(DoubleBackwardError, match=REFUSED):
        second(seq(torch.randn(3, 4), probs=w * 1).square().sum() + w.pow(3).sum(), w)


def test_second_derivatives_towards_the_incoming_gradient_are_refused() -> None:
    seq, x, dy = stack(), data(), data()
    (dx,) = torch.autograd.grad(seq(x), x, dy, create_graph=True)
    with pytest.raises(DoubleBackwardError, match=REFUSED):
        torch.autograd.grad(dx.sum() + dy.square().sum(), dy)


def test_create_graph_without_a_second_backward_works() -> None:
    seq, x = stack(), data()
    expected = trained(seq, x)
    loss = seq(x).square().sum()
    ours = torch.autograd.grad(loss, [x, *seq.parameters()], create_graph=True)
    torch.testing.assert_close([g.detach() for g in ours], expected)


def test_the_refusal_names_the_module_path() -> None:
    model, x = nn.ModuleDict({"mlp": fo.Sequential({"act": SiLU()})}), data()
    fo.configure(model)
    with pytest.raises(DoubleBackwardError, match=r"'mlp\.act' \(SiLU\)"):
        second(model["mlp"](x).sum(), x)


def test_under_reference_second_derivatives_are_torchs() -> None:
    seq, x = stack().double(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    with fo.reference():
        ours = second(seq(x).square().sum(), x)
        assert torch.autograd.gradgradcheck(seq, (x,))
    torch.testing.assert_close(ours, second(plain(seq)(x).square().sum(), x))


def test_under_reference_torch_func_works() -> None:
    seq, x = fo.Sequential(fo.Residual(*stack()), SwiGLU()), data()
    twin = nn.Sequential(plain(seq[0]))

    def torchs(x: Tensor) -> Tensor:
        gate, up = (x + twin(x)).chunk(2, -1)
        return nn.functional.silu(gate) * up

    with fo.reference():
        y, pull = torch.func.vjp(seq, x)
        torch.testing.assert_close(
            pull(torch.ones_like(y)), torch.func.vjp(torchs, x)[1](torch.ones_like(y))
        )
        torch.testing.assert_close(torch.func.jacrev(seq)(x), torch.func.jacrev(torchs)(x))
        ours = torch.func.grad(lambda x: seq(x).square().sum())(x)
        torch.testing.assert_close(ours, torch.func.grad(lambda x: torchs(x).square().sum())(x))


def test_under_reference_the_gradient_of_parameters_by_torch_func() -> None:
    seq, x = stack(), torch.randn(3, 4)
    params = dict(seq.named_parameters())
    with fo.reference():
        ours = torch.func.grad(lambda p: functional_call(seq, p, (x,)).square().sum())(params)
    theirs = torch.autograd.grad(seq(x).square().sum(), list(params.values()))
    torch.testing.assert_close(list(ours.values()), list(theirs))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_batch_of_output_gradients_gives_what_each_alone_does() -> None:
    """Also in the first backward, which is looked at."""
    seq, x, dys = fo.Sequential(Linear(4, 4), SiLU(), Linear(4, 4)), data(), torch.randn(2, 3, 4)
    wanted = [x.requires_grad_(), *seq.parameters()]
    batched = torch.autograd.grad(seq(x), wanted, dys, is_grads_batched=True)
    each = [torch.autograd.grad(seq(x), wanted, dy) for dy in dys]
    torch.testing.assert_close(batched, tuple(torch.stack(g) for g in zip(*each, strict=True)))


def test_torch_func_outside_reference_says_where_to_go() -> None:
    with pytest.raises(fo.FuseOpsError, match=r"torch\.func.*fuseops\.reference\(\)"):
        torch.func.grad(lambda x: stack()(x).sum())(torch.randn(3, 4))


def test_forward_mode_outside_reference_says_where_to_go() -> None:
    seq, x = stack(), torch.randn(3, 4)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(fo.FuseOpsError, match=r"forward-mode.*'0..4'.*fuseops\.reference\(\)"):
            seq(dual)
        seq(x).sum().backward()  # what carries no tangent runs as ever
        with fo.reference():
            tangent = forward_ad.unpack_dual(seq(dual)).tangent
        frozen = forward_ad.unpack_dual(seq.requires_grad_(False)(dual)).tangent
    assert tangent is not None and torch.equal(frozen, tangent)


@pytest.mark.parametrize("reference", [False, True])
def test_vmap_without_gradients_is_the_loop_and_refused_where_every_example_has_its_own_groups(
    reference: bool,
) -> None:
    seq, grouped, xs = stack(), GroupedLinear(2, 4, 3), torch.randn(2, 3, 4)
    offs = torch.tensor([[1, 3], [2, 3]], dtype=torch.int32)
    with torch.no_grad(), fo.reference() if reference else nullcontext():
        torch.testing.assert_close(torch.vmap(seq)(xs), torch.stack([seq(x) for x in xs]))
        with pytest.raises(fo.FuseOpsError, match="vmap over grouped rows"):
            torch.vmap(lambda x, o: grouped(x, offs=o))(xs, offs)
        with pytest.raises(
            fo.FuseOpsError, match="vmap over grouped rows" if reference else "func"
        ):
            torch.vmap(torch.func.grad(lambda x, o: grouped(x, offs=o).sum()))(xs, offs)


# --- in-place on the result -------------------------------------------------------------------


@pytest.mark.parametrize(
    "tail",
    [
        [],
        [Identity()],
        [Reshape(12)],
        [Reshape(4, 3), Identity()],
        [Dropout(0.5).eval()],
        [Dropout(0.0)],
        [Tap("a")],
    ],
    ids=repr,
)
@pytest.mark.parametrize("head", [[Linear(4, 4)], [Linear(4, 4), SiLU()], [nn.SiLU()]], ids=repr)
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_in_place_on_the_result_is_legal(backend: str | None, head: list, tail: list) -> None:
    seq, x = fo.Sequential(*head, *tail), data()
    returns = ("a",) if any(isinstance(op, Tap) for op in tail) else ()
    expected = torch.autograd.grad(fo.Sequential(*head)(x).mul(3).sum(), x)

    def written(x: Tensor) -> Tensor:
        y = seq(x, returns=returns)
        y = y[0] if returns else y
        return y.mul_(3)

    torch.compiler.reset()
    run = written if backend is None else torch.compile(written, backend=backend, fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(run(x).sum(), x), expected)


class SigmoidSaved(NamedTuple):
    y: Tensor


class Sigmoid(fo.Op[SigmoidSaved]):
    """Its backward reads its result."""

    saves_for = {"x": ("y",)}

    def fwd(self, x: Tensor) -> fo.Out:
        y = torch.sigmoid(x)
        return fo.Out(y, SigmoidSaved(y))

    def bwd(self, saved: SigmoidSaved, dy: Tensor) -> fo.Grads:
        return fo.Grads(dy * saved.y * (1 - saved.y))


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_a_write_to_what_the_backward_reads_is_refused(backend: str | None) -> None:
    seq, x = fo.Sequential(Linear(4, 4), Sigmoid()), data()

    def written(x: Tensor) -> Tensor:
        return seq(x).mul_(3)

    torch.compiler.reset()
    run = written if backend is None else torch.compile(written, backend=backend, fullgraph=True)
    with pytest.raises(RuntimeError, match=r"modified by an inplace|being modified inplace"):
        run(x).sum().backward()


# --- hooks and overrides ----------------------------------------------------------------------


def no_rule_covers(seq: fo.Sequential, position: int, x: Tensor) -> bool:
    from fuseops.ops import scopes

    plans: list = []
    with scopes.watch_plans(plans.append):
        seq(x)
    outer = plans[0]  # an op with hooks is called, and has a plan of its own after this one
    spans = [s for s in (*outer.forward, *outer.backward) if s.start <= position < s.stop]
    return bool(spans) and all(s.rule is None and s.kind == "call" and s.note for s in spans)


HOOKS: dict[str, Callable[[nn.Module, Callable], object]] = {
    "forward": lambda op, f: op.register_forward_hook(lambda m, i, o: f()),
    "forward_pre": lambda op, f: op.register_forward_pre_hook(lambda m, i: f()),
    "forward_kwargs": lambda op, f: op.register_forward_hook(
        lambda m, i, k, o: f(), with_kwargs=True
    ),
    "full_backward": lambda op, f: op.register_full_backward_hook(lambda m, i, o: f()),
    "full_backward_pre": lambda op, f: op.register_full_backward_pre_hook(lambda m, o: f()),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_on_child_ops_fire_and_end_the_fusion(kind: str) -> None:
    seq, x, calls = fo.Sequential(Linear(4, 4), SiLU(), Linear(4, 4)), data(), []
    expected = trained(seq, x)
    handle = HOOKS[kind](seq[0], lambda: calls.append(1))
    torch.testing.assert_close(trained(seq, x), expected)
    assert len(calls) == 1 and no_rule_covers(seq, 0, x)
    handle.remove()
    calls.clear()
    torch.testing.assert_close(trained(seq, x), expected)
    assert not calls and not no_rule_covers(seq, 0, x)


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_fire_on_ops_that_read_and_write_side_tensors(kind: str) -> None:
    x = data()
    for hooked in range(3):
        seq, calls = fo.Sequential(Tap("a"), Linear(4, 4), Add("a")), []
        expected = trained(seq, x)
        HOOKS[kind](seq[hooked], lambda calls=calls: calls.append(1))
        torch.testing.assert_close(trained(seq, x), expected)
        assert len(calls) == 1


def test_a_forward_pre_hook_may_change_the_input() -> None:
    seq, x = fo.Sequential(Linear(4, 4), SiLU()), data()
    seq[1].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    torch.testing.assert_close(seq(x), nn.functional.silu(2 * seq[0](x)))


def test_a_forward_hook_may_change_the_output() -> None:
    seq, x = fo.Sequential(Linear(4, 4), SiLU()), data()
    plain = seq[0](x)
    seq[0].register_forward_hook(lambda m, args, y: y + 1)
    torch.testing.assert_close(seq(x), nn.functional.silu(plain + 1))


def prune_nothing(op: nn.Module, t: nn.Parameter) -> None:
    prune.identity(op, "weight")
    op.weight_orig = t


def linear_by(op: nn.Module, t: nn.Parameter) -> None:
    op.forward = lambda x: nn.functional.linear(x, t)  # type: ignore[method-assign, assignment]


BROUGHT_IN: dict[str, Callable[[nn.Module, nn.Parameter], object]] = {
    "added by a hook": lambda op, t: op.register_forward_hook(lambda m, args, y: y + t[0]),
    "added before": lambda op, t: op.register_forward_pre_hook(lambda m, args: args[0] + t[0]),
    "of a forward on the instance": linear_by,
    "of which a hook makes the weight": prune_nothing,
}


@pytest.mark.parametrize("kind", BROUGHT_IN)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("evaluated", [False, True])
def test_parameters_that_hooks_and_overrides_bring_in_get_their_gradient(
    kind: str, frozen: bool, evaluated: bool
) -> None:
    ours = fo.Sequential(Linear(4, 4, bias=False), Tap("a"), SiLU(), Linear(4, 4), Add("a"))
    x, found = data().detach(), []
    for model, fused in ((ours, True), (copy.deepcopy(ours), False)):
        t = nn.Parameter(torch.linspace(-1, 1, 16, dtype=x.dtype).view(4, 4))
        model[0].requires_grad_(False)
        model[3].requires_grad_(not frozen)
        BROUGHT_IN[kind](model[0], t)
        with nullcontext() if fused else fo.reference():
            if evaluated:
                with torch.no_grad():
                    model(x)
            model(x).square().sum().backward()
        found.append(t.grad)
    torch.testing.assert_close(*found)
    assert found[1] is not None


def test_hooks_and_overrides_hold_under_compile() -> None:
    x = data()
    hooked, overridden = fo.Sequential(Linear(4, 4), SiLU()), fo.Sequential(DoubledForward(4, 4))
    hooked[0].register_forward_hook(lambda m, args, y: y + 1)
    for seq in (hooked, overridden):
        compiled = torch.compile(seq, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), seq(x))


def test_hooks_on_parameters_fire() -> None:
    seq, x, seen = fo.Sequential(Linear(4, 4), SiLU()), data(), []
    seq[0].weight.register_hook(lambda g: seen.append("grad"))
    seq[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    seq(x).sum().backward()
    assert sorted(seen) == ["accumulated", "grad"]


class DoubledForward(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Doubled(Linear):
    """Overrides fwd and bwd, with the keywords of the contract."""

    def fwd(self, x: Tensor, *, weight: Tensor, bias: Tensor | None, call: object) -> fo.Out:
        out = Linear.fwd(self, x, weight=weight, bias=bias, call=call)
        return out._replace(y=2 * out.y)

    def bwd(self, saved: object, dy: Tensor, *, call: object) -> fo.Grads:
        return Linear.bwd(self, saved, 2 * dy, call=call)


@pytest.mark.parametrize("cls", [DoubledForward, Doubled])
def test_an_overridden_op_is_itself_alone_and_inside(cls: type[Linear]) -> None:
    op, x = cls(4, 4), data()
    expected = 2 * nn.functional.linear(x, op.weight, op.bias)
    for model in (op, fo.Sequential(op)):
        torch.testing.assert_close(model(x), expected)
        wanted = torch.autograd.grad(
            expected.square().sum(), [x, *op.parameters()], retain_graph=True
        )
        torch.testing.assert_close(trained(model, x), list(wanted))
    torch.testing.assert_close(fo.Sequential(op, SiLU())(x), nn.functional.silu(expected))


def test_an_overridden_bwd_is_used_inside_a_would_be_backward_rule() -> None:
    class Halved(SiLU):
        def bwd(self, saved: object, dy: Tensor) -> fo.Grads:
            return fo.Grads(dy * 0.5)

    x = data()
    (dx,) = torch.autograd.grad(fo.Sequential(Bias(4), Halved())(x).sum(), x)
    torch.testing.assert_close(dx, torch.full_like(x, 0.5))


@pytest.mark.parametrize("name", ["forward", "fwd"])
def test_a_method_replaced_on_the_instance_is_used_alone_and_inside(name: str) -> None:
    op, x = SiLU(), data()
    seq = fo.Sequential(Linear(4, 4), op)
    seq(x)
    if name == "forward":
        op.forward = lambda x: x * 7
    else:
        op.fwd = lambda x: fo.Out(x * 7, (x, ("silu",)))
    torch.testing.assert_close(op(x), 7 * x)
    torch.testing.assert_close(seq(x), 7 * seq[0](x))
    del op.__dict__[name]
    torch.testing.assert_close(seq(x), nn.functional.silu(seq[0](x)))


def test_a_bwd_replaced_on_the_instance_is_used_alone_and_inside() -> None:
    op, x = SiLU(), data()
    seq = fo.Sequential(Bias(4), op)
    seq(x)
    op.bwd = lambda saved, dy: fo.Grads(dy * 7)
    for model in (op, seq):
        (dx,) = torch.autograd.grad(model(x).sum(), x)
        torch.testing.assert_close(dx, torch.full_like(x, 7))


def test_a_hooked_transparent_op_is_matched_by_no_rule() -> None:
    rule = fo.Rule("id_linear", (Identity, Linear), IdLinear, "joint")
    seq, x, calls = fo.Sequential(Identity(), Linear(4, 4)), data(), []
    seq[0].register_forward_hook(lambda m, i, o: calls.append(1))
    with fo.rules(rule):
        y = seq(x)
    assert calls == [1]
    torch.testing.assert_close(y, seq[1](x))


# --- fused spans that start with a transparent op ---------------------------------------------


class IdLinearSaved(NamedTuple):
    x: Tensor | None
    weight: Tensor | None


class IdLinear(fo.FusedOp):
    """(Identity, Linear) with a backward that is told from autograd's: dx is 5."""

    Saved = IdLinearSaved

    def fwd(self, x: Tensor, t: tuple, calls: tuple, keep: frozenset) -> fo.Out:
        return fo.Out(
            nn.functional.linear(x, t[1]["weight"], t[1]["bias"]), IdLinearSaved(x, t[1]["weight"])
        )

    def bwd(self, saved: IdLinearSaved, dy: Tensor, calls: tuple, dside: dict) -> tuple:
        weight = dy.t() @ saved.x
        return fo.Grads(torch.full_like(saved.x, 5)), fo.Grads(
            params={"weight": weight, "bias": dy.sum(0)}
        )


def test_a_fused_span_that_starts_with_a_transparent_op_runs_its_own_backward() -> None:
    seq, x = fo.Sequential(Identity(), Linear(4, 4)), data()
    with fo.rules(fo.Rule("id_linear", (Identity, Linear), IdLinear, "joint")):
        (dx,) = torch.autograd.grad(seq(x).sum(), x)
    torch.testing.assert_close(dx, torch.full_like(x, 5))


# --- wrong ops get errors that help -----------------------------------------------------------


class ScaleSaved(NamedTuple):
    x: Tensor | None
    weight: Tensor | None


class Scale(fo.Op[ScaleSaved]):
    """y = x * weight * probs, with a backward that can be made wrong."""

    reads = ("probs",)

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.weight, self.wrong = nn.Parameter(torch.ones(4)), wrong

    def fwd(self, x: Tensor, *, weight: Tensor, probs: Tensor) -> fo.Out:
        if self.wrong == "fwd":
            raise ValueError("broken")
        return fo.Out(x * weight * probs[:, None], ScaleSaved(x, weight))

    def bwd(self, saved: ScaleSaved, dy: Tensor) -> fo.Grads:
        if self.wrong == "bwd":
            raise ValueError("broken")
        dx, dw, dprobs = torch.ones(3, 4), torch.ones(4), torch.ones(3)
        result = {
            "": fo.Grads(dx, {"weight": dw}, {"probs": dprobs}),
            "x shape": fo.Grads(dx[:2], {"weight": dw}, {"probs": dprobs}),
            "weight shape": fo.Grads(dx, {"weight": dx}, {"probs": dprobs}),
            "probs shape": fo.Grads(dx, {"weight": dw}, {"probs": dx}),
            "no x": fo.Grads(None, {"weight": dw}, {"probs": dprobs}),
            "no weight": fo.Grads(dx, {}, {"probs": dprobs}),
            "no params": fo.Grads(dx, None, {"probs": dprobs}),
            "weight None": fo.Grads(dx, {"weight": None}, {"probs": dprobs}),
            "no probs": fo.Grads(dx, {"weight": dw}),
            "no Grads": (dx, dw, dprobs),
            "bare": dx,
            "nothing": None,
        }
        return result[self.wrong]


def wrong_model(wrong: str) -> tuple[fo.Sequential, Callable[[], None]]:
    model = nn.ModuleDict(
        {"mlp": fo.Sequential({"a": Linear(4, 4), "b": Scale(wrong), "c": Bias(4)})}
    )
    fo.configure(model)
    probs = data(3)
    return model["mlp"], lambda: model["mlp"](data(), probs=probs).sum().backward()


def message(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def test_the_right_backward_raises_nothing() -> None:
    wrong_model("")[1]()


@pytest.mark.parametrize(
    ("wrong", "tensor"),
    [
        ("x shape", "'x'"),
        ("weight shape", "'weight'"),
        ("probs shape", "'probs'"),
        ("no x", "'x'"),
        ("no weight", "'weight'"),
        ("no params", "'weight'"),
        ("weight None", "'weight'"),
        ("no probs", "'probs'"),
        ("no Grads", "Grads"),
        ("bare", "Grads"),
        ("nothing", "Grads"),
    ],
)
def test_a_wrong_backward_is_named_by_path_op_and_tensor(wrong: str, tensor: str) -> None:
    with pytest.raises(fo.FuseOpsError) as caught:
        wrong_model(wrong)[1]()
    text = message(caught.value)
    assert "mlp.b" in text and "Scale" in text and tensor in text, text


@pytest.mark.parametrize("where", ["fwd", "bwd"])
def test_an_error_in_an_op_carries_its_path_and_class(where: str) -> None:
    with pytest.raises(ValueError, match="broken") as caught:
        wrong_model(where)[1]()
    text = message(caught.value)
    assert "'mlp.b'" in text and "Scale" in text, text


def test_an_error_in_an_op_alone_carries_its_class() -> None:
    with pytest.raises(ValueError, match="broken") as caught:
        Scale("fwd")(data(), probs=data(3))
    assert "Scale" in message(caught.value)


def test_an_error_in_a_nested_sequential_carries_the_whole_path() -> None:
    model = fo.Sequential({"outer": fo.Sequential({"inner": Scale("fwd")})})
    with pytest.raises(ValueError, match="broken") as caught:
        model(data(), probs=data(3))
    assert "'outer.inner' (Scale)" in message(caught.value)


def test_a_bare_tensor_from_an_op_with_a_bwd_is_refused() -> None:
    class Bare(Linear):
        def fwd(self, x: Tensor, *, weight: Tensor, bias: Tensor | None) -> Tensor:
            return nn.functional.linear(x, 2 * weight, bias)

    with pytest.raises(fo.FuseOpsError, match=r"Bare.*(saves|Saved)"):
        fo.Sequential(Bare(4, 4))(data())


class ReadsSelf(fo.Op):
    def __init__(self, gain: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.gain = gain

    def fwd(self, x: Tensor) -> Tensor:
        return self.gain(x) if isinstance(self.gain, nn.Module) else x * self.gain


class Noisy(fo.Op):
    def fwd(self, x: Tensor, *, call: fo.Call) -> Tensor:
        return x * torch.rand_like(x) if call.training else x


@pytest.mark.parametrize("inside", [False, True])
def test_a_parameter_that_could_get_no_gradient_is_refused(inside: bool) -> None:
    for gain, name in ((nn.Parameter(torch.ones(4)), "gain"), (nn.Linear(4, 4), "gain.weight")):
        op = ReadsSelf(gain)
        with pytest.raises(fo.FuseOpsError, match=rf"ReadsSelf\) has parameters \['{name}'"):
            (fo.Sequential(SiLU(), op) if inside else op)(torch.randn(2, 4))
    op.forward = lambda x: op.gain(x)  # called as it is
    assert fo.Sequential(SiLU(), op)(torch.randn(2, 4)).requires_grad


def test_a_backward_that_would_draw_other_numbers_is_refused() -> None:
    seq, x = fo.Sequential(SiLU(), Noisy()), torch.randn(2, 4, requires_grad=True)
    seq.eval()(x).sum().backward()
    seq.train()
    with torch.no_grad():
        seq(x)
    with pytest.raises(fo.FuseOpsError, match=r"Noisy\.fwd draws random numbers, and has no bwd"):
        seq(x)


def test_a_keyword_that_is_no_tensor_is_named() -> None:
    class Powers(fo.Op):
        def __init__(self) -> None:
            super().__init__()
            self.exponent = 3.0

        def fwd(self, x: Tensor, *, exponent: float) -> Tensor:
            return x**exponent

    with pytest.raises(fo.FuseOpsError, match=r"Powers.*'exponent'.*float"):
        fo.Sequential(Powers())(data())


# --- distributed ------------------------------------------------------------------------------


@pytest.fixture
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # torch's own, about the gloo device
def test_ddp_trains_it(gloo: None) -> None:
    seq, x = stack(), data()
    expected = trained(seq, x)[1:]
    ddp = nn.parallel.DistributedDataParallel(seq)
    for _ in range(2):
        seq.zero_grad()
        ddp(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in seq.parameters()], expected)


@pytest.mark.filterwarnings("ignore")
def test_ops_over_dtensors_are_segments_of_their_own(gloo: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, distribute_tensor

    from fuseops.ops import scopes

    mesh = init_device_mesh("cpu", (1,))
    seq, x = fo.Sequential(Linear(4, 4), SiLU()), data()
    expected = seq(x)
    seq[0].weight = nn.Parameter(distribute_tensor(seq[0].weight.detach(), mesh))
    seq[0].bias = nn.Parameter(distribute_tensor(seq[0].bias.detach(), mesh))
    y = seq(distribute_tensor(x, mesh))
    assert isinstance(y, DTensor)
    torch.testing.assert_close(y.full_tensor(), expected)
    y.sum().backward()
    assert isinstance(seq[0].weight.grad, DTensor)
    plans: list = []
    with fo.recipe(fo.recipes.Float8BlockScaling()):
        with scopes.watch_plans(plans.append):
            seq(distribute_tensor(x, mesh))
        with fo.fusion(strict=True), pytest.raises(fo.FusionMissError, match="is ignored"):
            seq(distribute_tensor(x, mesh))
    notes = [span.note for span in plans[0].forward]
    ignored = "works on DTensors; the recipe Float8BlockScaling is ignored"
    assert notes == [ignored, "works on DTensors"]


def test_grouped_ops_have_second_derivatives_under_reference() -> None:
    op = GroupedLinear(2, 3, 2).double()
    x, offs = (
        torch.randn(5, 3, dtype=torch.float64, requires_grad=True),
        torch.tensor([2, 4], dtype=torch.int32),
    )
    with fo.reference():
        assert torch.autograd.gradgradcheck(lambda x: op(x, offs=offs).square(), (x,))
