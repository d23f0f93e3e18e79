"""fo.Sequential is torch.nn.Sequential: structure, state, copies, devices, grad modes, autocast."""

import copy
import gc
import io
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fuseops as fo
from fuseops.ops import GELU, Add, Bias, Dropout, Identity, Linear, Reshape, RMSNorm, SiLU, Tap


def mlp(container: type[nn.Sequential] = fo.Sequential, ops: object = fo.ops) -> nn.Sequential:
    """The same four layers out of ops or of torch's modules, with the same weights."""
    torch.manual_seed(7)
    layers = [("RMSNorm", (8,)), ("Linear", (8, 12)), ("GELU", ()), ("Linear", (12, 8))]
    return container(*[getattr(ops, name)(*args) for name, args in layers])


def data(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def grads_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients of x and of every parameter, from one uneven loss."""
    wanted = [x, *model.parameters()]
    y = model(x)
    weight = torch.linspace(-1, 1, y.numel()).view(y.shape)
    return list(torch.autograd.grad((y.float() * weight).sum(), wanted))


def assert_same_training(a: nn.Module, b: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(a(x), b(x))
    torch.testing.assert_close(grads_of(a, x), grads_of(b, x))


class Shift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Tripled(fo.Op):
    """y = 3x: an op that is only a fwd, and a rule target of its own."""

    def fwd(self, x: Tensor) -> Tensor:
        return 3 * x


class FusedTripled(fo.FusedOp):
    def fwd(self, x: Tensor, t: tuple, calls: tuple) -> fo.Out:
        return fo.Out(3 * x, ((x,),))


TRIPLED = fo.Rule("tripled", (Tripled,), FusedTripled)


def rules_that_fire(seq: fo.Sequential, x: Tensor, **side: Tensor) -> set[str]:
    """The rules of the plan that one call runs."""
    return {span.rule for span in fired_spans(seq, x, **side) if span.rule}


def fired_spans(seq: fo.Sequential, x: Tensor, **side: Tensor) -> list:
    from fuseops.ops import scopes

    plans: list = []
    with scopes.watch_plans(plans.append):
        seq(x, **side)
    return [span for plan in plans for span in (*plan.forward, *plan.backward)]


# --- it computes what nn.Sequential computes --------------------------------------------------


def test_the_result_and_all_gradients_are_those_of_nn_sequential() -> None:
    assert_same_training(mlp(), mlp(nn.Sequential, nn), data(5, 8))


def test_plain_modules_mix_with_ops() -> None:
    torch.manual_seed(0)
    ours = fo.Sequential(Linear(8, 8), nn.Tanh(), SiLU(), nn.Sequential(Linear(8, 4)), Shift())
    theirs = nn.Sequential(ours[0], nn.Tanh(), nn.SiLU(), ours[3], Shift())
    assert_same_training(ours, theirs, data(3, 8))


def test_more_leading_axes_and_none_at_all() -> None:
    for shape in [(8,), (2, 8), (2, 3, 8), (0, 8), (0, 3, 8), (2, 0, 8)]:
        assert_same_training(mlp(), mlp(nn.Sequential, nn), data(*shape))


def test_an_empty_sequential_returns_its_input() -> None:
    x = data(2, 3)
    assert fo.Sequential()(x) is x


def test_an_integer_input_reaches_an_embedding() -> None:
    seq = fo.Sequential(nn.Embedding(5, 8), Linear(8, 2))
    seq(torch.tensor([1, 4])).sum().backward()
    assert seq[0].weight.grad[4].abs().sum() > 0


@pytest.mark.parametrize("value", [None, 3, [1.0], (torch.ones(2),)])
def test_an_input_that_is_no_tensor_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match=r"Sequential.*tensor.*" + type(value).__name__):
        fo.Sequential(SiLU())(value)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


def test_a_plain_module_that_returns_no_tensor_is_named() -> None:
    seq = fo.Sequential({"lstm": Pair(), "fc": Linear(4, 4)})
    with pytest.raises(TypeError, match=r"'lstm' \(Pair\) in Sequential returned tuple.*'fc'"):
        seq(torch.randn(3, 4))
    assert isinstance(fo.Sequential(Linear(4, 4), Pair())(torch.randn(3, 4)), tuple)


def test_a_wrong_width_names_the_op_and_the_shape() -> None:
    with pytest.raises(fo.FuseOpsError, match=r"Linear.*8.*\(2, 5\)") as caught:
        fo.Sequential({"up": SiLU(), "down": Linear(8, 3)})(torch.ones(2, 5))
    assert "'down'" in "".join(caught.value.__notes__)


def test_a_wrong_width_names_the_path_that_is_known() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList([fo.Sequential({"down": Linear(8, 3)})])})
    fo.configure(model)
    with pytest.raises(fo.FuseOpsError, match="Linear") as caught:
        model["blocks"][0](torch.ones(2, 5))
    assert "'blocks.0.down'" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("child", "told"),
    [
        ([SiLU(), SiLU()], r"Sequential: child '0' .*list.*Sequential\(\*modules\)"),
        (torch.relu, "child '0'.*expected an nn.Module"),
        (SiLU, r"child '0' is the class SiLU.*SiLU\(\.\.\.\)"),
    ],
)
def test_a_child_that_is_no_module_is_told_what_to_pass(child: object, told: str) -> None:
    for make in (fo.Sequential, lambda c: fo.Sequential({"0": c})):
        with pytest.raises(TypeError, match=told):
            make(child)


def test_an_error_of_torch_is_told_what_every_tensor_is() -> None:
    with pytest.raises(RuntimeError) as caught:
        fo.Sequential({"up": SiLU(), "down": Linear(8, 3)})(torch.ones(2, 8).bfloat16())
    assert "'down' (Linear); x bfloat16[2, 8] on cpu, down.weight float32[3, 8] on cpu" in "".join(
        caught.value.__notes__
    )


# --- structure --------------------------------------------------------------------------------


def test_names_positions_and_ordered_dicts_give_torchs_keys() -> None:
    layers = {"fc1": Linear(4, 4), "act": SiLU(), "fc2": Linear(4, 4)}
    named, torchs = fo.Sequential(layers), nn.Sequential(OrderedDict(layers))
    assert (
        list(named.state_dict())
        == list(torchs.state_dict())
        == list(fo.Sequential(**layers).state_dict())
    )
    assert list(mlp().state_dict()) == list(mlp(nn.Sequential, nn).state_dict())
    assert named.fc1 is named["fc1"] is named[0]


def test_state_dicts_load_both_ways() -> None:
    ours, theirs = mlp(), mlp(nn.Sequential, nn)
    for p in theirs.parameters():
        nn.init.normal_(p)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert_same_training(ours, theirs, data(2, 8))


def test_indexing_iteration_and_length() -> None:
    layers = [Linear(4, 4), SiLU(), Shift(), Linear(4, 4)]
    seq = fo.Sequential(*layers)
    assert list(seq) == layers and len(seq) == 4
    assert seq[0] is layers[0] and seq[-1] is layers[3]
    with pytest.raises(IndexError):
        seq[4]


def test_slices_keep_names_order_and_modules() -> None:
    seq = fo.Sequential({"a": Linear(4, 4), "b": SiLU(), "c": Linear(4, 2)})
    part = seq[1:]
    assert type(part) is fo.Sequential and list(part._modules) == ["b", "c"]
    assert part.c is seq.c and [type(m) for m in seq[::-1]] == [Linear, SiLU, Linear]
    x = data(3, 4)
    torch.testing.assert_close(part(seq[:1](x)), seq(x))


def test_a_named_child_is_replaced_and_removed_by_name() -> None:
    seq, x = fo.Sequential({"a": Linear(4, 4), "b": SiLU(), "c": Linear(4, 2)}), data(3, 4)
    seq(x)
    seq["b"] = nn.ReLU()
    torch.testing.assert_close(seq(x), seq.c(seq.a(x).relu()))
    del seq["b"]
    assert list(seq._modules) == ["a", "c"]
    torch.testing.assert_close(seq(x), seq.c(seq.a(x)))
    with pytest.raises(KeyError, match=r"'d': there are \['a', 'c'\]"):
        seq["d"] = SiLU()
    with pytest.raises(KeyError, match="d"):
        del seq["d"]


@pytest.mark.parametrize(
    "edit",
    [
        lambda s, m: s.append(m),
        lambda s, m: s.insert(0, m),
        lambda s, m: s.insert(-1, m),
        lambda s, m: s.extend([m, m]),
        lambda s, m: s.__iadd__(nn.Sequential(m)),
        lambda s, m: s.__imul__(2),
        lambda s, m: s + nn.Sequential(m),
        lambda s, m: s * 2,
        lambda s, m: 2 * s,
        lambda s, m: s.__setitem__(1, m) or s,
        lambda s, m: s.__delitem__(1) or s,
        lambda s, m: s.__delitem__(slice(0, 1)) or s,
        lambda s, m: s.pop(2) and s,
    ],
)
def test_every_edit_does_what_it_does_to_nn_sequential(edit: Callable) -> None:
    layers, extra = [Linear(4, 4), SiLU(), Linear(4, 4)], Linear(4, 4)
    ours, theirs = fo.Sequential(*layers), nn.Sequential(*layers)
    x = data(2, 4)
    ours(x)  # there is a plan to become stale
    ours, theirs = edit(ours, extra), edit(theirs, extra)
    assert isinstance(ours, fo.Sequential)
    assert list(ours._modules.items()) == list(theirs._modules.items())
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize(("edit", "error"), [
    (lambda s: s * 0, ValueError),
    (lambda s: s * 1.5, TypeError),
    (lambda s: s + SiLU(), (TypeError, ValueError)),
])  # fmt: skip
def test_edits_that_make_no_sense_raise_as_torchs_do(edit: Callable, error: type) -> None:
    for seq in (nn.Sequential(SiLU()), fo.Sequential(SiLU())):
        with pytest.raises(error):
            edit(seq)


@pytest.mark.parametrize(
    "derive", [lambda s: s[:], lambda s: s + fo.Sequential(), lambda s: s * 1, copy.deepcopy]
)
def test_rules_and_configuration_come_along(derive: Callable) -> None:
    seq = fo.Sequential(Tripled())
    fo.configure(seq, rules=[TRIPLED], disable=["linear_act"])
    derived = derive(seq)
    assert rules_that_fire(derived, data(2)) == {"tripled"}
    fo.configure(derived, rules=[])
    assert rules_that_fire(seq, data(2)) == {"tripled"}, "the copy's settings are its own"


def test_subclasses_and_residuals_stay_what_they_are() -> None:
    class Block(fo.Sequential):
        pass

    block, residual = Block(SiLU(), SiLU()), fo.Residual(SiLU(), SiLU())
    for derived in (block[:1], block + block, block * 2, copy.deepcopy(block)):
        assert type(derived) is Block
    x = data(3)
    for derived in (residual[:1], copy.deepcopy(residual)[:1]):
        assert type(derived) is fo.Residual
        torch.testing.assert_close(derived(x), x + nn.functional.silu(x))


def test_the_mode_comes_along() -> None:
    seq = fo.Sequential(Dropout(0.5)).eval()
    assert not seq[:].training and not (seq + seq).training


def test_the_repr_is_torchs() -> None:
    assert repr(mlp()) == repr(mlp(nn.Sequential, nn)).replace("torch.nn.", "")
    assert repr(fo.Residual(SiLU())).startswith("Residual(\n  (0): SiLU")


# --- nesting and residuals --------------------------------------------------------------------


def test_nesting_changes_nothing() -> None:
    a, b, c = Linear(4, 4), SiLU(), Linear(4, 4)
    flat = fo.Sequential(a, b, c)
    for nested in (
        fo.Sequential(fo.Sequential(a, b), c),
        fo.Sequential(a, fo.Sequential(fo.Sequential(b)), c),
        nn.Sequential(a, fo.Sequential(b, c)),
    ):
        assert_same_training(nested, flat, data(3, 4))


def test_a_residual_adds_its_input() -> None:
    norm, fc = RMSNorm(4), Linear(4, 4)
    block, x = fo.Residual(norm, fc), data(3, 4)
    torch.testing.assert_close(block(x), x + fc(norm(x)))
    by_hand = fo.Sequential(Tap(), norm, fc, Add())
    torch.testing.assert_close(grads_of(block, x), grads_of(by_hand, x))


def test_a_residuals_keys_and_positions_are_the_childrens() -> None:
    block = fo.Residual(RMSNorm(4), Linear(4, 4))
    assert list(block.state_dict()) == ["0.weight", "1.weight", "1.bias"]
    assert len(block) == 2 and isinstance(block[0], RMSNorm)
    named = fo.Residual({"tap": SiLU(), "add": Linear(4, 4)})
    assert list(named.state_dict()) == ["add.weight", "add.bias"]
    named(data(2, 4)).sum().backward()


def test_residuals_nest_without_a_clash_of_names() -> None:
    x = data(2, 3)
    block = fo.Residual(fo.Residual(SiLU()), fo.Residual(SiLU()))
    inner = x + nn.functional.silu(x)
    torch.testing.assert_close(block(x), x + inner + nn.functional.silu(inner))


def test_a_residuals_name_is_its_own() -> None:
    x, other = data(2, 3), data(2, 3, seed=9)
    block = fo.Residual(Tap("residual"), SiLU(), Add("residual"))
    torch.testing.assert_close(block(x), 2 * x + nn.functional.silu(x))
    reader = fo.Residual(SiLU(), Add("residual"))
    torch.testing.assert_close(reader(x, residual=other), x + nn.functional.silu(x) + other)


def test_a_residual_whose_shape_changes_says_so() -> None:
    with pytest.raises(fo.FuseOpsError, match=r"\(2, 3\).*\(2, 4\)|\(2, 4\).*\(2, 3\)"):
        fo.Residual(Linear(4, 3))(data(2, 4))


# --- copies, files, devices -------------------------------------------------------------------


def test_a_deepcopy_after_a_call_shares_nothing() -> None:
    seq, x = mlp(), data(2, 8)
    before = seq(x).detach()
    twin = copy.deepcopy(seq)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(0)
    torch.testing.assert_close(seq(x), before)
    assert not twin(x).any()


def test_pickle_round_trips_after_a_call() -> None:
    seq, x = fo.Sequential(mlp(), fo.Residual(SiLU())), data(2, 8)
    seq(x)
    assert_same_training(pickle.loads(pickle.dumps(seq)), seq, x)


def test_torch_save_round_trips() -> None:
    seq, x = mlp(), data(2, 8)
    buffer = io.BytesIO()
    torch.save(seq, buffer)
    buffer.seek(0)
    assert_same_training(torch.load(buffer, weights_only=False), seq, x)


def test_an_op_that_was_called_alone_copies_and_pickles() -> None:
    op, x = Linear(4, 4), data(2, 4)
    op(x)
    for twin in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert_same_training(twin, op, x)


def test_meta_device_then_to_empty_then_reset() -> None:
    def build(device: str) -> fo.Sequential:
        return fo.Sequential(
            RMSNorm(4, device=device),
            Linear(4, 4, device=device),
            Bias(4, device=device),
            fo.Residual(Linear(4, 4, device=device)),
            fo.ops.GroupedLinear(2, 4, 4, device=device),
        )

    meta = build("meta")
    assert all(p.is_meta for p in meta.parameters())
    meta.to_empty(device="cpu")
    for module in meta.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    x, offs = data(4, 4), torch.tensor([1, 4], dtype=torch.int32)
    assert meta(x, offs=offs).isfinite().all()
    meta.load_state_dict(build("cpu").state_dict())


def test_the_meta_device_itself_runs() -> None:
    with torch.device("meta"):
        seq = mlp()
    assert seq(torch.empty(5, 8, device="meta")).shape == (5, 8)


# --- grad modes -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_the_result_is_the_same_and_has_no_graph(mode: Callable) -> None:
    seq, x = fo.Sequential(fo.Residual(*mlp()), nn.Tanh(), SiLU()), data(3, 8)
    expected = seq(x)
    with mode():
        y = seq(x)
    torch.testing.assert_close(y, expected)
    assert not y.requires_grad and y.grad_fn is None
    assert seq(x).requires_grad, "the plan of the grad-free call must not be used here"


def test_an_inference_tensor_may_go_through_frozen_weights() -> None:
    seq = mlp().requires_grad_(False)
    with torch.inference_mode():
        x = torch.ones(2, 8)
    assert seq(x).shape == (2, 8)


@pytest.mark.parametrize("enabled", [True, False])
def test_bf16_autocast_is_that_of_nn_sequential(enabled: bool) -> None:
    ours, theirs, x = mlp(), mlp(nn.Sequential, nn), data(5, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        y, z = ours(x), theirs(x)
        a, b = grads_of(ours, x), grads_of(theirs, x)
    assert y.dtype is z.dtype
    # one bf16 rounding (2^-8) of the activations, which each side places differently
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if enabled else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(y, z, **tolerance)
    for mine, torchs in zip(a, b, strict=True):
        assert mine.dtype is torchs.dtype
        torch.testing.assert_close(mine, torchs, **tolerance)


def test_autocast_leaves_float64_alone_as_torch_does() -> None:
    ours, theirs, x = mlp().double(), mlp(nn.Sequential, nn).double(), data(5, 8).double()
    with torch.autocast("cpu", torch.bfloat16):
        y, z = ours(x), theirs(x)
        a, b = grads_of(ours, x), grads_of(theirs, x)
    torch.testing.assert_close(y, z)
    for mine, torchs in zip(a, b, strict=True):
        torch.testing.assert_close(mine, torchs)


def test_autocast_ends_with_its_scope() -> None:
    seq, x = mlp(), data(2, 8)
    before = seq(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert seq(x).dtype is torch.bfloat16
    after = seq(x)
    assert after.dtype is torch.float32 and torch.equal(before, after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_inside_one_call_reaches_level_one_ops(dtype: torch.dtype) -> None:
    class Mixed(fo.Op):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def fwd(self, x: Tensor, *, weight: Tensor) -> Tensor:
            return x.float() @ weight.float()

    seq, x = fo.Sequential(Linear(4, 4), Mixed()).to(dtype), data(3, 4).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        y = seq(x)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert seq[1].weight.grad.dtype is dtype


# --- backward ---------------------------------------------------------------------------------


def test_retain_graph_gives_the_same_gradients_twice() -> None:
    seq, x = mlp(), data(3, 8)
    y = seq(x).square().sum()
    first = torch.autograd.grad(y, [x, *seq.parameters()], retain_graph=True)
    second = torch.autograd.grad(y, [x, *seq.parameters()])
    torch.testing.assert_close(first, second)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, [x])


def test_the_gradient_of_a_subset_is_the_subset_of_the_gradients() -> None:
    seq, x = mlp(), data(3, 8)
    every = [x, *seq.parameters()]
    whole = torch.autograd.grad(seq(x).square().sum(), every)
    for i, t in enumerate(every):
        (one,) = torch.autograd.grad(seq(x).square().sum(), [t])
        torch.testing.assert_close(one, whole[i])


def test_gradients_accumulate_in_grad() -> None:
    seq, x = mlp(), data(3, 8)
    seq(x).sum().backward()
    once = [p.grad.clone() for p in seq.parameters()]
    seq(x).sum().backward()
    torch.testing.assert_close([p.grad for p in seq.parameters()], [2 * g for g in once])


def test_an_op_alone_is_an_op_inside() -> None:
    for op in (Linear(4, 4), RMSNorm(4), SiLU(), Bias(4), GELU("tanh"), Reshape(2, 6), Identity()):
        assert_same_training(op, fo.Sequential(op), data(3, 4))


def test_an_op_alone_takes_side_inputs_by_name_or_routing() -> None:
    op = fo.ops.GroupedLinear(2, 3, 4)
    routing = fo.Routing.from_counts([1, 2])
    x = data(3, 3)
    torch.testing.assert_close(op(x, routing), op(x, offs=routing.offs))
    with pytest.raises(fo.SideInputError, match="offs"):
        op(x)


def test_the_same_op_twice_adds_its_gradients() -> None:
    fc = Linear(4, 4)
    ours, theirs = fo.Sequential(fc, SiLU(), fc), nn.Sequential(fc, nn.SiLU(), fc)
    assert_same_training(ours, theirs, data(3, 4))


def test_dropout_is_off_in_eval_and_scales_in_training() -> None:
    seq, x = fo.Sequential(Linear(4, 64), Dropout(0.25)), data(500, 4)
    torch.testing.assert_close(seq.eval()(x), seq[0](x))
    y = seq.train()(x)
    dropped = y == 0
    assert abs(dropped.float().mean() - 0.25) < 0.02
    torch.testing.assert_close(y[~dropped], seq[0](x)[~dropped] / 0.75)
    h = torch.ones(100, requires_grad=True)
    (dh,) = torch.autograd.grad(seq[1](h).sum(), h)
    torch.testing.assert_close(dh.unique(), torch.tensor([0.0, 4 / 3]))


def test_dropout_follows_torchs_generator() -> None:
    seq, x = fo.Sequential(Dropout(0.5)), torch.ones(100)
    torch.manual_seed(1)
    first = seq(x)
    torch.manual_seed(1)
    assert torch.equal(seq(x), first) and not torch.equal(seq(x), first)


def test_a_child_without_super_init_is_named() -> None:
    class Forgot(fo.Op):
        def __init__(self) -> None:
            self.width = 2

        def fwd(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(TypeError, match=r"child '1' was not initialised.*Forgot.__init__"):
        fo.Sequential(SiLU(), Forgot())


@pytest.mark.parametrize("calls", [1, 5])
@pytest.mark.parametrize(
    "make",
    [mlp, lambda: fo.Residual(mlp(), RMSNorm(8)), lambda: fo.MoE(8, 4, 4, 2)],
    ids=["sequential", "nested", "moe"],
)
def test_a_model_that_ran_is_freed_with_its_last_reference(
    make: Callable[[], nn.Module], calls: int
) -> None:
    """Not by a collector that runs when it pleases: its memory is the GPU's."""
    make()(data(4, 8)).sum().backward()  # what is made once
    model = make()
    gc.collect()
    gc.disable()
    try:
        for _ in range(calls):
            model(data(4, 8)).sum().backward()
        found = [weakref.ref(t) for t in (model, *model.modules(), *model.parameters())]
        del model
        assert not [ref() for ref in found if ref() is not None]
    finally:
        gc.enable()
